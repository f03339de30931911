"""Canaries: the trainer says what the logprobs of fixed prompts are under a version, and whoever
received that version checks them.

    trainer     canary = Canary(sequences, logprobs)   travels at the end of the version's bytes
    generator   after the swap, before the first token is sampled: the same by the path that samples

A wrong, stale, half-written or differently computed model shows here, at the version where it
begins.
"""

from __future__ import annotations

import math
from collections import deque
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
LATER_SCORED = 8
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


def canary_sequences(prompts: Prompts, version: int, *, first: bool) -> list[Sequence]:
    """Return the sequences that a version is checked with: parts of the run's first prompts, one
    after the other.

    first: the version that a run starts with, which is checked at more places than later ones.
    """
    if first:
        sequences = []
        for i in range(FIRST_PROMPTS):
            ids = prompts[i].prompt_ids[:FIRST_TOKENS].tolist()
            sequences.append(Sequence(ids, given=1))
    else:
        ids = prompts[version % FIRST_PROMPTS].prompt_ids[:LATER_TOKENS].tolist()
        given = max(1, len(ids) - LATER_SCORED)
        sequences = [Sequence(ids, given)]
    sequences = [sequence for sequence in sequences if len(sequence.token_ids) > 1]
    return sequences or [Sequence([0, 0], given=1)]


@dataclass(frozen=True, slots=True)
class ParityLimits:
    """How far the logprobs of two paths may differ, as root mean squares in nats.

    first: where a run starts. Behind that, growth times what the start gave, and at least floor.
    outlier: the most that one token counts, in nats. A fault moves most tokens; between right paths
    one of thousands may differ by a nat.
    """

    first: float
    floor: float
    growth: float
    outlier: float = math.inf

    @classmethod
    def of(cls, *dtypes: str, fixed: float | None = None, temperature: float = 1.0) -> ParityLimits:
        """Return the limits where these dtypes meet, the coarsest of which decides. fixed: the
        same limit from first to last in their place. temperature: below 1 it widens what lies
        between logits.
        """
        if fixed is not None:
            return cls(first=fixed, floor=fixed, growth=0.0)
        coarsest = max((LIMITS[dtype] for dtype in dtypes), key=lambda limits: limits.first)
        widening = 1 / min(1.0, temperature)
        return cls(
            first=coarsest.first * widening,
            floor=coarsest.floor * widening,
            growth=coarsest.growth,
            outlier=OUTLIER * coarsest.first * widening,
        )

    def squares(self, differences: Tensor) -> Tensor:
        """Return the sum of squared differences, in which no token counts for more than an outlier.
        What is not finite stays so.
        """
        squared = differences.square()
        bounded = squared.clamp(max=self.outlier**2)
        return torch.where(squared.isfinite(), bounded, squared).sum()


# Measured between right paths: 1e-6 to 1e-5 in float32; in bfloat16 0.05 to 0.1 for SmolLM2, and
# from 0.01 to 0.05 within one run of the tiny model. A wrong RoPE base makes 0.3 or more.
LIMITS = {
    "float32": ParityLimits(first=1e-3, floor=1e-4, growth=2.0),
    "float16": ParityLimits(first=0.03, floor=5e-3, growth=2.0),
    "bfloat16": ParityLimits(first=0.2, floor=0.1, growth=2.0),
}
OUTLIER = 2.5  # times `first`: faults, which move most tokens, are still seen
# So many tokens are compared at a time: a root mean square of fewer may be one token's. Those that
# are lacking count as equal, so that one token of a few may be an outlier.
FULL = 64
FULL_FRESH = 128  # of tokens that were sampled, of which most steps have many
LEAST_BASE = 16  # tokens that say what a start gives


class Agreement:
    """Compares one version after the other with what the start of the run gave. full: how many
    tokens are compared at a time.

    ParityError says what differs; `what` names the two sides and the tokens.
    """

    def __init__(self, limits: ParityLimits, full: int = FULL):
        self.limits = limits
        self._full = full
        self._base: float | None = None  # nats, what the start gave
        # Squares, what they count, and tokens: `full` of them if there were as many.
        self._newest: deque[tuple[float, float, int]] = deque()

    @property
    def allowed(self) -> float:
        """The largest root mean square that passes now."""
        if self._base is None:
            return self.limits.first
        return max(self.limits.floor, self.limits.growth * self._base)

    def check(
        self, squares: float, count: int, what: str, *, counted: float | None = None
    ) -> float:
        """Take in squared differences of `count` tokens, and return their root mean square with
        those of the versions before that are needed for `full` tokens.

        counted: the sum without what outliers have too much (ParityLimits.squares), from which
        versions behind the start are judged; not given: there are none.
        ParityError if it is above what is allowed, or not a number.
        """
        newest = [*self._newest, (squares, squares if counted is None else counted, count)]
        while sum(n for _, _, n in newest[1:]) >= self._full:
            del newest[0]
        tokens = sum(n for _, _, n in newest)
        without_outliers = sum(one for _, one, _ in newest)
        # A start has many tokens, and another model may show in few of them.
        total = sum(one for one, _, _ in newest) if self._base is None else without_outliers
        found = math.sqrt(total / max(tokens, self._full)) if total >= 0 else math.nan
        if not found <= self.allowed:
            start = "" if self._base is None else f" (the start of the run gave {self._base:.2g})"
            raise ParityError(
                f"{what}: their logprobs differ by {found:.4g} as a root mean square, more than "
                f"{self.allowed:.2g}{start}. They do not hold the same weights, or do not compute "
                "the same model. Set trainer.parity_tolerance only if the dtype explains it"
            )
        self._newest = deque(newest)
        if self._base is None and tokens >= LEAST_BASE:
            self._base = math.sqrt(without_outliers / tokens)
        return found


def check_canary(
    canary: Canary, logprobs: Tensor, agreement: Agreement, *, version: int, rank: int
) -> tuple[float, float]:
    """Return the largest difference in nats between the canary's logprobs and these [scored]
    float32, and the root mean square that the agreement found. ParityError as it says.
    """
    wanted = torch.tensor(canary.logprobs, dtype=torch.float64)
    if wanted.shape != logprobs.shape:
        raise ValueError(f"{logprobs.numel()} logprobs for a canary of {wanted.numel()}")
    differences = logprobs.double() - wanted
    what = f"generator on rank {rank} and the trainer on fixed prompts under version {version}"
    squares = float(differences.square().sum())
    counted = float(agreement.limits.squares(differences))
    found = agreement.check(squares, differences.numel(), what, counted=counted)
    return float(differences.abs().max()), found


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
