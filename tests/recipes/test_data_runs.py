"""Whole runs by what they are prompted with, what teaches them, from which distribution they
sample, and which samples they keep.
"""

from __future__ import annotations

import pytest

from llamarl.comm.channel import dp_rank_of
from llamarl.launch.reading import FILE
from llamarl.observe.samples import FILE_NAME, read_samples
from llamarl.words.choices import GROUP_FIELDS
from tests.build.job import finished_job
from tests.build.model_directory import copy_tiny
from tests.build.rows import write_rows
from tests.launching import GROUP_SIZE, SMALL, STEPS, untimed
from tests.padded import TOKENS, padded_directory

BAD_INPUT = 2

# --- conversations ---

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}{{ m.content }}={% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture
def model(tmp_path):
    """A copy of the tiny model with a chat template."""
    path = copy_tiny(tmp_path / "model")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def talks(file):
    """Write conversations whose answer is the last turn."""
    rows = []
    for n in range(60):
        turns = [("system", "7"), ("user", "1+1"), ("assistant", "2"), ("user", f"{n}+{n}")]
        prompt = [{"role": role, "content": content} for role, content in turns]
        rows.append({"prompt": prompt, "answer": f"{n}+{n}"})
    return write_rows(file, *rows)


def test_a_run_on_conversations_and_its_resumption_look_at_the_rows_once(tmp_path, model):
    path = talks(tmp_path / "rows.jsonl")
    data = (f"task.path={path}", "task=jsonl", "task.max_prompt_tokens=64", "max_new_tokens=6")
    given = (f"model.path={model}", "model=hf", *data, "reward.fn=tests.launching:of_turns")
    run_dir = tmp_path / "run"
    job = finished_job(*SMALL, *given, "max_steps=1", run_dir=run_dir, ranks=2)
    kept = (run_dir / FILE).read_bytes()
    assert job.rows[0]["eval/reward"] == job.rows[1]["reward/mean"] == 1.0
    job = finished_job(*SMALL, *given, "max_steps=2", "resume=auto", run_dir=run_dir)
    assert (run_dir / FILE).read_bytes() == kept
    assert job.rows[-1]["step"] == 2 and job.rows[-1]["reward/mean"] == 1.0


def test_a_conversation_that_the_template_refuses_ends_the_start(launch_here, tmp_path, model):
    (model / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    file = talks(tmp_path / "rows.jsonl")
    given = (f"model.path={model}", "model=hf", "task=jsonl", f"task.path={file}")
    code, said = launch_here(*SMALL, *given, f"run_dir={tmp_path / 'run'}")
    assert code == BAD_INPUT
    assert f"{file}:1: the chat template refuses it: no system" in said.err
    assert not (tmp_path / "run").exists()


# --- groups that teach ---

TEACHING = (
    *SMALL,
    "tickets.informative=true",
    "tickets.sampler=difficulty",
    "tickets.half_life=0.01",
    "checkpoint.every=2",
)
GIVEN_BACK = "tickets/given_back"


def teaching(folder, *overrides, ranks=None):
    return finished_job(*TEACHING, *overrides, run_dir=folder, ranks=ranks).rows


@pytest.fixture(scope="module")
def in_step(tmp_path_factory):
    """The rows of a synchronous run."""
    return teaching(tmp_path_factory.mktemp("in_step") / "run", "max_lag=0", "max_steps=4")


def test_every_group_of_a_batch_teaches_and_the_others_are_counted(in_step):
    rows = in_step[1:]
    assert sum(row[GIVEN_BACK] for row in rows) > 0, "nothing was put to the test"
    assert all(row["groups/kept_equal"] == 0 for row in rows)
    batch = [row["groups/teaching_fraction"] for row in rows]
    assert all(0 < fraction <= 1 for fraction in batch)
    assert all(0 <= row["reward/all_mean"] <= 1 for row in rows)


@pytest.mark.bitwise("a synchronous run is the same on one rank and on two, resumed or not")
def test_a_run_of_two_ranks_goes_on_with_that_of_one_process(in_step, tmp_path):
    folder = tmp_path / "run"
    teaching(folder, "max_lag=0", "max_steps=2")
    rows = teaching(folder, "max_lag=0", "max_steps=4", "resume=auto", ranks=2)
    assert untimed(rows) == untimed(in_step)


def test_where_nothing_is_solved_a_step_trains_on_what_there_is(tmp_path):
    never = [{"prompt": f"{n}+1=", "answer": "never"} for n in range(40)]
    file = write_rows(tmp_path / "rows.jsonl", *never)
    task = ("task=jsonl", f"task.path={file}", "task.chat=false", "task.max_prompt_tokens=16")
    short = ("max_new_tokens=4", "eval.num_prompts=0", "max_lag=1", "max_steps=2")
    rows = teaching(tmp_path / "run", *task, *short, "tickets.max_refill=2")
    assert [row["groups/kept_equal"] for row in rows] == [4, 4]
    assert all(row[GIVEN_BACK] <= 8 for row in rows)
    assert rows[0][GIVEN_BACK] == 8
    assert all(row["groups/teaching_fraction"] == 0 for row in rows)


# --- a narrowed distribution ---

RATIO = 1e-4  # float32
KL = 1e-6  # nats, of a model to itself by another path
KL_ARGS = ("loss.kl_coef=0.1", "max_lag=0", "max_steps=2", "metrics.samples=4", "eval.every=0")
REFERENCES = {
    "frozen": ("reference=frozen",),
    "streamed": ("reference=frozen", "reference.stream=true"),
    "sharded": ("reference=sharded",),
}


@pytest.mark.parametrize("reference", list(REFERENCES))
def test_ratio_and_kl_of_a_narrowed_distribution_are_those_of_one_model(reference, tmp_path):
    model = padded_directory(tmp_path / "padded")
    given = ("model=hf", f"model.path={model}", "model.dtype=float32", "lr=1e-3")
    narrow = ("generator.min_new_tokens=3", "temperature=1.5", "max_new_tokens=8")
    more = REFERENCES[reference]
    job = finished_job(*SMALL, *given, *narrow, *more, *KL_ARGS, run_dir=tmp_path / "run")
    rows = job.rows
    assert "12 of its 64 vocabulary rows" in job.output
    trained = [row for row in rows if row.get("ratio/mean") is not None]
    assert trained, "nothing was trained on"
    for row in trained:
        assert row["ratio/mean"] == pytest.approx(1, abs=RATIO)
        assert row["parity/logprob_diff_max"] <= RATIO
    assert abs(trained[0]["kl/ref"]) <= KL
    kept = completions(read_samples(job.run_dir / FILE_NAME))
    assert kept
    for completion in kept:
        assert len(completion["ids"]) > 3 and max(completion["ids"]) < TOKENS
        assert 2 not in completion["ids"][:3]


# --- samples ---

TWO_TRAINERS = ("placement.trainer=[0,1]", "placement.generator=[0]", "placement.reward=[0]")


def spread(runs):
    values = []
    for value, count in runs:
        values += [value] * count
    return values


def completions(samples):
    found = []
    for sample in samples:
        for group in sample["shown"]:
            found += group["completions"]
    return found


def check(samples):
    """What holds of the samples of any run of one turn."""
    assert [sample["step"] for sample in samples] == list(range(1, STEPS + 1))
    for sample in samples:
        assert 1 <= len(sample["shown"]) <= 2
        assert all(len(group["completions"]) == GROUP_SIZE for group in sample["shown"])
    for completion in completions(samples):
        size = completion["length"]
        runs = ("lag", "sampled", "advantage", "turn_reward")
        assert {len(spread(completion[name])) for name in runs} == {size}
        assert {len(completion[name]) for name in ("ids", "text", "generator", "trainer")} == {size}
        assert all(lag >= 0 for lag in spread(completion["lag"]))


def test_a_run_may_keep_no_samples(runs):
    """test_eval_sets.py has it that the run is the same without them."""
    assert not (runs("half").run_dir / FILE_NAME).exists()
    assert "sample of step" not in runs("half").output


def test_a_synchronous_runs_samples_are_of_its_own_weights(synchronous_run):
    samples = read_samples(synchronous_run.run_dir / FILE_NAME)
    check(samples)
    lag = GROUP_FIELDS.index("lag")
    for sample in samples:
        assert all(line[lag] == 0 for line in sample["groups"])
    num_tokens = 0
    for completion in completions(samples):
        assert "".join(completion["text"]).count("<eos>") <= 1
        for ours, theirs in zip(completion["trainer"], completion["generator"]):
            if ours is not None:
                num_tokens += 1
                assert ours == pytest.approx(theirs, abs=1e-3)
    assert num_tokens > 0


@pytest.mark.slow
def test_two_trainer_ranks_keep_the_samples_of_the_first(tmp_path):
    job = finished_job(*SMALL, *TWO_TRAINERS, run_dir=tmp_path / "run", ranks=2)
    samples = read_samples(job.run_dir / FILE_NAME)
    check(samples)
    for sample in samples:
        assert {dp_rank_of(line[0], 2) for line in sample["groups"]} == {0}
