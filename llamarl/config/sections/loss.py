"""The section `loss`: a loss with its options, and what cannot go together among these."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from omegaconf import OmegaConf
from pydantic import BeforeValidator

from llamarl.config.files import CONF_DIR, SCHEDULES, sections
from llamarl.words.choices import Estimator, Normalize, RatioLevel
from llamarl.words.fields import (
    AnyText,
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
    hints_of,
    nested,
    settings_dataclass,
)
from llamarl.words.findings import Findings, Problem, did_you_mean, need


@settings_dataclass
class LossOptions:
    """The options of losses. Each means the same in every loss that has it."""

    ratio_cap: Positive | None
    """Cap of the ratio policy/generator (rho of LlamaRL, 2 to 10). In a clipped loss it bounds
    the pull on tokens of negative advantage (TRL: delta); null: no cap.
    """
    ratio_mask_low: NonNegative | None
    """Tokens with a ratio below this get weight 0; null: no bound."""
    ratio_mask_high: Positive | None
    """Tokens with a ratio above this get weight 0; null: no bound."""
    ratio_level: RatioLevel
    """Ratio of a token; sequence: product over the completion; sequence_mean: the |y|-th root
    of that.
    """
    normalize: Normalize
    """tokens: mean over all tokens of the batch; completions: mean of each completion, then
    over completions; groups: mean of each group's tokens, then over groups (Magistral).
    """
    max_tokens: Count | None
    """Constant per completion to divide by (Dr. GRPO): ${max_new_tokens}; null: as normalize
    says.
    """
    clip_low: Share
    """eps: the ratio is clipped to 1 - clip_low .. 1 + clip_high."""
    clip_high: NonNegative
    """See clip_low. DAPO: 0.28; Magistral: 0.26 to 0.28."""
    beta: Positive
    """Coefficient of log(policy/reference) of a completion."""
    log_reward_temperature: Positive
    """T of the target (log ref / gamma + r / beta) / T (Lee et al. 2024)."""
    reference_temperature: Positive
    """gamma of that target."""
    tau: NonNegative
    """Coefficient of log(policy/generator) of a completion (Kimi K2)."""
    reward_weight: NonNegative
    """Weight of the reward's advantages beside the teacher's (distill); 0: the reward is only
    measured.
    """
    length_normalize: Flag
    """Mean over the tokens of a completion in place of their sum."""


LOSS_OPTIONS = hints_of(LossOptions)
_LOSSES = Path(__file__).resolve().parents[2] / "learning" / "losses"


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declaration of a loss, read from its source."""

    options: tuple[str, ...]  # its keyword-only parameters
    marks: frozenset[str]  # its decorators, such as "needs_reference"


@settings_dataclass
class LinearScheduleSettings:
    kind: Literal["linear"]
    """In a line from loss.NAME to final, where it stays (TBA, table 2)."""
    final: NonNegative
    """Value at end_step."""
    end_step: Count
    """Step at which final is reached."""


@settings_dataclass
class CutScheduleSettings:
    kind: Literal["cut"]
    """In a line towards final, and final from cut_step on (TBA, table 3)."""
    final: NonNegative
    """Value at end_step, and from cut_step on."""
    end_step: Count
    """Step at which the line would reach final."""
    cut_step: Natural
    """Step from which on the option is final."""


AnyScheduleSettings = Annotated[LinearScheduleSettings | CutScheduleSettings, ByKind()]


@settings_dataclass
class LossSettings:
    fn: AnyText
    """A loss of the package, or module:function."""
    name: AnyText
    """Name of the loss in the report: the chosen file of conf/loss; with a function of your
    own, that.
    """
    kl_coef: NonNegative
    """Coefficient of the KL to the reference (reference=frozen). docs/algorithms.md says over what
    it is a mean.
    """
    kl_estimator: Estimator
    """k3: GRPO's; k2: x^2/2, with the gradient of the KL; k1: -x, with k2's gradient; x =
    log(reference/policy).
    """
    entropy_coef: NonNegative
    """Coefficient of the entropy bonus, the same mean."""
    schedules: dict[str, AnyScheduleSettings]
    """Options that change from step to step, by their names: name -> kind, final, end_step."""
    options: Annotated[Options, Flat(known=LossOptions)]
    """Every further key of loss.*, for the function alone."""

    @property
    def ignores_rewards(self) -> bool:
        """Whether the loss learns from a teacher alone, so that rewards are only measured."""
        if self.fn != "distill" or "reward_weight" in self.schedules:
            return False
        return not self.options.get("reward_weight")

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


def find_loss(loss: LossSettings, found: Findings, *, scorers: Collection[str]) -> None:
    """Find a loss that does not exist, and options that it does not take or that are impossible.
    scorers: the kinds of what gives the reward.
    """
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
    if loss.ignores_rewards and not {"function", "environment"}.issuperset(scorers):
        found.add(
            "a model would score every completion, and nothing would be learned from that; "
            "reward=function (eval.gold measures held-out completions alone), or "
            "loss.reward_weight=1",
            "reward.kind",
            "loss.reward_weight",
        )


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
    """Return the package's losses by name: its public functions that return LossAndMetrics."""
    found = {}
    for file in sorted(_LOSSES.glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and _is_loss(node):
                options = tuple(argument.arg for argument in node.args.kwonlyargs)
                marks = frozenset(ast.unparse(mark) for mark in node.decorator_list)
                found[node.name] = Declaration(options, marks)
    return dict(sorted(found.items()))


def _is_loss(node: ast.FunctionDef) -> bool:
    returns = node.returns and ast.unparse(node.returns)
    return returns == "LossAndMetrics" and not node.name.startswith("_")


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
