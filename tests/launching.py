"""Jobs as a user starts them, watched from outside and ended for certain; and reward functions for
them.

Every process of a job carries its mark in the environment, so orphans are found too, and nobody
else's process is touched.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from llamarl.checkpoint.latest import latest_in
from llamarl.observe import is_timing
from llamarl.tasks.rewards import exact_match
from tests.forkery import ForkedProcess, the_forkery

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "llama_async.py"
STEPS = 4
GROUPS = 4
GROUP_SIZE = 4
EVAL_PROMPTS = 20
SMALL = (
    f"groups_per_step={GROUPS}",
    f"group_size={GROUP_SIZE}",
    f"eval.num_prompts={EVAL_PROMPTS}",
    "eval.every=2",
    "checkpoint.every=2",
    f"max_steps={STEPS}",
    "generator.max_slots=64",
)
COMPLETIONS = GROUPS * GROUP_SIZE  # a step
JOB_S = 240  # longer than any job here takes on a busy machine
POLL_S = 0.05
_MARK = "LLAMARL_TEST_JOB"


def environment(**more: str) -> dict[str, str]:
    """Of a process that a test starts: one thread, no GPU, and this checkout before all else that
    PYTHONPATH has.
    """
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(ROOT), *([given] if given else [])])
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": path,
        **more,
    }


class RunFolder:
    """What a job has written so far: its run directory, and its output in the file `log`."""

    def __init__(self, run_dir: Path | None, log: Path):
        self.run_dir = run_dir
        self._log = log

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def rows(self) -> list[dict]:
        """Whole rows of metrics.jsonl."""
        file = self.run_dir / "metrics.jsonl"
        if not file.exists():
            return []
        lines = file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def checkpoint(self) -> Path:
        """The newest one, by `latest`."""
        return latest_in(self.run_dir / "checkpoints")

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint."""
        return int(self.checkpoint.name.removeprefix("step_"))

    @property
    def consumed(self) -> int:
        """How many tickets were trained on, by the newest checkpoint."""
        ledger = self.part("controller")["ledger"]
        waiting = set(ledger["again"]) | {ticket for ticket, _ in ledger["finished"]}
        return ledger["frontier"] - len(waiting)

    @property
    def outcome(self) -> dict:
        """What outcome.json says."""
        return json.loads((self.run_dir / "outcome.json").read_text())

    def part(self, executor: str, rank: int = 0) -> dict:
        """What the newest checkpoint says of an executor on a rank."""
        return json.loads((self.checkpoint / f"{executor}.rank{rank}.json").read_text())


