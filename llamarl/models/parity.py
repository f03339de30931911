"""Canaries: the trainer says what the logprobs of fixed prompts are under a version, and whoever
received that version checks them.

    trainer     canary = Canary(sequences, logprobs)   travels at the end of the version's bytes
    generator   after the swap, before the first token is sampled: the same by the path that samples

A model that is computed differently shows in the logprobs. A late version may move them by less
than bfloat16 rounds, so some of the weights themselves (marks) travel with the canary too, and must
be what the generator then holds.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Protocol

import torch
from torch import Tensor

from llamarl.errors import ParityError
from llamarl.models.fsdp import local
from llamarl.models.quantize import kl_from_top
from llamarl.models.sharded_state import Shard
from llamarl.models.sharding import Box, overlap

# When a run starts, so many tokens of so many prompts are checked, scored from the second on.
FIRST_PROMPTS = 4
FIRST_TOKENS = 64
# At every later version so many tokens of one prompt are checked; only the last ones are scored.
LATER_TOKENS = 32
LATER_SCORED = 8
MARKS = 64  # weights of which each version says the values
TOP = 64  # likeliest tokens a place that a quantised generator is compared on

log = logging.getLogger(__name__)


class Prompts(Protocol):
    """Prompts by ticket number."""

    def __getitem__(self, ticket: int): ...


@dataclass(frozen=True, slots=True)
class Sequence:
    """Token ids. The first `given` are the prompt, the others are scored."""

    token_ids: list[int]
    given: int

    @property
    def num_scored(self) -> int:
        """How many tokens are scored."""
        return len(self.token_ids) - self.given


@dataclass(frozen=True, slots=True)
class Mark:
    """One weight of a version, as the trainer holds it."""

    name: str  # of its parameter
    place: list[int]  # in the whole parameter
    value: float


@dataclass(frozen=True, slots=True)
class Canary:
    """The trainer's logprobs of some sequences under one version, and some of its weights."""

    sequences: list[Sequence]
    logprobs: list[float]  # of each scored token, sequence after sequence
    # The likeliest tokens at each of these places, and their logprobs, for a generator that is
    # quantised; else empty.
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    marks: list[Mark] = field(default_factory=list)

    def to_json(self) -> dict:
        """Return the canary as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict) -> Canary:
        """Make a canary of what `to_json` returned."""
        sequences = [Sequence(**sequence) for sequence in values["sequences"]]
        marks = [Mark(**mark) for mark in values["marks"]]
        return cls(**{**values, "sequences": sequences, "marks": marks})


def canary_sequences(prompts: Prompts, version: int, *, first: bool) -> list[Sequence]:
    """Return the sequences that a version is checked with: parts of the run's first prompts, one
    after the other. The last is the version's own, of which rows tell: it is the same after a
    resume.

    first: the version that a run starts or goes on with, which is checked at more places.
    """
    sequences = []
    if first:
        for i in range(FIRST_PROMPTS):
            ids = prompts[i].prompt_ids[:FIRST_TOKENS].tolist()
            if len(ids) > 1:
                sequences.append(Sequence(ids, given=1))
    ids = prompts[version % FIRST_PROMPTS].prompt_ids[:LATER_TOKENS].tolist()
    if len(ids) < 2:
        ids = [0, 0]
    sequences.append(Sequence(ids, given=max(1, len(ids) - LATER_SCORED)))
    return sequences


def marks_of(shards: SequenceOf[Shard], version: int) -> list[Mark]:
    """Return the smallest weights of some rows that this rank holds, drawn anew for each version.

    A small weight has a small step to the next number of its dtype, so a small update shows in it.
    """
    random = Random(version)
    held = [shard for shard in shards if shard.box.numel]
    marks = []
    for shard in random.choices(held, k=MARKS) if held else []:
        row = [random.randrange(count) for count in shard.box.lengths[:-1]]
        weights = local(shard.parameter)[tuple(row)]
        smallest = int(weights.abs().argmin())
        place = [first + i for first, i in zip(shard.box.offsets, [*row, smallest])]
        marks.append(Mark(shard.name, place, float(weights[smallest])))
    return marks


def check_marks(
    marks: list[Mark], held: Mapping[str, tuple[Box, Tensor]], *, version: int, rank: int
) -> None:
    """Raise ParityError unless the weights that are marked are held, rounded to the dtype in which
    they are held.

    held: name -> which box of the parameter the rank holds, and the numbers in it. Marks elsewhere
    say nothing, and neither do weights that are held in one byte: those have other values.
    """
    wrong = []
    for mark in marks:
        if mark.name not in held:
            continue
        box, weights = held[mark.name]
        spot = Box(tuple(mark.place), (1,) * len(mark.place))
        if weights.dtype.itemsize == 1 or not overlap(spot, box).numel:
            continue
        found = float(weights[spot.within(box)])
        wanted = float(torch.tensor(mark.value).to(weights.dtype))
        if found != wanted:
            wrong.append(f"{mark.name} has {found:.7g} at {mark.place}, not {wanted:.7g}")
    if wrong:
        raise ParityError(
            f"generator on rank {rank} does not hold the trainer's weights of version {version}, "
            f"but others, such as an older version's: {len(wrong)} of {len(marks)} that were "
            f"looked at differ; {wrong[0]}"
        )


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
# Nats a token, below which prompts are noise to a model. Equally likely tokens have -ln of the
# vocabulary's size, -10.8 for 49,152; a text of the model's own tokens has -1 to -5.
STRANGE = -9.0
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
    def has_no_start(self) -> bool:
        """Whether nothing was compared that says what the start of the run gives."""
        return self._base is None

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
    """Return the largest difference in nats between the canary's logprobs of its last sequence and
    these [scored] float32, and their root mean square. ParityError as the agreement says, which
    takes in all of them.
    """
    wanted = torch.tensor(canary.logprobs, dtype=torch.float64)
    if wanted.shape != logprobs.shape:
        raise ValueError(f"{logprobs.numel()} logprobs for a canary of {wanted.numel()}")
    differences = logprobs.double() - wanted
    what = f"generator on rank {rank} and the trainer on fixed prompts under version {version}"
    squares = float(differences.square().sum())
    counted = float(agreement.limits.squares(differences))
    mean = float(wanted.mean())
    strange = (
        f"The model gives the tokens of the prompts {mean:.1f} nats each, as if they were noise: "
        "is the tokenizer in model.path another model's?"
    )
    if mean < STRANGE and agreement.has_no_start:
        log.warning("rank %d: %s", rank, strange)
    try:
        agreement.check(squares, differences.numel(), what, counted=counted)
    except ParityError as error:
        if mean < STRANGE:
            error.add_note(strange)
        raise
    own = differences[-canary.sequences[-1].num_scored :]
    return float(own.abs().max()), float(own.square().mean().sqrt())


def check_quantized(
    canary: Canary, logprobs_SV: Tensor, *, version: int, rank: int, most: float
) -> float:
    """Return a lower bound of the mean KL(generator || trainer) in nats over the canary's last
    sequence.

    logprobs_SV: the generator's, at all of its S places. ParityError if their mean is above `most`,
    or not a number.
    """
    top_ids_SK = torch.tensor(canary.top_ids)
    top_logprobs_SK = torch.tensor(canary.top_logprobs)
    kl_S = kl_from_top(top_ids_SK, top_logprobs_SK, logprobs_SV)
    kl = float(kl_S.mean())
    if not kl <= most:
        raise ParityError(
            f"the quantised generator on rank {rank} is {kl:.3g} nats from the trainer's policy "
            f"under version {version}, more than generator.max_quantization_kl={most:g}: quantise "
            "less (generator.quantize_exclude), or its weights are not the trainer's"
        )
    return float(kl_S[-canary.sequences[-1].num_scored :].mean())
