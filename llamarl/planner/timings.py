"""Timings: the seconds that the pieces of a run take, as functions of their sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of the pieces of a run, each on one replica of its executor."""

    # (live rows, context tokens of all these rows) -> seconds of a decode step, a token a row
    decode_s: Callable[[int, int], float]
    prefill_s: Callable[[int], float]  # prompt tokens that are read together -> seconds
    # (completions, packed tokens) of a data-parallel rank -> seconds of a step; a group's prompt is
    # packed once
    update_s: Callable[[int, int], float]
    score_s: Callable[[int], float]  # completions scored together -> seconds
    publish_s: float  # the trainer's stall at a publication of weights
    transfer_s: float  # from a publication to its last byte at a generator, beside the computing
    swap_s: float  # the generator's stall when it swaps weights in
    sampled_s: float = 0.0  # of a completion that ends, on its generator
    hosted_s: float = 0.0  # of a completion on the rank of the reward, besides its workers
    report_s: float = 0.0  # on the trainer's first rank, from a publication to its next turn
    # mean of a message between a generator and the ledger; 0: it arrives at once. If it takes any
    # time, such times and transfer_s are drawn, and have exponential distributions.
    message_s: float = 0.0
