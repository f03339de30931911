"""The forms that a reward function may have, and how completions are put to each.

    form      is called with                         and scores
    single    (prompt, completion, meta)             one completion: float, or None to abstain
    batch     (prompts, completions, metas)          all completions of one prompt: a list of those
    trl       (prompts=, completions=, **columns)    the same, as TRL's GRPOTrainer calls it

A function that takes `completions` has one of the last two forms: batch if it takes `metas` too,
else trl. Under other names, `@batched` says that it is a batch function. Standard library only:
reward workers use it, and start in a moment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Literal

Form = Literal["single", "batch", "trl"]
# (prompts, completions, metas) -> a value for each completion, which nobody has looked at yet
Call = Callable[[list[str], list[str], list[dict]], list]

_MARK = "llamarl_reward_form"
_MESSAGES = "prompt_messages"  # of a conversation's meta: llamarl.types.MESSAGES_KEY
# What TRL hands over besides, of its trainer; a function that cannot do without them needs TRL.
_OF_TRL_ALONE = ("completion_ids", "trainer_state", "environments")
_NO_COLUMNS = ("prompt", "completion", _MESSAGES, *_OF_TRL_ALONE)


def batched(function: Callable) -> Callable:
    """Marks a function as one of the form batch, whatever its parameters are called."""
    setattr(function, _MARK, "batch")
    return function


def form_of(function: Callable) -> Form:
    """The form of a reward function, by its mark or by the names of its parameters."""
    if getattr(function, _MARK, None) == "batch":
        return "batch"
    try:
        names = inspect.signature(function).parameters
    except ValueError:  # some functions written in C have none
        return "single"
    if "completions" not in names:
        return "single"
    return "batch" if "metas" in names else "trl"


def check_signature(function: Callable, name: str) -> None:
    """ValueError if a reward function of this name cannot be called as its form is."""
    form = form_of(function)
    if inspect.iscoroutinefunction(function) and form != "trl":
        raise ValueError(
            f"{name} is async; a reward is a plain function (prompt, completion, meta) -> float"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # calling will tell
        return
    try:
        if form == "trl":
            _check_trl(signature)
        else:
            signature.bind("prompt", "completion", {})
    except TypeError as error:
        calls = {
            "single": "(prompt, completion, meta)",
            "batch": "(prompts, completions, metas)",
            "trl": "(prompts=..., completions=..., **columns)",
        }
        raise ValueError(
            f"{name}{signature} cannot be called as {name}{calls[form]}: {error}"
        ) from error


def _check_trl(signature: inspect.Signature) -> None:
    """TypeError for a parameter that TRL's trainer alone could give."""
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise TypeError(f"{name} takes no keyword")
        is_needed = parameter.default is inspect.Parameter.empty
        if is_needed and name in _OF_TRL_ALONE:
            raise TypeError(f"{name} is not handed over; give it a default")


def call_of(function: Callable, *, chat: bool, system_prompt: str | None) -> Call:
    """How completions are put to a function, by its form.

    chat: the prompts were turns of a chat template, so that TRL's form gets messages. The call
    raises whatever the function raises, and ValueError if it does not return a value for each.
    """
    form = form_of(function)
    if form == "single":
        return lambda *columns: [function(*one) for one in zip(*columns)]
    if form == "batch":
        return lambda *columns: _listed(function(*columns), len(columns[1]))
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []

    def prompt_of(text: str, meta: dict) -> str | list[dict[str, str]]:
        """As TRL has a prompt: the turns that the model read, or a text."""
        if chat:
            return meta.get(_MESSAGES) or [*system, _turn("user", text)]
        return meta.get(_MESSAGES) or text

    def call(prompts: list[str], completions: list[str], metas: list[dict]) -> list:
        arguments = _columns(metas)
        asked = [prompt_of(text, meta) for text, meta in zip(prompts, metas)]
        said = []
        for prompt, text in zip(asked, completions):
            said.append(text if isinstance(prompt, str) else [_turn("assistant", text)])
        arguments["prompts"] = asked
        arguments["completions"] = said
        # Its reports have no place here.
        arguments["log_extra"] = arguments["log_metric"] = lambda *_: None
        returned = function(**_accepted(function, arguments))
        if inspect.iscoroutine(returned):
            import asyncio  # most functions need none of it

            returned = asyncio.run(returned)
        return _listed(returned, len(completions))

    return call


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _columns(metas: list[dict]) -> dict[str, object]:
    """The metas by key: of each key the values of all of them."""
    names: dict[str, None] = {}
    for meta in metas:
        names.update(dict.fromkeys(meta))
    kept = [name for name in names if name not in _NO_COLUMNS]
    columns: dict[str, object] = {}
    for name in kept:
        columns[name] = [meta.get(name) for meta in metas]
    return columns


def _accepted(function: Callable, arguments: dict[str, object]) -> dict[str, object]:
    """Those of the arguments that a function takes."""
    parameters = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _listed(returned: object, count: int) -> list:
    """What a function has returned as a list: of an array or a tensor its numbers."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if returned is None or isinstance(returned, str | Mapping | float | int):
        what = f"{type(returned).__name__} {returned!r:.60}"
        raise ValueError(f"returned {what}; need a list of {count}, one for each completion")
    values = [_plain(value) for value in returned]
    if len(values) != count:
        raise ValueError(f"returned {len(values)} values for {count} completions")
    return values


def _plain(value: object) -> object:
    """An array or a tensor of one number as that number."""
    return value.item() if hasattr(value, "item") else value
