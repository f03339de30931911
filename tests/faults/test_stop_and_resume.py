"""Stopping, killing, and going on as the same run: nothing lost, nothing twice, nobody waits for
the dead. A rank that is killed in native code says at which line of Python its threads stood.
"""

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llamarl.checkpoint.checkpointer import verify
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.tickets.prompts import PromptStream
from tests.build.job import finished_job
from tests.build.rows import write_rows
from tests.built_tasks import build_task
from tests.launching import (
    GROUP_SIZE,
    GROUPS,
    JOB_S,
    ROOT,
    SMALL,
    ForkedJob,
    Job,
    RunFolder,
    environment,
    killed_and_resumed,
    untimed,
)

LONG = (*SMALL, "max_steps=100000", "eval.every=0", "checkpoint.every=0")
SLOW = (*SMALL, "max_lag=0", "reward.fn=tests.launching:unhurried")
EXIT_FAILED = 1
BAD_INPUT = 2


def stop_whole(job, rows=2, end=Job.stop):
    """End a job after so many rows: all its processes, with a valid checkpoint."""
    job.until_rows(rows)
    everyone = set(job.pids())
    end(job)
    job.until_gone(everyone)
    assert verify(job.checkpoint) == []


def test_ctrl_c_in_one_process_ends_it_with_a_valid_checkpoint(tmp_path):
    with Job(*LONG, run_dir=tmp_path / "run") as job:
        stop_whole(job, end=lambda job: os.kill(job.process.pid, signal.SIGINT))
        assert job.wait() == 0, job.output
    step = job.saved_step
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


