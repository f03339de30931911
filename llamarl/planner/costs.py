"""Seconds of each operation of a run on the machine of a hardware profile, for any parallelism.

    costs = Costs(read_profile("h100"), read_config(DIR), Numerics())
    costs.timings(plan).decode_s(64, 64 * 1024)

If the profile has measured this model, the measured times are taken. Otherwise an operation takes
the longer of its FLOPs and its bytes at the assumed shares of the device's figures (a roofline),
and a fixed time a layer. A layer that n GPUs share takes 1/n of that, over `tensor_efficiency` at
each doubling of n. Messages are added in both cases, by the device's figures:

    decode, prefill   two sums over the n GPUs of each layer
    microbatch        four sums a layer, six with activation checkpointing. FSDP2 gathers the
                      weights twice and scatters float32 gradients once, overlapped with computing:
                      the longer of the two counts
    update            a sum of gradients over HSDP's replicas, and the optimizer's pass over memory
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

from llamarl.memory import ITEMSIZES, WIDE, numbers_of_token
from llamarl.models.config import ModelConfig
from llamarl.models.sharding import (
    is_quantized,
    num_parameters,
    parameter_shapes,
    tensor_parallel_box,
)
from llamarl.planner.profile import MeasuredTimes, Profile

QUANTIZED = {"fp8": "float8", "int8": "int8"}  # generator.quantize -> the dtype of its products
_QUANTILES = 64  # steps of a sum over lengths
# Bytes read and written a number: weight, gradient and moments are read, all but the gradient
# written.
_OF_OPTIMIZER = 28
_SUMS_FORWARD = 2  # over the GPUs of a layer: after the attention and after the MLP


# --- What is planned ---


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step.

    groups, group_size: groups_per_step, and completions of each. prompt_tokens, completion_tokens:
    the means. longest_prompt, max_new_tokens: the most, for which memory is kept. sigma: deviation
    of the logarithm of a completion's length; 0: all have the mean's. max_lag: steps.
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
        """The tokens of context of a decoding row, averaged over time. Long rows are there longer,
        so it is the prompt and E[L^2] / (2 E[L]).
        """
        variation = math.expm1(self.sigma**2)
        seen = self.completion_tokens * (1 + variation) / 2
        return self.prompt_tokens + min(seen, self.max_new_tokens)

    @property
    def share_in_work(self) -> float:
        """The share of a started group's completions that are being decoded, averaged over the time
        until the longest of them ends.
        """
        longest = self.length_at(self.group_size / (self.group_size + 1))
        return min(1.0, self.completion_tokens / longest)

    def length_at(self, share: float) -> float:
        """Return the length that a share of completions, between 0 and 1, does not exceed. Lengths
        are log-normal and cut off at max_new_tokens.
        """
        if self.sigma == 0:
            return self.completion_tokens
        median = self.completion_tokens * math.exp(-(self.sigma**2) / 2)
        length = median * math.exp(self.sigma * NormalDist().inv_cdf(share))
        return min(length, float(self.max_new_tokens))

    def drain(self, rows: float, number: int) -> list[tuple[float, float]]:
        """Return how `rows` rows that start together run out, as stretches of (rows, steps).
        number: completions of the whole step, whose longest is the end.
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

    def batch(self, rows: float, waiting: float) -> list[tuple[float, float]]:
        """Return the (rows, steps) in which a replica samples `waiting` completions that start
        together on `rows` slots: full first, then running out.
        """
        full = self.completion_tokens * (waiting - rows) / rows
        return [(rows, full), *self.drain(rows, self.completions)]


@dataclass(frozen=True, slots=True)
class Numerics:
    """The number formats of a job, and what it holds in them.

    dtype: model.dtype, of the generator. compute_dtype: the trainer's. quantize: as
    generator.quantize. optimizer, checkpointing: as trainer.optimizer and
    trainer.activation_checkpointing. weight_buffers: copies of its weights that a generator holds,
    the live one and the one that the next version arrives in. on_cpu: count memory as on a CPU.
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
class TrainerPlan:
    """How the trainer's GPUs share the model. shards: of FSDP2; replicate: sets of shards; tensor:
    GPUs that share each layer. microbatch_tokens: packed tokens of a forward and backward.
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
class Split:
    """A split of the GPUs. overcommit: groups started beyond one batch and not yet trained on.

    sharing: "apart": each side has GPUs of its own; "shared": both are on all GPUs and in their
    memory, and take turns; "offload": as shared, but the side that waits is in host memory.
    """

    trainer: TrainerPlan
    generator: GeneratorPlan
    overcommit: int = 0
    sharing: str = "apart"
    max_lag: int = 1

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
        """Return the mean lag of trained completions, in steps: 1 + overcommit/batch, at most
        max_lag; 0 if synchronous.
        """
        if self.is_synchronous:
            return 0.0
        return min(float(self.max_lag), 1 + self.overcommit / groups)


