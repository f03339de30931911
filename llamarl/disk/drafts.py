"""A file that is written in chunks, each durable against a kill or a power cut, and renamed into
place at the end.

    FILE.part       the chunks so far, and perhaps a torn one
    FILE.progress   JSON: the bytes of the whole chunks, the writer's notes with the last of them,
                    and what the file is about
    FILE            the whole file
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from llamarl.disk.files import put_in_place, replace_text
from llamarl.errors import InUse, RunDirectoryError


class Draft:
    """A file that this process alone writes in chunks, until `close` or its end.

    file: its directory is made. about: JSON about the file, kept beside it. anew: drop the chunks
    of an earlier process, and replace a file that is there. InUse if another process writes the
    file. RunDirectoryError if the file exists and anew is false, or if its chunks are damaged.
    OSError.
    """

    def __init__(self, file: Path, *, about: dict[str, object], anew: bool):
        self.file = file
        self.about = about  # of the process that began it
        self.notes: dict[str, object] = {}  # of the last whole chunk; {} before the first
        self._about = about
        self._part = file.with_name(f"{file.name}.part")
        self._progress = file.with_name(f"{file.name}.progress")
        if file.exists() and not anew:
            raise RunDirectoryError(
                f"{file} is there already; choose another out, or make it anew with resume=never"
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        self._stream = self._part.open("a+b")
        try:
            self._lock()
            self._go_on(anew)
        except BaseException:
            self._stream.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InUse(
                f"{self._part} is being written by another process; wait for its end, or choose "
                "another out"
            ) from error

    def _go_on(self, anew: bool) -> None:
        """Keep the whole chunks of an earlier process."""
        size = 0
        if self._progress.exists() and not anew:
            size = self._read_progress()
        if os.fstat(self._stream.fileno()).st_size < size:
            raise RunDirectoryError(
                f"{self._part} is shorter than {self._progress.name} says; begin anew with "
                "resume=never"
            )
        self._stream.truncate(size)
        has_chunks = size > 0 or bool(self.notes)  # all may be empty
        if not has_chunks:
            self.about = self._about
            self._note()

    def _read_progress(self) -> int:
        """Return the number of bytes of the whole chunks."""
        try:
            said = json.loads(self._progress.read_text())
            self.notes = dict(said["notes"])
            self.about = dict(said["about"])
            return int(said["bytes"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunDirectoryError(
                f"{self._progress} is damaged ({error}); begin anew with resume=never"
            ) from error

    def add(self, chunk: str, notes: dict[str, object]) -> None:
        """Write a chunk, which may be empty, and `notes` (JSON), durably."""
        self._stream.write(chunk.encode())
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self.notes = notes
        self._note()

    def _note(self) -> None:
        size = os.fstat(self._stream.fileno()).st_size
        said = {"bytes": size, "notes": self.notes, "about": self.about}
        replace_text(self._progress, json.dumps(said))

    def finish(self) -> None:
        """Rename the file into place, after the last chunk."""
        put_in_place(self._part, self.file)
        self._progress.unlink()

    def close(self) -> None:
        """Let other processes write it."""
        self._stream.close()
