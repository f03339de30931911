"""A run goes on as that run, in its own directory, as a user meets it: from the command line, under
torchrun, after a kill.
"""

import json
import os
import shutil
import signal
import socket

import pytest

from tests.build.job import finished_job
from tests.launching import SMALL, ForkedJob, Job

BAD_INPUT = 2
ENDLESS = ("max_steps=100000", "eval.every=0", "checkpoint.every=2")
# In waves of three groups, so that some are always amid one.
LONG = (
    "generator.max_slots=12",
    "overcommit=8",
    "max_lag=2",
    "max_new_tokens=240",
    "generator.min_new_tokens=200",
    "generator.chunk_tokens=4",
    "eval.every=0",
    "checkpoint.every=0",
)


def sums(file, first):
    rows = []
    for a in range(first, first + 20):
        rows += [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for b in range(10, 20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("task=jsonl", f"task.path={file}", "task.chat=false", "task.max_prompt_tokens=16")


@pytest.mark.slow
def test_completions_under_way_are_not_gone_on_with_under_other_prompts(tmp_path):
    """Stopped amid long completions, then the data change: refused; where it is allowed, those
    completions start anew.
    """
    task = sums(tmp_path / "sums.jsonl", first=10)
    with ForkedJob(*SMALL, *LONG, *task, "max_steps=100000", run_dir=tmp_path / "run") as job:
        job.until(lambda: len(job.rows) >= 2, "two steps")
        job.stop()
        job.wait()
        stopped = job.checkpoint
    in_work = json.loads((stopped / "generator.rank0.json").read_text())["in_work"]
    assert in_work, "nothing was under way when it was stopped"
    again = (
        *SMALL,
        *LONG,
        f"max_steps={int(stopped.name.removeprefix('step_')) + 2}",
        "resume=auto",
    )
    sums(tmp_path / "sums.jsonl", first=30)
    with ForkedJob(*again, *task, run_dir=tmp_path / "run") as job:
        assert job.wait() == BAD_INPUT and "the data itself has changed" in job.output
    job = finished_job(*again, *task, "resume_with_other=[data]", run_dir=tmp_path / "run")
    assert f"completions of {len(in_work)} tickets were sampled for other prompts" in job.output
    assert "completions go on after" not in job.output
    assert len(job.rows) == len({row["step"] for row in job.rows})
    after = json.loads((job.checkpoint / "controller.rank0.json").read_text())["ledger"]
    open_ = set(after["again"]) | {ticket for ticket, _ in after["finished"]}
    trained = int(job.checkpoint.name.removeprefix("step_")) * 4
    assert after["frontier"] - len(open_) == trained, "tickets that were trained on, each once"


def test_another_number_of_held_out_prompts_is_refused_by_its_key(
    synchronous_run, launch_here, tmp_path
):
    run_dir = shutil.copytree(synchronous_run.run_dir, tmp_path / "run")
    given = (*SMALL, "max_lag=0", "resume=auto", "eval.num_prompts=5")
    code, said = launch_here(*given, f"run_dir={run_dir}")
    assert code == BAD_INPUT
    assert "other held-out prompts: eval.num_prompts: 20 in the checkpoint, 5 now" in said.err


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
        return Job(
            *SMALL,
            *ENDLESS,
            slow,
            run_dir=None,
            ranks=1,
            cwd=home,
            rendezvous=port,
            torchrun=("--max-restarts=1",),
        )

    def steps(run):
        return [
            json.loads(line)["step"]
            for line in (run / "metrics.jsonl").read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    with start() as first:
        first.until(lambda: "step 3/" in first.output, "three steps of the first")
        (one,) = (home / "runs").iterdir()
        with start() as second:
            second.until(lambda: "step 3/" in second.output, "three steps of the second")
            (other,) = set((home / "runs").iterdir()) - {one}
            os.kill(first.rank_pids()[0], signal.SIGKILL)
            first.until(lambda: "resumed from" in first.output, "the restart of the first")
            lines = [
                line.split()[1].rstrip(",")
                for line in first.output.splitlines()
                if line.startswith("run  ")
            ]
            assert lines == [str(one), str(one)]
            assert steps(other) == sorted(set(steps(other)))


@pytest.mark.slow
def test_a_second_job_in_the_directory_of_a_running_one_is_refused(tmp_path):
    with Job(*SMALL, *ENDLESS, run_dir=tmp_path / "run", ranks=2) as first:
        first.until(lambda: len(first.rows) >= 2, "two steps")
        with Job(*SMALL, "resume=auto", "stop_s=1", run_dir=tmp_path / "run", ranks=2) as second:
            assert (
                second.wait() != 0
                and f"{tmp_path / 'run'} is in use by process {first.rank_pids()[0]} on "
                in second.output
            )
        assert first.process.poll() is None
