"""SampleFile: RUN_DIR/samples.jsonl, some of the trained completions, for people to read.

    {"step": 12, "every": 1, "groups": [...], "shown": [...]}

One object a step, as llamarl.learning.samples makes it. When the file exceeds its bound, every
second step is dropped, and from then on only multiples of `every` are added. So the file covers the
whole run at any length, and a resumed run reads `every` from the file.

No step depends on the file: a sample that the disk refuses is left out, with one warning.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llamarl.disk.files import replace_text, set_aside
from llamarl.disk.space import shown_free

FILE_NAME = "samples.jsonl"
MOST_BYTES = 1 << 26  # of the file

Sample = Mapping[str, object]  # as it is made
Shown = dict[str, Any]  # as the file has it

log = logging.getLogger(__name__)


class SampleFile:
    """Writes samples, each as a whole line and once.

    A fresh run keeps an earlier one's file under another name, as it does with metrics.jsonl.
    """

    def __init__(self, run_dir: str | Path, *, most_bytes: int = MOST_BYTES):
        self.path = Path(run_dir) / FILE_NAME
        self.newest: Shown | None = None  # the last one that was kept
        self._most_bytes = most_bytes
        self._every = 1
        self._continues = False  # after a write or a cut: append to what is there
        self._num_bytes = 0  # of the whole lines in the file
        self._is_refused = False

    def wants(self, step: int) -> bool:
        """Whether a step is one of those that are kept."""
        return step % self._every == 0

    def keep(self, step: int, make: Callable[[], Sample]) -> None:
        """Write the sample of a step, if it is kept; `make` is not called otherwise."""
        if not self.wants(step):
            return
        sample = make()
        self.newest = {"step": step, "every": self._every, **sample}
        line = json.dumps(self.newest, allow_nan=False, separators=(",", ":")) + "\n"
        try:
            self._append(line.encode())
            if self._num_bytes > self._most_bytes:
                self._thin()
        except OSError as error:
            self._warn(error)

    def cut(self, step: int) -> None:
        """Go on after the checkpoint of a step: cut off the samples of later ones, which are
        trained again, and a line that a kill left unfinished.
        """
        self._continues = True
        self._every = 1
        self._num_bytes = 0
        try:
            for sample, num_bytes in _lines_of(self.path):
                if sample["step"] > step:
                    break
                self._every = sample["every"]
                self._num_bytes += num_bytes
        except ValueError as error:
            log.warning("%s\nIt and the samples after it are cut off", error)
        try:
            if self.path.exists():
                os.truncate(self.path, self._num_bytes)
        except OSError as error:
            self._warn(error)

    def set_aside(self) -> None:
        """Begin anew: give an earlier run's file another name."""
        if self._continues:
            return
        self._continues = True
        set_aside(self.path)

    def sync(self) -> None:
        """Put the written samples on the disk, so that they survive a power cut."""
        if not self._num_bytes:
            return
        try:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        except OSError as error:
            self._warn(error)

    def _append(self, line: bytes) -> None:
        """Append a line. OSError if the disk does not take all of it: then none of it is left."""
        if not self._continues:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.set_aside()
        end = self._num_bytes
        with self.path.open("ab") as file:
            file.truncate(end)  # what was refused before may have left a part
            try:
                file.write(line)
                file.flush()
            except OSError:
                os.truncate(self.path, end)
                raise
        self._num_bytes = end + len(line)

    def _thin(self) -> None:
        """Keep every second step of those in the file, until it is half of what it may be."""
        samples = [sample for sample, _ in _lines_of(self.path)]
        text = ""
        size = self._num_bytes
        while size > self._most_bytes // 2 and len(samples) > 1:
            self._every *= 2
            samples = [sample for sample in samples if self.wants(sample["step"])]
            lines = []
            for sample in samples:
                sample["every"] = self._every
                lines.append(json.dumps(sample, separators=(",", ":")) + "\n")
            text = "".join(lines)
            size = len(text.encode())
        if text:
            replace_text(self.path, text)
            self._num_bytes = size

    def _warn(self, error: OSError) -> None:
        if self._is_refused:
            return
        self._is_refused = True
        log.warning(
            "%s: samples are left out while the disk refuses them (%s; said once), and %s",
            self.path,
            error,
            shown_free(self.path),
        )


def read_samples(file: Path) -> list[Shown]:
    """Return the samples of a file in the order of steps, without an unfinished last line; [] if
    there is no file. ValueError names a line that is none.
    """
    return [sample for sample, _ in _lines_of(file)]


def _lines_of(file: Path) -> Iterator[tuple[Shown, int]]:
    """Yield each sample with its line's size in bytes; none if there is no file. ValueError."""
    if not file.is_file():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return  # being written, or left by a kill
            try:
                sample = json.loads(line)
                is_sample = isinstance(sample["step"], int) and isinstance(sample["every"], int)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(_not_a_sample(file, number)) from error
            if not is_sample:
                raise ValueError(_not_a_sample(file, number))
            yield sample, len(line)


def _not_a_sample(file: Path, number: int) -> str:
    return f"{file}:{number}: not a sample; repair or delete this line"


# --- For the console and services ---


class SampleRhythm:
    """Says which sample is shown with a row: every so many steps the newest, and each once.

    every: 0 shows none.
    """

    def __init__(self, samples: SampleFile | None, every: int):
        self._samples = samples
        self._every = every
        self._shown_step: int | None = None

    def due(self, step: int) -> Shown | None:
        """Return the sample to show with the row of a step, if there is one."""
        if self._samples is None or self._every == 0 or step % self._every != 0:
            return None
        newest = self._samples.newest
        if newest is None or newest["step"] == self._shown_step:
            return None
        self._shown_step = newest["step"]
        return newest


def table_of(sample: Shown) -> list[dict]:
    """Return a sample as the rows of a table, one for each completion of its groups."""
    rows = []
    for group in sample["shown"]:
        for completion in group["completions"]:
            rows.append(
                {
                    "step": sample["step"],
                    "prompt": group["prompt"],
                    "completion": "".join(completion["text"]),
                    "reward": completion["reward"],
                }
            )
    return rows


SHOWN_CHARACTERS = 160  # of a prompt and of a completion


def sample_lines(sample: Shown) -> list[str]:
    """Return a sample in a few lines: its first group's prompt, best and worst completion. The
    model's text is quoted, so that no control character reaches the terminal.
    """
    if not sample["shown"]:
        return []
    group = sample["shown"][0]
    lines = [f"  sample of step {sample['step']}: {_quoted(group['prompt'], from_end=True)}"]
    with_tokens = [one for one in group["completions"] if one["ids"]]
    with_reward = [one for one in with_tokens if one["reward"] is not None]
    if not with_reward:
        return [*lines, "    no completion has a reward"]
    best = max(with_reward, key=lambda one: one["reward"])
    worst = min(with_reward, key=lambda one: one["reward"])
    lines.append(_completion_line("best", best))
    if worst["reward"] < best["reward"]:
        lines.append(_completion_line("worst", worst))
    else:
        lines.append("    all completions have this reward: nothing is learned from them")
    return lines


def _completion_line(name: str, completion: Shown) -> str:
    return f"    {name:<5} {completion['reward']:g}  {_quoted(''.join(completion['text']))}"


def _quoted(text: str, *, from_end: bool = False) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return repr(text)
    if from_end:
        return f"... {text[-SHOWN_CHARACTERS:]!r}"
    return f"{text[:SHOWN_CHARACTERS]!r} ..."
