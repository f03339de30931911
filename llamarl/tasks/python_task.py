"""Tasks of a user's own: `task=python task.fn=my_module:make_task`.

make_task(maker, **task.options)  -->  a Task, which is checked against what Task promises
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from llamarl.tasks.base import PromptMaker, Task, imported
from llamarl.types import Prompt
from llamarl.words.names import import_function
from llamarl.workers.guard import describe

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
    function = imported(key, import_function, fn)
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
            is_read_alike = torch.equal(one.prompt_ids, other.prompt_ids)
            if not is_read_alike or (one.text, one.meta) != (other.text, other.meta):
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


def _called(key: str, call: str, function: Callable, *given: object, **named: object) -> Any:
    """Return what the user's function returns. ValueError, beginning with `key`, for what it
    raises.
    """
    try:
        return function(*given, **named)
    except Exception as error:  # it is the user's code
        raise ValueError(f"{key}: {call} raised {describe(error)}") from error
