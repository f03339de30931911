"""Which executor runs on which ranks, and what ranks, model and engine cannot do together. Imports
no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from llamarl.config.conversion import Problem, show
from llamarl.config.schema import Config, PlacementSettings
from llamarl.models.config import ModelConfig, read_config, tiny_directory

COLOCATED = ("trainer", "generator", "reference")  # executors with a model on the device
TINY_MODEL = tiny_directory()


def resolve_placement(
    placement: PlacementSettings,
    world_size: int,
    *,
    groups_per_step: int = 0,
    tensor_parallel: int = 1,
) -> dict[str, tuple[int, ...]]:
    """Executor name -> its ranks, with every null filled in.

    Trainers take the first half of the ranks (as many as divide groups_per_step, and leave a
    multiple of tensor_parallel if that can be), generators the rest, as far as it makes whole
    replicas of tensor_parallel ranks, and reward and reference a rank that hosts nothing yet or
    else the generators' last. One rank hosts everything. Executors of placement.colocate share the
    ranks given for one of them, or all.
    """
    everyone = tuple(range(world_size))
    if together := set(placement.colocate or ()):
        given = [ranks for name in sorted(together) if (ranks := getattr(placement, name, None))]
        shared = {name: list(given[0] if given else everyone) for name in together & set(COLOCATED)}
        placement = dataclasses.replace(placement, **shared, colocate=None)
    trainer = tuple(placement.trainer or ())
    if not trainer:
        free = [rank for rank in everyone if rank not in (placement.generator or ())] or everyone
        size = max(1, min(world_size // 2, len(free)))
        sizes = [n for n in range(size, 0, -1) if groups_per_step % n == 0]
        whole = [
            n
            for n in sizes
            if placement.generator or (world_size - n) % tensor_parallel == 0 < world_size - n
        ]
        trainer = tuple(
            free[: (whole or [n for n in sizes if world_size - n >= tensor_parallel] or sizes)[0]]
        )
    rest = tuple(rank for rank in everyone if rank not in trainer)
    replicas = rest[: len(rest) // tensor_parallel * tensor_parallel]
    generator = tuple(placement.generator or replicas or rest or everyone)
    spare = tuple(rank for rank in rest if rank not in generator) or generator
    return {
        "trainer": trainer,
        "generator": generator,
        "reward": tuple(placement.reward or spare[-1:]),
        "reference": tuple(placement.reference or spare[-1:]),
    }


def placement_of(config: Config, world_size: int) -> dict[str, tuple[int, ...]]:
    """Executor name -> its ranks in this run."""
    return resolve_placement(
        config.placement,
        world_size,
        groups_per_step=config.groups_per_step,
        tensor_parallel=config.generator.tensor_parallel,
    )


def idle_ranks(config: Config, world_size: int) -> tuple[int, ...]:
    """The ranks that would host nothing."""
    placed = placement_of(config, world_size)
    hosts = {
        rank
        for name, ranks in placed.items()
        if name != "reference" or config.reference.enabled
        for rank in ranks
    }
    return tuple(rank for rank in range(world_size) if rank not in hosts)


def generator_problems(c: Config, problem: Callable[..., Problem]) -> list[Problem]:
    """What the generator cannot be asked for at once, or only of the other engine; and a vLLM that
    is absent.
    """
    longest = c.task.max_prompt_tokens + c.max_new_tokens
    impossible = [
        (
            "generator.min_new_tokens max_new_tokens",
            c.generator.min_new_tokens > c.max_new_tokens,
            "the least is more than the most",
        ),
        (
            "generator.cache_tokens",
            c.generator.cache_tokens is not None and c.generator.cache_tokens < longest,
            f"does not hold one sequence of task.max_prompt_tokens + max_new_tokens; need at least {longest}, or null",
        ),
        (
            "generator.recompute_kv",
            c.generator.recompute_kv and not c.updates_in_flight,
            "no completion is running when new weights are loaded; leave it out, or raise max_lag",
        ),
        (
            "generator.resume_partials max_lag",
            bool(c.generator.resume_partials) and c.max_lag == 0,
            "a resumed synchronous run has the bits of an uninterrupted one, so its completions start again; leave it out",
        ),
        (
            "generator.resume_partials generator.in_flight_updates",
            bool(c.generator.resume_partials) and c.max_lag != 0 and not c.updates_in_flight,
            "would go on under other weights than they were begun with; leave one of them out",
        ),
    ]
    return [
        problem(what, *keys.split()) for keys, wrong, what in impossible if wrong
    ] + _engine_problems(c, problem)


def _engine_problems(c: Config, problem: Callable[..., Problem]) -> list[Problem]:
    g = c.generator
    if g.kind == "native":
        memory = "generator.gpu_memory_utilization"
        return (
            []
            if g.gpu_memory_utilization is None
            else [problem("is vLLM's: generator=vllm, or null", memory)]
        )
    impossible = [
        (
            "generator.tensor_parallel",
            g.tensor_parallel > 1,
            "a vLLM here has one rank; 1, or generator=native",
        ),
        (
            "generator.quantize",
            g.quantize != "none",
            "vLLM takes weights as they are; none, or generator=native",
        ),
        (
            "generator.recompute_kv",
            g.recompute_kv,
            "vLLM keeps its cache over new weights; false, or generator=native",
        ),
        (
            "generator.resume_partials",
            g.resume_partials is True,
            "vLLM starts unfinished completions again; false",
        ),
        (
            "generator.cache_tokens",
            g.cache_tokens is not None,
            "gpu_memory_utilization bounds vLLM's cache; null",
        ),
        (
            "generator.gpu_memory_utilization",
            g.gpu_memory_utilization is None,
            "vLLM needs a number; start from generator=vllm",
        ),
        (
            "offload",
            c.offload,
            "vLLM's memory stays where it is; generator=native, or offload=false",
        ),
    ]
    found = [problem(what, key) for key, wrong, what in impossible if wrong]
    from llamarl.inference.vllm_engine import vllm_problem  # imports torch, so only for vLLM

    return found + [problem(what, "generator.kind") for what in [vllm_problem()] if what]


def placement_problems(
    c: Config, world_size: int, problem: Callable[..., Problem]
) -> list[Problem]:
    found = []
    values = dataclasses.asdict(c.placement)
    if (together := values.pop("colocate")) is not None:
        if len(together) < 2 or not set(together) <= set(COLOCATED):
            found.append(
                problem(
                    f"need two or three of {', '.join(COLOCATED)}; or null", "placement.colocate"
                )
            )
        elif len({tuple(values[name]) for name in together if values[name]}) > 1:
            found.append(
                problem(
                    "share their ranks, but are given different ones",
                    *(f"placement.{n}" for n in together if values[n]),
                )
            )
    for name, ranks in values.items():
        if ranks is None:
            continue
        if not ranks or len(set(ranks)) < len(ranks):
            found.append(problem("need at least one rank, each once; or null", f"placement.{name}"))
        if outside := [rank for rank in ranks if not 0 <= rank < world_size]:
            ranks_are = (
                f"ranks are 0 to {world_size - 1}" if world_size > 1 else "there is one rank, 0"
            )
            found.append(
                problem(
                    f"no rank {show(outside)}: {ranks_are} (torchrun --nproc-per-node)",
                    f"placement.{name}",
                )
            )
    if found:
        return found
    placed = placement_of(c, world_size)
    return _trainer_problems(c, len(placed["trainer"]), problem) + _tensor_parallel_problems(
        c, placed, world_size, problem
    )


def _trainer_problems(c: Config, num_ranks: int, problem: Callable[..., Problem]) -> list[Problem]:
    """Ranks, groups or parts of the model that the trainer's topology cannot share out evenly."""
    found, replicate, t = [], c.trainer.replicate, c.trainer.tensor_parallel
    if num_ranks % (replicate * t):
        keys = [
            f"trainer.{key}"
            for key, size in (("replicate", replicate), ("tensor_parallel", t))
            if size > 1
        ]
        ranks = f"{num_ranks} trainer rank{'s' * (num_ranks > 1)}"
        found.append(
            problem(
                f"{ranks} cannot be split so; set placement.trainer to a multiple of {replicate * t} ranks",
                *keys,
            )
        )
    else:
        dp_ranks = num_ranks // t
        ranks = f"{dp_ranks} {'trainer ranks' if t == 1 else f'sets of {t} trainer ranks'}"
        for key, amount in (("groups_per_step", c.groups_per_step), ("overcommit", c.overcommit)):
            if not isinstance(amount, str) and amount % dp_ranks:
                found.append(
                    problem(f"{ranks} cannot share it evenly; need a multiple of {dp_ranks}", key)
                )
        n = c.trainer.minibatches_per_step
        if n > 1 and c.groups_per_step % dp_ranks == 0 and c.groups_per_step % (dp_ranks * n):
            what = f"{ranks} cannot cut their groups into {n} minibatches each; need a multiple of {dp_ranks * n} groups"
            found.append(problem(what, "groups_per_step", "trainer.minibatches_per_step"))
    if t > 1 and (model := _model(c)) is not None:
        parts = [
            (model.num_attention_heads, "query heads"),
            (model.num_key_value_heads, "key/value heads"),
        ]
        parts.append((model.intermediate_size, "hidden units (intermediate_size)"))
        if uneven := [f"{count} {what}" for count, what in parts if count % t]:
            what = f"the trainer splits the model evenly, but it has {' and '.join(uneven)}"
            found.append(problem(what, "trainer.tensor_parallel"))
    return found


