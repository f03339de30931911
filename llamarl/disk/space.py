"""Free bytes of a disk, and deletion of directories that logs what the disk refuses."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llamarl.errors import OtherFormat

log = logging.getLogger(__name__)


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk of a path, which need not exist."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def shown_free(path: Path) -> str:
    """Return the free bytes of the disk of a path in words. Never fails."""
    try:
        return f"{free_bytes(path):,} bytes are free"
    except OSError as error:  # the disk that refused a write may refuse this too
        return f"how many bytes are free cannot be told ({error})"


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise OSError, as a write would, if the disk has fewer bytes left."""
    if free_bytes(folder) < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def is_full(error: Exception) -> bool:
    """Return whether an error of a write says that the disk or the user's quota is full."""
    number = getattr(error, "errno", None)  # safetensors' errors have it in their text alone
    return number in (errno.ENOSPC, errno.EDQUOT) or f"(os error {errno.ENOSPC})" in str(error)


def aside(path: Path) -> Path:
    """Return an unused name for a path that is to be deleted: PATH.old, PATH.old.1, ..."""
    name = Path(f"{path}.old")
    numbers = itertools.count(1)
    while name.exists():
        name = Path(f"{path}.old.{next(numbers)}")
    return name


@contextmanager
def named_if_unread(path: Path) -> Iterator[None]:
    """Log it and go on if a path cannot be read, or is a checkpoint of another format."""
    try:
        yield
    except OtherFormat as error:
        log.warning("%s: %s; it is left as it is", path, error)
    except OSError as error:
        log.warning(
            "%s: cannot be read (%s), so nothing of it is deleted; it is tried again with the next "
            "checkpoint. Look at its permissions and its disk",
            path,
            error,
        )


def discard(path: Path) -> None:
    """Delete a directory, or log that it stays. It is renamed first: a kill during the deletion
    must not leave a directory that looks like a damaged checkpoint.
    """
    try:
        if ".old" not in path.name:
            path = path.rename(aside(path))
        shutil.rmtree(path)
    except FileNotFoundError:
        return  # it was never begun, or is gone
    except OSError as error:
        log.warning(
            "%s cannot be deleted (%s); it is tried again with the next checkpoint. "
            "A file of it may be protected, or open in another process; nothing needs it, "
            "so it may be deleted by hand",
            path,
            error,
        )
