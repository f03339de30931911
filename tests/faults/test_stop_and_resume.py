"""Stopping, killing, and going on: nothing lost, nothing twice, nobody waits for the dead."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from llamarl.checkpoint.checkpointer import verify
from tests.build.job import finished_job
from tests.launching import GROUP_SIZE, GROUPS, SMALL, ForkedJob, Job, environment, untimed

LONG = ("max_steps=100000", "eval.every=0", "checkpoint.every=0")
HEARTBEAT_S = 4
EXIT_FAILED = 1


@pytest.mark.slow
def test_sigterm_ends_all_processes_with_a_valid_checkpoint(tmp_path):
    with Job(*SMALL, *LONG, run_dir=tmp_path / "run", ranks=2) as job:
        job.until(lambda: len(job.rows) >= 2, "two steps")
        everyone = set(job.pids())
        job.stop()
        job.until_gone(everyone)
        assert verify(job.checkpoint) == []


def test_ctrl_c_in_one_process_ends_it_with_a_valid_checkpoint(tmp_path):
    with Job(*SMALL, *LONG, run_dir=tmp_path / "run") as job:
        job.until(lambda: len(job.rows) >= 2, "two steps")
        everyone = set(job.pids())
        os.kill(job.process.pid, signal.SIGINT)
        job.until_gone(everyone)
        assert job.wait() == 0, job.output
        assert verify(job.checkpoint) == []
    step = int(job.checkpoint.name.removeprefix("step_"))
    assert job.outcome == {"ended": "stopped", "step": step, "max_steps": 100000}
    assert f"stopped    after step {step} of 100000: resume=auto goes on" in job.output


IN_THE_START = """
import os
import signal

from llamarl.config import Config, main


@main
def run(config: Config) -> None:
    from executors.build import build_executors
    from llamarl.launch import launch

    with launch(config) as job:
        generator, reward, _, trainer = build_executors(config, job)
        if job.world.rank == job.world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        job.run([generator, reward, trainer])


if __name__ == "__main__":
    run()
"""


def test_a_signal_before_the_loop_is_a_stop_with_an_outcome(tmp_path):
    """One rank of a run is sent it, while executors are built."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(IN_THE_START)
    job = finished_job(*SMALL, *LONG, run_dir=tmp_path / "run", recipe=recipe, ranks=2)
    assert job.outcome["ended"] == "stopped"
    assert verify(job.checkpoint) == []


def test_a_run_that_made_its_steps_says_so(synchronous_run):
    assert synchronous_run.outcome == {"ended": "finished", "step": 4, "max_steps": 4}
    assert "stopped  " not in synchronous_run.output


@pytest.mark.bitwise("a synchronous run that was resumed is the one that was not")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_run_killed_and_resumed_equals_one_that_was_not(synchronous_run, tmp_path, ranks):
    slow = ("max_lag=0", "reward.fn=tests.launching:unhurried")
    with Job(*SMALL, *slow, run_dir=tmp_path / "run", ranks=ranks) as job:
        job.until(lambda: (tmp_path / "run" / "checkpoints" / "latest").exists(), "a checkpoint")
        os.kill(max(job.rank_pids().items())[1], signal.SIGKILL)
        assert job.wait() != 0
    with Job(*SMALL, *slow, "resume=auto", run_dir=tmp_path / "run", ranks=ranks) as job:
        assert job.wait() == 0, job.output
        assert "resumed from step_" in job.output
        assert untimed(job.rows) == untimed(synchronous_run.rows)
    state = job.part("controller")["ledger"]
    assert state["frontier"] == 4 * 4 and state["again"] == [] and state["finished"] == []


def test_a_checkpoint_of_another_run_is_not_gone_on_with_by_other_values(
    launch_here, synchronous_run, tmp_path
):
    resume = f"resume={synchronous_run.checkpoint}"
    code, output = launch_here(
        *SMALL, "max_lag=0", "seed=7", "group_size=2", resume, f"run_dir={tmp_path / 'new'}"
    )
    assert code == 2 and not (tmp_path / "new").exists()
    assert (
        "seed: 0 in the checkpoint, 7 now" in output.err
        and "group_size: 4 in the checkpoint, 2 now" in output.err
    )
    assert f"model.path={synchronous_run.checkpoint / 'hf'}" in output.err


