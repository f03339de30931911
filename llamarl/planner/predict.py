"""The seconds of a step that a plan is predicted to take, by executor.

Asynchronous: trainer, generator, scorer and the weights' transfer work beside each other, and the
slowest sets the step.

    step = max(update + publication, sampling + swap, scores, transfer)

The generator's rows never run out together, so that no step waits for its longest completion. How
many run is bounded by the ledger: batch + overcommit groups may be started and not yet trained on,
and finished ones wait for their batch. Assumed: half a batch waits on average, so that

    rows <= (overcommit + batch / 2) group_size E[length] / E[longest of a group]

The last factor: a group counts as started until its longest completion has ended, while the rows of
the others are free. Slots are a bound too: a generator asks for a ticket once it has room for its
whole group, so that of its slots half a group less one half are free on average.

Synchronous (max_lag=0): everything follows everything. A batch starts together and its rows run
out, until the longest completion of the step ends.

    step = sampling + last scores + update + publication + transfer + swap

Asynchronous, batch by batch (in_flight_updates=false and max_lag=1, one step off): the generator
samples a whole batch with one version, its rows run out, and only then it takes new weights. The
batch of step v + 1 needs the version that step v - 1 makes, so that two steps hold one round:

    step = max(update + publication, sampling + swap, transfer,
               (update + publication + transfer + swap + sampling + last scores) / 2)

With sharing=offload what is held moves to host memory and back besides. Prompts are read together,
512 tokens or one prompt at a time, as generator.prefill_chunk has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llamarl.planner.costs import Costs
from llamarl.planner.memory import Bytes, Memory
from llamarl.planner.plans import GeneratorPlan, Plan, TrainerPlan, Work

PREFILL_TOKENS = 512  # of prompts that are read together


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan is predicted to do. Seconds of a step, by part; bytes of a GPU, by side.

    at_once: completions that a generator's replica decodes at once, as a mean.
    """

    plan: Plan
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
    work: Work
    memory: Memory

    @classmethod
    def of(cls, costs: Costs, work: Work) -> Predictor:
        """Return a predictor with prices of its own."""
        return cls(costs, work, Memory(costs, work))

    # --- Parts of a step ---

    def update_s(self, plan: TrainerPlan) -> float:
        """Return seconds of the trainer's update, of the data-parallel rank with most to do."""
        ranks = plan.data_ranks
        groups = self.work.groups / ranks
        uneven = self.costs.sheet.assumed("imbalance") if ranks > 1 else 1.0
        tokens = groups * self.work.packed_of_group * uneven
        return self.costs.update_s(groups * self.work.group_size, tokens, plan)

    def rows(self, plan: GeneratorPlan, overcommit: int) -> float:
        """Return how many completions a replica decodes at once, while others are trained on."""
        work = self.work
        most = (overcommit + work.groups / 2) * work.group_size * work.share_in_work
        # A ticket is asked for once there is room for its whole group, so that some slots are free.
        usable = plan.slots - (work.group_size - 1) / 2
        return min(usable, most / plan.replicas)

    def streaming_s(self, plan: GeneratorPlan, overcommit: int) -> float:
        """Return seconds that a step's completions take a generator whose rows never run out."""
        work = self.work
        rows = self.rows(plan, overcommit)
        busy = plan.replicas * min(1.0, rows)  # replicas that have a row
        rows = max(1.0, rows)
        steps = work.completions * work.completion_tokens / (busy * rows)
        decoding = steps * self.costs.decode_s(rows, rows * work.context, plan.tensor)
        besides = self.costs.sampled_s(work.completions / busy)
        return decoding + besides + self._prompts_s(work.groups / busy, plan.tensor)

    def batch_s(self, plan: GeneratorPlan) -> float:
        """Return seconds from a batch's start to the end of its longest completion."""
        work = self.work
        groups = math.ceil(work.groups / plan.replicas)
        waiting = groups * work.group_size
        rows = float(min(plan.slots, waiting))
        stretches = work.drain(rows, work.completions)
        full = work.completion_tokens * (waiting - rows) / rows
        stretches.insert(0, (rows, full))
        seconds = self._prompts_s(groups, plan.tensor) + self.costs.sampled_s(waiting)
        for alive, steps in stretches:
            seconds += steps * self.costs.decode_s(alive, alive * work.context, plan.tensor)
        return seconds

    def _prompts_s(self, groups: float, tensor: int) -> float:
        """Return seconds of reading so many prompts on a replica."""
        tokens = groups * self.work.prompt_tokens
        together = min(tokens, max(PREFILL_TOKENS, self.work.prompt_tokens))
        return tokens / together * self.costs.prefill_s(together, tensor)

    # --- A step ---

    def predict(self, plan: Plan) -> Prediction:
        """Return what a plan is predicted to do. It need not fit any memory."""
        work = self.work
        costs = self.costs
        update_s = self.update_s(plan.trainer)
        publish_s = costs.publish_s(plan.trainer)
        transfer_s = costs.transfer_s(plan)
        swap_s = costs.swap_s(plan.generator.tensor)
        trainer_bytes = self.memory.trainer(plan.trainer)
        generator_bytes = self.memory.generator(plan.generator)
        offload_s = 0.0
        if plan.is_synchronous:
            sample_s = self.batch_s(plan.generator)
            score_s = costs.score_s(work.group_size)
            if plan.sharing == "offload":
                moved = trainer_bytes.held + generator_bytes.held
                offload_s = 2 * costs.offload_s(moved)
            step_s = sample_s + score_s + update_s + publish_s + transfer_s + swap_s + offload_s
            at_once = min(plan.generator.slots, work.completions / plan.generator.replicas)
        elif plan.in_flight:
            sample_s = self.streaming_s(plan.generator, plan.overcommit)
            score_s = costs.score_s(work.completions)
            step_s = max(update_s + publish_s, sample_s + swap_s, score_s, transfer_s)
            at_once = self.rows(plan.generator, plan.overcommit)
        else:
            sample_s = self.batch_s(plan.generator)
            score_s = costs.score_s(work.group_size)
            trainer_s = update_s + publish_s
            generator_s = sample_s + swap_s
            round_s = trainer_s + transfer_s + generator_s + score_s
            step_s = max(trainer_s, generator_s, transfer_s, round_s / 2)
            at_once = min(plan.generator.slots, work.completions / plan.generator.replicas)
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
