"""The forms that a reward function may have, how completions are put to each, and the keys of the
meta that it gets.

    form      is called with                         and scores
    single    (prompt, completion, meta)             one completion: float, or None to abstain
    verl      (data_source=, solution_str=,          the same, as verl calls it
              ground_truth=, extra_info=)
    batch     (prompts, completions, metas)          all completions of one prompt: a list of those
    trl       (prompts=, completions=, **columns)    the same, as TRL's GRPOTrainer calls it

A function that takes `solution_str` has verl's form. One that takes `completions` has one of the
last two: batch if it takes `metas` too, else trl. Under other names, `@batched` says that it is a
batch function. Each may be async, and may have options: further parameters by keyword. Standard
library only: reward workers use it, and start in a moment.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any, Literal

from llamarl.words.names import did_you_mean
from llamarl.words.texts import answer_text

# Keys of a prompt's meta that llamarl writes beside the row's own.
SAMPLED = "sampled"  # what was sampled, for a scorer
MESSAGES = "prompt_messages"  # the turns of a conversation: llamarl.types.MESSAGES_KEY
PART_KEY = "part"  # the name of the prompt's part of a mixture
SET_KEY = "eval_set"  # the name of the prompt's set of eval.sets
REWARD_KEY = "part_reward"  # the default reward of that part or set
# Keys that no row may have. A row may have PART_KEY, unless it is of a mixture's part.
_MEANINGS = {
    SAMPLED: "what was sampled",
    MESSAGES: "the turns of a conversation",
    SET_KEY: "the name of a prompt's set",
    REWARD_KEY: "a prompt's own reward",
}

Form = Literal["single", "verl", "batch", "trl"]
# What a call scores: one completion; several of any prompts, side by side; all of one prompt.
Takes = Literal["one", "several", "group"]
# (prompts, completions, metas) -> a value for each completion, which is not checked yet
ScoreSeveral = Callable[[list[str], list[str], list[dict]], list]
# (prompt, completion, meta) -> the value, or what it is awaited by
ScoreOne = Callable[[str, str, dict], object]

_MARK = "llamarl_reward_form"
_CHECK = "llamarl_reward_check"
# What TRL hands over besides, of its trainer; a function that cannot do without them needs TRL.
_OF_TRL_ALONE = ("trainer_state", "environments")
_TOKENS = "completion_ids"  # TRL's name for the tokens of each completion
# What verl's reward managers call a function with.
_OF_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
# What they call one with that scores a whole batch.
_OF_VERLS_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_NO_COLUMNS = ("prompt", "completion", MESSAGES, _TOKENS, *_OF_TRL_ALONE)


def with_sampled(
    meta: Mapping[str, object], *, token_ids: list[int], raw_text: str, ended: bool
) -> dict[str, object]:
    """Return a row's meta with what was sampled, under the key SAMPLED.

        {"answer": "46", "sampled": {"num_tokens": 3, "ended": True, "raw_text": "46</s>",
                                     "token_ids": [19, 21, 2]}}

    token_ids: [L], with the stop token of a completion that ended by itself (`ended`), and not for
    want of room. raw_text: their text with special tokens. ValueError if the row has the key.
    """
    _check_own_key(SAMPLED, meta)
    sampled = {
        "num_tokens": len(token_ids),
        "ended": ended,
        "raw_text": raw_text,
        "token_ids": token_ids,
    }
    return {**meta, SAMPLED: sampled}


def answer_in(meta: Mapping[str, object]) -> str:
    """Return a row's answer as a text. ValueError if it has none, or no text or number."""
    if meta.get("answer") is None:
        remedy = "set task.answer_key, or use a reward that needs none"
        raise ValueError(f"the prompt's meta has no 'answer'; {remedy}")
    return answer_text(meta["answer"])


def check_row_keys(keys: Collection[str]) -> None:
    """Raise ValueError if a row has a key that is llamarl's own."""
    for key in _MEANINGS:
        _check_own_key(key, keys)


