"""The losses by name. Each is a pure function; losses of one family share a file.

inputs.py says what a loss is given, common.py what losses share and return. A published loss is one
of them with options, in conf/loss: `loss=cispo` is `policy_gradient` with a cap of 8.

A loss of one's own needs no registration: `loss.fn=my_module:my_loss` (the current directory is
importable).
"""

from __future__ import annotations

import inspect

from llamarl.learning.losses.best_of_group import best_of_n, online_dpo
from llamarl.learning.losses.clipped import clipped, proximal_rloo
from llamarl.learning.losses.common import Loss, has_mark
from llamarl.learning.losses.policy_gradient import distill, kimi_k2, policy_gradient, tba
from llamarl.learning.losses.reinforce import copg, reinforce, rloo
from llamarl.learning.losses.tb import tb
from llamarl.words.names import NoFunction, did_you_mean, import_function

LOSSES: dict[str, Loss] = {
    "policy_gradient": policy_gradient,
    "clipped": clipped,
    "proximal_rloo": proximal_rloo,
    "reinforce": reinforce,
    "rloo": rloo,
    "copg": copg,
    "online_dpo": online_dpo,
    "best_of_n": best_of_n,
    "tb": tb,
    "tba": tba,
    "kimi_k2": kimi_k2,
    "distill": distill,
}
REGULARISERS = ("kl_coef", "kl_estimator", "entropy_coef")  # of `regularised`, around every loss


def resolve_loss(name: str) -> Loss:
    """Return the loss called `name`, or the function that "module:function" names.

    ValueError, with the nearest name, if there is none or it does not take a loss's arguments. What
    a user's module raises while it is imported comes through.
    """
    if name not in LOSSES and ":" not in name:
        known = f"there is {', '.join(LOSSES)}, or module:function"
        raise ValueError(f"no loss {name!r}{did_you_mean(name, LOSSES)}; {known}")
    try:
        fn = LOSSES[name] if name in LOSSES else import_function(name)
    except NoFunction as error:
        raise ValueError(f"loss {name}: {error}") from error
    try:
        inspect.signature(fn).bind(None, **dict.fromkeys(options_of(fn)))
    except TypeError as error:
        raise ValueError(f"loss {name} must take (inputs, *, **options): {error}") from error
    return fn


def check_options(fn: Loss, options: dict[str, object]) -> None:
    """Raise ValueError for every option that `fn` does not take, with the nearest that it takes,
    and for every option that it lacks.
    """
    known = options_of(fn)
    parameters = inspect.signature(fn).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    problems = []
    for name in options:
        if name not in known and not takes_any:
            taken = ", ".join(known) or "none"
            nearest = did_you_mean(name, known)
            problems.append(f"{name}: unknown option{nearest}; {fn.__name__} takes {taken}")
    for name in known:
        if name not in options and parameters[name].default is inspect.Parameter.empty:
            problems.append(f"{name}: {fn.__name__} needs it")
    for name in known:
        if name in REGULARISERS:
            own = f"give {fn.__name__}'s own another name"
            problems.append(f"{name}: added around every loss; {own}")
    if problems:
        raise ValueError("\n".join(problems))


def check_splits(fn: Loss, name: str) -> None:
    """Raise ValueError if the loss called `name` cannot be computed from parts of groups."""
    needed = ("whole_groups", "group_means", "uses_all_completions")
    lacking = [f"@{mark}" for mark in needed if not has_mark(fn, mark)]
    if lacking:
        raise ValueError(
            f"buffer.draw=split loss.fn={name}: draw=split gives each rank some of a prompt's "
            "completions, and this loss does not declare that it allows that "
            f"({', '.join(lacking)}: docs/algorithms.md); buffer.draw=shared, or loss=tb"
        )


def options_of(fn: Loss) -> list[str]:
    """Return the names of the options that `fn` takes: its keyword-only parameters."""
    parameters = inspect.signature(fn).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
