"""A step's row of metrics: what its groups add up to, what its updates add, and the numbers that
they become.

A metric is made in parts, one a microbatch, which are joined over the microbatches and ranks of an
update and over the updates of the step. A step of several updates is one row: its means are over
the tokens and completions of all of them; losses and gradient norms are means over the updates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain

import torch
from torch import Tensor

from llamarl.comm.together import TrainerRanks
from llamarl.learning.segments import owners, sum_by
from llamarl.types import Group


class Reduction(Enum):
    """The ways in which the parts of a metric become its value: the largest, or their sum over a
    number of things.
    """

    MAX = "the largest part"
    TOKEN_MEAN = "the sum over the trained tokens that were computed"
    COMPLETION_MEAN = "the sum over the trained completions"
    UPDATE_MEAN = "the sum over the updates"


@dataclass(frozen=True, slots=True)
class Metric:
    """A part of a metric, or several parts joined; the value of a mean is the sum so far."""

    value: Tensor | float  # a tensor is 0-dim, without gradient
    reduction: Reduction

    def joined(self, other: Metric) -> Metric:
        """Return this part and another one of the same metric as one."""
        if self.reduction is not Reduction.MAX:
            return Metric(self.value + other.value, self.reduction)
        if isinstance(self.value, Tensor):
            theirs = torch.as_tensor(other.value, device=self.value.device)
            return Metric(torch.maximum(self.value, theirs), self.reduction)
        return Metric(max(self.value, other.value), self.reduction)


Metrics = dict[str, Metric]
Row = dict[str, float | None]  # by name; None: there was nothing to measure


def join(metrics: Metrics, more: Metrics) -> None:
    """Add more parts to `metrics`."""
    for name, part in more.items():
        metrics[name] = metrics[name].joined(part) if name in metrics else part


def metrics_of_loss(given: Mapping[str, Tensor]) -> Metrics:
    """Return the metrics of a loss, or of sums over a microbatch's tokens. Their names say how they
    are reduced (llamarl.learning.losses.common).

    "/max" ends the name of a maximum and "/completions", which is dropped, that of a mean over
    completions; all others are means over tokens. "/sum" becomes "/mean".
    """
    metrics = {}
    for name, value in given.items():
        reduction = Reduction.TOKEN_MEAN
        if name.endswith("/max"):
            reduction = Reduction.MAX
        elif name.endswith("/completions"):
            reduction = Reduction.COMPLETION_MEAN
            name = name.removesuffix("/completions")
        if name.endswith("/sum"):
            name = f"{name.removesuffix('/sum')}/mean"
        if name == "ratio/capped":
            name = "ratio/capped_fraction"
        metrics[name] = Metric(value, reduction)
    return metrics


def over_ranks(metrics: Metrics, ranks: TrainerRanks) -> Metrics:
    """Collective: return the metrics of all ranks joined, as floats.

    Ranks may have different names: a loss may say nothing of a microbatch without labels.
    """
    known = {}
    for entry in ranks.union([f"{m.reduction.name} {name}" for name, m in metrics.items()]):
        reduction, _, name = entry.partition(" ")
        nothing = -math.inf if reduction == "MAX" else 0.0
        known[name] = metrics.get(name, Metric(nothing, Reduction[reduction]))
    maxima: dict[str, Tensor | float] = {}
    sums: dict[str, Tensor | float] = {}
    for name, metric in known.items():
        own = maxima if metric.reduction is Reduction.MAX else sums
        own[name] = metric.value
    joined = ranks.sum(**sums) | ranks.max(**maxima)
    return {name: Metric(value, known[name].reduction) for name, value in joined.items()}


# --- How old the tokens are ---

# Steps, the first and the last of each bucket.
LAG_BUCKETS = {
    "lag/tokens/0": (0, 0),
    "lag/tokens/1": (1, 1),
    "lag/tokens/2-3": (2, 3),
    "lag/tokens/4-7": (4, 7),
    "lag/tokens/8-15": (8, 15),
    "lag/tokens/16-31": (16, 31),
    "lag/tokens/32-63": (32, 63),
    "lag/tokens/64+": (64, math.inf),
}


def lag_histogram(lags: Tensor) -> dict[str, Tensor]:
    """Return the number of tokens in each bucket of lags, from the lags [R] int64 of tokens in
    steps.

    Divided by the number of tokens they are shares, which add up to 1.
    """
    counts = {}
    for name, (first, last) in LAG_BUCKETS.items():
        counts[name] = ((lags >= first) & (lags <= last)).sum().float()
    return counts


# --- The row ---


# The beginnings of columns that hold the sum over a step's completions. All other columns that
# travel with completions hold the mean over those that have them.
SUMMED = ("dialogues/", "tokens/", "victim/")


def columns_row(groups: list[Group], ranks: TrainerRanks) -> Row:
    """Collective: return the columns that travel with the completions of these groups."""
    told: dict[str, list[float]] = defaultdict(list)
    for columns in chain.from_iterable(g.columns for g in groups):
        for name, number in columns.items():
            told[name].append(number)
    names = ranks.union(sorted(told))
    sums = ranks.sum(**{name: math.fsum(told[name]) for name in names})
    counts = ranks.sum(**{name: len(told[name]) for name in names})
    row: Row = {}
    for name in names:
        row[name] = sums[name]
        if not name.startswith(SUMMED):
            row[name] = sums[name] / counts[name]
    return row


def batch_row(groups: list[Group], version: int, ranks: TrainerRanks) -> Row:
    """Collective: return the metrics of the groups that a step took, also of those that have no
    part in its updates. version: the policy version that is trained.
    """
    outcomes = list(chain.from_iterable(g.outcomes for g in groups))
    reasons = list(chain.from_iterable(g.finish_reasons for g in groups))
    none = torch.zeros(0, dtype=torch.int64)
    lengths = torch.cat([none, *(g.lengths for g in groups)])
    is_sampled = torch.cat([none, *(g.loss_mask for g in groups)])
    # Versions never fall within a completion, so its first token is its oldest.
    starts = (lengths.cumsum(0) - lengths)[lengths > 0]
    versions = torch.cat([none, *(g.policy_versions for g in groups)])
    lags = (version - versions[starts]).tolist()
    sampled_lengths = sum_by(is_sampled, owners(lengths), len(lengths))
    aborted = torch.tensor([reason == "aborted" for reason in reasons], dtype=torch.bool)
    trained = [g.rewards[g.trained] for g in groups]
    rewards = torch.cat([torch.zeros(0), *trained]).double()
    sums = ranks.sum(
        completions=len(outcomes),
        rewarded=len(rewards),
        rewards=rewards.sum(),
        squared_rewards=rewards.square().sum(),
        errors=outcomes.count("error"),
        truncated=reasons.count("length"),
        aborted=reasons.count("aborted"),
        aborted_tokens=sampled_lengths[aborted].sum(),
        tokens=is_sampled.sum(),
        context=(~is_sampled.bool()).sum(),
        begun=len(lags),
        lags=sum(lags),
    )
    completions = max(1.0, sums["completions"])
    mean = deviation = None  # if no completion has a reward
    if rewarded := sums["rewarded"]:
        mean = sums["rewards"] / rewarded
        variance = sums["squared_rewards"] / rewarded - mean * mean
        deviation = math.sqrt(max(0.0, variance))
    # Only dialogues have any.
    context = {"tokens/context": sums["context"]} if sums["context"] else {}
    return {
        **columns_row(groups, ranks),
        **context,
        "reward/mean": mean,
        "reward/std": deviation,
        "reward/error_rate": sums["errors"] / completions,
        "lag/mean": sums["lags"] / max(1.0, sums["begun"]),
        "lag/max": ranks.max(lag=max(lags, default=0))["lag"],
        "tokens/generated": sums["tokens"],
        "tokens/deadline_truncated": sums["aborted_tokens"],
        "completion/length_mean": sums["tokens"] / completions,
        "completion/truncated_fraction": sums["truncated"] / completions,
        "completion/deadline_truncated_fraction": sums["aborted"] / completions,
    }


@dataclass(slots=True)
class Tally:
    """The sums of an update over its microbatches, on this rank."""

    # Of all ranks: trained completions, also those left out because their advantage is 0.
    completions: float
    labels: int = 0
    tokens: int = 0  # input tokens
    places: int = 0  # of attention, with its padding
    loss: Tensor | float = 0.0
    # A loss may mask a logprob that is not finite, or not look at it; the batch is broken all the
    # same.
    log_ratio: Tensor | float = 0.0
    metrics: Metrics = field(default_factory=dict)
    checked: Metrics = field(default_factory=dict)  # of all ranks: losses, norms, parity
    # Of each microbatch, for a StepWatch: the places of its labels and the trainer's logprobs.
    logprobs: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def measured(row: Row, column: str) -> float:
    """Return a value that every step has."""
    value = row[column]
    assert value is not None, f"no step goes without {column}"
    return value


def updates_row(updates: list[Tally], ranks: TrainerRanks) -> Row:
    """Collective: return the numbers that the metrics of a step's updates become, and defaults for
    those that no microbatch told of.
    """
    metrics: Metrics = {}
    for update in updates:
        join(metrics, update.checked | over_ranks(update.metrics, ranks))
    sizes = ranks.sum(
        labels=sum(u.labels for u in updates),
        tokens=sum(u.tokens for u in updates),
        places=sum(u.places for u in updates),
    )
    completions = sum(u.completions for u in updates)
    number_of = {
        Reduction.MAX: 1,
        Reduction.TOKEN_MEAN: max(1.0, sizes["labels"]),
        Reduction.COMPLETION_MEAN: max(1.0, completions),
        Reduction.UPDATE_MEAN: len(updates),
    }
    untold: Row = {
        "entropy": 0.0,
        "kl/ref": None,  # no reference
        "parity/logprob_diff_max": None,  # no fresh token
        "parity/logprob_diff_rms": None,
        "ratio/mean": 1.0,
        "ratio/max": 1.0,
        "ratio/capped_fraction": 0.0,
    }
    told = {name: float(m.value) / number_of[m.reduction] for name, m in metrics.items()}
    tokens = sizes["tokens"]
    places = sizes["places"]
    padding = 1 - tokens / places if places else 0.0
    return {**untold, **told, "packing/padding_fraction": padding}
