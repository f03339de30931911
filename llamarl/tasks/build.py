"""Builds tasks by kind: what `task=gsm8k` on the command line becomes.

    kind           prompts                           held out for evaluation        reward
    addition       "12+34="; needs no files          500 pairs, always the same     exact_match
    questions      name: sum or larger; of numbers   a part of the pairs            numeric_match
                   from least to most
    one_prompt     text: that of all tickets;        the same prompt                contains_words
                   words
    jsonl          path: a JSONL file; prompt_key,   eval_path, or a part of path   exact_match
                   answer_key
    gsm8k          path: JSONL with "question" and   eval_path, or a part of path   numeric_match
                   "answer"
    hf_dataset     path: a dataset directory;        eval_path, its test or valid-  exact_match
                   prompt_key, answer_key            ation split, or a part of path
    facts          posts to summarise; needs no      500 posts, always the same     facts:gold
                   files; seed
    reasoning_gym  name: such as chain_sum; seed     questions of a seed of their   reasoning_gym
                                                     own                            _score
    python         fn: module:function that returns  as it says                     as it says
                   a Task; options (own.py)
    environment    environment: module:Class; path,  as jsonl; of its own prompts   the environ-
                   or prompts of its own             as many of these                ment's
    mixture        parts: by name, each a kind     from each part, by its weight    each part's
                   with its keys, and a weight

"A part of path" is min(num_eval, a tenth) of its prompts, at random but the same in every run, and
taken out of training with all their rows.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llamarl.tasks.addition import addition_examples
from llamarl.tasks.base import (
    Example,
    Examples,
    Fitting,
    ListTask,
    PromptMaker,
    Task,
    Tokenizer,
    fitting_of,
    json_of,
)
from llamarl.tasks.environment import GIVEN, DialogueMaker
from llamarl.tasks.facts import Post, facts_posts
from llamarl.tasks.fitting import (
    Progress,
    Remembered,
    Tell,
    from_values,
    here,
    key_of,
    to_values,
    tokenizer_digest,
)
from llamarl.tasks.held_out import HeldOut
from llamarl.tasks.jsonl import GSM8K_INSTRUCTION, JsonlExamples, gsm8k_row, row_to_example
from llamarl.tasks.mixture import MixtureTask, shares
from llamarl.tasks.own import own_task
from llamarl.tasks.questions import question_examples
from llamarl.words.columns import OWN
from llamarl.words.names import nearest

log = logging.getLogger(__name__)

KINDS = (
    "addition",
    "facts",
    "questions",
    "one_prompt",
    "jsonl",
    "gsm8k",
    "hf_dataset",
    "reasoning_gym",
    "python",
    "environment",
    "mixture",
)
EXACT_MATCH = "llamarl.tasks.rewards:exact_match"
NUMERIC_MATCH = "llamarl.tasks.rewards:numeric_match"
DEFAULT_REWARDS = {  # EXACT_MATCH for all others
    "environment": GIVEN,
    "facts": "llamarl.tasks.facts:gold",
    "gsm8k": NUMERIC_MATCH,
    "one_prompt": "llamarl.tasks.rewards:contains_words",
    "questions": NUMERIC_MATCH,
}


def build_task(
    kind: str,
    tokenizer: Tokenizer,
    *,
    path: str | Path | None = None,
    eval_path: str | Path | None = None,
    prompt_key: str = "prompt",
    answer_key: str | None = "answer",
    name: str | None = None,
    options: Mapping[str, object] | None = None,
    least: int = 1,
    most: int = 20,
    fn: str | None = None,
    environment: str = "",
    num_prompts: int = 1,
    text: str = "",
    words: Sequence[str] = (),
    chat: bool = True,
    system_prompt: str | None = None,
    max_prompt_tokens: int = 512,
    num_eval: int = 500,
    seed: int = 0,
    parts: Mapping[str, Mapping[str, Any]] | None = None,
    remembered: Remembered = here,
    keeps_turns: bool = False,
    trains: bool = True,
) -> Task:
    """Build the task of a kind (see the table above). num_eval: the most prompts to hold out where
    no evaluation data is given. options: parameters of the reasoning_gym dataset, or of fn, which
    returns a task; num_prompts: what environment, without path, makes itself; both by import path.
    parts: of a mixture, by name: the settings of each and its weight. least, most: the range of a
    question's numbers. text, words: of the one prompt, and what its default reward looks for.
    remembered: who looks at the rows of files. keeps_turns: see PromptMaker. trains: whether it may
    have training prompts; else those of path are all held out, as those of eval_path are.
    ValueError or FileNotFoundError says what to change.
    """
    if kind not in KINDS:
        near = nearest(kind, KINDS, cutoff=0.3) or f"one of {', '.join(KINDS)}"
        raise ValueError(f"task.kind={kind}: unknown; did you mean {near}?")
    if kind == "mixture":
        return _mixture(parts or {}, tokenizer, num_eval=num_eval, seed=seed, remembered=remembered)
    if path is None and kind in ("jsonl", "gsm8k", "hf_dataset"):
        raise ValueError(f"task.kind={kind} needs task.path")
    if not trains:
        path, eval_path = None, path
    maker = prompt_maker(
        kind,
        tokenizer,
        chat=chat,
        system_prompt=system_prompt,
        max_prompt_tokens=max_prompt_tokens,
        keeps_turns=keeps_turns,
    )
    if kind == "environment":
        maker = DialogueMaker(environment, maker)
        if path is None:
            return maker.own_task(num_train=num_prompts, num_eval=num_eval)
    if kind == "python":
        if fn is None:
            raise ValueError("task.kind=python needs task.fn")
        return own_task(fn, maker, seed=seed, num_eval=num_eval, options=options or {})
    if kind == "reasoning_gym":
        from llamarl.tasks.procedural import ReasoningGymTask

        return ReasoningGymTask(name, maker, num_eval=num_eval, seed=seed, options=options or {})
    files = _Files(kind, prompt_key, answer_key)
    train: Examples
    held_out: Examples | None
    if kind == "addition":
        train, held_out = addition_examples()
    elif kind == "facts":
        train, held_out = facts_examples(seed)
    elif kind == "one_prompt":
        train = held_out = [Example(text, {"words": list(words)})]
    elif kind == "questions":
        train, held_out = question_examples(name, least, most), None
    elif path is not None:
        train, held_out = files.read(path)
    else:
        train, held_out = [], None
    if eval_path is not None:
        held_out = files.read_held_out(eval_path)
    default_reward = DEFAULT_REWARDS.get(kind, EXACT_MATCH)
    split = _Split(
        kind=kind,
        train=train,
        held_out=held_out,
        num_eval=num_eval,
        maker=maker,
        digests=files.digests,
        checks=files.checks,
    )
    train, held_out, fittings = split.looked_at(
        remembered, keys=[prompt_key, answer_key], chat=chat, system_prompt=system_prompt
    )
    if trains and num_eval and split.held_out is not None and not len(held_out):
        log.warning("task %s: no row is held out, so nothing is evaluated", kind)
    return ListTask(
        kind,
        train,
        held_out,
        maker,
        default_reward=default_reward,
        fittings=fittings,
        trains=trains,
    )


def build_held_out(
    task: Task, num_own: int, sets: Mapping[str, Mapping[str, Any]], **shared
) -> HeldOut:
    """Build the held-out prompts of a task, at most num_own, and those of eval.sets. sets: of each,
    by name, the settings of its kind and num_prompts. shared: what all of them are built with.

    ValueError or FileNotFoundError, naming the set, for what build_task says and for one without
    prompts.
    """
    tasks = {}
    counts = {OWN: num_own}
    for name, one in sets.items():
        counts[name] = one["num_prompts"]
        own = {key: value for key, value in one.items() if key != "num_prompts"}
        own["num_eval"] = counts[name]
        try:
            task_of_set = build_task(keeps_turns=True, trains=False, **own, **shared)
        except ValueError as error:
            raise ValueError(f"eval.sets.{name}: {error}") from error
        if not task_of_set.num_eval:
            raise ValueError(
                f"eval.sets.{name}: has no held-out prompts of at most "
                f"max_prompt_tokens={one['max_prompt_tokens']}; give it other rows, or raise that"
            )
        tasks[name] = task_of_set
    trained = {"the task": task}
    if isinstance(task, MixtureTask):
        trained = {f"task.parts.{name}": part for name, part in task.parts.items()}
    asked = {f"eval.sets.{name}": one for name, one in tasks.items()}
    if asked:
        _warn_of_shared(trained, asked, shared.get("remembered", here))
    return HeldOut(task, tasks, counts)


def _mixture(
    parts: Mapping[str, Mapping[str, Any]], tokenizer: Tokenizer, *, num_eval: int, **shared: Any
) -> MixtureTask:
    """Build the mixture of these parts. shared: what all of them are built with."""
    if not parts:
        raise ValueError("task.parts is empty; task.parts={a: {kind: addition}, b: {...}}")
    weights = {name: float(part["weight"]) for name, part in parts.items()}
    held_out = shares(weights, num_eval)
    tasks = {}
    for name, part in parts.items():
        own = {key: value for key, value in part.items() if key != "weight"}
        own["num_eval"] = max(1, held_out[name])
        try:
            tasks[name] = build_task(tokenizer=tokenizer, keeps_turns=True, **own, **shared)
        except ValueError as error:
            raise ValueError(f"task.parts.{name}: {error}") from error
    parts_by_key = {f"task.parts.{name}": task for name, task in tasks.items()}
    _warn_of_shared(parts_by_key, parts_by_key, shared.get("remembered", here))
    return MixtureTask(tasks, weights, num_eval)


@dataclass(frozen=True, slots=True)
class _Files:
    """Reads the rows of files. digests: of the files that were read, in order. checks: functions
    that read all their rows, and raise ValueError.
    """

    kind: str
    prompt_key: str
    answer_key: str | None
    digests: list[str] = field(default_factory=list)
    checks: list[Callable[[], None]] = field(default_factory=list)

    def read(self, path: str | Path) -> tuple[Examples, Examples | None]:
        """Read (training examples, held-out examples or None) from a file or directory."""
        if self.kind == "hf_dataset":
            from llamarl.tasks.hf_dataset import directory_digest, read_hf_dataset

            self.digests.append(directory_digest(path))
            return read_hf_dataset(path, self.prompt_key, self.answer_key)
        rows = JsonlExamples(path, row_reader(self.kind, self.prompt_key, self.answer_key))
        self.digests.append(rows.digest)
        self.checks.append(rows.check)
        return rows, None

    def read_held_out(self, path: str | Path) -> Examples:
        """Read the examples of a file or directory that holds evaluation data."""
        if self.kind == "hf_dataset":
            from llamarl.tasks.hf_dataset import directory_digest, read_held_out

            self.digests.append(directory_digest(path))
            return read_held_out(path, self.prompt_key, self.answer_key)
        return self.read(path)[0]


@dataclass(frozen=True, slots=True)
class _Split:
    """The examples of a task, and the files that they come from.

    held_out: None for a part of the training examples, of at most num_eval prompts. digests: of the
    files, in order; checks: what reads all their rows, and raises ValueError.
    """

    kind: str
    train: Examples
    held_out: Examples | None
    num_eval: int
    maker: PromptMaker
    digests: list[str]
    checks: list[Callable[[], None]]

    def looked_at(
        self, remembered: Remembered, **settings: object
    ) -> tuple[Examples, Examples, tuple[Fitting, Fitting]]:
        """Return the training examples, the held-out ones, and which of both fit. settings: what
        decides it besides.
        """
        tokenizer = tokenizer_digest(self.maker.tokenizer)
        if not self.digests or tokenizer is None:
            remembered = here  # made of nothing, in a moment; or nobody can tell what it is
        key = key_of(
            {
                "kind": self.kind,
                "rows": self.digests,
                "sizes": [len(self.train), None if self.held_out is None else len(self.held_out)],
                "num_eval": self.num_eval,
                "tokenizer": tokenizer,
                "instruction": self.maker.instruction,
                "max_prompt_tokens": self.maker.max_prompt_tokens,
                **self.maker.shown,
                **settings,
            }
        )
        found = remembered(key, self._find)
        prompts = PromptSplit(**found["prompts"])
        train, held_out = self._halves(prompts)
        if self.held_out is None and self.num_eval:
            prompts.warn(f"task {self.kind}", len(self.train))
        self._warn(found, len(train), len(held_out))
        fittings = (
            from_values(found["train"], len(train)),
            from_values(found["held_out"], len(held_out)),
        )
        return train, held_out, fittings

    def _halves(self, prompts: PromptSplit) -> tuple[Examples, Examples]:
        """Return the training examples and the held-out ones."""
        if self.held_out is not None:
            return self.train, self.held_out
        kept = prompts.kept(len(self.train))
        return _select(self.train, kept), _select(self.train, prompts.held)

    def _warn(self, found: Mapping[str, Any], num_train: int, num_held_out: int) -> None:
        """Say of which prompts there are rows in both halves."""
        if found["trained_too"]:
            log.warning(
                "task %s: %d of %d held-out rows have a prompt that %d of %d training rows have "
                "too, so that the held-out accuracy is in part of what is trained; take these out "
                "of one of the files",
                self.kind,
                found["trained_too"],
                num_held_out,
                found["held_out_too"],
                num_train,
            )

    def _find(self, progress: Progress) -> dict[str, Any]:
        """Look at all rows, and return which are held out and which fit as JSON values."""
        for check in self.checks:
            check()
        prompts = PromptSplit([], [], 0)
        if self.held_out is None:
            prompts = hold_out_prompts(_asked(self.maker, self.train), self.num_eval)
        found: dict[str, Any] = {"prompts": asdict(prompts)}
        train, held_out = self._halves(prompts)
        tell = Tell(self.kind, len(train) + len(held_out), progress)
        for name, examples in (("train", train), ("held_out", held_out)):
            found[name] = to_values(fitting_of(self.maker, examples, tell), len(examples))
        asked = []
        trained = []
        if self.held_out is not None and self.digests:
            asked = list(_asked(self.maker, held_out))
            wanted = set(asked)
            trained = [own for own in _asked(self.maker, train) if own in wanted]
        common = set(trained)
        found["held_out_too"] = len(trained)
        found["trained_too"] = sum(own in common for own in asked)
        return found


def _asked(maker: PromptMaker, examples: Iterable[Example]) -> Iterator[bytes]:
    """Yield a digest of what the policy is asked by each example: the prompt, and of an
    environment, which makes its problem of it, the whole row.
    """
    is_whole = isinstance(maker, DialogueMaker)
    for example in examples:
        prompt, meta = example.values
        asked = json_of(prompt, meta if is_whole else {})
        yield hashlib.blake2b(asked, digest_size=12).digest()


def _warn_of_shared(
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


def row_reader(
    kind: str, prompt_key: str = "prompt", answer_key: str | None = "answer"
) -> Callable[[dict], Example]:
    """Return the function that makes an example from a row of JSON, for the kinds that read JSON
    lines.
    """
    if kind == "gsm8k":
        return gsm8k_row
    return lambda row: row_to_example(row, prompt_key, answer_key)


def prompt_maker(
    kind: str,
    tokenizer: Tokenizer,
    *,
    chat: bool,
    system_prompt: str | None,
    max_prompt_tokens: int,
    keeps_turns: bool = False,
) -> PromptMaker:
    """Return the PromptMaker of a task of this kind."""
    return PromptMaker(
        tokenizer,
        chat=chat,
        system_prompt=system_prompt,
        max_prompt_tokens=max_prompt_tokens,
        instruction=GSM8K_INSTRUCTION if kind == "gsm8k" else "",
        keeps_turns=keeps_turns,
    )


def facts_examples(seed: int) -> tuple[list[Example], list[Example]]:
    """Return (training, held out) examples of the task facts: a post, with its gold summary as
    answer.
    """
    train, held_out = facts_posts(seed)
    return _post_examples(train), _post_examples(held_out)


def _post_examples(posts: Sequence[Post]) -> list[Example]:
    return [Example(post.text, {"answer": post.summary}) for post in posts]


def _select(examples: Examples, places: Sequence[int]) -> Examples:
    """Return the examples at these places; a dataset on disk stays there."""
    if isinstance(examples, list):
        return [examples[i] for i in places]
    return examples.select(places)


def hold_out(num_rows: int, num_eval: int) -> tuple[list[int], list[int]]:
    """Split rows into (training rows, evaluation rows), by number and in file order: min(num_eval,
    a tenth) are held out, the same in every run.
    """
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
