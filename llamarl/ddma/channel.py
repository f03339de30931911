"""The channel of the weights, as a recipe declares it."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamarl.comm.channel import Channel
from llamarl.models.sharding import HEAD

REFERENCE_WEIGHTS = "reference_policy"  # the channel of the weights that the reference is reset to


# the leader's word that a version was sent there; in order with its word of checkpoints
RESET = "reset"


@dataclass(frozen=True)
class Weights(Channel):
    """Policy weights, shard to shard (llamarl.ddma)."""

    dtype: str = field(default="float32", kw_only=True)  # that travels: the destination's
    quantize: str = field(
        default="none", kw_only=True
    )  # none, or what the projections travel as: fp8, int8
    keep: tuple[str, ...] = field(
        default=(HEAD,), kw_only=True
    )  # fragments of names of weights that are not quantised
    transport: str = field(default="auto", kw_only=True)
