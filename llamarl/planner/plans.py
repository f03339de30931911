"""What is planned: the work of a step, in which numbers it is computed, and a split of the GPUs.

plan.trainer.gpus + plan.generator.gpus <= the GPUs that there are
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}
QUANTIZED = {"fp8": "float8", "int8": "int8"}  # generator.quantize -> the dtype of its products
_QUANTILES = 64  # steps of a sum over lengths


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step.

    groups, group_size: groups_per_step, and completions of each. prompt_tokens, completion_tokens:
    the means. longest_prompt, max_new_tokens: the most of each, which memory is kept for.
    sigma: of the logarithm of a completion's length, 0: all are of the mean's. max_lag: steps.
    """

    groups: int
    group_size: int
    prompt_tokens: float
    completion_tokens: float
    longest_prompt: int
    max_new_tokens: int
    sigma: float = 0.0
    max_lag: int = 1

    def __post_init__(self):
        if min(self.groups, self.group_size, self.longest_prompt, self.max_new_tokens) < 1:
            raise ValueError("groups, completions and tokens of a step must be at least 1")
        if self.completion_tokens > self.max_new_tokens:
            raise ValueError(
                f"completion_tokens={self.completion_tokens:g} is the mean, and cannot be above "
                f"max_new_tokens={self.max_new_tokens}"
            )
        if self.prompt_tokens > self.longest_prompt:
            raise ValueError(
                f"prompt_tokens={self.prompt_tokens:g} is the mean, and cannot be above "
                f"task.max_prompt_tokens={self.longest_prompt}"
            )
        if min(self.prompt_tokens, self.completion_tokens) <= 0:
            raise ValueError("prompt_tokens and completion_tokens are means above 0")

    @property
    def completions(self) -> int:
        """The completions of a step."""
        return self.groups * self.group_size

    @property
    def longest(self) -> int:
        """The most tokens of a sequence."""
        return self.longest_prompt + self.max_new_tokens

    @property
    def packed_of_group(self) -> float:
        """The tokens of a group, its prompt once."""
        return self.prompt_tokens + self.group_size * self.completion_tokens

    @property
    def context(self) -> float:
        """The tokens that a decoding row has behind it, as a mean over time: long rows are there
        longer, so it is the prompt and E[L^2] / (2 E[L]).
        """
        variation = math.expm1(self.sigma**2)
        seen = self.completion_tokens * (1 + variation) / 2
        return self.prompt_tokens + min(seen, self.max_new_tokens)

    @property
    def share_in_work(self) -> float:
        """The completions of a started group that are being decoded, as a share and a mean over the
        time until the longest of them ends.
        """
        longest = self.length_at(self.group_size / (self.group_size + 1))
        return min(1.0, self.completion_tokens / longest)

    def length_at(self, share: float) -> float:
        """Return the length that a share of completions, 0 < share < 1, is no longer than: of a
        log-normal distribution with this mean, cut off at max_new_tokens.
        """
        if self.sigma == 0:
            return self.completion_tokens
        median = self.completion_tokens * math.exp(-(self.sigma**2) / 2)
        length = median * math.exp(self.sigma * NormalDist().inv_cdf(share))
        return min(length, float(self.max_new_tokens))

    def drain(self, rows: float, number: int) -> list[tuple[float, float]]:
        """Return (rows, steps) of how `rows` rows that start together run out, one list entry for
        each stretch. number: completions of the whole step: the longest of these ends it.
        """
        stretches = []
        before = 0.0
        longest = self.length_at(number / (number + 1))
        for i in range(_QUANTILES):
            share = (i + 1) / (_QUANTILES + 1)
            length = min(longest, self.length_at(share))
            alive = max(1.0, rows * (1 - i / _QUANTILES))
            stretches.append((alive, length - before))
            before = length
        stretches.append((max(1.0, rows / _QUANTILES), longest - before))
        return [(alive, steps) for alive, steps in stretches if steps > 0]


@dataclass(frozen=True, slots=True)
class Numerics:
    """In which numbers a job computes, and what it holds of them.

    dtype: model.dtype, of the generator. compute_dtype: the trainer's. quantize: as
    generator.quantize. optimizer, checkpointing: as trainer.optimizer and
    trainer.activation_checkpointing. weight_buffers: copies of its weights that a generator holds:
    the live one and the one that the next version comes into. on_cpu: memory is counted as on a
    CPU.
    """

    dtype: str = "bfloat16"
    compute_dtype: str = "bfloat16"
    quantize: str = "none"
    optimizer: str = "adamw"
    checkpointing: bool = False
    weight_buffers: int = 2
    on_cpu: bool = False

    @property
    def itemsize(self) -> int:
        """The bytes of a number of the generator."""
        return ITEMSIZES[self.dtype]

    @property
    def product_dtype(self) -> str:
        """The dtype of the generator's products."""
        return QUANTIZED.get(self.quantize, self.dtype)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of each layer's MLP: `used` of `number` see each token, and the
    model's intermediate_size is that of the used ones together.
    """

    number: int
    used: int

    def __post_init__(self):
        if not 1 <= self.used <= self.number:
            raise ValueError(f"used={self.used}, number={self.number}: need 1 <= used <= number")

    @property
    def held(self) -> float:
        """The experts that there are over those that a token sees."""
        return self.number / self.used

    def read(self, rows: float) -> float:
        """Return the experts that so many tokens see together over those that one sees, where each
        token's are drawn evenly.
        """
        unseen = (1 - self.used / self.number) ** rows
        return self.held * (1 - unseen)


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """How the trainer's GPUs share the model. shards: of FSDP2; replicate: sets of these; tensor:
    GPUs that share each layer. microbatch_tokens: packed tokens a forward and backward.
    """

    shards: int
    replicate: int
    tensor: int
    microbatch_tokens: int

    @property
    def data_ranks(self) -> int:
        """The number of ranks that train on groups of their own."""
        return self.shards * self.replicate

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.data_ranks * self.tensor


@dataclass(frozen=True, slots=True)
class GeneratorPlan:
    """How the generator's GPUs share the work. slots: completions decoded at once on a replica."""

    tensor: int
    replicas: int
    slots: int

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.tensor * self.replicas


@dataclass(frozen=True, slots=True)
class Plan:
    """A split. overcommit: groups started beyond one batch and not yet trained on. How the two
    sides share GPUs is told by `sharing`:

        apart    each has its own
        shared   both are on all GPUs and in their memory, and take turns
        offload  the same, but the one that waits does so in host memory

    in_flight: as generator.in_flight_updates. False: a generator takes weights in once all that it
    has started has ended.
    """

    trainer: TrainerPlan
    generator: GeneratorPlan
    overcommit: int = 0
    sharing: str = "apart"
    max_lag: int = 1
    in_flight: bool = True

    @property
    def is_synchronous(self) -> bool:
        """Whether the sides take turns."""
        return self.max_lag == 0

    @property
    def gpus(self) -> int:
        """The number of GPUs in use."""
        if self.sharing == "apart":
            return self.trainer.gpus + self.generator.gpus
        return max(self.trainer.gpus, self.generator.gpus)

    def mean_lag(self, groups: int) -> float:
        """Return the mean lag of trained completions, in steps: 1 + overcommit/batch, at most the
        bound; 0 of a synchronous job.
        """
        if self.is_synchronous:
            return 0.0
        return min(float(self.max_lag), 1 + self.overcommit / groups)
