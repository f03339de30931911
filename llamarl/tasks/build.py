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
                   a Task; options
    environment    environment: module:Class; path,  as jsonl; of its own prompts   the environ-
                   or prompts of its own             as many of these                ment's
    mixture        parts: by name, each a kind     from each part, by its weight    each part's
                   with its keys, and a weight

"A part of path" is min(num_eval, a tenth) of its prompts, at random but the same in every run, and
taken out of training with all their rows.
"""

from __future__ import annotations

import inspect
import json
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from llamarl.tasks.base import (
    Example,
    Examples,
    PromptMaker,
    Task,
    Tokenizer,
)
from llamarl.tasks.environment import GIVEN, DialogueMaker
from llamarl.tasks.facts import Post, facts_posts
from llamarl.tasks.files import GSM8K_INSTRUCTION, JsonlExamples, gsm8k_row, row_to_example
from llamarl.tasks.held_out import HeldOut
from llamarl.tasks.list_task import (
    ListTask,
    Remembered,
    here,
)
from llamarl.tasks.mixture import MixtureTask, shares
from llamarl.tasks.procedural import addition_examples, question_examples
from llamarl.tasks.split import Split, warn_of_shared
from llamarl.types import Prompt
from llamarl.words.choices import OWN
from llamarl.words.names import NoFunction, import_function, nearest

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
    split = Split(
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
        warn_of_shared(trained, asked, shared.get("remembered", here))
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
    warn_of_shared(parts_by_key, parts_by_key, shared.get("remembered", here))
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
            from llamarl.tasks.files import directory_digest, read_hf_dataset

            self.digests.append(directory_digest(path))
            return read_hf_dataset(path, self.prompt_key, self.answer_key)
        rows = JsonlExamples(path, row_reader(self.kind, self.prompt_key, self.answer_key))
        self.digests.append(rows.digest)
        self.checks.append(rows.check)
        return rows, None

    def read_held_out(self, path: str | Path) -> Examples:
        """Read the examples of a file or directory that holds evaluation data."""
        if self.kind == "hf_dataset":
            from llamarl.tasks.files import directory_digest, read_held_out

            self.digests.append(directory_digest(path))
            return read_held_out(path, self.prompt_key, self.answer_key)
        return self.read(path)[0]


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


_GIVEN = ("seed", "num_eval")  # to a function that takes them
_TEXTS = ("name", "default_reward", "train_digest", "eval_digest")


def own_task(
    fn: str, maker: PromptMaker, *, seed: int, num_eval: int, options: Mapping[str, object]
) -> Task:
    """Build the task that the function at import path `fn` returns. It is called with the maker,
    the options, and by their names seed and num_eval if it has such parameters.

    ValueError, beginning with the key, for what cannot be called or is no Task.
    """
    key = f"task.fn={fn}"
    try:
        function = import_function(fn)
    except NoFunction as error:
        raise ValueError(f"{key}: {error}") from error
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ValueError(f"{key}: importing it failed: {_described(error)}") from error
    given = {"seed": seed, "num_eval": num_eval}
    parameters = inspect.signature(function).parameters
    arguments = {name: given[name] for name in _GIVEN if name in parameters} | dict(options)
    try:
        inspect.signature(function).bind(maker, **arguments)
    except TypeError as error:
        taken = ", ".join(list(parameters)[1:]) or "none"
        raise ValueError(
            f"{key}: it cannot be called with the prompt maker and these task.options: {error}; "
            f"it takes {taken}"
        ) from error
    task = _called(key, "it", function, maker, **arguments)
    check_task(task, key)
    return task


def check_task(task: Any, key: str) -> None:
    """Ask a task for its first and last prompts. ValueError, beginning with `key`, says where it
    breaks what Task promises.
    """
    for name in _TEXTS:
        value = getattr(task, name, None)
        if not isinstance(value, str):
            raise ValueError(f"{key}: {name} must be a text, is {value!r:.60} (of a Task)")
    if not task.name:
        raise ValueError(f"{key}: name is empty")
    for name, least in (("num_train", 1), ("num_eval", 0)):
        value = getattr(task, name, None)
        if type(value) is not int or value < least:
            what = f"must be a whole number of at least {least}, is {value!r:.60}"
            raise ValueError(f"{key}: {name} {what}")
    for name, count in (("train_prompt", task.num_train), ("eval_prompt", task.num_eval)):
        prompt_of = getattr(task, name, None)
        if not callable(prompt_of):
            raise ValueError(f"{key}: {name} must be a function of a number")
        for number in sorted({0, count - 1}) if count else ():
            call = f"{name}({number})"
            one, other = (_called(key, call, prompt_of, number) for _ in range(2))
            for prompt in (one, other):
                _check_prompt(prompt, f"{key}: {call}")
            if not _same(one, other):
                raise ValueError(
                    f"{key}: {call} gives another prompt when it is asked again; it must depend on "
                    "its number alone"
                )


def _check_prompt(prompt: object, where: str) -> None:
    """Raise ValueError, beginning with `where`, if it is no prompt."""
    if not isinstance(prompt, Prompt):
        what = f"is a {type(prompt).__name__}, must be a Prompt"
        raise ValueError(f"{where} {what}; make it with maker.prompt(Example(text, meta))")
    ids = prompt.prompt_ids
    if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(f"{where}: prompt_ids must be a tensor of int64 with one dimension")
    if not ids.numel():
        raise ValueError(f"{where}: prompt_ids is empty: the first token needs something before it")
    if not isinstance(prompt.text, str):
        raise ValueError(f"{where}: text must be a text, is {prompt.text!r:.60}")
    try:
        is_json = json.loads(json.dumps(prompt.meta)) == prompt.meta
    except (TypeError, ValueError):
        is_json = False
    if not (is_json and isinstance(prompt.meta, dict)):
        raise ValueError(f"{where}: meta must be a dict of JSON values, is {prompt.meta!r:.60}")


def _same(one: Prompt, other: Prompt) -> bool:
    is_read_alike = torch.equal(one.prompt_ids, other.prompt_ids)
    return is_read_alike and (one.text, one.meta) == (other.text, other.meta)


def _called(key: str, call: str, function: Callable, *given: object, **named: object) -> Any:
    """Return what the user's function returns. ValueError, beginning with `key`, for what it
    raises.
    """
    try:
        return function(*given, **named)
    except Exception as error:  # it is the user's code
        raise ValueError(f"{key}: {call} raised {_described(error)}") from error


def _described(error: Exception) -> str:
    """Describe an exception that was caught, with the innermost place."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    place = f"{Path(frame.f_code.co_filename).name}:{line}"
    return f"{type(error).__name__}: {error}".removesuffix(": ") + f" ({place})"
