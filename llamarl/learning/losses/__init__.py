"""Losses by name. Each is a pure function in a file of its own; `common` says what they share and
return.

A loss of one's own needs no registration: `loss.fn=my_module:my_loss` (the current directory is
importable).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import Tensor

from llamarl.learning.losses.aipo import aipo
from llamarl.learning.losses.best_of_n import best_of_n
from llamarl.learning.losses.cispo import cispo
from llamarl.learning.losses.common import GIVEN, Metrics, takes
from llamarl.learning.losses.copg import copg
from llamarl.learning.losses.dr_grpo import dr_grpo
from llamarl.learning.losses.grpo import grpo
from llamarl.learning.losses.icepop import icepop
from llamarl.learning.losses.kimi_k2 import kimi_k2
from llamarl.learning.losses.online_dpo import online_dpo
from llamarl.learning.losses.ppo import ppo
from llamarl.learning.losses.proximal_rloo import proximal_rloo
from llamarl.learning.losses.reinforce import reinforce
from llamarl.learning.losses.rloo import rloo
from llamarl.learning.losses.tb import tb
from llamarl.learning.losses.tba import tba
from llamarl.tasks.names import NoFunction, did_you_mean, import_function

Loss = Callable[..., tuple[Tensor, Metrics]]

_ALL = (
    aipo,
    reinforce,
    grpo,
    dr_grpo,
    ppo,
    rloo,
    copg,
    proximal_rloo,
    online_dpo,
    best_of_n,
    tb,
    tba,
    cispo,
    icepop,
    kimi_k2,
)
LOSSES: dict[str, Loss] = {fn.__name__: fn for fn in _ALL}
REGULARISERS = ("kl_coef", "kl_estimator", "entropy_coef")  # of `regularised`, around every loss
_TENSORS = ("trainer_logprobs", "generator_logprobs", "ref_logprobs", "advantages", "loss_mask")


def resolve_loss(name: str) -> Loss:
    """The loss called `name`, or the function that "module:function" names.

    ValueError, with the nearest name, if there is none or it does not take a loss's arguments. What
    a user's module raises while it is imported comes through.
    """
    fn = LOSSES[name] if name in LOSSES else _imported(name)
    try:
        given = {name: None for name in GIVEN if takes(fn, name)}
        inspect.signature(fn).bind(*_TENSORS, **{**_required(fn), **given, "num_loss_tokens": 1})
    except TypeError as error:
        raise ValueError(
            f"loss {name} must take ({', '.join(_TENSORS)}, *, num_loss_tokens, **options): {error}"
        ) from error
    return fn


def check_options(fn: Loss, options: dict[str, object]) -> None:
    """ValueError naming every option that `fn` does not take (with the nearest it does) or that it
    needs and is not given.
    """
    parameters = inspect.signature(fn).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in GIVEN]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    problems = [
        f"{name}: unknown option{did_you_mean(name, known)}; {fn.__name__} takes {', '.join(known) or 'none'}"
        for name in options
        if name not in known and not takes_all
    ]
    problems += [f"{name}: {fn.__name__} needs it" for name in _required(fn) if name not in options]
    problems += [
        f"{name}: added around every loss; give {fn.__name__}'s own another name"
        for name in known
        if name in REGULARISERS
    ]
    if problems:
        raise ValueError("\n".join(problems))


def options_of(fn: Loss) -> set[str]:
    """The names of the options that `fn` takes."""
    parameters = inspect.signature(fn).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in GIVEN}


def _required(fn: Loss) -> dict[str, None]:
    """The keyword-only options without a default."""
    parameters = inspect.signature(fn).parameters.values()
    return {
        p.name: None
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in GIVEN
    }


def _imported(name: str) -> Loss:
    if ":" not in name:
        known = f"there is {', '.join(LOSSES)}, or module:function"
        raise ValueError(f"no loss {name!r}{did_you_mean(name, LOSSES)}; {known}")
    try:
        return import_function(name)
    except NoFunction as error:
        raise ValueError(f"loss {name}: {error}") from error
