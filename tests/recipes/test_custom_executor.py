"""recipes/custom_executor.py: its executor alone and wherever the main job's executors go, and a
recipe that lists its channels.
"""

import pytest
import torch

from llamarl.executor import ExecutorGroup
from llamarl.types import Group
from recipes.custom_executor import LengthPenalty
from tests.build.group import build_group
from tests.build.job import finished_job
from tests.executors.fakes import FakeControl, FakeMetrics, FakeReceiver, FakeSender
from tests.house import blocks, text_of
from tests.launching import GROUP_SIZE, ROOT, SMALL, STEPS, ForkedJob, untimed

RECIPE = ROOT / "recipes" / "custom_executor.py"
# A recipe of the user's: further imports and classes, and what it does with the job.
WRITTEN = """
from executors.build import build_executors
from llamarl.config import Config, main
from llamarl.launch import launch
{own}

@main
def run(config: Config) -> None:
    with launch(config) as job:
{body}

if __name__ == "__main__":
    run()
"""


def written(folder, own, body):
    file = folder / "recipe.py"
    file.write_text(WRITTEN.format(own=own, body=body))
    return file


def test_a_token_costs_the_same_everywhere_and_a_full_channel_stops_it():
    penalty = LengthPenalty(per_token=0.25)
    source, sink = FakeReceiver(), FakeSender()
    alone = ExecutorGroup("length_penalty", (0,), 0, torch.device("cpu"))
    ends = [(Group, source)], [(Group, sink)]
    penalty.attach(alone, *ends, FakeControl(), FakeMetrics())
    assert not penalty.step() and penalty.waiting_for() is None
    outcomes = ("score", "score", "error")
    source.records.append(build_group(0, [2, 0, 4], [1.0, 0.5, 0.0], outcomes=outcomes))
    sink.room = 0
    assert not penalty.step() and penalty.waiting_for().startswith("room: ") and source.records
    sink.room = 1
    assert penalty.step()
    (sent,) = sink.records
    assert sent.rewards[:2].tolist() == [0.5, 0.5] and sent.trained.tolist() == [True, False, False]
    assert sent.lengths.tolist() == [2, 0, 4]


def test_the_readme_shows_it_as_it_is():
    source = RECIPE.read_text()
    bodies = blocks("python", text_of(ROOT / "README.md"))
    (shown,) = [body for body in bodies if "LengthPenalty" in body]
    assert shown in source
    assert len(source.splitlines()) < 60, "it is one screen"


DROPS = """
from llamarl.comm import dropped
from llamarl.executor import Executor
from llamarl.types import Completion, EvalCompletion

dropped.STILL_S = 1.0


class Filter(Executor):
    name = "filter"
    consumes = (Completion, EvalCompletion)
    produces = (Completion, EvalCompletion)

    def step(self):
        records = self.inputs.of(Completion).take()
        for record in records:
            if DROPPED != "a completion" or (record.ticket, record.sample_index) != (9, 1):
                self.outputs.of(Completion).put(record)
        answers = self.inputs.of(EvalCompletion).take()
        for answer in answers:
            if DROPPED != "an answer" or answer.prompt_index != 2:
                self.outputs.of(EvalCompletion).put(answer)
        return bool(records or answers)
"""
WITH_FILTER = """
        generator, reward, _, trainer = build_executors(config, job)
        job.placement["filter"] = job.placement["generator"]
        job.run([generator, Filter(), reward, trainer])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "dropped, ranks, said",
    [
        ("a completion", None, f"rank 0 took {GROUP_SIZE} Completion records and sent on"),
        ("an answer", 2, "rank 1 took 4 EvalCompletion records and sent on 3 of the evaluation of"),
    ],
)
def test_an_executor_that_drops_a_record_is_named_long_before_timeout_s(
    dropped, ranks, said, tmp_path
):
    recipe = written(tmp_path, DROPS.replace("DROPPED", repr(dropped)), WITH_FILTER)
    given = (*SMALL, "eval.num_prompts=4")
    with ForkedJob(*given, run_dir=tmp_path / "run", recipe=recipe, ranks=ranks) as job:
        assert job.wait() != 0
    assert f"filter on {said}" in job.output
    assert "waited" not in job.output, "nobody waited for timeout_s"
    if dropped == "a completion":
        assert "of ticket 9" in job.output and "finish_reason='aborted'" in job.output


STEERED = """
from executors.generator import Generator
from executors.reference import Reference
from executors.trainer import FSDPTrainer


def steer(layer, args, output):
    return -output


class Steered:
    @staticmethod
    def adapt_decoder(decoder):
        decoder.layers[0].register_forward_hook(steer)


class SteeredTrainer(Steered, FSDPTrainer):
    def setup(self):
        super().setup()
        print("steered", type(self).__name__)


class SteeredGenerator(Steered, Generator):
    pass


class SteeredReference(Steered, Reference):
    pass


OWN = {"generator": SteeredGenerator, "reference": SteeredReference, "trainer": SteeredTrainer}
"""
WITH_STEERED = """
        generator, reward, references, trainer = build_executors(config, job, **OWN)
        job.run([generator, reward, *references, trainer])
"""


@pytest.mark.slow
def test_subclasses_with_a_forward_of_their_own_sample_what_they_train(tmp_path):
    recipe = written(tmp_path, STEERED, WITH_STEERED)
    given = (*SMALL, "max_lag=0", "reference=frozen", "loss.kl_coef=0.01", "max_steps=1")
    job = finished_job(*given, run_dir=tmp_path / "run", recipe=recipe)
    assert "steered SteeredTrainer" in job.output
    first = job.rows[1]
    assert first["ratio/mean"] == pytest.approx(1.0, abs=1e-3)
    assert first["kl/ref"] == pytest.approx(0.0, abs=1e-4)
    # With its sign turned it is another model, and does not begin with the 40 % of the tiny one.
    assert job.rows[0]["eval/accuracy"] < 0.3


OF_CHANNELS = """
from llamarl.comm import Gather, Scatter
from llamarl.ddma.channel import Weights
from llamarl.types import Completion, EvalCompletion, Group
"""
LISTED = """
        generator, reward, _, trainer = build_executors(config, job)
        channels = [
            Gather(generator, reward, carries=Completion),
            Gather(generator, reward, carries=EvalCompletion),
            Scatter(reward, trainer, carries=Group),
            Weights(trainer, generator),
        ]
        job.run([generator, reward, trainer], channels)
"""


def test_a_recipe_may_list_its_channels(synchronous_run, tmp_path):
    recipe = written(tmp_path, OF_CHANNELS, LISTED)
    given = (*SMALL, "max_lag=0", "max_steps=2")
    job = finished_job(*given, run_dir=tmp_path / "run", recipe=recipe)
    assert untimed(job.rows) == untimed(synchronous_run.rows)[:3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, overrides",
    [
        (2, ["placement.reward=[0,1]"]),
        (None, ["reference=frozen", "loss.kl_coef=0.01"]),
        (None, ["reference=reset", "reference.reset_every=2", "loss.kl_coef=0.01", "max_lag=0"]),
    ],
)
def test_it_takes_the_topologies_of_the_main_job(tmp_path, ranks, overrides):
    given = (*SMALL, *overrides)
    rows = finished_job(*given, run_dir=tmp_path / "run", ranks=ranks, recipe=RECIPE).rows
    assert rows[-1]["step"] == STEPS and all(row["eval/accuracy"] is not None for row in rows[::2])
    if ranks is None:
        assert rows[1]["kl/ref"] == pytest.approx(0.0, abs=1e-4) and rows[2]["kl/ref"] > 0
