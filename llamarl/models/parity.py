"""Canaries: the trainer says what the logprobs of fixed prompts are under a version, and whoever
received that version checks them.

    trainer     canary = Canary(sequences, logprobs)   travels at the end of the version's bytes
    generator   after the swap, before the first token is sampled: the same by the path that samples

A wrong, stale, half-written or differently computed model shows here, at the version where it
begins.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor

from llamarl.errors import ParityError
from llamarl.models.quantize import kl_from_top

# When a run starts, so many tokens of so many prompts are checked, scored from the second on.
FIRST_PROMPTS = 4
FIRST_TOKENS = 64
# At every later version so many tokens of one prompt are checked; only the last ones are scored.
LATER_TOKENS = 32
LATER_SCORED = 4
TOP = 64  # likeliest tokens a place that a quantised generator is compared on


class Prompts(Protocol):
    """Prompts by ticket number."""

    def __getitem__(self, ticket: int): ...


@dataclass(frozen=True, slots=True)
class Sequence:
    """Token ids. The first `given` are the prompt, the others are scored."""

    token_ids: list[int]
    given: int


@dataclass(frozen=True, slots=True)
class Canary:
    """The trainer's logprobs of some sequences under one version."""

    sequences: list[Sequence]
    logprobs: list[float]  # of each scored token, sequence after sequence
    # The likeliest tokens at each of these places, and their logprobs, for a generator that is
    # quantised; else empty.
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]

    def to_json(self) -> dict:
        """Return the canary as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict) -> Canary:
        """Make a canary of what `to_json` returned."""
        sequences = [Sequence(**sequence) for sequence in values["sequences"]]
        return cls(**{**values, "sequences": sequences})


def canary_sequences(prompts: Prompts, *, first: bool) -> list[Sequence]:
    """Return the sequences that a version is checked with: parts of the run's first prompts.

    first: the version that a run starts with, which is checked at more places than later ones.
    """
    if first:
        sequences = []
        for i in range(FIRST_PROMPTS):
            ids = prompts[i].prompt_ids[:FIRST_TOKENS].tolist()
            sequences.append(Sequence(ids, given=1))
    else:
        ids = prompts[0].prompt_ids[:LATER_TOKENS].tolist()
        given = max(1, len(ids) - LATER_SCORED)
        sequences = [Sequence(ids, given)]
    sequences = [sequence for sequence in sequences if len(sequence.token_ids) > 1]
    return sequences or [Sequence([0, 0], given=1)]


def check_canary(
    canary: Canary, logprobs: Tensor, *, version: int, rank: int, tolerance: float
) -> float:
    """Return the largest difference in nats between the canary's logprobs and these [scored]
    float32.

    ParityError if it is above the tolerance, or not a number.
    """
    differences = []
    for wanted, got in zip(canary.logprobs, logprobs.tolist(), strict=True):
        differences.append(abs(wanted - got))
    # Python's own would pass over NaN.
    worst = torch.tensor(differences, dtype=torch.float64).max().item()
    if not worst <= tolerance:
        raise ParityError(
            f"generator on rank {rank} and the trainer differ by {worst:.4g} in the logprobs of "
            f"fixed prompts under version {version}, more than {tolerance:g}: they do not hold the "
            "same weights, or do not compute the same model. Raise trainer.parity_tolerance only "
            "if the dtype explains it"
        )
    return worst


def check_quantized(
    canary: Canary, logprobs_SV: Tensor, *, version: int, rank: int, most: float
) -> float:
    """Return a lower bound of the mean KL(generator || trainer) in nats over the canary's S places.

    logprobs_SV: the generator's. ParityError if it is above `most`, or not a number.
    """
    top_ids_SK = torch.tensor(canary.top_ids)
    top_logprobs_SK = torch.tensor(canary.top_logprobs)
    kl = float(kl_from_top(top_ids_SK, top_logprobs_SK, logprobs_SV).mean())
    if not kl <= most:
        raise ParityError(
            f"the quantised generator on rank {rank} is {kl:.3g} nats from the trainer's policy "
            f"under version {version}, more than generator.max_quantization_kl={most:g}: quantise "
            "less (generator.quantize_exclude), or its weights are not the trainer's"
        )
    return kl
