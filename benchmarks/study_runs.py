"""The runs of a study: one at a time, arm after arm of a seed, each in a directory of its own.

A run goes on from its newest checkpoint (resume=auto) and is kept once it has finished, under a
name that is made of all that makes it that run. So a study may be stopped, or killed, at any time:
what is lost is what a run made since its last checkpoint. Several commands may make one study
together: each run is made by one. A run on one rank is forked from this
process, which has imported what it imports; one on several is torchrun's.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from running import ROOT, STOP_S, job_command, keep, kept_file
from study_terms import Arm, Row, Run, Study

from llamarl.observe.report import write_report

IMPORTED = (
    "hydra",
    "transformers",
    "executors.build",
    "executors.trainer",
)
POLL_S = 0.1
PR_SET_PDEATHSIG = 1  # of Linux's prctl: a signal to this process when its parent dies
# What every run has: it is looked at by its metrics alone.
ALWAYS = ("metrics.trace=false", "resume=auto")
# Values that runs of a model's directory were made with and kept, where a study does not say them.
KEPT = {"trainer.warmup_steps": 0, "eval.num_prompts": 500}
LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class Piece:
    """One run to make: in `run_dir`, with the words of a command line that set it."""

    study: Study
    arm: Arm
    seed: int
    file: Path
    given: Mapping[str, str]

    @property
    def run_dir(self) -> Path:
        return self.file.with_suffix("") / "run"

    @property
    def log(self) -> Path:
        return self.file.with_suffix("") / "log"

    @property
    def title(self) -> str:
        return f"{self.study.name} [{self.arm.name}] seed {self.seed}"

    @property
    def words(self) -> list[str]:
        filled = []
        for word in words_of(self.study, self.arm, self.seed):
            for name, path in self.given.items():
                word = word.replace(f"{{{name}}}", path)
            filled.append(word)
        given = {word.partition("=")[0] for word in filled}
        if "model=hf" in filled:
            filled += [f"{key}={value}" for key, value in KEPT.items() if key not in given]
        return [*filled, *ALWAYS]


# Makes a run, or goes on with it, until it has finished or the clock of time.monotonic() shows the
# deadline. False: it was stopped, and can go on. RuntimeError: it failed.
Maker = Callable[[Piece, float], bool]


def words_of(study: Study, arm: Arm, seed: int) -> tuple[str, ...]:
    """Return what sets a run, with paths by their names."""
    return (*study.common, *arm.overrides, f"seed={seed}")


def piece_of(study: Study, arm: Arm, seed: int, folder: Path, given: Mapping[str, str]) -> Piece:
    """Return a run with the file that keeps it. Studies that share a run share its file."""
    made_by = arm.made_by.__name__ if arm.made_by else study.recipe
    known = [made_by, arm.ranks, sorted(words_of(study, arm, seed)), study.columns]
    return Piece(study, arm, seed, kept_file(folder, known), given)


def order(study: Study, seed: int) -> list[Arm]:
    """Return the arms, beginning with another one at each seed: a busy hour meets all alike."""
    first = study.seeds.index(seed) % len(study.arms)
    return [*study.arms[first:], *study.arms[:first]]


def load(file: Path) -> Run | None:
    """Return a kept run; None if there is none."""
    if not file.exists():
        return None
    kept = json.loads(file.read_text())
    return Run(tuple(kept["rows"]), kept["failed"], kept["seconds"], kept["load"])


def loaded(study: Study, folder: Path) -> dict[int, dict[str, Run]]:
    """Return what is kept of a study: seed -> arm -> run."""
    found: dict[int, dict[str, Run]] = {}
    for seed in study.seeds:
        found[seed] = {}
        for arm in study.arms:
            run = load(piece_of(study, arm, seed, folder, {}).file)
            if run is not None:
                found[seed][arm.name] = run
    return found


def make(
    study: Study,
    folder: Path,
    given: Mapping[str, str],
    *,
    seeds: Sequence[int] | None = None,
    minutes: float | None = None,
    maker: Maker | None = None,
) -> bool:
    """Make what is missing of a study, or of these seeds of it. False if not all is made: the
    minutes were over, or another command is at a run, which is left to it.

    RuntimeError if a run fails in another way than by numbers that are not finite: those are a
    result, and what ended it is kept with its rows.
    """
    maker = maker or make_run
    deadline = time.monotonic() + 60 * minutes if minutes else float("inf")
    is_whole = True
    for seed in study.seeds if seeds is None else seeds:
        for arm in order(study, seed):
            piece = piece_of(study, arm, seed, folder, given)
            if piece.file.exists():
                continue
            if time.monotonic() >= deadline:
                return False
            with _held(piece) as is_held:
                if not is_held:
                    print(f"{piece.title}  left to another command", flush=True)
                    is_whole = False
                    continue
                if piece.file.exists():
                    continue  # another command has just made it
                if not _make_one(piece, maker, deadline):
                    return False
    return is_whole


@contextmanager
def _held(piece: Piece) -> Iterator[bool]:
    """Keep other commands from making this run; False if another one makes it.

    A forked child holds it too: while one is left behind, no other command begins its run.
    """
    piece.file.parent.mkdir(parents=True, exist_ok=True)
    # Beside the run's directory, which its maker removes at the end.
    lock = piece.file.with_suffix(".held")
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
        if piece.file.exists():
            lock.unlink(missing_ok=True)


def _make_one(piece: Piece, maker: Maker, deadline: float) -> bool:
    """Make a run, or go on with it, and keep it. False if it was stopped before its end."""
    piece.run_dir.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    has_finished = maker(piece, deadline)
    took_s = time.monotonic() - started
    _note_seconds(piece, took_s)
    said = "made" if has_finished else "stopped, to go on"
    print(f"{took_s:5.0f} s  {piece.title}  {said}", flush=True)
    if has_finished:
        _keep_run(piece)
    return has_finished


def _seconds_file(piece: Piece) -> Path:
    return piece.file.with_suffix("") / "seconds"


def _note_seconds(piece: Piece, seconds: float) -> None:
    """Add to what a run took so far, over all its pieces."""
    file = _seconds_file(piece)
    before = float(file.read_text()) if file.exists() else 0.0
    file.write_text(str(before + seconds))


def _keep_run(piece: Piece) -> None:
    """Keep the columns that the study reads, and its report if it is asked for; remove the rest."""
    lines = (piece.run_dir / "metrics.jsonl").read_text().splitlines()
    rows: list[Row] = []
    for line in lines:
        row = json.loads(line)
        rows.append({name: row[name] for name in piece.study.columns if name in row})
    diverged = piece.run_dir.parent / "diverged"
    kept = {
        "words": words_of(piece.study, piece.arm, piece.seed),
        "rows": rows,
        "failed": diverged.read_text() if diverged.exists() else None,
        "seconds": float(_seconds_file(piece).read_text()),
        "load": os.getloadavg()[0],
    }
    if piece.study.keeps_reports:
        write_report(piece.run_dir, piece.file.with_suffix(".html"))
    keep(piece.file, kept)
    shutil.rmtree(piece.run_dir.parent)


# --- One run ---


def make_run(piece: Piece, deadline: float) -> bool:
    """Make a run in a process of its own, or on ranks of torchrun. RuntimeError if it fails."""
    process = _forked(piece) if piece.arm.ranks == 1 else _launched(piece)
    is_over = _await(process, deadline)
    said = piece.log.read_text().splitlines() if piece.log.exists() else []
    if piece.arm.made_by is not None:
        ended = "finished" if is_over and process.returncode == 0 else "stopped"
        if is_over and process.returncode:
            raise RuntimeError(_failure(piece, said))
        return ended == "finished"
    outcome_file = piece.run_dir / "outcome.json"
    if not outcome_file.exists():
        if not is_over:
            return False  # killed before it could say so: it goes on from its last checkpoint
        raise RuntimeError(_failure(piece, said))
    ended = json.loads(outcome_file.read_text())["ended"]
    if ended == "failed":
        diverged = [line for line in said if "NotFinite" in line]
        if not diverged:
            raise RuntimeError(_failure(piece, said))
        (piece.run_dir.parent / "diverged").write_text(diverged[-1])
        return True
    return ended == "finished"


def _failure(piece: Piece, said: list[str]) -> str:
    last = "\n".join(said[-LOG_LINES:])
    return f"{piece.title} failed ({' '.join(piece.words)}):\n{last}"


class _Fork:
    """A child of this process, with what subprocess.Popen has of one."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _await(process: _Fork | subprocess.Popen, deadline: float) -> bool:
    """Wait for a process until the deadline, then have it stop. False if it had to be asked to.

    It is asked too if this process is: nothing goes on behind its back.
    """
    asked_at: float | None = None
    try:
        while process.poll() is None:
            now = time.monotonic()
            if asked_at is None and now >= deadline:
                process.send_signal(signal.SIGTERM)
                asked_at = now
            if asked_at is not None and now >= asked_at + STOP_S:
                process.send_signal(signal.SIGKILL)
            time.sleep(POLL_S)
    except BaseException:
        process.send_signal(signal.SIGTERM)
        end = time.monotonic() + STOP_S
        while process.poll() is None and time.monotonic() < end:
            time.sleep(POLL_S)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        raise
    return asked_at is None


def _launched(piece: Piece) -> subprocess.Popen:
    command = job_command(
        piece.run_dir, piece.words, ranks=piece.arm.ranks, recipe=piece.study.recipe
    )
    with open(piece.log, "w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)


def _import_all() -> None:
    """Import what a main job imports, lazily or not. No thread may run here: a child has one."""
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in IMPORTED:
        importlib.import_module(module)


def _forked(piece: Piece) -> _Fork:
    _import_all()
    sys.stdout.flush()
    if pid := os.fork():
        return _Fork(pid)
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with open(piece.log, "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        _run_here(piece)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except Exception:  # noqa: BLE001 - into the run's log, for the parent to judge
        traceback.print_exc()
    finally:  # whatever happened, a child never goes on as its parent
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_here(piece: Piece) -> None:
    if piece.arm.made_by is None:
        recipe = str(ROOT / "recipes" / piece.study.recipe)
        sys.argv = [recipe, f"run_dir={piece.run_dir}", *piece.words]
        runpy.run_path(recipe, run_name="__main__")
        return
    rows = piece.arm.made_by(piece.run_dir.parent, piece.words)
    piece.run_dir.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (piece.run_dir / "metrics.jsonl").write_text(lines)
