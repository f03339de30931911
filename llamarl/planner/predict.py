"""Predicts the seconds, the memory and the mean lag of a plan; LlamaRL's theorem 7.5 as functions.

Asynchronous: trainer, generator, scorer and the transfer of weights overlap, and the slowest sets
the step.

    step = max(update + publication, sampling + swap, scores, transfer)

A generator always has completions to decode, so no step waits for its longest completion. The
ledger bounds how many are decoded: batch + overcommit groups may be started and not yet trained on,
and finished groups wait for their batch. If half a batch waits on average,

    rows <= (overcommit + batch / 2) group_size E[length] / E[longest of a group]

The last factor: a group counts as started until its longest completion has ended. Slots are a bound
too: a generator asks for a ticket once it has room for the whole group, so half a group's slots
less one half are free on average.

Synchronous (max_lag=0): nothing overlaps. A batch starts together, and ends with its longest
completion.

    step = sampling + last scores + update + publication + transfer + swap

With sharing=offload, moving one side to host memory and back is added. Prompts are read together,
512 tokens or one prompt at a time, as generator.prefill_chunk has it.

Memory is counted from the model's shapes, as a dry run does it (llamarl/memory.py):

    trainer     its shard of weights and moments; two slots of the weights that it sends; at the
                peak of an update gradients, activations of the longest microbatch, gathered
                weights, logits
    generator   its copies of the weights; keys and values of all slots at their longest; logits
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from llamarl.inference.schedule import whole_blocks
from llamarl.memory import (
    ITEMSIZES,
    MOMENTS,
    SLOTS,
    Training,
    cache_bytes,
    longest_microbatch,
    sampling_bytes,
    update_bytes,
    weights_bytes,
)
from llamarl.planner.costs import Costs, GeneratorPlan, Split, StepWork, TrainerPlan

PREFILL_TOKENS = 512  # of prompts that are read together


@dataclass(frozen=True, slots=True)
class Bytes:
    """The bytes of a GPU that one side takes. held: all the time; working: more at the peak."""

    held: int
    working: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.held + self.working


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan is predicted to do. Seconds of a step, by part; bytes of a GPU, by side.

    at_once: completions that a generator's replica decodes at once, as a mean.
    """

    plan: Split
    step_s: float
    update_s: float
    sample_s: float
    score_s: float
    publish_s: float
    transfer_s: float
    swap_s: float
    offload_s: float
    at_once: float
    mean_lag: float
    trainer_bytes: Bytes
    generator_bytes: Bytes

    @property
    def trainer_s(self) -> float:
        """The seconds of a step in which the trainer is busy."""
        return self.update_s + self.publish_s

    @property
    def generator_s(self) -> float:
        """The seconds of a step in which the generator is busy."""
        return self.sample_s + self.swap_s

    @property
    def bytes_of_gpu(self) -> int:
        """The most bytes that a GPU takes."""
        trainer = self.trainer_bytes
        generator = self.generator_bytes
        if self.plan.sharing == "shared":
            return trainer.held + generator.held + max(trainer.working, generator.working)
        return max(trainer.total, generator.total)


