"""Many small main jobs, one process each, forked from one that has imported what they import; what
is finished is kept.

A run of the tiny model is over in seconds, of which a fresh interpreter spends most on imports. A
run is named by its overrides, so that a study that was cut off goes on where it was, and studies
that share runs make them once.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import runpy
import shutil
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from running import ROOT, keep, kept_file

KEPT = {
    "step",
    "reward/mean",
    "eval/accuracy",
    "lag/mean",
    "lag/max",
    "ratio/mean",
    "ratio/max",
    "ratio/capped_fraction",
    "grad_norm",
    "entropy",
    "kl/generator",
    "time/wall_s",
    "time/evaluated_s",
    "loss/value",
    "buffer/size",
}
IMPORTED = (
    "hydra",
    "torchtune.models.llama3",
    "transformers",
    "executors.build",
    "executors.trainer",
)


@dataclass(frozen=True)
class Run:
    """A finished run. rows: a dict a step of KEPT; failed: the error that ended it, or None; cpu_s:
    of the whole process.
    """

    overrides: tuple[str, ...]
    rows: list[dict]
    failed: str | None
    cpu_s: float
    load: float  # runnable processes of the machine, the minute's mean, at its end


def store(folder: Path, overrides: tuple[str, ...]) -> Path:
    """The file that keeps this run."""
    return kept_file(folder, sorted(overrides))


def load_run(folder: Path, overrides: tuple[str, ...]) -> Run | None:
    file = store(folder, overrides)
    if not file.exists():
        return None
    kept = json.loads(file.read_text())
    return Run(
        overrides=tuple(kept["overrides"]),
        rows=kept["rows"],
        failed=kept["failed"],
        cpu_s=kept["cpu_s"],
        load=kept["load"],
    )


def make(folder: Path, wanted: list[tuple[str, ...]], *, jobs: int) -> None:
    """Make, `jobs` at a time, and keep in `folder` those that are not kept there yet. RuntimeError
    for one that does not run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [w for w in dict.fromkeys(wanted) if not store(folder, w).exists()]
    if missing:
        _import_all()
    running: dict[int, tuple[str, ...]] = {}
    while missing or running:
        while missing and len(running) < jobs:
            overrides = missing.pop(0)
            running[_fork(folder, overrides)] = overrides
        pid, status, usage = os.wait4(-1, 0)
        overrides = running.pop(pid)
        run = _finish(folder, overrides, status, usage)
        last = next(
            (r["eval/accuracy"] for r in reversed(run.rows) if r.get("eval/accuracy") is not None),
            None,
        )
        print(
            f"{run.cpu_s:5.0f} s  {len(missing) + len(running):3} left  accuracy {last}  "
            f"{run.failed or ''}  {' '.join(overrides)}",
            flush=True,
        )


def _import_all() -> None:
    """What a main job imports, lazily or not. No thread may be running here: a forked child has
    one.
    """
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in IMPORTED:
        importlib.import_module(module)


def _scratch(folder: Path, overrides: tuple[str, ...]) -> Path:
    return store(folder, overrides).with_suffix("")


def _fork(folder: Path, overrides: tuple[str, ...]) -> int:
    scratch = _scratch(folder, overrides)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    with open(scratch / "log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    recipe = str(ROOT / "recipes" / "llama_async.py")
    sys.argv = [recipe, f"run_dir={scratch / 'run'}", *overrides]
    code = 1
    try:
        runpy.run_path(recipe, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except Exception:  # noqa: BLE001 - into the run's log, for the parent to judge
        traceback.print_exc()
    finally:  # whatever happened, a child never goes on as its parent
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _kept(row: dict) -> dict:
    """What is kept of a row of metrics."""
    return {k: v for k, v in row.items() if k in KEPT or k.startswith("buffer/")}


def _finish(
    folder: Path, overrides: tuple[str, ...], status: int, usage: resource.struct_rusage
) -> Run:
    """Keep its rows and remove the rest. A run that was refused or killed is an error; one that
    diverged is a result.
    """
    scratch = _scratch(folder, overrides)
    failed, log = None, (scratch / "log").read_text().splitlines()
    if status:
        failed = next((line for line in reversed(log) if "NotFinite" in line), None)
        if failed is None:
            raise RuntimeError(
                f"{' '.join(overrides)} failed, status {status}:\n" + "\n".join(log[-15:])
            )
    lines = (scratch / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [_kept(json.loads(line)) for line in lines]
    run = Run(
        overrides=overrides,
        rows=rows,
        failed=failed,
        cpu_s=usage.ru_utime + usage.ru_stime,
        load=os.getloadavg()[0],
    )
    keep(store(folder, overrides), {**run.__dict__, "finished_at": time.time()})
    shutil.rmtree(scratch)
    return run
