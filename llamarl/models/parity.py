"""Canaries: what the trainer says fixed prompts' logprobs are under a version, for whoever received
that version to check.

    trainer     canary = Canary(sequences, logprobs)   travels at the end of the version's bytes
    generator   after the swap, before the first token is sampled: the same by the path that samples

A wrong, stale, half-written or differently computed model shows here, at the version where it
begins.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor

from llamarl.errors import ParityError
from llamarl.models.quantize import kl_from_top

FIRST_PROMPTS, FIRST_TOKENS = 4, 64  # checked whole when a run starts
LATER_TOKENS, LATER_SCORED = 32, 4  # of one prompt at every later version
TOP = 64  # likeliest tokens a place that a quantised generator is compared on


class Prompts(Protocol):
    def __getitem__(self, ticket: int): ...


@dataclass(frozen=True, slots=True)
class Sequence:
    """Token ids, of which the first `given` are the prompt and the others are scored."""

    token_ids: list[int]
    given: int


@dataclass(frozen=True, slots=True)
class Canary:
    """logprobs: of each scored token, sequence after sequence. top_ids, top_logprobs: the likeliest
    tokens at each of these places and their logprobs, for a generator that is quantised; else
    empty.
    """

    sequences: list[Sequence]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict) -> Canary:
        return cls(**{**values, "sequences": [Sequence(**s) for s in values["sequences"]]})


def canary_sequences(prompts: Prompts, *, first: bool) -> list[Sequence]:
    """Of the run's first prompts: several from their first token on when a run starts, the end of
    one at later versions.
    """
    if not first:
        ids = prompts[0].prompt_ids[:LATER_TOKENS].tolist()
        return (
            [Sequence(ids, max(1, len(ids) - LATER_SCORED))]
            if len(ids) > 1
            else [Sequence([0, 0], 1)]
        )
    ids = [prompts[i].prompt_ids[:FIRST_TOKENS].tolist() for i in range(FIRST_PROMPTS)]
    return [Sequence(tokens, 1) for tokens in ids if len(tokens) > 1] or [Sequence([0, 0], 1)]


def check_canary(
    canary: Canary, logprobs: Tensor, *, version: int, rank: int, tolerance: float
) -> float:
    """The largest difference in nats. ParityError if it is above the tolerance, or not a number.
    logprobs: [scored] float32.
    """
    differences = [abs(a - b) for a, b in zip(canary.logprobs, logprobs.tolist(), strict=True)]
    # NaN is neither above nor below a number, so max() alone would lose it.
    worst = max(differences, key=lambda d: math.inf if math.isnan(d) else d, default=0.0)
    if not worst <= tolerance:
        raise ParityError(
            f"generator on rank {rank} and the trainer differ by {worst:.4g} in the logprobs of fixed prompts under version "
            f"{version}, more than {tolerance:g}: they do not hold the same weights, or do not compute the same model. "
            "Raise trainer.parity_tolerance only if the dtype explains it"
        )
    return worst


def check_quantized(
    canary: Canary, logprobs_SV: Tensor, *, version: int, rank: int, most: float
) -> float:
    """Mean KL(generator || trainer) in nats over the canary's places, from below. ParityError if it
    is above `most`, or not a number.
    """
    top = torch.tensor(canary.top_ids), torch.tensor(canary.top_logprobs)
    kl = float(kl_from_top(*top, logprobs_SV).mean())
    if not kl <= most:
        raise ParityError(
            f"the quantised generator on rank {rank} is {kl:.3g} nats from the trainer's policy under version {version}, more than "
            f"generator.max_quantization_kl={most:g}: quantise less (generator.quantize_exclude), or its weights are not the trainer's"
        )
    return kl
