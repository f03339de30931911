"""Splits the rows of a task into training and held-out ones, and finds which of them fit."""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llamarl.tasks.base import (
    Example,
    Examples,
    PromptMaker,
    StoredExamples,
    Task,
    json_of,
)
from llamarl.tasks.environment import DialogueMaker
from llamarl.tasks.list_task import (
    Fitting,
    ListTask,
    Progress,
    Remembered,
    Tell,
    fitting_of,
    from_values,
    here,
    key_of,
    to_values,
    tokenizer_digest,
)

log = logging.getLogger(__name__)


def rows_task(
    name: str,
    train: Examples,
    held_out: Examples | None,
    maker: PromptMaker,
    *,
    num_eval: int,
    default_reward: str,
    remembered: Remembered = here,
    trains: bool = True,
) -> ListTask:
    """Return the task of a kind's rows. held_out None: at most num_eval prompts, a tenth of the
    training prompts, are held out.

    remembered: finds which rows fit. trains: whether there must be training prompts.
    """
    split = _Split(name=name, train=train, held_out=held_out, num_eval=num_eval, maker=maker)
    kept, held, fittings = split.fitted(remembered)
    if trains and num_eval and held_out is not None and not len(held):
        log.warning("task %s: no row is held out, so nothing is evaluated", name)
    return ListTask(
        name, kept, held, maker, default_reward=default_reward, fittings=fittings, trains=trains
    )


@dataclass(frozen=True, slots=True)
class _Split:
    """The rows of a task, which are looked at once a run. Its fields are those of `rows_task`."""

    name: str
    train: Examples
    held_out: Examples | None
    num_eval: int
    maker: PromptMaker

    def fitted(self, remembered: Remembered) -> tuple[Examples, Examples, tuple[Fitting, Fitting]]:
        """Return the training rows, the held-out ones, and which of both fit."""
        tokenizer = tokenizer_digest(self.maker.tokenizer)
        if not self._files or tokenizer is None:
            remembered = here  # rows that no file holds are quick; an unknown tokenizer has no key
        key = key_of(
            {
                "kind": self.name,
                "rows": [[rows.digest, rows.keys] for rows in self._files],
                "sizes": [len(self.train), None if self.held_out is None else len(self.held_out)],
                "num_eval": self.num_eval,
                "tokenizer": tokenizer,
                **self.maker.identity,
            }
        )
        found = remembered(key, self._find)
        prompts = PromptSplit(**found["prompts"])
        train, held_out = self._halves(prompts)
        if self.held_out is None and self.num_eval:
            prompts.warn(f"task {self.name}", len(self.train))
        if found["trained_too"]:
            log.warning(
                "task %s: %d of %d held-out rows have a prompt that %d of %d training rows have "
                "too, so that the held-out accuracy is in part of what is trained; take these out "
                "of one of the files",
                self.name,
                found["trained_too"],
                len(held_out),
                found["held_out_too"],
                len(train),
            )
        fittings = (
            from_values(found["train"], len(train)),
            from_values(found["held_out"], len(held_out)),
        )
        return train, held_out, fittings

    @property
    def _files(self) -> list[StoredExamples]:
        """The rows that come from files."""
        halves = (self.train, self.held_out)
        return [rows for rows in halves if rows is not None and not isinstance(rows, list)]

    def _halves(self, prompts: PromptSplit) -> tuple[Examples, Examples]:
        """Return the training rows and the held-out ones."""
        if self.held_out is not None:
            return self.train, self.held_out
        kept = prompts.kept(len(self.train))
        return _select(self.train, kept), _select(self.train, prompts.held)

    def _find(self, progress: Progress) -> dict[str, Any]:
        """Look at all rows, and return which are held out and which fit as JSON values."""
        for rows in self._files:
            rows.check()  # names all bad rows at once, before the slow work below
        prompts = PromptSplit([], [], 0)
        if self.held_out is None:
            prompts = hold_out_prompts(_asked(self.maker, self.train), self.num_eval)
        found: dict[str, Any] = {"prompts": asdict(prompts)}
        train, held_out = self._halves(prompts)
        tell = Tell(self.name, len(train) + len(held_out), progress)
        for half, examples in (("train", train), ("held_out", held_out)):
            found[half] = to_values(fitting_of(self.maker, examples, tell), len(examples))
        asked = []
        trained = []
        if self.held_out is not None and self._files:
            asked = list(_asked(self.maker, held_out))
            wanted = set(asked)
            trained = [own for own in _asked(self.maker, train) if own in wanted]
        common = set(trained)
        found["held_out_too"] = len(trained)
        found["trained_too"] = sum(own in common for own in asked)
        return found


