"""Search for the split, degrees, microbatch and slots with the shortest predicted step, within the
memory of a GPU and the bound on lag.

    found = search(predictor, SearchLimits(gpus=16, memory=72 * GIB))
    found.asynchronous.step_s, found.synchronous.step_s

An asynchronous step is the longer of the two sides, and each side depends on its own GPUs alone. So
the best trainer is found once for each number of GPUs, the best generator for the GPUs that are
left, and the pairs are compared. The search is exhaustive over

    trainer     data-parallel ranks that divide groups_per_step, every split of them into shards and
                replicas, every number of GPUs a layer; microbatches in powers of two
    generator   every number of GPUs a layer, as many replicas as fit; slots for 1, 2, 4, ...
                groups, and the most that fits or that the bound on lag lets run; overcommit in
                eighths of a batch that the data-parallel ranks can share evenly, from 0 to max_lag
                batches

GPUs that share a layer are powers of two, up to the query heads. Among plans within 1 % of the
shortest step it takes the one with the least lag, then with the fewest GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from llamarl.memory import GIB, SLOTS, WIDE
from llamarl.models.config import check_sizes, read_config
from llamarl.models.sharding import why_not_split
from llamarl.planner.costs import Costs, GeneratorPlan, Numerics, Split, StepWork, TrainerPlan
from llamarl.planner.predict import Prediction, Predictor
from llamarl.planner.profile import Count, FromZero, Natural, Positive, Profile
from llamarl.words.fields import settings_dataclass

LEAST_MICROBATCH = 1024  # tokens
MOST_MICROBATCH = 1 << 17
MOST_TENSOR = 64
ALIKE = 1.01  # steps within 1 % are alike
_PARTS = 8  # overcommit is tried in such parts of a batch


class NothingFits(ValueError):
    """No plan fits the memory; the message says what would."""


@settings_dataclass
class SearchSettings:
    """The keys of a search. None: the planner chooses, or takes a default that follows from other
    keys.
    """

    path: str
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    checkpointing: bool | None = None
    trainer_tensor: Count | None = None
    generator_tensor: Count | None = None
    quantize: Literal["none", "fp8", "int8"] = "none"
    groups_per_step: Count = 64
    group_size: Count = 8
    max_prompt_tokens: Count = 512
    max_new_tokens: Count = 1024
    prompt_tokens: Positive | None = None
    completion_tokens: Positive | None = None
    length_sigma: FromZero = 0.5
    max_lag: Natural = 1
    overcommit: Natural | None = None

    def work(self) -> StepWork:
        """Return the work of a step. ValueError for sizes that contradict each other."""
        prompt = self.max_prompt_tokens / 2 if self.prompt_tokens is None else self.prompt_tokens
        completion = self.completion_tokens
        if completion is None:
            completion = self.max_new_tokens / 2
        return StepWork(
            groups=self.groups_per_step,
            group_size=self.group_size,
            prompt_tokens=prompt,
            completion_tokens=completion,
            longest_prompt=self.max_prompt_tokens,
            max_new_tokens=self.max_new_tokens,
            sigma=self.length_sigma,
            max_lag=self.max_lag,
        )

    def numerics(self, *, checkpointing: bool, on_cpu: bool = False) -> Numerics:
        """Return the number formats of the job."""
        return Numerics(
            dtype=self.dtype,
            compute_dtype=self.compute_dtype or self.dtype,
            quantize=self.quantize,
            optimizer=self.optimizer,
            checkpointing=checkpointing,
            on_cpu=on_cpu,
        )


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """What a plan may use. memory: bytes of a GPU. overcommit: groups; trainer_tensor,
    generator_tensor: GPUs that share a layer of each side; None: the search chooses.
    """

    gpus: int
    memory: float
    overcommit: int | None = None
    trainer_tensor: int | None = None
    generator_tensor: int | None = None

    def __post_init__(self):
        if self.gpus < 1 or self.memory <= 0:
            raise ValueError(f"gpus={self.gpus}, memory={self.memory:g}: need at least 1, above 0")
        for side in ("trainer", "generator"):
            tensor = getattr(self, f"{side}_tensor") or 1
            if tensor > self.gpus:
                raise ValueError(
                    f"{side}.tensor_parallel={tensor}: {tensor} GPUs share a layer, and there are "
                    f"{self.gpus}"
                )


@dataclass(frozen=True, slots=True)
class Found:
    """The best plans. asynchronous: None with max_lag=0 or on one GPU. synchronous: None if none
    fits.
    """

    asynchronous: Prediction | None
    synchronous: Prediction | None

    @property
    def best(self) -> Prediction:
        """The shorter of both; the synchronous one where they are equal."""
        both = [one for one in (self.synchronous, self.asynchronous) if one is not None]
        return min(both, key=lambda one: one.step_s)

    @property
    def pays(self) -> bool:
        """Whether the asynchronous step is the shorter one."""
        return self.best is self.asynchronous


def search(predictor: Predictor, limits: SearchLimits) -> Found:
    """Return the best asynchronous and the best synchronous plan. NothingFits if there is none."""
    looking = _Search(predictor, limits)
    found = Found(looking.asynchronous(), looking.synchronous())
    if found.asynchronous is None and found.synchronous is None:
        raise NothingFits(looking.remedy())
    return found


def best_of(
    settings: SearchSettings, profile: Profile, *, gpus: int, memory: float
) -> tuple[Found, Predictor]:
    """Return the best plans, with the activation checkpointing that was given or is faster.
    memory: bytes of a GPU that a job may fill. ValueError if none fits.
    """
    limits = SearchLimits(
        gpus=gpus,
        memory=memory,
        overcommit=settings.overcommit,
        trainer_tensor=settings.trainer_tensor,
        generator_tensor=settings.generator_tensor,
    )
    model = read_config(settings.path)
    check_sizes(model)
    heads = model.num_attention_heads
    for side in ("trainer", "generator"):
        tensor = getattr(limits, f"{side}_tensor") or 1
        why = why_not_split(model, tensor)
        if why:
            raise ValueError(f"{side}.tensor_parallel={tensor}: {why}")
        if tensor > heads:
            raise ValueError(
                f"{side}.tensor_parallel={tensor}: the model has {heads} query heads to split"
            )
    work = settings.work()
    on_cpu = profile.device.kind == "cpu"
    choices = [False, True] if settings.checkpointing is None else [settings.checkpointing]
    found: list[tuple[Found, Predictor]] = []
    for checkpointing in choices:
        numerics = settings.numerics(checkpointing=checkpointing, on_cpu=on_cpu)
        predictor = Predictor(Costs(profile, model, numerics), work)
        try:
            found.append((search(predictor, limits), predictor))
        except NothingFits:
            if checkpointing == choices[-1] and not found:
                raise
    return min(found, key=lambda one: one[0].best.step_s)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, rising."""
    return [n for n in range(1, number + 1) if number % n == 0]


