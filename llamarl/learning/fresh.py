"""Compares trainer and generator on fresh tokens: those sampled by the weights with which a step
begins, after tokens from these weights alone. Both compute the same model there, so their logprobs
differ by rounding alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llamarl.comm.together import TrainerRanks
from llamarl.learning.step_metrics import Metric, Metrics, Reduction
from llamarl.models.parity import FULL_FRESH, Agreement, ParityLimits
from llamarl.types import PackedBatch


class FreshTokens:
    """Adds up differences over the microbatches of a step's first update, then checks them.

    limits: how far logprobs may be apart; None: the generator samples from another distribution on
    purpose. recomputes_kv: the generator computes its K/V cache anew under new weights; else a
    completion that began under older ones goes on with theirs, and its logprobs are not the
    trainer's.
    """

    def __init__(self, limits: ParityLimits | None, *, recomputes_kv: bool):
        self._agreement = None if limits is None else Agreement(limits, FULL_FRESH)
        self._recomputes_kv = recomputes_kv

    def begin(self, version: int) -> None:
        """Begin the step that changes the weights of this version."""
        self._version = version
        self._farthest: Tensor | float = -1.0  # the largest difference, nats
        self._squares: Tensor | float = 0.0
        self._counted: Tensor | float = 0.0  # the squares as the agreement counts them
        self._num_fresh: Tensor | int = 0

    def add(self, batch: PackedBatch, differences: Tensor) -> None:
        """Add the differences [R] of trainer and generator logprobs of a microbatch."""
        is_fresh = self._is_fresh(batch)
        distances = differences.abs().masked_fill(~is_fresh, -1.0)
        self._farthest = distances.max().clamp(min=self._farthest)  # keeps NaN
        fresh_alone = differences.masked_fill(~is_fresh, 0.0)
        self._squares = self._squares + fresh_alone.square().sum()
        if self._agreement is not None:
            self._counted = self._counted + self._agreement.limits.squares(fresh_alone)
        self._num_fresh = self._num_fresh + is_fresh.sum()

    def _is_fresh(self, batch: PackedBatch) -> Tensor:
        """Return [R] bool: the labels whose tokens are fresh."""
        if self._recomputes_kv:
            return batch.policy_versions == self._version
        # Versions never fall within a completion: one that began under this one is of it alone.
        begun_N = torch.full_like(batch.groups, self._version).scatter_reduce(
            0, batch.completions, batch.policy_versions, "amin"
        )
        return begun_N[batch.completions] == self._version

    def checked(self, step: str, ranks: TrainerRanks) -> Metrics:
        """Collective over ranks: return how far the logprobs are apart; nothing if no token is
        fresh. ParityError, which names the step, if they are too far apart.
        """
        worst = ranks.max(farthest=float(self._farthest))["farthest"]
        total = ranks.sum(
            squares=float(self._squares),
            counted=float(self._counted),
            fresh=int(self._num_fresh),
        )
        if not total["fresh"]:
            return {}
        if self._agreement is not None:
            what = (
                f"trainer, {step}: trainer and generator on tokens sampled from version "
                f"{self._version} alone"
            )
            self._agreement.check(
                total["squares"], int(total["fresh"]), what, counted=total["counted"]
            )
        typical = math.sqrt(total["squares"] / total["fresh"])
        return {
            "parity/logprob_diff_max": Metric(worst, Reduction.MAX),
            "parity/logprob_diff_rms": Metric(typical, Reduction.MAX),
        }