@pytest.mark.slow
def test_trainer_ranks_stop_at_the_same_step_and_the_run_goes_on_with_one(tmp_path):
    two = ("placement.trainer=[0,1]", "placement.generator=[2]", "placement.reward=[2]")
    with Job(*SMALL, *LONG, *two, run_dir=tmp_path / "run", ranks=3) as job:
        job.until(lambda: len(job.rows) >= 3, "three steps")
        everyone = set(job.pids())
        job.stop()
        job.until_gone(everyone)
        assert verify(job.checkpoint) == []
        stopped_at = int(job.checkpoint.name.removeprefix("step_"))
    further = f"max_steps={stopped_at + 2}"
    job = finished_job(*SMALL, *LONG, further, "resume=auto", run_dir=tmp_path / "run", ranks=2)
    assert [r["step"] for r in job.rows][-1] == stopped_at + 2
    assert len({r["step"] for r in job.rows}) == len(job.rows)


SLOW_EXPORT = """
import os, time
if "RANK" in os.environ:
    from executors.trainer import FSDPTrainer
    export = FSDPTrainer.export
    def slow(self, out):
        time.sleep(6)
        export(self, out)
    FSDPTrainer.export = slow
"""


@pytest.mark.slow
def test_a_checkpoint_that_takes_longer_than_stop_s_is_waited_for(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW_EXPORT)
    slow = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"}
    with Job(*SMALL, *LONG, "stop_s=2", run_dir=tmp_path / "run", ranks=2, env=slow) as job:
        job.until(lambda: len(job.rows) >= 2, "two steps")
        everyone = set(job.pids())
        job.stop()
        job.until_gone(everyone)
        assert verify(job.checkpoint) == [] and "could not end" not in job.output


STOPS = 6
UNFINISHED = (
    "max_lag=2",
    "max_new_tokens=240",
    "generator.min_new_tokens=200",
    "generator.chunk_tokens=4",
    "trainer.microbatch_tokens=512",  # between two of which a stop is heard
    "eval.every=0",
    "checkpoint.every=0",
)


REPLICAS = ("placement.trainer=[0]", "placement.generator=[1,2]", "placement.reward=[2]")
# In waves of three groups, so that some are always amid one.
SHARED = (
    "placement.trainer=[0]",
    "placement.generator=[1,2]",
    "placement.reward=[0]",
    "generator.tensor_parallel=2",
    "generator.max_slots=12",
)


def stopped_amid_work(run_dir: Path, three: tuple[str, ...]) -> tuple[Path, set[int]]:
    """(checkpoint, its tickets in work) of a run that was stopped after some steps.

    Where the trainer had fewer cores than the generator, everything that may start is finished when
    the stop comes: then the run goes on and is stopped again.
    """
    for attempt in range(STOPS):
        with ForkedJob(
            *SMALL,
            *UNFINISHED,
            *three,
            "max_steps=100000",
            *(["resume=auto"] if attempt else []),
            run_dir=run_dir,
            ranks=3,
        ) as job:
            before = len(job.rows)
            job.until(lambda: len(job.rows) >= before + 2, "two steps")
            job.stop()
            job.wait()
            assert verify(job.checkpoint) == []
            stopped = job.checkpoint
        state = json.loads((stopped / "controller.rank0.json").read_text())["ledger"]
        saved = [
            json.loads((stopped / f"generator.rank{i}.json").read_text())["in_work"] for i in (0, 1)
        ]
        in_work = {ticket for ticket, _ in state["in_work"]} & set().union(*saved)
        if in_work:
            return stopped, in_work
    raise AssertionError(f"nothing was under way at any of {STOPS} stops")