def powers_up_to(most: int, first: int = 1) -> list[int]:
    """Return first, 2 first, 4 first, ... up to most; [first] if most is less."""
    found = [first]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found


class _Search:
    """One search."""

    def __init__(self, predictor: Predictor, limits: SearchLimits):
        self.predictor = predictor
        self.work = predictor.work
        self.limits = limits
        model = predictor.costs.model
        most = min(limits.gpus, model.num_attention_heads, MOST_TENSOR)
        tensors = [n for n in powers_up_to(most) if why_not_split(model, n) is None]
        self.trainer_tensors = tensors
        self.generator_tensors = tensors
        if limits.trainer_tensor is not None:
            self.trainer_tensors = [limits.trainer_tensor]
        if limits.generator_tensor is not None:
            self.generator_tensors = [limits.generator_tensor]

    # --- Candidates ---

    def trainer_gpus(self) -> list[int]:
        """Return the numbers of GPUs that a trainer may have."""
        found = set()
        for tensor in self.trainer_tensors:
            for ranks in divisors(self.work.groups):
                if ranks * tensor <= self.limits.gpus:
                    found.add(ranks * tensor)
        return sorted(found)

    def trainers(self, gpus: int, taken: float = 0.0) -> Iterator[TrainerPlan]:
        """Yield the plans of so many GPUs that fit. taken: bytes of a GPU that the other side
        holds.
        """
        for tensor in self.trainer_tensors:
            if gpus % tensor or self.work.groups % (gpus // tensor):
                continue
            ranks = gpus // tensor
            for shards in divisors(ranks):
                sizes = self._microbatches(ranks)
                fits = False  # a smaller microbatch than one that fits fits too
                for size in reversed(sizes):
                    plan = TrainerPlan(shards, ranks // shards, tensor, size)
                    fits = fits or self._fits(plan, taken)
                    if fits:
                        yield plan

    def _microbatches(self, ranks: int) -> list[int]:
        tokens = self.work.groups / ranks * self.work.packed_of_group
        most = min(MOST_MICROBATCH, 2 * max(tokens, LEAST_MICROBATCH))
        return powers_up_to(int(most), LEAST_MICROBATCH)

    def _fits(self, plan: TrainerPlan, taken: float) -> bool:
        room = self.limits.memory - taken
        # A quick lower bound refuses most plans: weights, moments and slots alone.
        costs = self.predictor.costs
        numbers = costs.num_numbers / (plan.shards * plan.tensor)
        if numbers * (WIDE + SLOTS * costs.numerics.itemsize) > room:
            return False
        return self.predictor.trainer_bytes(plan).total <= room

    def generators(self, gpus: int, rows: float, taken: float = 0.0) -> Iterator[GeneratorPlan]:
        """Yield the plans of at most so many GPUs that fit. rows: the most that may run at once."""
        for tensor in self.generator_tensors:
            replicas = gpus // tensor
            if not replicas:
                continue
            # Half a group's slots are free on average (predict.py), so allow for that many more.
            size = self.work.group_size
            fitting = self.predictor.most_slots(tensor, self.limits.memory - taken)
            most = min(fitting, max(size, -(-int(rows) // replicas) + size // 2))
            if most < size:
                continue
            for slots in {*powers_up_to(most, size), most}:
                yield GeneratorPlan(tensor, replicas, slots)

    def overcommits(self, ranks: int) -> list[int]:
        """Return the overcommits to try, rising: those that so many data-parallel ranks can share
        evenly.
        """
        given = self.limits.overcommit
        if given is not None:
            return [given] if given % ranks == 0 else []
        groups = self.work.groups
        most = self.work.max_lag * groups
        found = {most}
        for part in range(_PARTS * self.work.max_lag):
            wanted = groups * part / _PARTS
            found.add(min(most, math.ceil(wanted / ranks) * ranks))
        return sorted(found)

    # --- Asynchronous ---

    def asynchronous(self) -> Prediction | None:
        """Return the best plan with GPUs of its own for each side; None if there is none."""
        if self.work.max_lag == 0:
            return None
        predicted = []
        for gpus in self.trainer_gpus():
            left = self.limits.gpus - gpus
            if left < 1:
                continue
            for trainer, overcommit in self._trainers(gpus):
                generator = self._fastest_generator(left, overcommit)
                if generator is None:
                    continue
                plan = Split(trainer, generator, overcommit, max_lag=self.work.max_lag)
                predicted.append(self.predictor.predict(plan))
        return shortest(predicted)

    def _trainers(self, gpus: int) -> Iterator[tuple[TrainerPlan, int]]:
        """Yield the fastest trainer of so many GPUs for each number of data-parallel ranks, with
        each overcommit that these can share.
        """
        fastest: dict[int, tuple[float, TrainerPlan]] = {}
        for plan in self.trainers(gpus):
            took = self._training_s(plan)
            if plan.data_ranks not in fastest or took < fastest[plan.data_ranks][0]:
                fastest[plan.data_ranks] = (took, plan)
        for ranks, (_, plan) in fastest.items():
            for overcommit in self.overcommits(ranks):
                yield plan, overcommit

    def _training_s(self, plan: TrainerPlan) -> float:
        return self.predictor.update_s(plan) + self.predictor.costs.publish_s(plan)

    def _fastest_trainer(self, gpus: int) -> TrainerPlan | None:
        return min(self.trainers(gpus), key=self._training_s, default=None)

    def _fastest_generator(self, gpus: int, overcommit: int) -> GeneratorPlan | None:
        rows = (overcommit + self.work.groups / 2) * self.work.group_size
        plans = self.generators(gpus, rows)
        costs = self.predictor.costs

        def seconds(plan: GeneratorPlan) -> tuple[float, int]:
            streaming_s = self.predictor.streaming_s(plan, overcommit)
            return streaming_s + costs.swap_s(plan.tensor), plan.slots

        return min(plans, key=seconds, default=None)

    # --- Synchronous ---

    def synchronous(self) -> Prediction | None:
        """Return the best plan in which the sides take turns, on GPUs of their own or on all."""
        return shortest([*self._apart(), *self._together()])

    def _apart(self) -> Iterator[Prediction]:
        for gpus in self.trainer_gpus():
            left = self.limits.gpus - gpus
            trainer = self._fastest_trainer(gpus) if left > 0 else None
            if trainer is None:
                continue
            for generator in self._best_of_each_degree(left):
                yield self.predictor.predict(Split(trainer, generator, max_lag=0))

    def _best_of_each_degree(self, gpus: int, taken: float = 0.0) -> list[GeneratorPlan]:
        """Return the plan that samples a batch fastest, for each number of GPUs a layer."""
        by_tensor: dict[int, GeneratorPlan] = {}
        seconds: dict[int, float] = {}
        for plan in self.generators(gpus, self.work.completions, taken):
            took = self.predictor.batch_s(plan)
            if plan.tensor not in by_tensor or took < seconds[plan.tensor]:
                by_tensor[plan.tensor] = plan
                seconds[plan.tensor] = took
        return list(by_tensor.values())

    def _together(self) -> Iterator[Prediction]:
        """Yield plans in which both sides are on all GPUs."""
        gpus = max(self.trainer_gpus(), default=0)
        offloaded = list(self._best_of_each_degree(gpus))
        trainer = self._fastest_trainer(gpus)
        if trainer is not None:
            for generator in offloaded:
                plan = Split(trainer, generator, sharing="offload", max_lag=0)
                yield self.predictor.predict(plan)
        for generator in offloaded:
            for fewer in powers_up_to(generator.slots, self.work.group_size):
                smaller = replace(generator, slots=fewer)
                taken = self.predictor.generator_bytes(smaller).total
                trainers = self.trainers(gpus, taken)
                beside = min(trainers, key=self.predictor.update_s, default=None)
                if beside is not None:
                    plan = Split(beside, smaller, sharing="shared", max_lag=0)
                    yield self.predictor.predict(plan)

    # --- What would fit ---

    def remedy(self) -> str:
        """Return what the sides need at least, and what would make room."""
        limits = self.limits
        trainer = self._least_trainer()
        generator = min(
            self.predictor.generator_bytes(GeneratorPlan(tensor, 1, self.work.group_size)).total
            for tensor in self.generator_tensors
        )
        lines = [
            f"nothing fits {limits.memory / GIB:.3g} GiB a GPU on {limits.gpus} GPU(s):",
            f"  the trainer takes at least {trainer / GIB:.3g} GiB a GPU",
            f"  the generator takes at least {generator / GIB:.3g} GiB a GPU",
        ]
        numerics = self.predictor.costs.numerics
        if trainer > limits.memory and not numerics.checkpointing:
            lines.append("  try trainer.activation_checkpointing=true")
        if trainer > limits.memory and numerics.optimizer == "adamw":
            lines.append("  try trainer.optimizer=adamw8bit")
        if generator > limits.memory and numerics.quantize == "none":
            lines.append("  try generator.quantize=fp8")
        return "\n".join(lines)

    def _least_trainer(self) -> int:
        """Return the fewest bytes of a GPU that any trainer takes."""
        found = []
        for tensor in self.trainer_tensors:
            most = max(1, self.limits.gpus // tensor)
            ranks = max(n for n in divisors(self.work.groups) if n <= most)
            plan = TrainerPlan(ranks, 1, tensor, LEAST_MICROBATCH)
            found.append(self.predictor.trainer_bytes(plan).total)
        return min(found)


def shortest(predicted: Iterable[Prediction]) -> Prediction | None:
    """Return the prediction with the least lag among those within 1 % of the shortest step, then
    with the fewest GPUs, then the shortest. None if there are none.
    """
    everything = list(predicted)
    if not everything:
        return None
    least = min(one.step_s for one in everything)
    alike = [one for one in everything if one.step_s <= least * ALIKE]
    return min(alike, key=lambda one: (one.mean_lag, one.plan.gpus, one.step_s))
