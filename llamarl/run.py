"""A run's directory: where it is, whether it may be used, and which checkpoint it goes on from.

RUN_DIR/config.yaml      the resolved config
        metrics.jsonl    one row a step
        checkpoints/     step_N/, latest
        trace.rank*.json
        launch.json      which launch made it, so that a restarted worker finds its own directory again
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from llamarl.checkpoint import find
from llamarl.config import Config, config_differences, load_config, save_config
from llamarl.placement import World

RUNS = Path("runs")
# What a run is: with other values it would be another run, not this one going on.
_IDENTITY = (
    "seed",
    "groups_per_step",
    "group_size",
    "max_new_tokens",
    "temperature",
    "max_lag",
    "buffer.kind",
    "model.path",
    "task.kind",
    "task.path",
    "task.name",
)


class RunDirectoryError(ValueError):
    """The directory may not be used like this; the message says what to do."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    path: Path
    resume_from: Path | None  # a checkpoint's directory


def open_run(config: Config, world: World) -> RunDirectory:
    """Collective over the world: rank 0 decides, the others follow. RunDirectoryError on every rank."""
    store = world.store()
    if world.rank == 0:
        try:
            run = _decide(config)
            answer = {"path": str(run.path), "resume_from": str(run.resume_from or "")}
        except (
            ValueError,
            OSError,
        ) as error:  # a damaged checkpoint, an old config.yaml, a directory in use or that cannot be made
            answer = {"error": str(error)}
        if store is not None:
            store.set("run", json.dumps(answer))
    else:
        answer = json.loads(store.get("run"))
    if "error" in answer:
        raise RunDirectoryError(answer["error"])
    return RunDirectory(Path(answer["path"]), Path(answer["resume_from"]) if answer["resume_from"] else None)


def _decide(config: Config) -> RunDirectory:
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    path = Path(config.run_dir) if config.run_dir else (_of_this_launch() if restarted else None)
    if path is None:
        path = RUNS / time.strftime("%Y%m%d-%H%M%S")
    used = path.exists() and any(path.iterdir())
    mine = used and restarted and _launch_of(path) == _launch_id()
    resume = "auto" if mine and config.resume == "never" else config.resume
    if used and resume == "never":
        raise RunDirectoryError(f"{path} holds a run already; go on with resume=auto, or choose another run_dir")
    resume_from = None if resume == "never" else find(resume, path)
    saved = resume_from.parents[1] / "config.yaml" if resume_from else None
    if saved and saved.is_file():
        _check_same_run(load_config(saved), config, resume_from)
    path.mkdir(parents=True, exist_ok=True)
    (path / "launch.json").write_text(json.dumps({"launch": _launch_id()}))
    save_config(config, path / "config.yaml")
    return RunDirectory(path.absolute(), resume_from.absolute() if resume_from else None)


def _check_same_run(old: Config, new: Config, checkpoint: Path) -> None:
    changed = {k: v for k, v in config_differences(old, new).items() if k in _IDENTITY}
    if changed:
        lines = "\n".join(f"  {key}: {was} in the checkpoint, {now} now" for key, (was, now) in changed.items())
        raise RunDirectoryError(
            f"{checkpoint}: this would be another run, not that one going on:\n{lines}\n"
            f"Use the old values, or start a run of its own from the checkpoint's weights: model=hf model.path={checkpoint / 'hf'}"
        )


def _launch_id() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "none")


def _launch_of(path: Path) -> str | None:
    file = path / "launch.json"
    return json.loads(file.read_text())["launch"] if file.is_file() else None


def _of_this_launch() -> Path | None:
    """The newest directory under runs/ that this launch made before its workers were restarted."""
    made = [p.parent for p in RUNS.glob("*/launch.json") if _launch_of(p.parent) == _launch_id()]
    return max(made, key=lambda p: p.stat().st_mtime, default=None)