def _asked(maker: PromptMaker, examples: Iterable[Example]) -> Iterator[bytes]:
    """Yield a digest of the question of each example: its prompt, or its whole row if an
    environment makes the question.
    """
    # An environment may ask by any column of a row, so rows with one prompt may be two problems.
    is_whole = isinstance(maker, DialogueMaker)
    for example in examples:
        prompt, meta = example.values
        asked = json_of(prompt, meta if is_whole else {})
        yield hashlib.blake2b(asked, digest_size=12).digest()


def warn_of_shared(
    train: Mapping[str, Task], held_out: Mapping[str, Task], remembered: Remembered
) -> None:
    """Say which prompts of one name's held-out rows another name trains on. Tasks that make their
    prompts on demand have no rows to compare.
    """
    trained = {name: task for name, task in train.items() if isinstance(task, ListTask)}
    asked = {name: task for name, task in held_out.items() if isinstance(task, ListTask)}

    def find(progress: Progress) -> dict[str, Any]:
        digests = {name: list(_asked(task.maker, task.held_out)) for name, task in asked.items()}
        wanted = set(itertools.chain(*digests.values()))
        found = []
        for name, task in trained.items():
            progress()
            common = wanted.intersection(_asked(task.maker, task.train))
            for other, own in digests.items():
                count = sum(digest in common for digest in own)
                if count and other != name:
                    found.append([other, count, len(own), name])
        return {"shared": found}

    key = key_of(
        {
            "trained": {name: task.train_digest for name, task in trained.items()},
            "asked": {name: task.eval_digest for name, task in asked.items()},
        }
    )
    for name, count, num_rows, by in remembered(key, find)["shared"]:
        log.warning(
            "%s: %d of %d held-out rows have a prompt that %s trains on, so that the held-out "
            "accuracy is in part of what is trained; leave them out of one of the two",
            name,
            count,
            num_rows,
            by,
        )


def _select(examples: Examples, places: Sequence[int]) -> Examples:
    """Return the examples at these places; a dataset on disk stays there."""
    if isinstance(examples, list):
        return [examples[i] for i in places]
    return examples.select(places)


def hold_out(num_rows: int, num_eval: int) -> tuple[list[int], list[int]]:
    """Split rows into (training rows, evaluation rows), by number and in file order: min(num_eval,
    a tenth) are held out, the same in every run.
    """
    # A fixed seed: runs with other seeds are evaluated on the same prompts, so they compare.
    num_held = min(num_eval, max(1, num_rows // 10)) if num_rows > 1 else 0
    held = set(random.Random(0).sample(range(num_rows), num_held))
    kept = [i for i in range(num_rows) if i not in held]
    return kept, sorted(held)


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """Which rows are held out, by place and in order: one of each prompt that is."""

    held: list[int]
    left_out: list[int]  # the further rows of these prompts
    num_prompts: int  # different ones, of all rows

    def kept(self, num_rows: int) -> list[int]:
        """Return the places of the rows to train on."""
        gone = {*self.held, *self.left_out}
        return [place for place in range(num_rows) if place not in gone]

    def warn(self, where: str, num_rows: int) -> None:
        """Say if none is held out, or if rows are left out. where: the rows come from."""
        if not self.held:
            log.warning(
                "%s: %d row(s), %d different prompt(s), so none is held out and nothing is "
                "evaluated",
                where,
                num_rows,
                self.num_prompts,
            )
        elif self.left_out:
            log.warning(
                "%s: %d rows have %d different prompts: %d are held out, and %d more rows of "
                "theirs are left out of training",
                where,
                num_rows,
                self.num_prompts,
                len(self.held),
                len(self.left_out),
            )


def hold_out_prompts(prompts: Iterable[bytes], num_eval: int) -> PromptSplit:
    """Hold out a row of each of min(num_eval, a tenth) prompts. If all prompts differ, the rows are
    those of `hold_out`. prompts: of each row, equal for equal ones.
    """
    numbers: dict[bytes, int] = {}  # of the prompts, in the order in which they come
    rows = array("q")
    for prompt in prompts:
        rows.append(numbers.setdefault(prompt, len(numbers)))
    _, chosen = hold_out(len(numbers), num_eval)
    missing = set(chosen)
    asked = set(chosen)
    held: list[int] = []
    left_out: list[int] = []
    for place, prompt_number in enumerate(rows):
        if prompt_number in missing:
            missing.remove(prompt_number)
            held.append(place)
        elif prompt_number in asked:
            left_out.append(place)
    return PromptSplit(held, left_out, len(numbers))