@pytest.mark.slow
@pytest.mark.parametrize(
    "three, ranks, resume",
    [
        (REPLICAS, 2, True),
        (REPLICAS, 3, True),
        (REPLICAS, 3, False),
        (SHARED, 2, True),
    ],
)
def test_a_run_stopped_amid_long_completions_goes_on_with_them(tmp_path, three, ranks, resume):
    """Begun on two generators, or one of two ranks, and gone on with by one rank or by as many;
    each ticket is trained on once.
    """
    stopped, in_work = stopped_amid_work(tmp_path / "run", three)
    step = int(stopped.name.removeprefix("step_")) + 3
    again = (f"max_steps={step}", "resume=auto", f"generator.resume_partials={str(resume).lower()}")
    job = finished_job(
        *SMALL,
        *UNFINISHED,
        *(three if ranks == 3 else ()),
        *again,
        run_dir=tmp_path / "run",
        ranks=ranks,
    )
    assert [r["step"] for r in job.rows][-3:] == [step - 2, step - 1, step] and max(
        r["lag/max"] for r in job.rows
    ) <= 2
    went_on = [int(n) for n in re.findall(r"(\d+) completions go on after", job.output)]
    ended = [
        int(n)
        for n in re.findall(r"completions go on after \d+ tokens, (\d+) had ended", job.output)
    ]
    assert sum(went_on) + sum(ended) == len(in_work) * GROUP_SIZE * resume
    after = job.part("controller")["ledger"]
    open_ = set(after["again"]) | {ticket for ticket, _ in after["finished"]}
    assert after["frontier"] - len(open_) == step * GROUPS, (
        "tickets that were trained on, each once"
    )


@pytest.mark.bitwise("a synchronous run that was restarted is the one that was not")
@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank_and_the_run_ends_well(synchronous_run, tmp_path):
    slow = ("max_lag=0", "reward.fn=tests.launching:unhurried")
    with Job(
        *SMALL, *slow, run_dir=tmp_path / "run", ranks=2, torchrun=("--max-restarts=1",)
    ) as job:
        job.until(lambda: (tmp_path / "run" / "checkpoints" / "latest").exists(), "a checkpoint")
        os.kill(job.rank_pids()[0], signal.SIGKILL)
        assert job.wait() == 0, job.output
        assert untimed(job.rows) == untimed(synchronous_run.rows)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_by_the_others(tmp_path, stopped):
    with Job(
        *SMALL, *LONG, f"heartbeat_timeout_s={HEARTBEAT_S}", run_dir=tmp_path / "run", ranks=2
    ) as job:
        job.until(lambda: len(job.rows) >= 2, "two steps")
        os.kill(job.rank_pids()[stopped], signal.SIGSTOP)
        job.until(
            lambda: f"rank {stopped} (" in job.output and "has not been heard of" in job.output,
            "the silent rank's name",
        )


@pytest.mark.slow
def test_a_reward_that_fails_once_the_run_has_begun_ends_it_and_is_named(tmp_path):
    with ForkedJob(
        *SMALL,
        "max_steps=50",
        "eval.every=0",
        "reward.fn=tests.launching:fails_later",
        run_dir=tmp_path / "run",
        env={"FAIL_AFTER": "3"},  # it scores the samples that it is tried on
    ) as job:
        assert job.wait() == EXIT_FAILED
        assert "tests.launching:fails_later" in job.output and "no more verdicts" in job.output
    assert job.outcome["ended"] == "failed"


@pytest.mark.slow
def test_a_reward_that_hangs_on_one_prompt_is_contained_and_counted(tmp_path):
    from llamarl.models.config import tiny_directory
    from llamarl.models.hf import load_tokenizer
    from llamarl.tickets.prompts import PromptStream
    from tests.built_tasks import build_task

    task = build_task(
        "addition", load_tokenizer(tiny_directory()), chat=False, max_prompt_tokens=16
    )
    env = {"HANG_ON": PromptStream(task, 0)[0].text}
    hanging = (
        "reward.fn=tests.launching:hangs_on_one",
        "reward.timeout_s=1",
        "reward.max_error_rate=1.0",
        "max_lag=0",
        "max_steps=1",
    )
    job = finished_job(*SMALL, *hanging, run_dir=tmp_path / "run", env=env)
    assert job.rows[1]["reward/error_rate"] == 4 / 16  # the four completions of ticket 0
