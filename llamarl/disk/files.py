"""Files that stay whole after a kill or a power cut, and locks of directories."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from llamarl.disk.space import free_bytes
from llamarl.errors import InUse

log = logging.getLogger(__name__)

FORMAT = 1  # of a checkpoint's manifest and of a run's config.yaml
LOCK = "lock"
RUNS = Path("runs")  # where new run directories are made
_LOOK_S = 0.2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # of a file system without them


def other_format(values: Mapping) -> str:
    """Return a sentence that refuses the values of a file in another format; "" for this one."""
    found = values.get("format")
    if found == FORMAT:
        return ""
    shown = "no format" if found is None else f"format {found}"
    return (
        f"{shown}, where this commit of llamarl reads format {FORMAT}; finish the run with the "
        "commit that began it"
    )


def replace_text(file: str | Path, text: str) -> None:
    """Replace a file atomically and durably: even after a power cut it is the old one or the new
    one. OSError names the file and what to do.
    """
    file = Path(file)
    new = file.with_name(f"{file.name}.new")
    try:
        with new.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        put_in_place(new, file)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()  # half a file takes room
        raise OSError(error.errno, _why_not_written(error, file), str(file)) from error


def _why_not_written(error: OSError, file: Path) -> str:
    """Return why a write failed, with the file's name: the system names it only when a file cannot
    be opened.
    """
    why = f"cannot be written: {error.strerror or error}"
    if error.errno not in _NO_ROOM:
        return why
    free = free_bytes(file.parent)
    return f"{why}, and {free:,} bytes are free; make room there, and start again"


def put_in_place(new: Path, file: Path) -> None:
    """Rename a synced file, or a link, to another name in its directory, durably."""
    os.replace(new, file)
    sync_directory(file.parent)


def sync_directory(path: Path) -> None:
    """Put a directory's entries on the disk."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def set_aside(file: Path) -> None:
    """Rename a file of an earlier run, if there is one, to NAME.1.SUFFIX, NAME.2.SUFFIX, ..."""
    if file.exists():
        names = (file.with_suffix(f".{n}{file.suffix}") for n in itertools.count(1))
        os.replace(file, next(name for name in names if not name.exists()))


def new_directory(folder: Path) -> Path:
    """Make the first of FOLDER/TIME, FOLDER/TIME-2, FOLDER/TIME-3, ... that does not exist, so that
    jobs which begin in the same second get one each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = folder.absolute() / time.strftime("%Y%m%d-%H%M%S")
    names = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    for path in itertools.chain([first], names):
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("there are always more names")


class DirectoryLock:
    """Holds a directory for this process alone, until `release` or the end of the process, by a
    lock of the kernel (on NFS of the server) on DIRECTORY/lock. The file's text is for people.

    patience_s: how long to wait for the last holder to end; waiting() is called meanwhile. InUse
    names the holder after that. On a file system without locks: a warning and no protection.
    """

    def __init__(
        self, directory: Path, *, patience_s: float, waiting: Callable[[], None] = lambda: None
    ):
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(directory / LOCK, flags, 0o644)
        try:
            self._take(directory, patience_s, waiting)
            self._say_who(directory)
        except BaseException:
            os.close(self._file)
            raise

    def _take(self, directory: Path, patience_s: float, waiting: Callable[[], None]) -> None:
        until: float | None = None
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                log.warning(
                    "%s: cannot be locked (%s); see to it that no other job writes there",
                    directory,
                    error.strerror,
                )
                return None
            if until is None:
                log.warning(
                    "%s is in use by %s; waiting up to %.0f s for its end",
                    directory,
                    self._holder(),
                    patience_s,
                )
                until = time.monotonic() + patience_s
            elif time.monotonic() > until:
                raise InUse(
                    f"{directory} is in use by {self._holder()}; "
                    "wait for its end, or choose another run_dir"
                )
            waiting()
            time.sleep(_LOOK_S)

    def _say_who(self, directory: Path) -> None:
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(holder).encode(), 0)
        except OSError as error:  # the lock holds all the same
            log.warning("%s: does not say who has it (%s)", directory / LOCK, error.strerror)

    def _holder(self) -> str:
        """Return who wrote the file last, for people."""
        try:
            holder = json.loads(os.pread(self._file, 4096, 0))
            return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        except (ValueError, KeyError, TypeError):
            return "another process"

    def release(self) -> None:
        """Let others use the directory."""
        os.close(self._file)
