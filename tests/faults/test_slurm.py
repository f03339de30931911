"""docs/scaling.md's script under Slurm itself: what ends a job, whether it goes on, and with which
exit code.
"""

import re
import sys
from pathlib import Path

import pytest

from llamarl.checkpoint.checkpointer import verify
from tests.house import ROOT, blocks, text_of
from tests.launching import JOB_S, SMALL, RunFolder, environment
from tests.slurm import Cluster, absent, free_ports

STEPS = 40
KEYS = (
    *SMALL,
    f"max_steps={STEPS}",
    "max_lag=0",
    "eval.every=0",
    "checkpoint.every=0",
    "reward.fn=tests.launching:held",
    "reward.num_workers=1",
    "reward.timeout_s=1000",  # longer than a score is held
)
HOLD_AFTER = 64  # scores of a start, some four steps
# Every other state, also those of a moment (SIGNALING, STAGE_OUT), is of a job that goes on.
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
LIMIT_S = 120  # from a shorter time limit to the signal; Slurm looks every 30 s

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(absent() is not None, reason=f"no Slurm: {absent()}"),
]


def script_of(document: str, settings: dict[str, str]) -> str:
    """Return the document's Slurm script with what it says is to be set, each of which it has."""
    (script,) = [body for body in blocks("bash", document) if "#SBATCH" in body]
    for written, wanted in settings.items():
        assert written in script
        script = script.replace(written, wanted)
    return script


class Submitted:
    """A job of the script in a folder that looks like a checkout."""

    def __init__(self, cluster: Cluster, folder: Path, *options: str):
        self.cluster = cluster
        self.folder = folder
        self.run_dir = folder / "runs" / "mine"
        bin_dir = folder / ".venv" / "bin"
        if not bin_dir.exists():
            bin_dir.mkdir(parents=True)
            (folder / "recipes").symlink_to(ROOT / "recipes")
            self.program("python", f'exec {sys.executable} "$@"')
            self.program("torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
        recipe = "recipes/llama_async.py"
        (port,) = free_ports(1)
        settings = {
            "--nproc-per-node=8": "--nproc-per-node=1",
            "29500": str(port),
            recipe: " ".join([recipe, *KEYS]),
        }
        script = script_of(text_of(ROOT / "docs" / "scaling.md"), settings)
        (folder / "job.sh").write_text(script)
        self.hold = folder / "hold"
        more = environment(
            GLOO_SOCKET_IFNAME="lo", HOLD_AFTER=str(HOLD_AFTER), HOLD_FILE=str(self.hold)
        )
        # What Slurm itself has put there must not be lost.
        more |= {name: cluster.environment[name] for name in cluster.environment.keys() - more}
        words = ["sbatch", "--parsable", "--time=60", *options, "job.sh"]
        self.number = cluster.command(*words, cwd=folder, **more).strip()

    def program(self, name: str, line: str) -> None:
        """Make a program of the environment."""
        file = self.folder / ".venv" / "bin" / name
        file.write_text(f"#!/bin/sh\n{line}\n")
        file.chmod(0o755)

    @property
    def output(self) -> str:
        file = self.folder / f"slurm-{self.number}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    @property
    def steps(self) -> list[int]:
        """The steps of whole rows."""
        return [row["step"] for row in RunFolder(self.run_dir, self.run_dir).rows]

    @property
    def resumed(self) -> list[int]:
        """The steps from which it went on."""
        return [int(step) for step in re.findall(r"resumed from step_(\d+)", self.output)]

    @property
    def stopped(self) -> list[int]:
        """The steps after which it was stopped in order."""
        return [int(step) for step in re.findall(r"stopped +after step (\d+) of", self.output)]

    def state(self) -> dict[str, str]:
        return self.cluster.job(self.number)

    def until(self, holds, what: str) -> None:
        try:
            self.cluster.until(holds, what, JOB_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.state()}\n{self.output}") from None

    def until_ended(self) -> tuple[str, str]:
        """Return its state and exit code once it has ended."""
        self.until(lambda: self.state()["JobState"] in ENDED, "the job ended")
        state = self.state()
        return state["JobState"], state["ExitCode"]

    def near_its_limit(self) -> None:
        """Shorten its time limit to what is left after Slurm's signal."""
        hours, minutes, seconds = map(int, self.state()["RunTime"].split(":"))
        limit = 60 * hours + minutes + (seconds > 0) + LIMIT_S // 60
        words = ("scontrol", "update", f"JobId={self.number}", f"TimeLimit={limit}")
        self.cluster.command(*words)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm") / "c") as cluster:
        yield cluster


def test_a_requeued_job_goes_on_from_where_it_was_and_ends_with_0(cluster, tmp_path):
    (tmp_path / "hold").touch()
    job = Submitted(cluster, tmp_path)
    job.until(lambda: len(job.steps) >= 2, "two steps")
    cluster.command("scontrol", "requeue", job.number)
    job.until(lambda: len(job.resumed) == 1, "it went on after somebody requeued it")
    job.until(lambda: len(job.steps) >= job.resumed[0] + 2, "two steps more")
    job.near_its_limit()
    job.until(lambda: len(job.resumed) == 2, "it went on after it requeued itself")
    assert job.state()["Restarts"] == "2"
    assert job.stopped == job.resumed and 2 <= job.resumed[0] < job.resumed[1] < STEPS
    (tmp_path / "hold").unlink()
    assert job.until_ended() == ("COMPLETED", "0:0"), job.output
    assert job.steps == list(range(1, STEPS + 1)), "each step once"
    assert f"runs/mine: finished after step {STEPS}" in job.output


def test_a_job_that_its_time_limit_ends_has_a_checkpoint_and_ends_with_75(cluster, tmp_path):
    (tmp_path / "hold").touch()
    job = Submitted(cluster, tmp_path, "--no-requeue")
    job.until(lambda: len(job.steps) >= 2, "two steps")
    job.near_its_limit()
    assert job.until_ended() == ("FAILED", "75:0"), job.output
    (step,) = job.stopped
    assert verify(job.run_dir / "checkpoints" / f"step_{step}") == []
    assert RunFolder(job.run_dir, job.run_dir).outcome["ended"] == "stopped"

    # What an earlier allocation left must not have a job requeued again and again.
    job.program("torchrun", "exit 1")
    again = Submitted(cluster, tmp_path)
    assert again.until_ended() == ("FAILED", "3:0"), again.output
    assert again.state()["Restarts"] == "0"
