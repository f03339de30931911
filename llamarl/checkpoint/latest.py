"""RUN_DIR/checkpoints/latest: a relative symbolic link to the newest sealed checkpoint. On a file
system without links, and in runs of older commits, it is a text file with the checkpoint's name.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from llamarl.disk.files import put_in_place, replace_text, sync_directory
from llamarl.disk.space import discard

LATEST = "latest"

log = logging.getLogger(__name__)


def latest_in(folder: Path) -> Path | None:
    """Return the checkpoint that `latest` in a folder of checkpoints names, or None without it."""
    latest = folder / LATEST
    if latest.is_symlink():
        return folder / os.readlink(latest)
    if latest.is_file():
        return folder / latest.read_text().strip()
    # A copy of a run may have followed the link: then it is a checkpoint itself.
    return latest if latest.is_dir() else None


def point_to(checkpoint: Path) -> None:
    """Make `latest` beside a checkpoint name it, atomically and durably. If the disk refuses, warn,
    and remove `latest`: it must not name a checkpoint that is about to be pruned.
    """
    latest = checkpoint.with_name(LATEST)
    try:
        sync_directory(checkpoint.parent)  # after a power cut the link must not be without it
        if latest.is_dir() and not latest.is_symlink():
            discard(latest)
        _replace(latest, checkpoint.name)
    except OSError as error:  # a resume looks at the checkpoints themselves
        log.warning("%s: not written (%s); the newest checkpoint is %s", latest, error, checkpoint)
        with suppress(OSError):
            latest.unlink(missing_ok=True)


def _replace(latest: Path, name: str) -> None:
    draft = latest.with_name(f"{LATEST}.tmp")
    draft.unlink(missing_ok=True)  # a kill left it
    try:
        draft.symlink_to(name)
    except OSError as error:
        if latest.is_symlink() or not latest.exists():  # a text file was warned of before
            log.warning(
                "%s: cannot be a symbolic link here (%s), so it is a text file that names the "
                "newest checkpoint. llamarl reads it; give other programs step_N/hf",
                latest,
                error,
            )
        replace_text(latest, f"{name}\n")
    else:
        put_in_place(draft, latest)
