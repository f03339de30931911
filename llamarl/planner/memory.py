"""Bytes of a plan on each of its GPUs, counted from the model's shapes as a dry run counts them
(llamarl.learning.memory, llamarl.inference.room).

    trainer     its shard of weights and moments; two slots of what it sends; the peak of an update:
                gradients, activations of the longest microbatch, what FSDP2 gathers, logits
    generator   weights, as many times as it holds them; keys and values of all slots at their
                longest; a step's logits
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from llamarl.inference.room import whole_blocks
from llamarl.learning.memory import (
    MOMENTS,
    WIDE,
    Training,
    held_numbers,
    longest_microbatch,
    update_bytes,
)
from llamarl.planner.costs import Costs
from llamarl.planner.plans import ITEMSIZES, GeneratorPlan, TrainerPlan, Work

SEND_SLOTS = 2  # a version leaves from one while the next is copied to the other
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Bytes:
    """What one side takes of a GPU. held: all the time; working: at the peak of a step besides."""

    held: int
    working: int

    @property
    def total(self) -> int:
        """Both."""
        return self.held + self.working


@dataclass(frozen=True)
class Memory:
    """Prices of a job's plans."""

    costs: Costs
    work: Work

    @cached_property
    def _trainers(self) -> dict[tuple[int, int, int, int], Bytes]:
        return {}

    def trainer(self, plan: TrainerPlan) -> Bytes:
        """Return the bytes of a trainer's GPU."""
        key = (plan.shards, plan.tensor, plan.microbatch_tokens, plan.data_ranks)
        if key not in self._trainers:
            self._trainers[key] = self._trainer(plan)
        return self._trainers[key]

    def _trainer(self, plan: TrainerPlan) -> Bytes:
        if self.costs.experts is not None:
            raise ValueError("a trainer's memory is not counted for a mixture of experts")
        n = self.costs.numerics
        model = self.costs.model
        work = self.work
        groups = max(1, work.groups // plan.data_ranks)
        size = longest_microbatch(
            prompt_tokens=work.longest_prompt,
            completion_tokens=work.max_new_tokens,
            group_size=work.group_size,
            budget_tokens=plan.microbatch_tokens,
            num_groups=groups,
        )
        training = Training(
            itemsize=ITEMSIZES[n.compute_dtype],
            checkpointing=n.checkpointing,
            several=groups * work.group_size > size.completions,
            tensor_parallel=plan.tensor,
            shards=plan.shards,
            moment_bytes=MOMENTS[n.optimizer],
            on_cpu=n.on_cpu,
        )
        found = update_bytes(model, size, training)
        sent = held_numbers(model, tensor_parallel=plan.tensor, shards=plan.shards) * n.itemsize
        return Bytes(held=found.held + SEND_SLOTS * sent, working=found.working)

    def generator(self, plan: GeneratorPlan) -> Bytes:
        """Return the bytes of a generator's GPU."""
        n = self.costs.numerics
        weights = self.costs.generator_bytes(plan.tensor)
        buffers = n.weight_buffers + (1 if n.on_cpu else 0)  # a CPU lays them out once more
        cache = plan.slots * self.bytes_of_slot(plan.tensor)
        logits = plan.slots * self.costs.model.vocab_size * WIDE
        return Bytes(held=buffers * weights + cache, working=logits)

    def bytes_of_slot(self, tensor: int) -> int:
        """Return the bytes of the keys and values of a row at its longest."""
        places = whole_blocks(self.work.longest)
        return places * self.costs.cached_numbers(tensor) * self.costs.numerics.itemsize

    def most_slots(self, tensor: int, memory: float) -> int:
        """Return how many slots fit a GPU's memory; 0 or less if not even the weights do."""
        empty = self.generator(GeneratorPlan(tensor=tensor, replicas=1, slots=0)).total
        of_slot = self.bytes_of_slot(tensor) + self.costs.model.vocab_size * WIDE
        return int((memory - empty) // of_slot)
