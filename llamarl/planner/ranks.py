"""A step of executors that share ranks, on ranks that share cores.

    shared = share(predictor, plan, {"trainer": (0,), "generator": (1,), "reward": (1,)}, cores=2)
    shared.step_s

predict.py has GPUs in mind: each side has its own, or both take turns. On a CPU a rank is a process
with a thread that computes, executors of a rank take turns on it, a scorer's worker is a process of
its own, and a machine may have fewer cores than there are ranks. So the plan is simulated
(docs/simulation.md) with its executors on their ranks, and the ranks on their cores: steps, and the
lags, follow from who has to wait for whom.

Seconds of a piece are those on a core that has the machine to itself. A piece takes 1 + crowding
times as long while all cores are busy: they share caches, memory and, where two are one core's
threads, the core. While more is under way than there are cores, each gets its share of them.

In a synchronous step a message is on its way several times, and nobody works: turn_s of the sheet.
In an asynchronous run two messages race after each step: a version, and the news that there is room
for tickets. A ticket that starts before the version has arrived is a step older. Both times are
drawn, and so the lag is that of several runs. A generator on its trainer's rank has no such race:
its next turn waits for what that has published.

All completions are as long as the mean here.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from llamarl.config.placement import wants_short_turns
from llamarl.config.sections.generator import CHUNK_TOKENS
from llamarl.learning.memory import WIDE
from llamarl.planner.memory import Bytes
from llamarl.planner.plans import Plan
from llamarl.planner.predict import Predictor
from llamarl.planner.simulation_settings import SimulationSettings
from llamarl.planner.timings import Timings
from llamarl.planner.turns import Placed, SharedRanks
from llamarl.planner.world import simulate

STEPS = 40  # that are simulated, of which the first quarter is in no figure
_SEEDS = 4  # runs that the race between two messages is decided in
# By the traces of 46 asynchronous runs on two cores, medians of all: from a take to what a
# generator that was idle does about it, which is three messages; from a step's end to the next
# one's begin where none waits; and what is left of a version's way once its bytes are counted.
_MESSAGE_S = 2e-4
_REPORT_S = 4e-4
_WAY_S = 1e-3
# Resident bytes, by 94 runs of batches that the proof does not have: a rank that hosts a reward and
# has no model, with torch and the threads of its connections; what a trainer and a generator load
# besides; and what FSDP2 does, once several ranks train.
_MIB = 1 << 20
_PROCESS_BYTES = 291 * _MIB
_TRAINER_BYTES = 50 * _MIB
_TOGETHER_BYTES = 80 * _MIB
_GENERATOR_BYTES = 9 * _MIB
_HEAP = 1.25  # of activations, with what lies unused between them in malloc's heap
# Sets of weights at a trainer's sum of gradients with others: the weights that FSDP2 has gathered,
# gradients before and after the sum, and the sum's buffer.
_GATHERED = 4
_WEIGHTS = 5  # sets that a generator's process maps


@dataclass(frozen=True, slots=True)
class Shared:
    """Seconds of a step, and the mean lag of what is trained on, in steps."""

    step_s: float
    mean_lag: float


def share(
    predictor: Predictor,
    plan: Plan,
    placed: Placed,
    *,
    cores: int,
    steps: int = STEPS,
    first: int = STEPS // 4,
) -> Shared:
    """Predict a step of this plan on these ranks of a machine of so many cores: the mean of a run
    of `steps` steps behind the `first` ones. ValueError for less than one core.
    """
    if cores < 1:
        raise ValueError(f"cores={cores}: need at least 1")
    work = predictor.work
    measured = predictor.costs.sheet.measured
    length = max(1, round(work.completion_tokens))
    shared = SharedRanks(
        trainer=tuple(placed["trainer"]),
        generator=tuple(placed["generator"]),
        reward=tuple(placed["reward"]),
        cores=cores,
        crowding=0.0 if measured is None else measured.crowding,
    )
    is_short = wants_short_turns(placed, synchronous=plan.is_synchronous)
    settings = SimulationSettings(
        max_steps=steps,
        warmup_steps=first,
        max_lag=plan.max_lag,
        overcommit=0 if plan.is_synchronous else plan.overcommit,
        groups_per_step=work.groups,
        group_size=work.group_size,
        num_generators=len(shared.generator),
        max_slots=plan.generator.slots,
        chunk_tokens=1 if is_short else CHUNK_TOKENS,
        in_flight_updates=plan.in_flight and not plan.is_synchronous,
        num_rewards=len(shared.reward),
        score_batch=work.completions,
        num_trainers=len(shared.trainer),
        prompt_tokens=round(work.prompt_tokens),
        lengths=(length,),
        max_new_tokens=max(length, work.max_new_tokens),
    )
    timings = _timings(predictor, plan, length)
    seeds = 1 if plan.is_synchronous else _SEEDS
    results = [simulate(replace(settings, seed=seed), timings, shared) for seed in range(seeds)]
    return Shared(
        step_s=statistics.fmean(result.step_s for result in results),
        mean_lag=statistics.fmean(result.mean_lag for result in results),
    )


def _timings(predictor: Predictor, plan: Plan, length: int) -> Timings:
    """Return the seconds of this plan's pieces. length: that completions have in the simulation, in
    whole tokens; all seconds are those of their true mean.
    """
    costs = predictor.costs
    work = predictor.work
    measured = costs.sheet.measured
    timings = costs.timings(plan)
    longer = work.completion_tokens / length
    of_group = work.packed_of_group
    transfer_s = timings.transfer_s
    if plan.is_synchronous:
        turn_s = 0.0 if measured is None else measured.turn_s
        transfer_s = turn_s or transfer_s  # the weights' way is in it
    else:
        transfer_s = (measured.transfer_s if measured else 0.0) or transfer_s + _WAY_S
    return replace(
        timings,
        decode_s=lambda rows, context: longer * timings.decode_s(rows, context),
        update_s=lambda number, _: costs.update_s(
            number, number / work.group_size * of_group, plan.trainer
        ),
        transfer_s=transfer_s,
        sampled_s=costs.sampled_s(1),
        hosted_s=costs.hosted_s(1),
        message_s=0.0 if plan.is_synchronous else _MESSAGE_S,
        report_s=0.0 if plan.is_synchronous else _REPORT_S,
    )


def bytes_of_ranks(predictor: Predictor, plan: Plan, placed: Placed) -> dict[int, int]:
    """Return the most resident bytes of each rank's process (VmHWM), libraries included.

    A batch is as long as its mean here, where a GPU's memory is kept for the longest. A generator's
    cache grows with its rows, and has as many as may be started at most.
    """
    work = predictor.work
    seen = replace(
        work,
        longest_prompt=max(1, math.ceil(work.prompt_tokens)),
        max_new_tokens=max(1, math.ceil(work.completion_tokens)),
    )
    found = Predictor.of(predictor.costs, seen)
    started = (work.groups + plan.overcommit) * work.group_size / len(placed["generator"])
    slots = max(1, min(plan.generator.slots, math.ceil(started)))
    sides = {
        "trainer": _trainer_bytes(found.memory.trainer(plan.trainer), found, plan),
        "generator": _generator_bytes(found, slots),
    }
    held: dict[int, int] = {}
    working: dict[int, int] = {}
    for name, ranks in placed.items():
        for rank in ranks:
            own = sides.get(name, Bytes(held=0, working=0))
            held[rank] = held.get(rank, _PROCESS_BYTES) + own.held
            working[rank] = max(working.get(rank, 0), own.working)
    return {rank: held[rank] + working[rank] for rank in held}


def _trainer_bytes(counted: Bytes, found: Predictor, plan: Plan) -> Bytes:
    """Return what a trainer adds to a process, of what is counted of its tensors."""
    working = counted.working * _HEAP
    libraries = _TRAINER_BYTES
    if plan.trainer.data_ranks > 1:
        libraries += _TOGETHER_BYTES
        gathered = _GATHERED * WIDE * found.costs.num_numbers // plan.trainer.shards
        working = max(working, gathered)
    return Bytes(held=counted.held + libraries, working=math.ceil(working))


def _generator_bytes(found: Predictor, slots: int) -> Bytes:
    """Return what a generator with rows in so many slots adds to a process: its weights are live,
    in the buffer of the next version, laid out for its products, and in the two slots of the
    sender, whose shared memory is mapped here too.
    """
    weights = _WEIGHTS * found.costs.generator_bytes(1)
    cache = slots * found.memory.bytes_of_slot(1)
    return Bytes(held=weights + cache + _GENERATOR_BYTES, working=0)
