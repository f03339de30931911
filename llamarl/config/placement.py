"""Which executor runs on which ranks, and what ranks and model cannot do. Without torch."""

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
    placement = _with_shared_ranks(placement, everyone)
    trainer = tuple(placement.trainer or ())
    if not trainer:
        trainer = _trainer_ranks(
            everyone,
            tuple(placement.generator or ()),
            groups_per_step=groups_per_step,
            tensor_parallel=tensor_parallel,
        )
    rest = tuple(rank for rank in everyone if rank not in trainer)
    in_replicas = len(rest) // tensor_parallel * tensor_parallel
    generator = tuple(placement.generator or rest[:in_replicas] or rest or everyone)
    spare = tuple(rank for rank in rest if rank not in generator) or generator
    return {
        "trainer": trainer,
        "generator": generator,
        "reward": tuple(placement.reward or spare[-1:]),
        "reference": tuple(placement.reference or spare[-1:]),
    }


def _with_shared_ranks(
    placement: PlacementSettings, everyone: tuple[int, ...]
) -> PlacementSettings:
    """The same with the ranks of placement.colocate written out for each executor of it."""
    if not placement.colocate:
        return placement
    together = sorted(set(placement.colocate) & set(COLOCATED))
    given = [getattr(placement, name) for name in together]
    shared = next((ranks for ranks in given if ranks), everyone)
    ranks_of = {name: list(shared) for name in together}
    return dataclasses.replace(placement, colocate=None, **ranks_of)


