"""Finds which rows of a task's files fit: on rank 0, for all ranks and for every start of a run.

Over the store of this start, at the n-th time that a task asks:

    word      from -> to      meaning
    rows/n    rank 0 -> all   the key and what was found; or that rank 0 failed

RUN_DIR/prompts.json      what was found, by key, with a digest of its own. A file that is damaged
                          or of other rows is made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from llamarl.comm.groups import World
from llamarl.comm.meeting import Exchange, reaching
from llamarl.disk.files import replace_text
from llamarl.tasks.list_task import Find

FILE = "prompts.json"

log = logging.getLogger("llamarl")


class SharedReading:
    """A Remembered for all ranks of a job.

    folders: run directories where an earlier start may have saved what it found. timeout_s: the
    others give up if rank 0 shows no progress for this long.
    """

    def __init__(self, world: World, folders: Sequence[Path], timeout_s: float):
        self._rank = world.rank
        store = world.store()
        self._is_alone = store is None
        self._exchange = Exchange(store or dist.HashStore(), rank=world.rank, timeout_s=timeout_s)
        self._folders = folders
        self._found: dict[str, dict[str, object]] = {}  # by key: what this start has found
        self._num_asked = 0
        self._is_new = False  # whether some of it is in no file yet

    def __call__(self, key: str, find: Find) -> dict[str, object]:
        """Return what rank 0 has found for this key. A rank with another key reads its own rows;
        the ranks notice such a difference later, when they compare their prompts.
        """
        word = f"rows/{self._num_asked}"
        self._num_asked += 1
        if self._rank > 0:
            return self._follow(word, key, find)
        told: dict[str, object] = {"error": "rank 0 failed to read the task's rows; see its output"}
        try:
            found = self._find(key, find)
            told = {"key": key, "found": found}
        finally:
            if not self._is_alone:
                with reaching("the other ranks, to tell them which rows fit", rank=0):
                    self._exchange.tell(word, told)
        return found

    def _follow(self, word: str, key: str, find: Find) -> dict[str, object]:
        """On every rank but 0."""
        with reaching("rank 0, which reads the task's rows", rank=self._rank):
            told = self._exchange.hear(word, source=0, what="which of the task's rows fit")
        if "error" in told:
            raise ValueError(told["error"])
        if told["key"] != key:
            return find(self._exchange.progress)
        return told["found"]

    def _find(self, key: str, find: Find) -> dict[str, object]:
        """On rank 0: return what an earlier start has found, or find it now."""
        for folder in self._folders:
            kept = load(folder / FILE)
            if key in kept:
                self._found[key] = kept[key]
                return kept[key]
        found = find(self._exchange.progress)
        self._found[key] = found
        self._is_new = True
        return found

    def save(self, folder: Path) -> None:
        """Keep what was found in a run's directory. If the disk refuses it, warn and go on, because
        only work is lost.
        """
        if not self._is_new:
            return
        text = json.dumps(self._found, sort_keys=True)
        kept = {"digest": _digest(text), "found": text}
        try:
            replace_text(folder / FILE, json.dumps(kept))
        except OSError as error:
            log.warning(
                "%s cannot be written (%s): a resumed run reads all rows again",
                folder / FILE,
                error.strerror,
            )


def load(file: Path) -> dict[str, dict[str, object]]:
    """Return what an earlier start has found, by key. Nothing if there is no such file, or with a
    warning if it is damaged.
    """
    if not file.is_file():
        return {}
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if _digest(kept["found"]) != kept["digest"]:
            raise ValueError("its digest does not match")
        return json.loads(kept["found"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is damaged (%s): the task's rows are read again", file, error)
        return {}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
