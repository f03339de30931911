"""The section `loss`: a loss with its options, and what cannot go together among these."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from omegaconf import OmegaConf

from llamarl.config.files import CONF_DIR, SCHEDULES, sections
from llamarl.config.findings import Findings, Problem
from llamarl.config.hints import convert, did_you_mean, need
from llamarl.config.loss_options import LOSS_OPTIONS, declarations
from llamarl.config.marks import settings_dataclass
from llamarl.config.ranges import Count, Natural, NonNegative
from llamarl.words.choices import Estimator


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


AnyScheduleSettings = LinearScheduleSettings | CutScheduleSettings


@settings_dataclass
class LossSettings:
    fn: str  # a loss of the package, or module:function
    name: str  # the chosen file in conf/loss; fn if a user's function has taken its place
    kl_coef: NonNegative
    kl_estimator: Estimator
    entropy_coef: NonNegative
    schedules: dict[str, AnyScheduleSettings]  # by the options that change from step to step
    options: dict[str, object]  # every further key of loss.*, for the function alone

    def options_for(self, taken: set[str]) -> dict[str, object]:
        """Return the options for a function that takes these. A user's function need not take the
        options of the package's losses.
        """
        return {
            key: value
            for key, value in self.options.items()
            if key in taken or key not in LOSS_OPTIONS
        }


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
            if not _fits(value, hint):
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
        hint = LOSS_OPTIONS.get(option, float)
        if isinstance(first, bool) or not isinstance(first, int | float):
            found.add(
                f"a schedule starts from the number in loss.{option}, and this loss has none; "
                f"choose a loss that has this option (loss=NAME loss.{option}=NUMBER), or leave "
                "the schedule out",
                f"{key}.kind",
                "loss.fn",
            )
        elif not _fits(0.5, hint):  # a line goes through numbers that are not whole
            found.add(
                f"loss.{option} must stay a whole number, so it has no schedule; leave the "
                "schedule out",
                f"{key}.kind",
            )
        elif not _fits(schedule.final, hint):
            found.add(f"loss.{option} cannot have this value: {need(None, hint)}", f"{key}.final")


def _fits(value: object, hint: object) -> bool:
    """Whether an option may have a value."""
    try:
        convert(value, hint)
    except ValueError:
        return False
    return True