# --- Seconds ---


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of the operations of a run, each on one replica of its executor."""

    # (live rows, context tokens of all these rows) -> seconds of a decode step, a token a row
    decode_s: Callable[[int, float], float]
    prefill_s: Callable[[int], float]  # prompt tokens that are read together -> seconds
    # (completions, packed tokens) of a data-parallel rank -> seconds of a step; a group's prompt is
    # packed once
    update_s: Callable[[int, int], float]
    score_s: Callable[[int], float]  # completions scored together -> seconds
    publish_s: float  # the trainer's stall at a publication of weights
    transfer_s: float  # from a publication to its last byte at a generator
    swap_s: float  # the generator's stall when it swaps weights in


@dataclass(frozen=True)
class Costs:
    """Seconds on a profile's machine, for a model and its number formats."""

    profile: Profile
    model: ModelConfig
    numerics: Numerics

    # --- The model in numbers ---

    @cached_property
    def num_numbers(self) -> int:
        """The numbers of all parameters."""
        return num_parameters(self.model)

    @cached_property
    def multiplied(self) -> int:
        """The parameters that every token is multiplied with: all but the embedding's rows."""
        total = 0
        for name, shape in parameter_shapes(self.model).items():
            if name != "model.embed_tokens.weight" or self.model.tie_word_embeddings:
                total += math.prod(shape)
        return total

    @cached_property
    def _attention_flops(self) -> float:
        """FLOPs of a pair of query and key, over all layers, forward."""
        m = self.model
        return 4.0 * m.num_attention_heads * m.head_dim * m.num_hidden_layers

    @cached_property
    def _by_tensor(self) -> dict[int, tuple[int, int]]:
        """Caches (weight bytes, cached numbers a token) by the GPUs that share a layer."""
        return {}

    def generator_bytes(self, tensor: int) -> int:
        """Return the bytes of the generator's weights on the rank that holds most of them."""
        return self._of_tensor(tensor)[0]

    def cached_numbers(self, tensor: int) -> int:
        """Return how many numbers a token's keys and values are on a rank, over all layers."""
        return self._of_tensor(tensor)[1]

    def _of_tensor(self, tensor: int) -> tuple[int, int]:
        if tensor not in self._by_tensor:
            cached = numbers_of_token(self.model, tensor)
            self._by_tensor[tensor] = (self._generator_bytes(tensor), cached)
        return self._by_tensor[tensor]

    def _generator_bytes(self, tensor: int) -> int:
        layers = self.model.num_hidden_layers
        total = 0
        for name, shape in parameter_shapes(replace(self.model, num_hidden_layers=1)).items():
            box = tensor_parallel_box(self.model, name, shape, tensor - 1, tensor)
            num_bytes = box.numel * self.numerics.itemsize
            if self.numerics.quantize != "none" and is_quantized(name, shape):
                num_bytes = box.numel + WIDE * box.lengths[0]  # and a scale a row
            total += num_bytes * (layers if name.startswith("model.layers.") else 1)
        return total

    def _measured(self, dtype: str) -> MeasuredTimes | None:
        """Return the measured times, if they are of this model in this dtype."""
        measured = self.profile.measured
        return measured if measured is not None and measured.is_of(self.model, dtype) else None

    # --- Messages ---

    def _is_inside(self, gpus: int, stride: int = 1) -> bool:
        """Whether so many GPUs are in one node. stride: each is so many after the one before."""
        return gpus * stride <= self.profile.device.gpus_per_node

    def _rate(self, gpus: int, stride: int = 1) -> float:
        """Return bytes a second, each way, of a message that goes round these GPUs. Between nodes
        it uses the ports of all GPUs of a node that take part.
        """
        device = self.profile.device
        inside = device.link_bytes_per_s * self.profile.assumed("link_efficiency")
        if self._is_inside(gpus, stride):
            return inside
        ports = max(1, device.gpus_per_node // stride)
        return min(inside, ports * self._port_rate())

    def _port_rate(self) -> float:
        """Return bytes a second, each way, between two GPUs of different nodes."""
        device = self.profile.device
        return device.network_bytes_per_s * self.profile.assumed("network_efficiency")

    def _latency_s(self, is_inside: bool) -> float:
        return self.profile.assumed("link_latency_s" if is_inside else "network_latency_s")

    def sum_s(self, num_bytes: float, gpus: int, stride: int = 1) -> float:
        """Return seconds of a sum of tensors of so many bytes over these GPUs, as a ring."""
        if gpus == 1:
            return 0.0
        moved = 2 * (gpus - 1) / gpus * num_bytes
        return moved / self._rate(gpus, stride) + self._latency_s(self._is_inside(gpus, stride))

    def _memory_rate(self) -> float:
        device = self.profile.device
        return device.memory_bytes_per_s * self.profile.assumed("memory_efficiency")

    def copy_s(self, num_bytes: float) -> float:
        """Return seconds of a copy within a device: it reads and writes."""
        measured = self.profile.measured
        if measured is not None:
            return measured.copy.at(num_bytes)
        return 2 * num_bytes / self._memory_rate()

    # --- Computing ---

    def _shared(self, seconds: float, tensor: int) -> float:
        """Return a computation's seconds if so many GPUs share each layer."""
        kept = self.profile.assumed("tensor_efficiency") ** math.log2(tensor)
        return seconds / (tensor * kept)

    def _messages_s(self, tokens: float, tensor: int, sums: int, itemsize: int) -> float:
        """Return seconds of `sums` sums a layer of the residual stream of so many tokens."""
        of_sum = self.sum_s(tokens * self.model.hidden_size * itemsize, tensor)
        return sums * self.model.num_hidden_layers * of_sum

    def decode_s(self, rows: float, context: float, tensor: int = 1) -> float:
        """Return seconds of a decode step: a token for each of `rows` rows, which have `context`
        tokens of context together. Measured times are those at the context of the runs.
        """
        n = self.numerics
        messages = self._messages_s(rows, tensor, _SUMS_FORWARD, n.itemsize)
        measured = self._measured(n.dtype)
        if measured is not None and n.quantize == "none":
            return self._shared(measured.decode.at(rows), tensor) + messages
        flops = 2.0 * self.multiplied * rows + self._attention_flops * context
        speed = self.profile.device.flops_of(n.product_dtype)
        speed *= self.profile.assumed("decode_efficiency")
        computing = self._shared(flops / speed, tensor)
        cache = context * self.cached_numbers(tensor) * n.itemsize
        reading = (self._weights_read(tensor) + cache) / self._memory_rate()
        fixed = self.model.num_hidden_layers * self.profile.assumed("decode_layer_s")
        return fixed + max(computing, reading) + messages

    def _weights_read(self, tensor: int) -> float:
        """Return the bytes of the weights that a decode step reads: not the embedding's rows."""
        held = self.generator_bytes(tensor)
        if self.model.tie_word_embeddings:
            return held
        embedding = self.model.vocab_size * self.model.hidden_size * self.numerics.itemsize
        return held - embedding // tensor

    def prefill_s(self, tokens: float, tensor: int = 1) -> float:
        """Return seconds of reading prompts of so many tokens together."""
        n = self.numerics
        messages = self._messages_s(tokens, tensor, _SUMS_FORWARD, n.itemsize)
        measured = self._measured(n.dtype)
        if measured is not None:
            return self._shared(measured.prefill.at(tokens), tensor) + messages
        speed = self.profile.device.flops_of(n.product_dtype)
        speed *= self.profile.assumed("prefill_efficiency")
        computing = self._shared(2.0 * self.multiplied * tokens / speed, tensor)
        fixed = self.model.num_hidden_layers * self.profile.assumed("decode_layer_s")
        return fixed + computing + messages

    def microbatch_s(self, tokens: float, pairs: float, trainer: TrainerPlan) -> float:
        """Return seconds of a forward and backward of packed tokens with so many pairs of a query
        and a key. Measured times are those at the lengths of the runs.
        """
        n = self.numerics
        tensor = trainer.tensor
        passes = 4 if n.checkpointing else 3  # a backward is two forwards
        sums = 3 * _SUMS_FORWARD if n.checkpointing else 2 * _SUMS_FORWARD
        messages = self._messages_s(tokens, tensor, sums, ITEMSIZES[n.compute_dtype])
        measured = self._measured(n.compute_dtype)
        if measured is not None:
            computing = self._shared(measured.train.at(tokens) * passes / 3, tensor)
        else:
            flops = passes * (2.0 * self.multiplied * tokens + self._attention_flops * pairs)
            speed = self.profile.device.flops_of(n.compute_dtype)
            speed *= self.profile.assumed("train_efficiency")
            layer_s = self.profile.assumed("train_layer_s") * passes / 3
            fixed = self.model.num_hidden_layers * layer_s
            computing = self._shared(flops / speed, tensor) + fixed
        return max(computing + messages, self._gathers_s(trainer))

    def _gathers_s(self, trainer: TrainerPlan) -> float:
        """Return seconds of FSDP2's messages in a microbatch."""
        if trainer.shards == 1:
            return 0.0
        own = self.num_numbers / trainer.tensor
        moved = own * (2 * ITEMSIZES[self.numerics.compute_dtype] + WIDE)
        share = (trainer.shards - 1) / trainer.shards
        return moved * share / self._rate(trainer.shards, trainer.tensor)

    def update_s(self, completions: float, tokens: float, trainer: TrainerPlan) -> float:
        """Return seconds of an optimizer update on the share of one data-parallel rank: so many
        completions of so many packed tokens, in as many microbatches as they fill.
        """
        if tokens <= 0:
            return 0.0
        size = min(tokens, trainer.microbatch_tokens)
        length = tokens / max(1.0, completions)
        microbatches = tokens / size * self.microbatch_s(size, size * length / 2, trainer)
        held = self.num_numbers / (trainer.shards * trainer.tensor)
        between = self.sum_s(held * WIDE, trainer.replicate, trainer.shards * trainer.tensor)
        if self._measured(self.numerics.compute_dtype) is not None:
            return microbatches + between  # the optimizer's time is in the measured microbatches
        return microbatches + between + held * _OF_OPTIMIZER / self._memory_rate()

    def score_s(self, completions: float) -> float:
        """Return seconds of the scores of completions that are scored together."""
        measured = self.profile.measured
        if measured is not None and measured.score is not None:
            return measured.score.at(completions)
        return completions * self.profile.assumed("score_s")

    # --- Weights ---

    def publish_s(self, trainer: TrainerPlan) -> float:
        """Return the trainer's stall: its shard is copied to a slot in the generator's dtype."""
        return self.copy_s(self.num_numbers * self.numerics.itemsize / trainer.gpus)

    def transfer_s(self, plan: Split) -> float:
        """Return seconds from a publication to its last byte, by the busiest end of a link: a
        trainer rank that sends or a generator rank that receives.
        """
        tensor = plan.generator.tensor
        received = self.generator_bytes(tensor)
        sent = received * tensor / plan.trainer.gpus
        is_inside = self._is_inside(plan.gpus)
        rate = self._rate(plan.gpus) if is_inside else self._port_rate()
        return max(sent, received) / rate + self._latency_s(is_inside)

    def swap_s(self, tensor: int) -> float:
        """Return the generator's stall: the weights that arrived are copied to the live ones."""
        return self.copy_s(self.generator_bytes(tensor))

    def offload_s(self, num_bytes: float) -> float:
        """Return seconds of moving bytes to host memory, or back."""
        return num_bytes / self.profile.device.host_bytes_per_s

    def timings(self, plan: Split) -> Timings:
        """Return the seconds of a plan's operations, each on one replica of its executor, without
        `imbalance`, which is of a whole step.
        """
        tensor = plan.generator.tensor
        return Timings(
            decode_s=lambda rows, context: self.decode_s(rows, context, tensor),
            prefill_s=lambda tokens: self.prefill_s(tokens, tensor),
            update_s=lambda number, tokens: self.update_s(number, tokens, plan.trainer),
            score_s=self.score_s,
            publish_s=self.publish_s(plan.trainer),
            transfer_s=self.transfer_s(plan),
            swap_s=self.swap_s(tensor),
        )
