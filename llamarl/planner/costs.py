"""Seconds of the pieces of a run on the machine of a data sheet, for any degrees of parallelism.

    costs = Costs(read_sheet("h100"), read_config(DIR), Numerics())
    costs.timings(plan).decode_s(64, 64 * 1024)

Where the sheet has measured this model, computing takes what was measured. Elsewhere it takes the
larger of what its FLOPs take and what its bytes take at the shares of the device's figures that the
sheet assumes (a roofline), and a fixed time a layer. In both cases a layer that is shared by n GPUs
takes 1/n of that over `tensor_efficiency` at each doubling, and messages come on top, by the
device's figures:

    decode, prefill   two sums over the n GPUs a layer
    microbatch        four such sums a layer, six with activation checkpointing; FSDP2 gathers the
                      weights twice and scatters float32 gradients once, behind the computing: only
                      what is longer counts
    update            a sum of gradients over HSDP's replicas, and the optimizer's pass over memory

Of a mixture of experts a token is multiplied with those that it sees; all are held, sent and
stepped, and a decode step reads those that its rows see together. What is not counted: the routing,
the exchange of tokens between GPUs, and experts of which some get more tokens than others.

Shapes: N parameters, D hidden_size, H query heads, K head dim, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from llamarl.inference.room import numbers_of_token
from llamarl.learning.memory import WIDE
from llamarl.models.config import ModelConfig
from llamarl.models.sharding import is_quantized, parameter_shapes, tensor_parallel_box
from llamarl.planner.plans import ITEMSIZES, Experts, Numerics, Plan, TrainerPlan
from llamarl.planner.sheet import Sheet
from llamarl.planner.timings import Timings

_OF_OPTIMIZER = (
    28  # bytes read and written a number: weight, gradient and moments in; all but it out
)
_SUMS_FORWARD = 2  # over the GPUs of a layer: behind the attention and behind the MLP


@dataclass(frozen=True)
class Costs:
    """Seconds on a sheet's machine, for a model and the numbers that it is computed in."""

    sheet: Sheet
    model: ModelConfig
    numerics: Numerics
    experts: Experts | None = None  # None: every layer has one MLP, which every token sees

    # --- The model in numbers ---

    @cached_property
    def multiplied(self) -> int:
        """The parameters that every token is multiplied with: all but the embedding's rows."""
        total = 0
        for name, shape in parameter_shapes(self.model).items():
            is_looked_up = name in ("model.embed_tokens.weight", "model.embed_positions.weight")
            if not is_looked_up or self.model.tie_word_embeddings and "tokens" in name:
                total += math.prod(shape)
        return total

    @cached_property
    def _attention_flops(self) -> float:
        """FLOPs of a pair of query and key, over all layers, forward."""
        m = self.model
        return 4.0 * m.num_attention_heads * m.head_dim * m.num_hidden_layers

    def generator_bytes(self, tensor: int) -> int:
        """Return the bytes of the generator's weights on the rank that holds most of them."""
        mlps, others = self._parts(tensor)
        return others + round(mlps * (self.experts.held if self.experts else 1.0))

    def _parts(self, tensor: int) -> tuple[int, int]:
        """Return the bytes, on that rank, of the MLPs that a token sees and of all else."""
        if tensor not in self._held:
            self._held[tensor] = self._generator_bytes(tensor)
        return self._held[tensor]

    def _generator_bytes(self, tensor: int) -> tuple[int, int]:
        layers = self.model.num_hidden_layers
        mlps = 0
        others = 0
        for name, shape in parameter_shapes(replace(self.model, num_hidden_layers=1)).items():
            box = tensor_parallel_box(self.model, name, shape, tensor - 1, tensor)
            num_bytes = box.numel * self.numerics.itemsize
            if self.numerics.quantize != "none" and is_quantized(name, shape):
                num_bytes = box.numel + WIDE * box.lengths[0]  # and a scale a row
            num_bytes *= layers if name.startswith("model.layers.") else 1
            if _is_of_mlp(name):
                mlps += num_bytes
            else:
                others += num_bytes
        return mlps, others

    def cached_numbers(self, tensor: int) -> int:
        """Return how many numbers a token's keys and values are on a rank, over all layers."""
        if tensor not in self._cached:
            self._cached[tensor] = numbers_of_token(self.model, tensor)
        return self._cached[tensor]

    @cached_property
    def _held(self) -> dict[int, tuple[int, int]]:
        return {}

    @cached_property
    def _cached(self) -> dict[int, int]:
        return {}

    # --- Messages ---

    def _is_inside(self, gpus: int, stride: int = 1) -> bool:
        """Whether so many GPUs are in one node. stride: each is so many behind the one before."""
        return gpus * stride <= self.sheet.device.gpus_per_node

    def _rate(self, gpus: int, stride: int = 1) -> float:
        """Return bytes a second, each way, of a message that goes round these GPUs. Between nodes
        it uses the ports of all GPUs of a node that take part.
        """
        device = self.sheet.device
        inside = device.link_bytes_per_s * self.sheet.assumed("link_efficiency")
        if self._is_inside(gpus, stride):
            return inside
        ports = max(1, device.gpus_per_node // stride)
        return min(inside, ports * self._port_rate())

    def _port_rate(self) -> float:
        """Return bytes a second, each way, between two GPUs of different nodes."""
        device = self.sheet.device
        return device.network_bytes_per_s * self.sheet.assumed("network_efficiency")

    def sum_s(self, num_bytes: float, gpus: int, stride: int = 1) -> float:
        """Return seconds of a sum of tensors of so many bytes over these GPUs, as a ring."""
        if gpus == 1:
            return 0.0
        inside = self._is_inside(gpus, stride)
        latency_s = self.sheet.assumed("link_latency_s" if inside else "network_latency_s")
        moved = 2 * (gpus - 1) / gpus * num_bytes
        return moved / self._rate(gpus, stride) + latency_s

    def _memory_rate(self) -> float:
        device = self.sheet.device
        return device.memory_bytes_per_s * self.sheet.assumed("memory_efficiency")

    def copy_s(self, num_bytes: float) -> float:
        """Return seconds of a copy within a device: it reads and writes."""
        measured = self.sheet.measured
        if measured is not None:
            return measured.copy.at(num_bytes)
        return 2 * num_bytes / self._memory_rate()

    # --- Computing ---

    def _shared(self, seconds: float, tensor: int) -> float:
        """Return what is left of a computation's seconds when so many GPUs share each layer."""
        kept = self.sheet.assumed("tensor_efficiency") ** math.log2(tensor)
        return seconds / (tensor * kept)

    def _messages_s(self, tokens: float, tensor: int, sums: int, itemsize: int) -> float:
        """Return seconds of `sums` sums a layer of the residual stream of so many tokens."""
        of_sum = self.sum_s(tokens * self.model.hidden_size * itemsize, tensor)
        return sums * self.model.num_hidden_layers * of_sum

    def _measures(self, dtype: str) -> bool:
        measured = self.sheet.measured
        if measured is None or self.experts is not None:
            return False
        return measured.is_of(self.model, dtype)

    def decode_s(self, rows: float, context: float, tensor: int = 1) -> float:
        """Return seconds of a decode step: a token for each of `rows` rows that have `context`
        tokens behind them together.
        """
        n = self.numerics
        measured = self.sheet.measured
        messages = self._messages_s(rows, tensor, _SUMS_FORWARD, n.itemsize)
        if measured is not None and self._measures(n.dtype) and n.quantize == "none":
            return self._shared(measured.decode.at(rows, context), tensor) + messages
        device = self.sheet.device
        flops = 2.0 * self.multiplied * rows + self._attention_flops * context
        speed = device.flops_of(n.product_dtype) * self.sheet.assumed("decode_efficiency")
        computing = self._shared(flops / speed, tensor)
        cache = context * self.cached_numbers(tensor) * n.itemsize
        reading = (self._weights_read(rows, tensor) + cache) / self._memory_rate()
        fixed = self.model.num_hidden_layers * self.sheet.assumed("decode_layer_s")
        return fixed + max(computing, reading) + messages

    def _weights_read(self, rows: float, tensor: int) -> float:
        """Return the bytes of the weights that a decode step of so many rows reads: not the
        embedding's rows, and of the experts those that some row sees.
        """
        mlps, others = self._parts(tensor)
        held = others + mlps * (self.experts.read(rows) if self.experts else 1.0)
        if self.model.tie_word_embeddings:
            return held
        embedding = self.model.vocab_size * self.model.hidden_size * self.numerics.itemsize
        return held - embedding // tensor

    def prefill_s(self, tokens: float, tensor: int = 1) -> float:
        """Return seconds of reading prompts of so many tokens together."""
        n = self.numerics
        measured = self.sheet.measured
        messages = self._messages_s(tokens, tensor, _SUMS_FORWARD, n.itemsize)
        if measured is not None and self._measures(n.dtype):
            return self._shared(measured.prefill.at(tokens), tensor) + messages
        speed = self.sheet.device.flops_of(n.product_dtype)
        speed *= self.sheet.assumed("prefill_efficiency")
        computing = self._shared(2.0 * self.multiplied * tokens / speed, tensor)
        fixed = self.model.num_hidden_layers * self.sheet.assumed("decode_layer_s")
        return fixed + computing + messages

    def microbatch_s(
        self, tokens: float, pairs: float, trainer: TrainerPlan, completions: float = 0.0
    ) -> float:
        """Return seconds of a forward and backward of packed tokens with so many pairs of a query
        and a key, in so many completions.
        """
        n = self.numerics
        tensor = trainer.tensor
        passes = 4 if n.checkpointing else 3  # a backward is two forwards
        itemsize = ITEMSIZES[n.compute_dtype]
        sums = 3 * _SUMS_FORWARD if n.checkpointing else 2 * _SUMS_FORWARD
        messages = self._messages_s(tokens, tensor, sums, itemsize)
        measured = self.sheet.measured
        if measured is not None and self._measures(n.compute_dtype):
            alone = measured.microbatch.at(tokens, pairs, completions) * passes / 3
            computing = self._shared(alone, tensor)
        else:
            flops = passes * (2.0 * self.multiplied * tokens + self._attention_flops * pairs)
            speed = self.sheet.device.flops_of(n.compute_dtype)
            speed *= self.sheet.assumed("train_efficiency")
            fixed = self.model.num_hidden_layers * self.sheet.assumed("train_layer_s") * passes / 3
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

    @cached_property
    def num_numbers(self) -> int:
        """How many numbers all parameters have, those of all experts too."""
        total = 0
        held = self.experts.held if self.experts else 1.0
        for name, shape in parameter_shapes(self.model).items():
            count = math.prod(shape)
            total += round(count * held) if _is_of_mlp(name) else count
        return total

    def update_s(self, completions: float, tokens: float, trainer: TrainerPlan) -> float:
        """Return seconds of an optimizer update on what one data-parallel rank has: so many
        completions of so many packed tokens, in as many microbatches as they fill.
        """
        if tokens <= 0:
            return 0.0
        size = min(tokens, trainer.microbatch_tokens)
        number = tokens / size
        seen = tokens / max(1.0, completions)
        each = completions / number
        microbatches = number * self.microbatch_s(size, size * seen / 2, trainer, each)
        held = self.num_numbers / (trainer.shards * trainer.tensor)
        between = self.sum_s(held * WIDE, trainer.replicate, trainer.shards * trainer.tensor)
        measured = self.sheet.measured
        if measured is not None and self._measures(self.numerics.compute_dtype):
            own_s = measured.update_s / (trainer.shards * trainer.tensor)
            together_s = measured.together_s if trainer.data_ranks > 1 else 0.0
            return microbatches + between + own_s + together_s
        return microbatches + between + held * _OF_OPTIMIZER / self._memory_rate()

    def score_s(self, completions: float) -> float:
        """Return seconds of the scores of completions that are scored together."""
        measured = self.sheet.measured
        if measured is not None and measured.score is not None:
            return measured.score.at(completions)
        return completions * self.sheet.assumed("score_s")

    # --- Weights ---

    def publish_s(self, trainer: TrainerPlan) -> float:
        """Return the trainer's stall: its shard is copied to a slot in the generator's dtype, and
        the canary is scored.
        """
        copy_s = self.copy_s(self.num_numbers * self.numerics.itemsize / trainer.gpus)
        return copy_s + self._besides("publish_s")

    def transfer_s(self, plan: Plan) -> float:
        """Return seconds from a publication to its last byte: of the busiest end of a link, a
        trainer rank that sends or a generator rank that receives.
        """
        tensor = plan.generator.tensor
        received = self.generator_bytes(tensor)
        sent = received * tensor / plan.trainer.gpus
        inside = self._is_inside(plan.gpus)
        rate = self._rate(plan.gpus) if inside else self._port_rate()
        latency_s = self.sheet.assumed("link_latency_s" if inside else "network_latency_s")
        return max(sent, received) / rate + latency_s

    def swap_s(self, tensor: int) -> float:
        """Return the generator's stall: what has come becomes what is read, and the canary is
        scored.
        """
        return self.copy_s(self.generator_bytes(tensor)) + self._besides("swap_s")

    def sampled_s(self, completions: float) -> float:
        """Return seconds of completions on their generator, besides decode steps."""
        return completions * self._besides("sampled_s")

    def hosted_s(self, completions: float) -> float:
        """Return seconds of completions on the rank that hosts the reward, besides its workers."""
        return completions * self._besides("hosted_s")

    def _besides(self, name: str) -> float:
        measured = self.sheet.measured
        return 0.0 if measured is None else getattr(measured, name)

    def offload_s(self, num_bytes: float) -> float:
        """Return seconds of moving bytes to host memory, or back."""
        return num_bytes / self.sheet.device.host_bytes_per_s

    def timings(self, plan: Plan) -> Timings:
        """Return the seconds of a plan's pieces, each on one replica of its executor. Publication
        and transfer are of this plan's ranks; imbalance is not in them, for it is of a step.
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


def _is_of_mlp(name: str) -> bool:
    """Whether a parameter is of a layer's MLP."""
    return ".mlp." in name
