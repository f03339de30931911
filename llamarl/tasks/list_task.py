"""A Task over two lists of rows: which of them are held out, and which have prompts that are short
enough.

    key_of(...)  -->  remembered(key, find)  -->  {"train": ..., "held_out": ...}  -->  Fittings

Encoding 100,000 rows of 80 words takes about 40 CPU-seconds, so one rank does it once and saves
what it found as JSON. The key is a digest of all inputs: the files, the tokenizer, the settings.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import logging
import random
import time
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np

from llamarl.tasks.base import (
    CACHED_PROMPTS,
    Example,
    Examples,
    PromptMaker,
    Task,
    Tokenizer,
    json_of,
    refused_by_template,
)
from llamarl.tasks.environment import DialogueMaker
from llamarl.tasks.special import warn_of_spelled
from llamarl.types import Message, Prompt

BATCH = 1024  # examples that are encoded together
FORMAT = 4  # of what is remembered, and of how prompts are made
SOON_S = 3.0  # after which progress is logged
TOLD_EVERY_S = 5.0

log = logging.getLogger(__name__)


class ListTask:
    """A Task over two sequences of examples. It tokenises on demand; prompts over the limit are
    dropped with one warning.

    fittings: which of both are short enough; None: they are looked at here. trains: whether there
    must be training prompts. ValueError if none of these is left, or naming an example that the
    chat template refuses.
    """

    def __init__(
        self,
        name: str,
        train: Examples,
        held_out: Examples,
        maker: PromptMaker,
        *,
        default_reward: str,
        fittings: tuple[Fitting, Fitting] | None = None,
        trains: bool = True,
    ):
        self.name = name
        self.default_reward = default_reward
        self.maker = maker
        self.train = train  # also the examples whose prompts are too long
        self.held_out = held_out
        limit = maker.max_prompt_tokens
        fitting, fitting_eval = fittings or (fitting_of(maker, train), fitting_of(maker, held_out))
        self.num_train = len(fitting.places)
        self.num_eval = len(fitting_eval.places)
        self.where_train = lambda i: _place_of(train, 0, fitting.places[i])
        self.train_digest = fitting.digest
        self.eval_digest = fitting_eval.digest
        self.train_prompt = _cached_prompts(maker, train, fitting)
        self.eval_prompt = _cached_prompts(maker, held_out, fitting_eval)
        num_dropped = len(train) - self.num_train
        num_dropped_eval = len(held_out) - self.num_eval
        if num_dropped or num_dropped_eval:
            log.warning(
                "task %s: dropped %d of %d training and %d of %d evaluation prompts, "
                "longer than max_prompt_tokens=%d",
                name,
                num_dropped,
                len(train),
                num_dropped_eval,
                len(held_out),
                limit,
            )
        places = []
        for examples, own in ((train, fitting), (held_out, fitting_eval)):
            if own.first_spelled is not None:
                places.append(_place_of(examples, 0, own.first_spelled))
        if places:
            spelled = fitting.spelled + fitting_eval.spelled
            warn_of_spelled(f"task {name}", spelled, len(train) + len(held_out), first=places[0])
        if trains and not self.num_train:
            raise ValueError(
                f"task {name}: none of {len(train)} training prompts fits "
                f"task.max_prompt_tokens={limit}; raise it"
            )


def _cached_prompts(
    maker: PromptMaker, examples: Examples, fitting: Fitting
) -> Callable[[int], Prompt]:
    """Return a function that gives the i-th of the examples that fit, tokenised."""
    places = fitting.places
    return lru_cache(CACHED_PROMPTS)(lambda i: maker.prompt(examples[places[i]]))


@dataclass(frozen=True, slots=True)
class Fitting:
    """Says which of a sequence of examples have prompts that are short enough."""

    places: array  # of int64, ascending
    digest: str  # SHA-256 over those examples
    spelled: int = 0  # how many of all the examples spell a special token
    first_spelled: int | None = None  # the first of these, by place


def fitting_of(
    maker: PromptMaker,
    examples: Examples,
    on_batch: Callable[[int], None] = lambda count: None,
) -> Fitting:
    """Find which examples have prompts that are short enough, a batch at a time. on_batch(n): n
    more are done. ValueError names the example that the chat template refuses.
    """
    places = array("q")
    digest = hashlib.sha256()
    walk = iter(examples)
    begin = 0
    spelled: list[int] = []
    batch = list(itertools.islice(walk, BATCH))
    while batch:
        own = [place for place, row in enumerate(batch) if maker.spells_special(row.prompt)]
        spelled += [begin + place for place in own]
        where = partial(_place_of, examples, begin)
        for place in _fitting_places(maker, batch, frozenset(own), where):
            places.append(begin + place)
            digest.update(json_of(*batch[place].values))
        begin += len(batch)
        on_batch(len(batch))
        batch = list(itertools.islice(walk, BATCH))
    return Fitting(places, digest.hexdigest(), len(spelled), next(iter(spelled), None))


def _fitting_places(
    maker: PromptMaker,
    batch: Sequence[Example],
    spelled: Collection[int],
    place_of: Callable[[int], str],
) -> list[int]:
    """Return which examples of a batch fit, by place. spelled: those that spell a special token.
    place_of: where an example is, for messages.
    """
    from jinja2.exceptions import TemplateError

    # A conversation is always looked at: a template may refuse it. So is a text that spells a
    # special token, which may have no other tokens.
    doubtful = []
    fitting = []
    for place, example in enumerate(batch):
        question = example.prompt
        is_plain = isinstance(question, str) and place not in spelled
        if isinstance(question, str) and is_plain and maker.surely_fits(question):
            fitting.append(place)
        else:
            doubtful.append(place)
    if not doubtful:
        return fitting
    try:
        lengths = maker.num_tokens([batch[place].prompt for place in doubtful])
    except (ValueError, TemplateError):
        for place in doubtful:
            question = batch[place].prompt
            if not isinstance(question, str) or place in spelled:
                _check_question(maker, question, place_of(place))
        raise
    for place, length in zip(doubtful, lengths):
        if length <= maker.max_prompt_tokens:
            fitting.append(place)
    return sorted(fitting)


def _check_question(maker: PromptMaker, question: str | tuple[Message, ...], where: str) -> None:
    """Raise ValueError, naming the place, if a question can be put into no template."""
    try:
        with refused_by_template():
            maker.ids(question)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _place_of(examples: Examples, begin: int, place: int) -> str:
    """Return where an example is, for messages: FILE:LINE if it comes from a file."""
    number = begin + place
    return f"prompt {number}" if isinstance(examples, list) else examples.where(number)


# --- What one rank finds for all ---

Progress = Callable[[], None]
Find = Callable[[Progress], dict[str, Any]]  # JSON values


class Remembered(Protocol):
    """Gives the result of work that one rank, or an earlier start of the run, does for all."""

    def __call__(self, key: str, find: Find) -> dict[str, Any]:
        """Return what `find` finds, JSON values, or what it found earlier under the same key.
        find(progress) calls progress() while its work goes on. ValueError of `find` comes through,
        on every rank.
        """


def here(key: str, find: Find) -> dict[str, Any]:
    """Do the work in this process: it is not shared, and nothing is saved."""
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
    # A bit a row, compressed: nearly all rows fit, so a million rows take a few kilobytes.
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


@dataclass
class Tell:
    """Logs progress, once the work takes more than SOON_S. progress: called at every batch."""

    name: str
    count: int
    progress: Progress

    def __post_init__(self):
        self._done = 0
        self._next = time.monotonic() + SOON_S

    def __call__(self, number: int) -> None:
        """Note that `number` more are done."""
        self._done += number
        self.progress()
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + TOLD_EVERY_S
            log.info(
                "task %s: %s of %s rows encoded, to know which are short enough; once a run",
                self.name,
                f"{self._done:,}",
                f"{self.count:,}",
            )


# --- Which rows are for training, and which are held out ---


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
    files = [rows for rows in (train, held_out) if rows is not None and not isinstance(rows, list)]
    tokenizer = tokenizer_digest(maker.tokenizer)
    if not files or tokenizer is None:
        remembered = here  # rows that no file holds are quick; an unknown tokenizer has no key
    key = key_of(
        {
            "kind": name,
            "rows": [[rows.digest, rows.keys] for rows in files],
            "sizes": [len(train), None if held_out is None else len(held_out)],
            "num_eval": num_eval,
            "tokenizer": tokenizer,
            **maker.identity,
        }
    )

    def find(progress: Progress) -> dict[str, Any]:
        """Look at all rows, and return which are held out and which fit as JSON values."""
        for rows in files:
            rows.check()  # names all bad rows at once, before the slow work below
        prompts = PromptSplit([], [], 0)
        if held_out is None:
            prompts = hold_out_prompts(_asked(maker, train), num_eval)
        found: dict[str, Any] = {"prompts": asdict(prompts)}
        halves = prompts.halves(train, held_out)
        tell = Tell(name, sum(map(len, halves)), progress)
        for half, examples in zip(("train", "held_out"), halves):
            found[half] = to_values(fitting_of(maker, examples, tell), len(examples))
        asked = []
        trained = []
        if held_out is not None and files:
            asked = list(_asked(maker, held_out))
            wanted = set(asked)
            trained = [own for own in _asked(maker, train) if own in wanted]
        common = set(trained)
        found["held_out_too"] = len(trained)
        found["trained_too"] = sum(own in common for own in asked)
        return found

    found = remembered(key, find)
    prompts = PromptSplit(**found["prompts"])
    kept, held = prompts.halves(train, held_out)
    if held_out is None and num_eval:
        prompts.warn(f"task {name}", len(train))
    if found["trained_too"]:
        log.warning(
            "task %s: %d of %d held-out rows have a prompt that %d of %d training rows have too, "
            "so that the held-out accuracy is in part of what is trained; take these out of one "
            "of the files",
            name,
            found["trained_too"],
            len(held),
            found["held_out_too"],
            len(kept),
        )
    if trains and num_eval and held_out is not None and not len(held):
        log.warning("task %s: no row is held out, so nothing is evaluated", name)
    fittings = (
        from_values(found["train"], len(kept)),
        from_values(found["held_out"], len(held)),
    )
    return ListTask(
        name, kept, held, maker, default_reward=default_reward, fittings=fittings, trains=trains
    )


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

    def halves(self, rows: Examples, held_out: Examples | None) -> tuple[Examples, Examples]:
        """Return (training rows, held-out rows): those of `held_out` if the user gave them. A
        dataset on disk stays there.
        """
        if held_out is not None:
            return rows, held_out
        kept = self.kept(len(rows))
        if isinstance(rows, list):
            return [rows[i] for i in kept], [rows[i] for i in self.held]
        return rows.select(kept), rows.select(self.held)

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
    """Hold out a row of each of min(num_eval, a tenth) prompts, the same in every run. prompts: of
    each row, equal for equal ones.
    """
    numbers: dict[bytes, int] = {}  # of the prompts, in the order in which they come
    rows = array("q")
    for prompt in prompts:
        rows.append(numbers.setdefault(prompt, len(numbers)))
    count = len(numbers)
    num_held = min(num_eval, max(1, count // 10)) if count > 1 else 0
    # A fixed seed: runs with other seeds are evaluated on the same prompts, so they compare.
    asked = set(random.Random(0).sample(range(count), num_held))
    missing = set(asked)
    held: list[int] = []
    left_out: list[int] = []
    for place, prompt_number in enumerate(rows):
        if prompt_number in missing:
            missing.remove(prompt_number)
            held.append(place)
        elif prompt_number in asked:
            left_out.append(place)
    return PromptSplit(held, left_out, count)
