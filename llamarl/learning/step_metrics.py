"""A step's row of metrics: sums over this rank's groups, what the updates add, and the means that
they become.

Names: "/max" ends maxima; "/completions" ends sums over completions, whose mean is over completions
under the name without it; all other sums are over labels and their mean is over those that were
computed ("/sum" becomes "/mean"). A step of several updates is one row: its means are over the
labels and completions of all of them; losses and gradient norms are means over the updates.
"""

from __future__ import annotations

import math

import torch

from llamarl.types import Group

PER_COMPLETION = "/completions"
OVER_UPDATES = ("loss/value", "value/loss", "value/grad_norm")  # of an update as a whole


def batch_sums(groups: list[Group], version: int) -> dict[str, float]:
    """Sums over this rank's groups, from which the batch's means are made."""
    rewards = torch.cat([g.rewards for g in groups]) if groups else torch.empty(0)
    lengths = torch.cat([g.lengths for g in groups]).double() if groups else torch.empty(0)
    outcomes = [o for g in groups for o in g.outcomes]
    reasons = [r for g in groups for r in g.finish_reasons]
    valid = rewards[~rewards.isnan()].double()
    aborted = [
        n for g in groups for n, r in zip(g.lengths.tolist(), g.finish_reasons) if r == "aborted"
    ]
    oldest = [v for g in groups for v in _oldest_per_completion(g)]
    return {
        "_completions": float(len(outcomes)),
        "_valid": float(valid.numel()),
        "_reward": float(valid.sum()),
        "_reward_squared": float(valid.square().sum()),
        "_errors": float(outcomes.count("error")),
        "_truncated": float(reasons.count("length")),
        "_aborted": float(len(aborted)),
        "_aborted_tokens": float(sum(aborted)),
        "_length": float(lengths.sum()),
        "_begun": float(len(oldest)),
        "_lag": float(sum(version - v for v in oldest)),
    }


def _oldest_per_completion(group: Group) -> list[int]:
    """Of each completion that has tokens. Versions never fall within one, so its first token is its
    oldest.
    """
    starts = group.lengths.cumsum(0) - group.lengths
    return group.policy_versions[starts[group.lengths > 0]].tolist()


def metrics_of(
    totals: dict[str, float], maxima: dict[str, float], norms: list[float]
) -> dict[str, float | None]:
    """The row's names from sums and maxima over all ranks and updates; norms: the gradient's, of
    each update.
    """
    n, valid, rows = (
        max(1.0, totals["_completions"]),
        max(1.0, totals["_valid"]),
        max(1.0, totals.get("_rows", 0.0)),
    )
    trained, updates = max(1.0, totals["_trained"]), len(norms)
    mean = totals["_reward"] / valid
    places = totals.get("_places", 0.0)  # that attention computed, of all updates
    fresh = maxima.get("parity/max", -1.0)
    out = {
        "loss/value": totals.get("loss/value", 0.0) / updates,
        "grad_norm": sum(norms) / updates,
        "reward/mean": mean,
        "reward/std": math.sqrt(max(0.0, totals["_reward_squared"] / valid - mean * mean)),
        "reward/error_rate": totals["_errors"] / n,
        "entropy": totals.get("entropy", 0.0) / rows,
        "kl/ref": totals["kl/ref"] / rows if "kl/ref" in totals else None,  # no reference
        "ratio/mean": totals.get("ratio/sum", rows) / rows,
        "ratio/max": maxima.get("ratio/max", 1.0),
        "ratio/capped_fraction": totals.get("ratio/capped", 0.0) / rows,
        "lag/mean": totals["_lag"] / max(1.0, totals["_begun"]),
        "lag/max": maxima["lag/max"],
        "tokens/trained": totals["tokens/trained"],
        "tokens/generated": totals["_length"],
        "tokens/deadline_truncated": totals["_aborted_tokens"],
        "completion/length_mean": totals["_length"] / n,
        "completion/truncated_fraction": totals["_truncated"] / n,
        "completion/deadline_truncated_fraction": totals["_aborted"] / n,
        "packing/padding_fraction": 1 - totals["_tokens"] / places if places else 0.0,
        "packing/unused_budget_fraction": totals["_unused"] / max(1.0, totals["_budget"]),
        "parity/logprob_diff_max": fresh if fresh >= 0 else None,  # no fresh token in the batch
    }
    known = {
        "loss/value",
        "entropy",
        "kl/ref",
        "ratio/sum",
        "ratio/capped",
        "tokens/trained",
        "tokens",
    }
    extra = {
        k: _mean(k, v, rows, trained, updates)
        for k, v in totals.items()
        if k not in known and not k.startswith("_")
    }
    extra |= {k: v for k, v in maxima.items() if k not in {"parity/max", "ratio/max", "lag/max"}}
    return {**{_mean_name(k): v for k, v in extra.items()}, **out}


def _mean_name(name: str) -> str:
    name = name.removesuffix(PER_COMPLETION)
    return f"{name[:-3]}mean" if name.endswith("/sum") else name


def _mean(name: str, total: float, rows: float, completions: float, updates: int) -> float:
    return total / (
        updates if name in OVER_UPDATES else completions if name.endswith(PER_COMPLETION) else rows
    )