@dataclass(frozen=True)
class Predictor:
    """Predicts the plans of one job on one machine."""

    costs: Costs
    work: StepWork

    # --- Memory ---

    @cached_property
    def _trainers(self) -> dict[TrainerPlan, Bytes]:
        return {}

    def trainer_bytes(self, plan: TrainerPlan) -> Bytes:
        """Return the bytes of a trainer's GPU."""
        if plan not in self._trainers:  # a search asks for each plan many times
            self._trainers[plan] = self._trainer_bytes(plan)
        return self._trainers[plan]

    def _trainer_bytes(self, plan: TrainerPlan) -> Bytes:
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
        sent = weights_bytes(
            model, n.dtype, plan.gpus, tensor_parallel=plan.tensor, replicate=plan.replicate
        )
        return Bytes(held=found.held + SLOTS * sent, working=found.working)

    def generator_bytes(self, plan: GeneratorPlan) -> Bytes:
        """Return the bytes of a generator's GPU."""
        n = self.costs.numerics
        weights = self.costs.generator_bytes(plan.tensor)
        buffers = n.weight_buffers + (1 if n.on_cpu else 0)  # a CPU lays them out once more
        model = self.costs.model
        cache = plan.slots * self.bytes_of_slot(plan.tensor)
        logits = sampling_bytes(model, plan.slots)
        return Bytes(held=buffers * weights + cache, working=logits)

    def bytes_of_slot(self, tensor: int) -> int:
        """Return the bytes of the keys and values of a row at its longest."""
        places = whole_blocks(self.work.longest)
        return cache_bytes(self.costs.model, places, self.costs.numerics.dtype, tensor)

    def most_slots(self, tensor: int, memory: float) -> int:
        """Return how many slots fit a GPU's memory; 0 or less if not even the weights do."""
        empty, one = (
            self.generator_bytes(GeneratorPlan(tensor, 1, slots)).total for slots in (0, 1)
        )
        return int((memory - empty) // (one - empty))

    # --- Parts of a step ---

    def update_s(self, plan: TrainerPlan) -> float:
        """Return seconds of the update on the data-parallel rank with the most work."""
        ranks = plan.data_ranks
        groups = self.work.groups / ranks
        uneven = self.costs.profile.assumed("imbalance") if ranks > 1 else 1.0
        tokens = groups * self.work.packed_of_group * uneven
        return self.costs.update_s(groups * self.work.group_size, tokens, plan)

    def rows(self, plan: GeneratorPlan, overcommit: int) -> float:
        """Return how many completions an asynchronous replica decodes at once."""
        work = self.work
        most = (overcommit + work.groups / 2) * work.group_size * work.share_in_work
        # A generator asks for a ticket once it has room for the whole group.
        usable = plan.slots - (work.group_size - 1) / 2
        return min(usable, most / plan.replicas)

    def streaming_s(self, plan: GeneratorPlan, overcommit: int) -> float:
        """Return seconds in which an asynchronous generator samples a step's completions."""
        work = self.work
        rows = self.rows(plan, overcommit)
        busy = plan.replicas * min(1.0, rows)  # replicas that have a row
        rows = max(1.0, rows)
        steps = work.completions * work.completion_tokens / (busy * rows)
        decoding = steps * self.costs.decode_s(rows, rows * work.context, plan.tensor)
        return decoding + self._prompts_s(work.groups / busy, plan.tensor)

    def batch_s(self, plan: GeneratorPlan) -> float:
        """Return seconds in which a synchronous generator samples a batch to its last token."""
        work = self.work
        groups = math.ceil(work.groups / plan.replicas)
        waiting = groups * work.group_size
        rows = float(min(plan.slots, waiting))
        seconds = self._prompts_s(groups, plan.tensor)
        for alive, steps in work.batch(rows, waiting):
            seconds += steps * self.costs.decode_s(alive, alive * work.context, plan.tensor)
        return seconds

    def _prompts_s(self, groups: float, tensor: int) -> float:
        """Return seconds of reading so many prompts on a replica."""
        tokens = groups * self.work.prompt_tokens
        together = min(tokens, max(PREFILL_TOKENS, self.work.prompt_tokens))
        return tokens / together * self.costs.prefill_s(together, tensor)

    # --- A step ---

    def predict(self, plan: Split) -> Prediction:
        """Return the prediction of a plan, which need not fit any memory."""
        work = self.work
        costs = self.costs
        update_s = self.update_s(plan.trainer)
        publish_s = costs.publish_s(plan.trainer)
        transfer_s = costs.transfer_s(plan)
        swap_s = costs.swap_s(plan.generator.tensor)
        trainer_bytes = self.trainer_bytes(plan.trainer)
        generator_bytes = self.generator_bytes(plan.generator)
        offload_s = 0.0
        if plan.is_synchronous:
            sample_s = self.batch_s(plan.generator)
            score_s = costs.score_s(work.group_size)
            if plan.sharing == "offload":
                moved = trainer_bytes.held + generator_bytes.held
                offload_s = 2 * costs.offload_s(moved)
            step_s = sample_s + score_s + update_s + publish_s + transfer_s + swap_s + offload_s
            at_once = min(plan.generator.slots, work.completions / plan.generator.replicas)
        else:
            sample_s = self.streaming_s(plan.generator, plan.overcommit)
            score_s = costs.score_s(work.completions)
            step_s = max(update_s + publish_s, sample_s + swap_s, score_s, transfer_s)
            at_once = self.rows(plan.generator, plan.overcommit)
        return Prediction(
            plan=plan,
            step_s=step_s,
            update_s=update_s,
            sample_s=sample_s,
            score_s=score_s,
            publish_s=publish_s,
            transfer_s=transfer_s,
            swap_s=swap_s,
            offload_s=offload_s,
            at_once=at_once,
            mean_lag=plan.mean_lag(work.groups),
            trainer_bytes=trainer_bytes,
            generator_bytes=generator_bytes,
        )


# --- Theorem 7.5 ---
#
# Section 7 of LlamaRL (arXiv 2505.24034): the step of a synchronous and of an asynchronous job, and
# the split between both sides. Symbols, as in the paper:
#
#     B0      completions of a step            G0      GPUs
#     m       GPUs that hold one replica of a model; m_t of the trainer, m_g of the generator
#     b       completions that a replica works on at once; b_t, b_g
#     eta(b)  seconds a completion on one replica that works on b at once
#     theta   the trainer's share of the GPUs
#
# With all GPUs on one side, each replica does B0 m / G0 completions of a step (definition 7.4):
#
#     T_sync  = (B0 m / G0) (eta_t(b_t) + eta_g(b_g))
#     T_async = max(B0 m_t eta_t(b_t) / (theta G0), B0 m_g eta_g(b_g) / ((1 - theta) G0))
#
# One falls with theta and the other rises, so the maximum is least where both are equal:
#
#     theta*  = m_t eta_t / (m_t eta_t + m_g eta_g)
#     T*      = (B0 / G0) (m_t eta_t + m_g eta_g)
#
# Theorem 7.5. Assume that eta_t and eta_g do not rise with b (assumption 7.1; figure 5), and that
# memory M a GPU holds both sides of a synchronous job, (W_t + W_g + A_t b_t + A_g b_g) / m <= M,
# but each side of an asynchronous one alone: (W_t + A_t b_t) / m_t <= M and the same of g.
# Then T* <= T_sync. With m_t = m_g = m and the same b both are equal: overlap alone gains nothing
# on a fixed number of GPUs. The gain comes from a larger b, at which eta is lower, or a smaller m.


def best_split(trainer: tuple[float, float], generator: tuple[float, float]) -> float:
    """Return theta*, the trainer's share at which both sides take equally long. trainer, generator:
    (m, eta).
    """
    gpus_t, eta_t = trainer
    gpus_g, eta_g = generator
    return gpus_t * eta_t / (gpus_t * eta_t + gpus_g * eta_g)
