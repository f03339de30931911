"""The reward worker: a process that scores completions with the user's function. RewardPool starts
it, and guard.py says what it is below and what it may use.

    commands [keys, prompts, completions, metas, sampled, limit_s], a call each: of one completion,
             of several side by side, or of all those of a prompt (forms.py: takes_of)
    messages ["ready", takes] or ["failed", why], once
             [keys, [[kind, value or null, reason], ...], finished_at], in the order of the calls;
             of several side by side each has a line of its own, as it is done

sampled has of each completion what goes into its meta as SAMPLED (forms.py), or null. limit_s is
of the whole call; where it scores several side by side, of each of them. finished_at is
time.monotonic(), which all processes of a machine share.

What was started while the module was imported lives on between calls, and so do pools and executors
that the module keeps. Standard library only, as guard.py.
"""

from __future__ import annotations

import json
import math
import numbers
import time
import traceback
from collections.abc import Awaitable, Callable

from llamarl.tasks import forms
from llamarl.tasks.forms import (
    SAMPLED,
    ScoreOne,
    ScoreSeveral,
    WorkerLimits,
    call_of,
    call_one_of,
    check_signature,
    runner,
    takes_of,
    with_options,
)
from llamarl.words.names import NoFunction, import_function
from llamarl.workers import guard
from llamarl.workers.guard import describe_in_worker, kill_children, short

SHOWN_FRAMES = 3  # of a traceback, and of each line of it
SHOWN_COLUMNS = 80

# The Outcome of one item: its kind, the score (None unless there is one), and why there is none.
Verdict = tuple[str, float | None, str]
TOO_LATE = ""  # the reason of an error whose words the pool has: it took longer than limit_s


def main(path: str, setup: dict, note: int) -> None:
    """Score the items of the commands with the function at `path` until there are no more. setup:
    guard.begin's, with "options", "timeout_s", "chat", "system_prompt" and "traced".
    """
    commands, send = guard.begin(setup, note)
    memory_bytes = setup["memory_mb"] << 20
    try:
        function = resolve(
            path,
            setup["options"],
            timeout_s=setup["timeout_s"],
            memory_mb=setup["memory_mb"],
        )
    except ValueError as error:
        send(["failed", str(error)])
        return
    takes = takes_of(function)
    if takes == "several":
        call_one = call_one_of(function)
    else:
        call = call_of(function, chat=setup["chat"], system_prompt=setup["system_prompt"])
    traced = setup["traced"]

    def tell(keys: list[int], verdicts: list[Verdict]) -> None:
        guard.end_if_over(memory_bytes, note)
        send([keys, verdicts, time.monotonic()])

    kept = guard.children()  # what was started while the module was imported
    guard.end_if_over(memory_bytes, note)
    send(["ready", takes])
    for line in commands:
        keys, prompts, completions, metas, sampled, limit_s = json.loads(line)
        for meta, one in zip(metas, sampled):
            if one is not None:
                meta[SAMPLED] = one
        if takes == "several":
            guard.limit_cpu(limit_s * len(keys))
            items = dict(zip(keys, zip(prompts, completions, metas)))
            runner().run(score_each(call_one, items, limit_s, tell, traced=traced))
            kill_children(but=kept | guard.held_by_multiprocessing())
        else:
            guard.limit_cpu(limit_s)
            verdicts = score(call, prompts, completions, metas, traced=traced)
            kill_children(but=kept | guard.held_by_multiprocessing())
            tell(keys, verdicts)


def score(
    call: ScoreSeveral,
    prompts: list[str],
    completions: list[str],
    metas: list[dict],
    *,
    traced: bool = False,
) -> list[Verdict]:
    """Return the verdicts on the items of one call. Only a finite number is a score. traced: report
    exceptions with their innermost lines.
    """
    try:
        return [_verdict(value) for value in call(prompts, completions, metas)]
    # The user's code may raise anything; whatever it is becomes a typed error of these items and
    # ends nothing else.
    except BaseException as error:
        return [_raised(error, traced=traced)] * len(completions)


async def score_each(
    call_one: ScoreOne,
    items: dict[int, tuple[str, str, dict]],
    limit_s: float,
    tell: Callable[[list[int], list[Verdict]], None],
    *,
    traced: bool = False,
) -> None:
    """Score (prompt, completion, meta) items by key side by side, and tell the verdict on each as
    soon as it is known: an error, TOO_LATE, where it takes longer than limit_s.
    """
    import asyncio  # most functions need none of it

    async def score_one(key: int, item: tuple[str, str, dict]) -> None:
        clock = asyncio.timeout(limit_s)
        try:
            async with clock:
                returned = call_one(*item)
                assert isinstance(returned, Awaitable), "async functions are called side by side"
                verdict = _verdict(await returned)
        # As in `score`.
        except BaseException as error:
            verdict = _raised(error, traced=traced)
            if clock.expired() and isinstance(error, TimeoutError):
                verdict = ("error", None, TOO_LATE)
        tell([key], [verdict])

    await asyncio.gather(*(score_one(key, item) for key, item in items.items()))


def _raised(error: BaseException, *, traced: bool) -> Verdict:
    """Return the verdict on the items of a call that raised."""
    reason = short(describe_in_worker(error))
    if traced:
        reason += _innermost(error)
    return ("error", None, reason)


def _innermost(error: BaseException) -> str:
    """Return the last SHOWN_FRAMES lines of code that an exception came through, each in a line;
    none of llamarl's own.
    """
    own = {__file__, forms.__file__}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in own]
    shown = ""
    for frame in frames[-SHOWN_FRAMES:]:
        shown += f"\n  {frame.filename}:{frame.lineno}, in {frame.name}"
        if frame.line:
            shown += f": {frame.line[:SHOWN_COLUMNS]}"
    return shown.encode("utf-8", "replace").decode()


def _verdict(value: object) -> Verdict:
    """Return the verdict that a returned value means: a number, or an array or a tensor of one."""
    if value is None:
        return ("abstain", None, "the reward returned None")
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):
            pass  # it has several numbers, or none, which is told below
    if not isinstance(value, numbers.Real):
        what = f"{type(value).__name__} {value!r:.60}"
        reason = f"returned {what}; need a float, or None to abstain"
        return ("error", None, short(reason))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        reason = f"returned {number}; need a finite number, or None to abstain"
        return ("error", None, reason)
    return ("score", number, "")


def resolve(path: str, options: dict, *, timeout_s: float, memory_mb: int) -> Callable:
    """Import the reward function at the import path "module:function", with its options filled in.

    ValueError says what is wrong with the path, the module, the options or the function's
    parameters.
    """
    module_name, _, name = path.partition(":")
    try:
        function = import_function(path)
    except NoFunction:
        raise
    except BaseException as error:  # a module may raise anything while it is imported
        is_missing = isinstance(error, ModuleNotFoundError)
        remedy = "; install it, or change the module" if is_missing else ""
        raise ValueError(
            f"importing {module_name} failed: {describe_in_worker(error)}{remedy}"
        ) from error
    limits = WorkerLimits(timeout_s=timeout_s, memory_mb=memory_mb)
    function = with_options(function, options, name, limits)
    check_signature(function, name)
    return function