def _check_own_key(key: str, keys: Collection[str]) -> None:
    if key in keys:
        raise ValueError(
            f'the key "{key}" is where a reward finds {_MEANINGS[key]}; rename the column'
        )


def batched(function: Callable) -> Callable:
    """Mark a function as one of the form batch, whatever its parameters are called."""
    setattr(function, _MARK, "batch")
    return function


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What the worker process allows a reward function."""

    timeout_s: float  # seconds by the clock for a completion
    memory_mb: int  # MiB that the worker and what it starts may hold


Check = Callable[..., None]  # (limits, **options); ValueError for options that cannot be used


def checked_by(check: Check) -> Callable[[Callable], Callable]:
    """Return a decorator for a reward function whose options are checked before anything is scored.

        def check(limits, *, most=10): ...    # ValueError: most=-1: need at least 0

        @checked_by(check)
        def brevity(prompt, completion, meta, *, most=10): ...

    check: also raises ValueError where a package is missing. It may import what is slow.
    """

    def decorate(function: Callable) -> Callable:
        setattr(function, _CHECK, check)
        return function

    return decorate


def with_options(
    function: Callable, options: Mapping[str, object], name: str, limits: WorkerLimits
) -> Callable:
    """Check the options of a function and return it with them filled in. ValueError for an option
    that it does not take, or that its own check refuses.
    """
    check = getattr(function, _CHECK, None)
    if options:
        function = _filled_in(function, options, name)
    if check is not None:
        check(limits, **options)
    return function


def _filled_in(function: Callable, options: Mapping[str, object], name: str) -> Callable:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:  # some functions written in C have none
        raise ValueError(f"{name} takes no options") from error
    taken = []
    is_open = False
    for parameter in parameters:
        is_open = is_open or parameter.kind is parameter.VAR_KEYWORD
        if parameter.kind is parameter.KEYWORD_ONLY:
            taken.append(parameter.name)
    for option in options:
        if option not in taken and not is_open:
            listed = f"; it has {', '.join(taken) or 'none, for they are keyword-only parameters'}"
            hint = did_you_mean(option, taken) or listed
            raise ValueError(f"{name} has no option {option}{hint}")
    filled = partial(function, **options)
    if hasattr(function, _MARK):
        setattr(filled, _MARK, getattr(function, _MARK))
    return filled


def form_of(function: Callable) -> Form:
    """Return the form of a reward function, by its mark or by the names of its parameters."""
    if getattr(function, _MARK, None) == "batch":
        return "batch"
    try:
        names = inspect.signature(function).parameters
    except ValueError:  # some functions written in C have none
        return "single"
    if "solution_str" in names:
        return "verl"
    if "completions" not in names:
        return "single"
    return "batch" if "metas" in names else "trl"


def takes_of(function: Callable) -> Takes:
    """Return what a call of a reward function scores. Async functions of one completion are called
    for several at a time.
    """
    if form_of(function) in ("batch", "trl"):
        return "group"
    return "several" if _is_async(function) else "one"


def _is_async(function: Callable) -> bool:
    """Whether calling a function only begins its work. For an instance its __call__ decides."""
    call = getattr(function, "__call__", None)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def check_signature(function: Callable, name: str) -> None:
    """Raise ValueError if a reward function of this name cannot be called as its form is."""
    form = form_of(function)
    try:
        signature = inspect.signature(function)
    except ValueError:  # calling will tell
        return
    try:
        if form == "trl":
            _check_keywords(signature, not_given=_OF_TRL_ALONE)
        elif form == "verl":
            required = _required(signature)
            _check_keywords(signature, not_given=[n for n in required if n not in _OF_VERL])
        else:
            signature.bind("prompt", "completion", {})
            _check_no_verl(signature, is_marked=form == "batch")
    except TypeError as error:
        calls = {
            "single": "(prompt, completion, meta)",
            "verl": "(data_source=..., solution_str=..., ground_truth=..., extra_info=...)",
            "batch": "(prompts, completions, metas)",
            "trl": "(prompts=..., completions=..., **columns)",
        }
        raise ValueError(
            f"{name}{signature} cannot be called as {name}{calls[form]}: {error}"
        ) from error


def _required(signature: inspect.Signature) -> list[str]:
    """Return the names of the parameters that a call must give."""
    names = []
    for name, parameter in signature.parameters.items():
        is_open = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not is_open:
            names.append(name)
    return names


def _check_keywords(signature: inspect.Signature, *, not_given: Collection[str]) -> None:
    """Raise TypeError for a function that takes no keywords, or needs one of `not_given`."""
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise TypeError(f"{name} takes no keyword")
    for name in _required(signature):
        if name in not_given:
            raise TypeError(f"{name} is not handed over; give it a default")


# Without this check such a function would be called, and score the wrong arguments.
def _check_no_verl(signature: inspect.Signature, *, is_marked: bool) -> None:
    """Raise TypeError for a function of verl's that would get prompt, completion and meta in place
    of what its parameters are called.
    """
    if is_marked:
        return
    for name in list(signature.parameters)[:3]:
        if name in _OF_VERLS_BATCH:
            what = "verl's batch form is not called here"
            raise TypeError(f"{name}: {what}; score one completion, with {', '.join(_OF_VERL)}")
        if name in _OF_VERL:
            what = "verl's functions are known by a parameter solution_str"
            raise TypeError(f"{name}: {what}; call the completion's parameter that")


def call_of(function: Callable, *, chat: bool, system_prompt: str | None) -> ScoreSeveral:
    """Return a function that hands completions to a reward function in its form.

    chat: the prompts were turns of a chat template, so that TRL's form gets messages. The call
    raises whatever the function raises, and ValueError if it does not return a value for each.
    """
    form = form_of(function)
    if form in ("single", "verl"):
        one = call_one_of(function)
        return lambda *columns: [awaited(one(*item)) for item in zip(*columns)]
    if form == "batch":
        return lambda *columns: _listed(awaited(function(*columns)), len(columns[1]))
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []

    def prompt_of(text: str, meta: dict) -> str | list[dict[str, str]]:
        """Return a prompt as TRL has it: the turns that the model read, or a text."""
        if chat:
            return meta.get(MESSAGES) or [*system, _turn("user", text)]
        return meta.get(MESSAGES) or text

    def call(prompts: list[str], completions: list[str], metas: list[dict]) -> list:
        arguments = _columns(metas)
        if all(SAMPLED in meta for meta in metas):
            arguments[_TOKENS] = [meta[SAMPLED]["token_ids"] for meta in metas]
        asked = [prompt_of(text, meta) for text, meta in zip(prompts, metas)]
        said = []
        for prompt, text in zip(asked, completions):
            said.append(text if isinstance(prompt, str) else [_turn("assistant", text)])
        arguments["prompts"] = asked
        arguments["completions"] = said
        # Its reports have no place here.
        arguments["log_extra"] = arguments["log_metric"] = lambda *_: None
        returned = awaited(function(**_accepted(function, arguments)))
        return _listed(returned, len(completions))

    return call


def call_one_of(function: Callable) -> ScoreOne:
    """Return a function that hands one completion to a reward function of the form single or verl.
    What an async function returns is to be awaited.
    """
    if form_of(function) == "single":
        return function

    def call(prompt: str, completion: str, meta: dict) -> object:
        arguments = _verl_arguments(completion, meta)
        returned = function(**_accepted(function, arguments))
        if inspect.isawaitable(returned):
            return _score_of_awaited(returned)
        return _score_of(returned)

    return call


def _verl_arguments(completion: str, meta: dict) -> dict[str, object]:
    """Return the arguments that verl's reward managers give a function. ValueError for a row
    without a ground truth.
    """
    kept = meta.get("reward_model")
    if isinstance(kept, Mapping) and "ground_truth" in kept:
        ground_truth = kept["ground_truth"]
    elif "answer" in meta:
        ground_truth = meta["answer"]
    else:
        raise ValueError(
            "no ground_truth: the row has no answer and no reward_model.ground_truth; "
            "set task.answer_key"
        )
    extra_info = _extra_info(meta.get("extra_info"))
    if SAMPLED in meta:
        extra_info[SAMPLED] = meta[SAMPLED]
    return {
        "data_source": meta.get("data_source", ""),
        "solution_str": completion,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
    }


def _extra_info(found: object) -> dict[str, object]:
    """Return a row's extra_info, which may be a JSON text, as a new dict. ValueError if it is no
    object.
    """
    if isinstance(found, str) and found:
        try:
            found = json.loads(found)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the row's extra_info {found!r:.60} is no JSON: {error}") from error
    if not found:
        return {}
    if not isinstance(found, Mapping):
        what = f"{type(found).__name__} {found!r:.60}"
        raise ValueError(f"the row's extra_info is {what}; need an object")
    return dict(found)


def _score_of(returned: object) -> object:
    """Return the score in what a function of verl's returns: a number, or a mapping with more to
    log.
    """
    if isinstance(returned, Mapping) and "score" in returned:
        return returned["score"]
    return returned


async def _score_of_awaited(returned: Awaitable) -> object:
    return _score_of(await returned)


_runners: list = []  # the asyncio.Runner of this process, once there is one


def runner():
    """Return the asyncio.Runner of this process. One loop serves all calls, so that what a function
    keeps open between them, such as an HTTP session, goes on working.
    """
    if not _runners:
        import asyncio  # most functions need none of it

        _runners.append(asyncio.Runner())
    return _runners[0]


def awaited(returned: object) -> object:
    """Return what a function has returned; for an async one, what it returns once it has run."""
    if not inspect.isawaitable(returned):
        return returned

    async def wait() -> object:
        return await returned

    return runner().run(wait())


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _columns(metas: list[dict]) -> dict[str, object]:
    """Return the metas by key: for each key the values of all of them."""
    columns: dict[str, object] = {}
    for name in dict.fromkeys(chain.from_iterable(metas)):
        if name not in _NO_COLUMNS:
            columns[name] = [meta.get(name) for meta in metas]
    return columns


def _accepted(function: Callable, arguments: dict[str, object]) -> dict[str, object]:
    """Return those of the arguments that a function takes. Its options keep their values, whatever
    the columns of a row are called.
    """
    if isinstance(function, partial):
        arguments = {n: value for n, value in arguments.items() if n not in function.keywords}
    parameters = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _listed(returned: Any, count: int) -> list:
    """Return what a function has returned as a list; an array or a tensor as its numbers."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if returned is None or isinstance(returned, str | Mapping | float | int):
        what = f"{type(returned).__name__} {returned!r:.60}"
        raise ValueError(f"returned {what}; need a list of {count}, one for each completion")
    values = list(returned)
    if len(values) != count:
        raise ValueError(f"returned {len(values)} values for {count} completions")
    return values


def import_package(module: str, *, user: str, package: str, extra: str) -> ModuleType:
    """Import a module of an extra. ValueError that names the extra without it. user: what needs the
    module, for people.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        remedy = f"pip install 'llamarl[{extra}]'"
        raise ValueError(f"{user} needs the package {package}: {remedy}") from error


def need_word(name: str, value: object, words: Sequence[str]) -> None:
    """Raise ValueError unless the option is one of these words."""
    if value not in words:
        hint = did_you_mean(str(value), words)
        raise ValueError(f"option {name}={value!r}: need one of {', '.join(words)}{hint}")


def need_flag(name: str, value: object) -> None:
    """Raise ValueError unless the option is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"option {name}={value!r}: need true or false")


def need_count(name: str, value: object) -> None:
    """Raise ValueError unless the option is a whole number of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"option {name}={value!r}: need a whole number of at least 1")


def need_text(name: str, value: object) -> None:
    """Raise ValueError unless the option is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"option {name}={value!r}: need a text")


def need_positive(name: str, value: object) -> None:
    """Raise ValueError unless the option is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"option {name}={value!r}: need a number above 0")