def _trainer_ranks(
    everyone: tuple[int, ...],
    generator: tuple[int, ...],
    *,
    groups_per_step: int,
    tensor_parallel: int,
) -> tuple[int, ...]:
    """The trainer's ranks where none are given; generator: the ranks that are given for it."""
    world_size = len(everyone)
    free = tuple(rank for rank in everyone if rank not in generator) or everyone
    most = max(1, min(world_size // 2, len(free)))
    sizes = [n for n in range(most, 0, -1) if groups_per_step % n == 0]
    if generator:
        return free[: sizes[0]]
    left_by = {n: world_size - n for n in sizes}  # ranks that such a trainer leaves to generators
    whole = [n for n in sizes if left_by[n] > 0 and left_by[n] % tensor_parallel == 0]
    enough = [n for n in sizes if left_by[n] >= tensor_parallel]
    best = whole or enough or sizes
    return free[: best[0]]


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
    if not config.reference.enabled:
        del placed["reference"]
    hosts = set().union(*placed.values())
    return tuple(rank for rank in range(world_size) if rank not in hosts)


def placement_problems(
    c: Config, world_size: int, problem: Callable[..., Problem]
) -> list[Problem]:
    """Ranks that cannot be, or cannot host what is placed on them. problem: makes one of what is
    wrong and the keys that it is about.
    """
    values = dataclasses.asdict(c.placement)
    together = values.pop("colocate")
    given = {name: ranks for name, ranks in values.items() if ranks is not None}
    found = []
    if together is not None:
        found += _colocation_problems(together, given, problem)
    for name, ranks in given.items():
        key = f"placement.{name}"
        if not ranks or len(set(ranks)) < len(ranks):
            found.append(problem("need at least one rank, each once; or null", key))
        outside = [rank for rank in ranks if not 0 <= rank < world_size]
        if outside:
            there_are = "there is one rank, 0"
            if world_size > 1:
                there_are = f"ranks are 0 to {world_size - 1}"
            what = f"no rank {show(outside)}: {there_are} (torchrun --nproc-per-node)"
            found.append(problem(what, key))
    if found:
        return found
    placed = placement_of(c, world_size)
    return [
        *_trainer_problems(c, len(placed["trainer"]), problem),
        *_tensor_parallel_problems(c, placed, world_size, problem),
    ]


def _colocation_problems(
    together: list[str], given: dict[str, list[int]], problem: Callable[..., Problem]
) -> list[Problem]:
    """Executors that cannot share ranks, or are given different ones."""
    if len(together) < 2 or not set(together) <= set(COLOCATED):
        what = f"need two or three of {', '.join(COLOCATED)}; or null"
        return [problem(what, "placement.colocate")]
    placed = [name for name in together if given.get(name)]
    if len({tuple(given[name]) for name in placed}) > 1:
        keys = [f"placement.{name}" for name in placed]
        return [problem("share their ranks, but are given different ones", *keys)]
    return []


def _trainer_problems(c: Config, num_ranks: int, problem: Callable[..., Problem]) -> list[Problem]:
    """Ranks, groups or parts of the model that the trainer's topology cannot share out evenly."""
    t = c.trainer.tensor_parallel
    found = _split_problems(c, num_ranks, problem)
    model = _model(c)
    if t == 1 or model is None:
        return found
    parts = {
        "query heads": model.num_attention_heads,
        "key/value heads": model.num_key_value_heads,
        "hidden units (intermediate_size)": model.intermediate_size,
    }
    uneven = [f"{count} {what}" for what, count in parts.items() if count % t]
    if uneven:
        what = f"the trainer splits the model evenly, but it has {' and '.join(uneven)}"
        found.append(problem(what, "trainer.tensor_parallel"))
    return found


def _split_problems(c: Config, num_ranks: int, problem: Callable[..., Problem]) -> list[Problem]:
    """Ranks that do not make whole replicas, or groups that these cannot share."""
    t = c.trainer.tensor_parallel
    sizes = {"trainer.replicate": c.trainer.replicate, "trainer.tensor_parallel": t}
    unit = c.trainer.replicate * t
    if num_ranks % unit:
        keys = [key for key, size in sizes.items() if size > 1]
        ranks = "1 trainer rank" if num_ranks == 1 else f"{num_ranks} trainer ranks"
        remedy = f"set placement.trainer to a multiple of {unit} ranks"
        return [problem(f"{ranks} cannot be split so; {remedy}", *keys)]
    found = []
    dp_ranks = num_ranks // t
    ranks = f"{dp_ranks} trainer ranks"
    if t > 1:
        ranks = f"{dp_ranks} sets of {t} trainer ranks"
    for key, amount in {"groups_per_step": c.groups_per_step, "overcommit": c.overcommit}.items():
        if not isinstance(amount, str) and amount % dp_ranks:
            what = f"{ranks} cannot share it evenly; need a multiple of {dp_ranks}"
            found.append(problem(what, key))
    n = c.trainer.minibatches_per_step
    is_shared = c.groups_per_step % dp_ranks == 0
    if n > 1 and is_shared and c.groups_per_step % (dp_ranks * n):
        what = (
            f"{ranks} cannot cut their groups into {n} minibatches each; "
            f"need a multiple of {dp_ranks * n} groups"
        )
        found.append(problem(what, "groups_per_step", "trainer.minibatches_per_step"))
    return found


def _tensor_parallel_problems(
    c: Config, placed: dict[str, tuple[int, ...]], world_size: int, problem: Callable[..., Problem]
) -> list[Problem]:
    """Replicas of the generator that are not whole, that the model has too few heads for, or that
    would wait for themselves.
    """
    key = "generator.tensor_parallel"
    m = c.generator.tensor_parallel
    if m == 1:
        return []
    found = []
    generator = placed["generator"]
    if len(generator) % m:
        noun = "generator rank" if len(generator) == 1 else "generator ranks"
        example = show(list(range(world_size - m, world_size)))
        remedy = f"set placement.generator to {m} ranks or a multiple, such as {example}"
        if world_size <= m:
            count = f"at least {m + 1} ranks (torchrun --nproc-per-node={m + 1})"
            remedy = f"start {count}, or lower it"
        what = f"{noun} {show(list(generator))} cannot be split into replicas of {m}; {remedy}"
        found.append(problem(what, key))
    model = _model(c)
    if model is not None and model.num_attention_heads < m:
        heads = model.num_attention_heads
        what = f"the model has {heads} query heads, fewer than ranks to split them over"
        found.append(problem(f"{what}; at most {heads}", key))
    if c.max_lag == 0:  # one rests while the other works
        return found
    for first in range(0, len(generator), m):
        replica = generator[first : first + m]
        both = sorted(set(replica) & set(placed["trainer"]))
        if len(both) > 1:
            what = (
                f"ranks {show(both)} would share a replica and the trainer, "
                "and each wait in one for the other; place them apart, or max_lag=0"
            )
            found.append(problem(what, key, "placement.trainer", "placement.generator"))
    return found


def _model(c: Config) -> ModelConfig | None:
    """The model's config; None if it cannot be read, which is told elsewhere."""
    try:
        return read_config(c.model.path or TINY_MODEL)
    except (OSError, ValueError):
        return None