class Job(RunFolder):
    """One started recipe: under python (ranks=None) or torchrun. A context manager; leaving it
    kills what still runs.
    """

    def __init__(
        self,
        *overrides: str,
        run_dir: Path | None,
        ranks: int | None = None,
        torchrun: tuple[str, ...] = (),
        env=(),
        cwd=None,
        rendezvous="--standalone",
        recipe: Path = RECIPE,
        directory_key: str = "run_dir",
    ):
        self._recipe = str(recipe)
        self._mark = uuid.uuid4().hex
        home = run_dir.parent if run_dir else cwd
        log = home / f"{self._mark}.log" if cwd is None else cwd.parent / f"{self._mark}.log"
        super().__init__(run_dir, log)
        where = [f"{directory_key}={run_dir}"] if run_dir else []
        argv = [self._recipe, *overrides, *where]
        marked = {"PYTHONUNBUFFERED": "1", _MARK: self._mark} | dict(env)
        self.process = self._start(
            argv,
            ranks=ranks,
            options=(rendezvous, *torchrun),
            env=environment(**marked),
            cwd=cwd or ROOT,
        )

    def _command(self, argv, ranks, options) -> list[str]:
        launcher = []
        if ranks:
            launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *options]
        return [sys.executable, *launcher, *argv]

    def _start(self, argv, *, ranks, options, env, cwd) -> subprocess.Popen | ForkedProcess:
        with self._log.open("wb") as log:
            return subprocess.Popen(
                self._command(argv, ranks, options),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=cwd,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_) -> None:
        self.kill_all()
        self.process.wait()

    def kill_all(self) -> None:
        """Kill every process of the job at once."""
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended meanwhile

    def stop(self) -> None:
        """Ask for the end at the next step, as a cluster's scheduler does."""
        os.kill(self.process.pid, signal.SIGTERM)

    def wait(self, timeout_s: float = JOB_S) -> int:
        """The exit code of python or torchrun. AssertionError with the output if it does
        not end.
        """
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output}") from None

    def until(self, predicate: Callable[[], object], what: str, timeout_s: float = JOB_S) -> None:
        """Poll until predicate() holds. AssertionError with the output if it does not in time, or
        the job ends before.
        """
        deadline = time.monotonic() + timeout_s
        while not predicate():
            ended = self.process.poll() is not None and not predicate()
            if ended or time.monotonic() > deadline:
                raise AssertionError(
                    f"{what}: not so "
                    f"{'when the job ended' if ended else f'after {timeout_s} s'}:\n{self.output}"
                )
            time.sleep(POLL_S)

    def until_rows(self, count: int) -> None:
        """Wait for that many rows of metrics.jsonl."""
        self.until(lambda: len(self.rows) >= count, f"{count} rows")

    def until_gone(self, pids: set[int], timeout_s: float = JOB_S) -> float:
        """Seconds until none of these processes of the job is left. AssertionError with those that
        are.
        """
        began = time.monotonic()
        while left := pids & self.pids().keys():
            if time.monotonic() - began > timeout_s:
                raise AssertionError(
                    f"after {timeout_s} s there still are {left} of {self.pids()}:\n{self.output}"
                )
            self.process.poll()
            time.sleep(POLL_S)
        return time.monotonic() - began

    def pids(self) -> dict[int, str]:
        """All living processes of the job, orphans included, with their command lines."""
        return {p.pid: " ".join(p.info["cmdline"] or []) for p in self._processes()}

    def rank_pids(self) -> dict[int, int]:
        """Rank -> pid."""
        ranks = {}
        for p in self._processes():
            command = p.info["cmdline"]
            if self._recipe in command and "torch.distributed.run" not in command:
                ranks[int(p.info["environ"].get("RANK", 0))] = p.pid
        return ranks

    def signal_rank(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a rank a signal; by default it is killed."""
        os.kill(self.rank_pids()[rank], number)

    def _processes(self) -> list[psutil.Process]:
        attributes = ["environ", "cmdline", "status"]
        return [
            p
            for p in psutil.process_iter(attributes)
            if (p.info["environ"] or {}).get(_MARK) == self._mark
            and p.info["status"] != psutil.STATUS_ZOMBIE
        ]


class ForkedJob(Job):
    """A job that starts at once, where a test is of what comes of it and not of how it is started:
    its ranks have no interpreter of their own, and its launcher does as torchrun does.

    All of a session's have one order of sets of words (PYTHONHASHSEED), so that whether that
    matters is for Jobs to say.
    """

    def _start(self, argv, *, ranks, options, env, cwd) -> ForkedProcess:
        assert options == ("--standalone",), "a Job has options of torchrun"
        self._log.touch()
        return the_forkery().start(argv, ranks=ranks, environment=env, log=self._log, cwd=cwd)

    def __exit__(self, *_) -> None:
        self.process.end()
        self.kill_all()  # what its ranks have started

    def stop(self) -> None:
        self.process.stop()

    def rank_pids(self) -> dict[int, int]:
        return dict(enumerate(self.process.pids))


def killed_and_resumed(start: Callable[..., Job], code: int = 0) -> Job:
    """Kill the last rank of a job once there is a checkpoint, and start the job again to its end.

    start(*overrides): the job. code: with which the second ends.
    """
    with start() as job:
        job.until((job.run_dir / "checkpoints" / "latest").exists, "a checkpoint")
        job.signal_rank(max(job.rank_pids()))
        assert job.wait() != 0
    with start("resume=auto") as job:
        assert job.wait() == code, job.output
    assert "resumed from step_" in job.output
    return job


def untimed(rows: list[dict]) -> list[dict]:
    """Rows without what depends on the clock."""
    found = []
    for row in rows:
        found.append({name: value for name, value in row.items() if not is_timing(name)})
    return found


# -- reward functions: (prompt, completion_text, meta) -> float; all but the failing ones score as
# exact_match --------------

_calls = 0


def unhurried(prompt: str, completion: str, meta: dict) -> float:
    """Takes 20 ms, so that a step takes long enough to be interrupted."""
    time.sleep(0.02)
    return exact_match(prompt, completion, meta)


def held(prompt: str, completion: str, meta: dict) -> float:
    """After HOLD_AFTER calls it waits for as long as there is a file HOLD_FILE."""
    global _calls
    _calls += 1
    while _calls > int(os.environ["HOLD_AFTER"]) and Path(os.environ["HOLD_FILE"]).exists():
        time.sleep(0.02)
    return exact_match(prompt, completion, meta)


def fails_later(prompt: str, completion: str, meta: dict) -> float:
    """Scores FAIL_AFTER completions, and none after them."""
    global _calls
    _calls += 1
    if _calls > int(os.environ["FAIL_AFTER"]):
        raise RuntimeError("no more verdicts")
    return exact_match(prompt, completion, meta)


def hangs_on_one(prompt: str, completion: str, meta: dict) -> float:
    """Never returns for the prompt HANG_ON."""
    while prompt == os.environ["HANG_ON"]:
        time.sleep(1)
    return exact_match(prompt, completion, meta)


def of_turns(prompts, completions, answer, **columns):
    """TRL's form: 1 where a prompt is the turns system, user, assistant, user; else it raises."""
    for prompt, completion in zip(prompts, completions, strict=True):
        roles = [turn["role"] for turn in (*prompt, *completion)]
        if roles != ["system", "user", "assistant", "user", "assistant"]:
            raise ValueError(f"the turns are {roles}")
    return [float(text == prompt[-1]["content"]) for text, prompt in zip(answer, prompts)]


def fails(prompt: str, completion: str, meta: dict) -> float:
    raise RuntimeError("no verdict")


def with_beta(inputs, *, beta):
    """A loss with a coefficient that can follow a schedule: REINFORCE times beta."""
    objective = (inputs.advantages * inputs.trainer_logprobs)[inputs.loss_mask].sum()
    return -beta * objective / max(inputs.num_loss_tokens, 1), {}
