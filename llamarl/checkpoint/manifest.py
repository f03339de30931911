"""The manifest of a checkpoint: its files with their sizes and SHA-256, and a digest of itself. It
is written last.

On a shared file system a host may see the files of another host late: NFS caches a directory for up
to a minute. So readers wait until they see all files that the manifest names.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from llamarl.disk.files import other_format
from llamarl.errors import CheckpointError, OtherFormat

MANIFEST = "manifest.json"
SEEN_S = 90.0  # files of another host appear within so long, or the directory is not shared
_LOOK_S = 0.2

Files = dict[str, list]  # file -> [bytes, SHA-256]

log = logging.getLogger(__name__)


def digest_of(body: dict) -> str:
    """Return the digest that vouches for a manifest."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> dict:
    """Read the manifest. CheckpointError if it is absent or damaged, OtherFormat if this commit
    does not read it.
    """
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(
            f"{MANIFEST}: absent; {path.name} was never finished, or is no checkpoint"
        )
    try:
        body = json.loads(file.read_text())
        digest = body.pop("sha256", None)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST}: not readable: {error}") from error
    if digest != digest_of(body):
        raise CheckpointError(f"{MANIFEST}: its contents have changed (SHA-256)")
    refusal = other_format(body)
    if refusal:
        raise OtherFormat(f"{file}: {refusal}")
    return body


def unseen(folder: Path, files: Mapping[str, list]) -> list[str]:
    """Return the files that this host does not see in their full size. files: as the manifest has
    them.
    """
    found = []
    for name, (size, _) in files.items():
        try:
            seen = (folder / name).stat().st_size
        except OSError:
            seen = -1
        if seen != size:
            found.append(name)
    return found


class Sight:
    """Says whether this host sees the files that other hosts wrote; it is asked again and again.

    timeout_s: the longest wait, at most SEEN_S.
    """

    def __init__(self, timeout_s: float):
        self._patience_s = min(SEEN_S, timeout_s)
        self._since: dict[Path, float] = {}  # when files were first looked for, by folder

    def sees(self, folder: Path, files: Mapping[str, list]) -> bool:
        """Whether all files of a folder are seen here. CheckpointError if some do not appear."""
        absent = unseen(folder, files)
        since = self._since.setdefault(folder, time.monotonic())
        if not absent:
            del self._since[folder]
            return True
        if time.monotonic() - since < self._patience_s:
            return False
        raise CheckpointError(
            f"{folder}: the leader does not see {', '.join(absent)}, though they were written up "
            f"to {self._patience_s:g} s ago; put the run's directory where all hosts see the same "
            "files"
        )


def wait_until_seen(
    path: Path, digest: str, *, patience_s: float, waiting: Callable[[], None]
) -> list[str]:
    """Wait until this host sees the checkpoint whose manifest has this digest. Return the files
    that it does not see after patience_s; [] if it sees all. waiting is called meanwhile.
    """
    until = time.monotonic() + patience_s
    is_told = False
    while True:
        absent = _unseen_of(path, digest)
        if not absent or time.monotonic() > until:
            return absent
        if not is_told:
            log.warning(
                "%s is not all seen on this host yet (%s); waiting up to %.0f s for it",
                path,
                ", ".join(absent),
                patience_s,
            )
            is_told = True
        waiting()
        time.sleep(_LOOK_S)


def _unseen_of(path: Path, digest: str) -> list[str]:
    """Return what this host does not see of the checkpoint whose manifest has this digest."""
    try:
        body = read_manifest(path)
    except (CheckpointError, OSError):
        return [MANIFEST]
    if digest_of(body) != digest:
        return [MANIFEST]
    return unseen(path, body["files"])
