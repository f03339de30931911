"""Finds which rows of a file have prompts that are short enough, as JSON: so one rank looks at them
once, and the others and a resumed run take what it found.

    key_of(...)  -->  remembered(key, find)  -->  {"train": ..., "held_out": ...}  -->  Fittings

100,000 rows of 80 words take some 40 CPU-seconds to encode. What was found is known again by a key,
a digest of all that it follows from: the bytes of the files, the tokenizer, the settings.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import time
import zlib
from array import array
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np

from llamarl.tasks.base import Fitting, Tokenizer

FORMAT = 4  # of what is remembered, and of how prompts are made
SOON_S = 3.0  # until how far it is is said
TOLD_EVERY_S = 5.0

log = logging.getLogger(__name__)

Progress = Callable[[], None]
Find = Callable[[Progress], dict[str, Any]]  # JSON values


class Remembered(Protocol):
    """Work that one rank does for all of them, or that an earlier start of the run has done."""

    def __call__(self, key: str, find: Find) -> dict[str, Any]:
        """Return what `find` finds, JSON values, or what it found earlier under the same key.
        find(progress) calls progress() while its work goes on. ValueError of `find` comes through,
        on every rank.
        """


def here(key: str, find: Find) -> dict[str, Any]:
    """Find it here: nobody shares the work, and nothing is kept."""
    return find(lambda: None)


def tokenizer_digest(tokenizer: Tokenizer) -> str | None:
    """Return a SHA-256 of a tokenizer: its tokens and rules, its template, the packages that
    compute it. None for a tokenizer that cannot say what it is.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    values = [
        backend.to_str(),
        tokenizer.chat_template,
        type(tokenizer).__name__,
        getattr(tokenizer, "special_tokens_map", None),
        [version(package) for package in ("transformers", "tokenizers")],
    ]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def key_of(values: Mapping[str, object]) -> str:
    """Return a SHA-256 of all that decides which prompts fit, as JSON values."""
    text = json.dumps([FORMAT, values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def to_values(fitting: Fitting, count: int) -> dict[str, object]:
    """Encode which of `count` examples fit as JSON values: a bit each, packed."""
    bits = np.zeros(count, dtype=bool)
    bits[np.frombuffer(fitting.places, dtype=np.int64)] = True
    packed = zlib.compress(np.packbits(bits).tobytes())
    return {
        "count": count,
        "fitting": base64.b64encode(packed).decode(),
        "digest": fitting.digest,
        "spelled": fitting.spelled,
        "first_spelled": fitting.first_spelled,
    }


def from_values(values: Any, count: int) -> Fitting:
    """Decode what `to_values` returned. ValueError if it is not of so many examples, or damaged."""
    try:
        if values["count"] != count:
            raise ValueError(f"it is of {values['count']} examples, here are {count}")
        packed = zlib.decompress(base64.b64decode(values["fitting"], validate=True))
        bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=count)
        digest = str(values["digest"])
        spelled = int(values["spelled"])
        first = values["first_spelled"]
        if first is not None:
            first = int(first)
    except (KeyError, TypeError, zlib.error) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    places = np.flatnonzero(bits).astype(np.int64)
    return Fitting(array("q", places.tobytes()), digest, spelled, first)


class Tell:
    """Says how far the work is, once it takes more than SOON_S. progress: called at every batch."""

    def __init__(self, name: str, count: int, progress: Progress):
        self._name = name
        self._count = count
        self._progress = progress
        self._done = 0
        self._next = time.monotonic() + SOON_S

    def __call__(self, number: int) -> None:
        """Note that `number` more are done."""
        self._done += number
        self._progress()
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + TOLD_EVERY_S
            log.info(
                "task %s: %s of %s rows encoded, to know which are short enough; once a run",
                self._name,
                f"{self._done:,}",
                f"{self._count:,}",
            )
