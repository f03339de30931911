"""The section `loss`: a loss with its options, and what cannot go together among these."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from omegaconf import OmegaConf
from pydantic import BeforeValidator

from llamarl.config.fields import (
    ByKind,
    Count,
    Flag,
    Flat,
    Natural,
    NonNegative,
    Number,
    Options,
    Positive,
    Share,
    fits,
    nested,
    settings_dataclass,
)
from llamarl.config.files import CONF_DIR, SCHEDULES, sections
from llamarl.config.findings import Findings, Problem, did_you_mean
from llamarl.config.refusals import need
from llamarl.words.choices import Estimator, Normalize, RatioLevel

# What each option may be; it means the same in every loss that has it.
LOSS_OPTIONS: dict[str, object] = {
    "ratio_cap": Positive | None,
    "ratio_mask_low": NonNegative | None,
    "ratio_mask_high": Positive | None,
    "ratio_level": RatioLevel,
    "normalize": Normalize,
    "max_tokens": Count | None,
    "clip_low": Share,
    "clip_high": NonNegative,
    "beta": Positive,
    "log_reward_temperature": Positive,
    "reference_temperature": Positive,
    "tau": NonNegative,
    "length_normalize": Flag,
}

_LOSSES = Path(__file__).resolve().parents[2] / "learning" / "losses"


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declaration of a loss, read from its source."""

    options: tuple[str, ...]  # its keyword-only parameters
    marks: frozenset[str]  # its decorators, such as "needs_reference"


@settings_dataclass
class LinearScheduleSettings:
    kind: Literal["linear"]
    final: NonNegative
    end_step: Count


@settings_dataclass
class CutScheduleSettings:
    kind: Literal["cut"]
    final: NonNegative
    end_step: Count
    cut_step: Natural


AnyScheduleSettings = Annotated[LinearScheduleSettings | CutScheduleSettings, ByKind()]


@settings_dataclass
class LossSettings:
    fn: str  # a loss of the package, or module:function
    name: str  # the chosen file in conf/loss; fn if a user's function has taken its place
    kl_coef: NonNegative
    kl_estimator: Estimator
    entropy_coef: NonNegative
    schedules: dict[str, AnyScheduleSettings]  # by the options that change from step to step
    # Every further key of loss.*, for the function alone.
    options: Annotated[Options, Flat(known=LOSS_OPTIONS)]

    def options_for(self, taken: set[str]) -> dict[str, object]:
        """Return the options for a function that takes these. A user's function need not take the
        options of the package's losses.
        """
        return {
            key: value
            for key, value in self.options.items()
            if key in taken or key not in LOSS_OPTIONS
        }


AnyLossSettings = Annotated[LossSettings, BeforeValidator(functools.partial(nested, LossSettings))]


@functools.cache
def published_losses() -> dict[str, Mapping[str, object]]:
    """Return the settings of the section `loss` by `loss=NAME`: the files of conf/loss."""
    files = sorted((CONF_DIR / "loss").glob("*.yaml"))
    return {file.stem: sections(OmegaConf.load(file))["loss"] for file in files}


def find_loss(loss: LossSettings, found: Findings) -> None:
    """Find a loss that does not exist, and options that it does not take or that are impossible."""
    losses, published = declarations(), published_losses()
    if ":" in loss.fn:
        _find_own_loss(loss, found)
    elif loss.fn not in losses and loss.fn not in published:
        near = did_you_mean(loss.fn, [*published, *losses])
        found.add(f"need {' or '.join(losses)} or module:function{near}", "loss.fn")
    elif loss.fn not in losses or not loss.options.keys() >= set(losses[loss.fn].options):
        choices = [name for name in published if loss.fn in (name, published[name]["fn"])]
        choice = f"loss={' or '.join(choices)}"
        found.add(f"has options of its own; choose it with them: {choice}", "loss.fn")
    else:
        _find_options(loss, losses[loss.fn].options, found)
    _find_schedules(loss, found)