@pytest.mark.slow
def test_a_signal_before_the_loop_is_a_stop_with_an_outcome(tmp_path):
    """One rank of a run is sent it, while executors are built."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(IN_THE_START)
    job = finished_job(*LONG, run_dir=tmp_path / "run", recipe=recipe, ranks=2)
    assert job.outcome["ended"] == "stopped"
    assert verify(job.checkpoint) == []


def test_a_run_that_made_its_steps_says_so(synchronous_run):
    assert synchronous_run.outcome == {"ended": "finished", "step": 4, "max_steps": 4}
    assert "stopped  " not in synchronous_run.output


@pytest.mark.bitwise("a synchronous run that was resumed is the one that was not")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_run_killed_and_resumed_equals_one_that_was_not(synchronous_run, tmp_path, ranks):
    job = killed_and_resumed(lambda *w: Job(*SLOW, *w, run_dir=tmp_path / "run", ranks=ranks))
    assert untimed(job.rows) == untimed(synchronous_run.rows)
    state = job.part("controller")["ledger"]
    assert state["frontier"] == 4 * 4 and state["again"] == [] and state["finished"] == []


@pytest.mark.slow
def test_trainer_ranks_stop_at_the_same_step_and_the_run_goes_on_with_one(tmp_path):
    two = ("placement.trainer=[0,1]", "placement.generator=[2]", "placement.reward=[2]")
    with Job(*LONG, *two, run_dir=tmp_path / "run", ranks=3) as job:
        stop_whole(job, rows=3)
        stopped_at = job.saved_step
    further = f"max_steps={stopped_at + 2}"
    job = finished_job(*LONG, further, "resume=auto", run_dir=tmp_path / "run", ranks=2)
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
    with Job(*LONG, "stop_s=2", run_dir=tmp_path / "run", ranks=2, env=slow) as job:
        stop_whole(job)
        assert "could not end" not in job.output


STOPS = 6
UNFINISHED = (
    *SMALL,
    "max_lag=2",
    "max_new_tokens=240",
    "generator.min_new_tokens=200",
    "generator.chunk_tokens=4",
    "trainer.microbatch_tokens=512",  # between two of which a stop is heard
    "eval.every=0",
    "checkpoint.every=0",
)
# In waves of three groups, so that some are always amid one.
WAVES = "generator.max_slots=12"
REPLICAS = ("placement.trainer=[0]", "placement.generator=[1,2]", "placement.reward=[2]")
SHARED = (*REPLICAS[:2], "placement.reward=[0]", "generator.tensor_parallel=2", WAVES)


def stopped_amid_work(run_dir: Path, three: tuple[str, ...]) -> tuple[int, set[int]]:
    """(step of the checkpoint, its tickets in work) of a run that was stopped after some steps.

    Where the trainer had fewer cores than the generator, everything that may start is finished when
    the stop comes: then the run goes on and is stopped again.
    """
    for resume in ("never", *["auto"] * (STOPS - 1)):
        given = (*UNFINISHED, *three, "max_steps=100000", f"resume={resume}")
        with ForkedJob(*given, run_dir=run_dir, ranks=3) as job:
            job.until_rows(len(job.rows) + 2)
            job.stop()
            job.wait()
            assert verify(job.checkpoint) == []
        known = {ticket for ticket, _ in job.part("controller")["ledger"]["in_work"]}
        in_work = known & set().union(*(job.part("generator", i)["in_work"] for i in (0, 1)))
        if in_work:
            return job.saved_step, in_work
    raise AssertionError(f"nothing was under way at any of {STOPS} stops")


@pytest.mark.slow
@pytest.mark.parametrize(
    "three, ranks, resume",
    [(REPLICAS, 2, True), (REPLICAS, 3, True), (REPLICAS, 3, False), (SHARED, 2, True)],
)
def test_a_run_stopped_amid_long_completions_goes_on_with_them(tmp_path, three, ranks, resume):
    """Begun on two generators, or one of two ranks, and gone on with by one rank or by as many;
    each ticket is trained on once.
    """
    stopped, in_work = stopped_amid_work(tmp_path / "run", three)
    step = stopped + 3
    again = (f"max_steps={step}", "resume=auto", f"generator.resume_partials={str(resume).lower()}")
    given = (*UNFINISHED, *(three if ranks == 3 else ()), *again)
    job = finished_job(*given, run_dir=tmp_path / "run", ranks=ranks)
    assert [row["step"] for row in job.rows][-3:] == [step - 2, step - 1, step]
    assert max(row["lag/max"] for row in job.rows) <= 2
    told = r"(\d+) completions go on after (?:\d+ tokens, (\d+) had ended)?"
    counts = itertools.chain.from_iterable(re.findall(told, job.output))
    assert sum(int(count or 0) for count in counts) == len(in_work) * GROUP_SIZE * resume
    assert job.consumed == step * GROUPS, "tickets that were trained on, each once"


@pytest.mark.bitwise("a synchronous run that was restarted is the one that was not")
@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank_and_the_run_ends_well(synchronous_run, tmp_path):
    with Job(*SLOW, run_dir=tmp_path / "run", ranks=2, torchrun=("--max-restarts=1",)) as job:
        job.until((tmp_path / "run" / "checkpoints" / "latest").exists, "a checkpoint")
        job.signal_rank(0)
        assert job.wait() == 0, job.output
        assert untimed(job.rows) == untimed(synchronous_run.rows)


@pytest.mark.slow
def test_a_stopped_trainer_is_named_by_the_others(tmp_path):
    """A stopped generator is in test_emergency.py."""
    silent = "rank 0 (trainer) has not been heard of"
    with Job(*LONG, "heartbeat_timeout_s=4", run_dir=tmp_path / "run", ranks=2) as job:
        job.until_rows(2)
        job.signal_rank(0, signal.SIGSTOP)
        job.until(lambda: silent in " ".join(job.output.split()), "the silent rank's name")


@pytest.mark.slow
def test_a_reward_that_fails_once_the_run_has_begun_ends_it_and_is_named(tmp_path):
    failing = (*LONG, "reward.fn=tests.launching:fails_later")
    env = {"FAIL_AFTER": "3"}  # it scores the samples that it is tried on
    with ForkedJob(*failing, run_dir=tmp_path / "run", env=env) as job:
        assert job.wait() == EXIT_FAILED
        assert "tests.launching:fails_later" in job.output and "no more verdicts" in job.output
    assert job.outcome["ended"] == "failed"


@pytest.mark.slow
def test_a_reward_that_hangs_on_one_prompt_is_contained_and_counted(tmp_path):
    tokenizer = load_tokenizer(tiny_directory())
    task = build_task("addition", tokenizer, chat=False, max_prompt_tokens=16)
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


# --- in its own directory ---

ENDLESS = (*LONG, "checkpoint.every=2")


def sums(file, first):
    rows = []
    for a in range(first, first + 20):
        rows += [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for b in range(10, 20)]
    write_rows(file, *rows)
    return ("task=jsonl", f"task.path={file}", "task.chat=false", "task.max_prompt_tokens=16")


@pytest.mark.slow
def test_completions_under_way_are_not_gone_on_with_under_other_prompts(tmp_path):
    """Stopped amid long completions, then the data change: refused; where it is allowed, those
    completions start anew.
    """
    task = sums(tmp_path / "sums.jsonl", first=10)
    given = (*UNFINISHED, WAVES, "overcommit=8", *task)
    with ForkedJob(*given, "max_steps=100000", run_dir=tmp_path / "run") as job:
        job.until_rows(2)
        job.stop()
        job.wait()
    in_work = job.part("generator")["in_work"]
    assert in_work, "nothing was under way when it was stopped"
    again = (*given, f"max_steps={job.saved_step + 2}", "resume=auto")
    sums(tmp_path / "sums.jsonl", first=30)
    with ForkedJob(*again, run_dir=tmp_path / "run") as job:
        assert job.wait() == BAD_INPUT and "the data itself has changed" in job.output
    job = finished_job(*again, "resume_with_other=[data]", run_dir=tmp_path / "run")
    assert f"completions of {len(in_work)} tickets were sampled for other prompts" in job.output
    assert "completions go on after" not in job.output
    assert len(job.rows) == len({row["step"] for row in job.rows})
    assert job.consumed == job.saved_step * GROUPS, "tickets that were trained on, each once"


@pytest.mark.slow
def test_of_two_launches_without_a_name_each_restarted_rank_goes_on_in_its_own_directory(tmp_path):
    """torchrun calls every launch without --rdzv-id "none"."""
    home = tmp_path / "home"
    home.mkdir()
    slow = "reward.fn=tests.launching:unhurried"

    def start():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = f"--master-port={free.getsockname()[1]}"
        where = {"cwd": home, "rendezvous": port, "torchrun": ("--max-restarts=1",)}
        return Job(*ENDLESS, slow, run_dir=None, ranks=1, **where)

    with start() as first:
        first.until(lambda: "step 3/" in first.output, "three steps of the first")
        (one,) = (home / "runs").iterdir()
        with start() as second:
            second.until(lambda: "step 3/" in second.output, "three steps of the second")
            (other,) = set((home / "runs").iterdir()) - {one}
            first.signal_rank(0)
            first.until(lambda: "resumed from" in first.output, "the restart of the first")
            assert re.findall(r"^run  +([^\s,]+)", first.output, re.MULTILINE) == [str(one)] * 2
            steps = [row["step"] for row in RunFolder(other, other).rows]
            assert steps == sorted(set(steps))


@pytest.mark.slow
def test_a_second_job_in_the_directory_of_a_running_one_is_refused(tmp_path):
    with Job(*ENDLESS, run_dir=tmp_path / "run", ranks=2) as first:
        first.until_rows(2)
        with Job(*SMALL, "resume=auto", "stop_s=1", run_dir=tmp_path / "run", ranks=2) as second:
            assert second.wait() != 0
            in_use = f"{tmp_path / 'run'} is in use by process {first.rank_pids()[0]} on "
            assert in_use in second.output
        assert first.process.poll() is None


# --- killed in native code ---

CRASHES = """
import ctypes
import sys

from llamarl.config import Config, main


@main
def run(config: Config) -> None:
    where_it_stands()


def where_it_stands():
    ctypes.string_at(0)


sys.argv = ["recipe", "max_steps=1"]
run()
"""


def test_a_crash_in_native_code_names_its_line_of_python():
    done = subprocess.run(
        [sys.executable, "-c", CRASHES],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=JOB_S,
    )
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr and "in where_it_stands" in done.stderr