def _tensor_parallel_problems(
    c: Config, placed: dict[str, tuple[int, ...]], world_size: int, problem: Callable[..., Problem]
) -> list[Problem]:
    """Replicas of the generator that are not whole, that the model has too few heads for, or that
    would wait for themselves.
    """
    key, m, found = "generator.tensor_parallel", c.generator.tensor_parallel, []
    if m == 1:
        return found
    generator = placed["generator"]
    if len(generator) % m:
        ranks = f"generator rank{'s' * (len(generator) > 1)} {show(list(generator))}"
        if world_size <= m:
            remedy = (
                f"start at least {m + 1} ranks (torchrun --nproc-per-node={m + 1}), or lower it"
            )
        else:
            remedy = f"set placement.generator to {m} ranks or a multiple, such as {show(list(range(world_size - m, world_size)))}"
        found.append(problem(f"{ranks} cannot be split into replicas of {m}; {remedy}", key))
    if (model := _model(c)) is not None and (heads := model.num_attention_heads) < m:
        found.append(
            problem(
                f"the model has {heads} query heads, fewer than ranks to split them over; at most {heads}",
                key,
            )
        )
    for first in (
        range(0, len(generator), m) if c.max_lag != 0 else ()
    ):  # else one rests while the other works
        both = sorted(set(generator[first : first + m]) & set(placed["trainer"]))
        if len(both) > 1:
            why = f"ranks {show(both)} would share a replica and the trainer, and each wait in one for the other"
            what = f"{why}; place them apart, or max_lag=0"
            found.append(problem(what, key, "placement.trainer", "placement.generator"))
    return found


def _model(c: Config) -> ModelConfig | None:
    """The model's config; None if it cannot be read, which is told elsewhere."""
    try:
        return read_config(c.model.path or TINY_MODEL)
    except (OSError, ValueError):
        return None