def _find_options(loss: LossSettings, taken: Sequence[str], found: Findings) -> None:
    """Find options that the package's loss does not take, or that are out of range or contradict
    each other. taken: the names of those that it takes.
    """
    all_fit = True
    for name, value in loss.options.items():
        key = f"loss.{name}"
        hint = LOSS_OPTIONS.get(name)
        if name in taken:
            if not fits(value, hint):
                found.add(need(value, hint), key)
                all_fit = False
            continue
        why = f"; {loss.fn} does not take it"
        if hint is None:
            why = did_you_mean(key, [f"loss.{name}" for name in taken])
        found.problems.append(Problem(key, f"unknown key{why}", (key,)))
    if not all_fit:
        return
    low = _bound(loss, "ratio_mask_low") or 0
    high = _bound(loss, "ratio_mask_high") or math.inf
    cap = _bound(loss, "ratio_cap") or math.inf
    clip = _bound(loss, "clip_high")
    if clip is None:
        clip = -math.inf
    is_mean = loss.options.get("max_tokens") is None or loss.options.get("normalize") == "tokens"
    if low >= high:
        what = "these bounds mask every ratio; the low bound must be below the high one"
        found.add(what, "loss.ratio_mask_low", "loss.ratio_mask_high")
    if cap <= 1 + clip:
        what = f"a cap at or below 1 + clip_high = {1 + clip:g} leaves nothing to clip"
        found.add(f"{what}; raise it, or null", "loss.ratio_cap", "loss.clip_high")
    if not is_mean:
        what = (
            "max_tokens is a constant to divide by, so normalize has no use; normalize=tokens, "
            "or max_tokens=null"
        )
        found.add(what, "loss.max_tokens", "loss.normalize")


def _bound(loss: LossSettings, option: str) -> float | None:
    """Return the number that an option has; None if it is null or the loss does not have it."""
    value = loss.options.get(option)
    return value if isinstance(value, int | float) else None


def _find_own_loss(loss: LossSettings, found: Findings) -> None:
    """Check a user's loss function. The options of the chosen file in conf/loss are still set
    beside it: ignore those.
    """
    from llamarl.learning.losses import (  # imports torch, so only here
        check_options,
        options_of,
        resolve_loss,
    )

    try:
        fn = resolve_loss(loss.fn)
        taken = loss.options_for(set(options_of(fn)))
        check_options(fn, taken)
    except ValueError as error:
        for line in str(error).splitlines():
            found.add(line, "loss.fn")
        return
    for name, value in loss.options.items():
        published = [options.get(name) for options in published_losses().values()]
        if name not in taken and value is not None and value not in published:
            found.add(f"{loss.fn} does not take it", f"loss.{name}")


def _find_schedules(loss: LossSettings, found: Findings) -> None:
    """Find schedules of options that are no numbers, or that end in an impossible value."""
    for option, schedule in loss.schedules.items():
        key = f"{SCHEDULES}.{option}"
        first = loss.options.get(option)
        hint = LOSS_OPTIONS.get(option, Number)
        if isinstance(first, bool) or not isinstance(first, int | float):
            found.add(
                f"a schedule starts from the number in loss.{option}, and this loss has none; "
                f"choose a loss that has this option (loss=NAME loss.{option}=NUMBER), or leave "
                "the schedule out",
                f"{key}.kind",
                "loss.fn",
            )
        elif not fits(0.5, hint):  # a line goes through numbers that are not whole
            found.add(
                f"loss.{option} must stay a whole number, so it has no schedule; leave the "
                "schedule out",
                f"{key}.kind",
            )
        elif not fits(schedule.final, hint):
            found.add(f"loss.{option} cannot have this value: {need(None, hint)}", f"{key}.final")


@functools.cache
def declarations() -> dict[str, Declaration]:
    """Return the package's losses by name. A loss is the function with the name of its file."""
    found = {}
    for file in sorted(_LOSSES.glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == file.stem:
                options = tuple(argument.arg for argument in node.args.kwonlyargs)
                marks = frozenset(ast.unparse(mark) for mark in node.decorator_list)
                found[node.name] = Declaration(options, marks)
    return found


def declares(loss: str, mark: str) -> bool:
    """Whether a loss, by its name or "module:function", has the mark. False for one that is not
    there, which is found where the loss itself is checked.
    """
    if ":" not in loss:
        return loss in declarations() and mark in declarations()[loss].marks
    from llamarl.learning.losses import resolve_loss  # these import torch, so only here
    from llamarl.learning.losses.common import has_mark

    try:
        return has_mark(resolve_loss(loss), mark)
    except ValueError:
        return False
