"""Placement: which executor runs on which ranks, and what ranks and model cannot do. Imports no
torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from itertools import chain
from pathlib import Path

from llamarl.config.schema import Config
from llamarl.config.sections.placement import COLOCATED, find_given_ranks
from llamarl.models.config import ModelConfig, read_config, tiny_directory
from llamarl.models.shape import AUTO
from llamarl.models.sharding import why_not_split
from llamarl.words.findings import Findings, show

TINY_MODEL = tiny_directory()

Ranks = tuple[int, ...]


def placement_of(config: Config, world_size: int) -> dict[str, Ranks]:
    """Return executor name -> its ranks in this run, with every null filled in. Reference and
    victim are left out if they have no ranks of their own.

    Trainers take the first half of the ranks (as many as divide groups_per_step, or a prompt's
    completions where these are split, and leave a multiple of generator.tensor_parallel if that can
    be), generators the rest, as far as it makes whole replicas, and reward, reference and victim a
    rank that hosts nothing yet or else the generators' last. One rank hosts everything. Executors
    of placement.colocate share the ranks given for one of them, or all.
    """
    tensor_parallel = config.generator.tensor_parallel
    everyone = list(range(world_size))
    given = dataclasses.asdict(config.placement)
    together = [name for name in COLOCATED if name in (given["colocate"] or ())]
    shared = [given[name] for name in together if given[name]]
    given.update(dict.fromkeys(together, shared[0] if shared else everyone))
    trainer = given["trainer"]
    generator = given["generator"] or []
    if not trainer:
        free = [rank for rank in everyone if rank not in generator] or everyone
        most = max(1, min(world_size // 2, len(free)))
        amount = config.trained_per_prompt if config.splits_prompts else config.groups_per_step
        sizes = [n for n in range(most, 0, -1) if amount % n == 0]
        if not generator:
            left_by = {n: world_size - n for n in sizes}  # ranks that are left to generators
            whole = [n for n in sizes if left_by[n] > 0 and left_by[n] % tensor_parallel == 0]
            enough = [n for n in sizes if left_by[n] >= tensor_parallel]
            sizes = whole or enough or sizes
        trainer = free[: sizes[0]]
    rest = [rank for rank in everyone if rank not in trainer]
    in_replicas = len(rest) // tensor_parallel * tensor_parallel
    generator = generator or rest[:in_replicas] or rest or everyone
    spare = [rank for rank in rest if rank not in generator] or generator
    placed = {
        "trainer": tuple(trainer),
        "generator": tuple(generator),
        "reward": tuple(given["reward"] or spare[-1:]),
    }
    if config.reference.placed:
        placed["reference"] = tuple(given["reference"] or spare[-1:])
    if config.victim.placed:
        placed["victim"] = tuple(given["victim"] or spare[-1:])
    return placed


def idle_ranks(config: Config, world_size: int) -> list[int]:
    """Return the ranks that would host nothing."""
    world_size = config.ranks or world_size
    hosts = set().union(*placement_of(config, world_size).values())
    return [rank for rank in range(world_size) if rank not in hosts]


def find_placement(c: Config, world_size: int, found: Findings) -> None:
    """Find ranks that do not exist, or that cannot host what is placed on them."""
    if not find_given_ranks(c.placement, found, world_size=world_size):
        return
    placed = placement_of(c, world_size)
    model = _model_at(c.model.path or TINY_MODEL, c.model.implementation)
    if c.device == "mps":
        _find_apple(c, placed, found)
    _find_trainer(c, len(placed["trainer"]), model, found)
    _find_shared_models(c, placed, model, found)
    if c.generator.tensor_parallel > 1:
        _find_replicas(c, placed, world_size, found)
        _find_heads("generator", c.generator.tensor_parallel, "model", model, found)
    _find_rings(c, placed, found)


def _find_apple(c: Config, placed: dict[str, Ranks], found: Findings) -> None:
    """Find what a Mac's one GPU cannot do: it has no collectives, memory of its own, or float8."""
    for name, ranks in placed.items():
        if name != "generator" and len(ranks) > 1:
            what = f"ranks cannot share a model on a Mac's GPU; placement.{name}=[{ranks[0]}]"
            found.add(what, "device", f"placement.{name}")
    has = {
        "generator.tensor_parallel": c.generator.tensor_parallel > 1,
        "generator.quantize": c.generator.quantize != "none",
        "generator.kind": c.generator.kind == "vllm",
        "offload": c.offload,
        "trainer.cpu_offload": c.trainer.cpu_offload,
    }
    for key, is_wanted in has.items():
        if is_wanted:
            found.add("not on a Mac's GPU; leave it out, or device=cpu", "device", key)


def _find_heads(
    section: str, size: int, noun: str, model: ModelConfig | None, found: Findings
) -> None:
    """Find more ranks than query heads, or than can share transformers' modules."""
    if model is None or _find_unsplit(section, size, noun, model, found):
        return
    if model.num_attention_heads >= size:
        return
    heads = model.num_attention_heads
    what = f"the {noun} has {heads} query heads, fewer than the ranks that share them"
    found.add(f"{what}; at most {heads}", f"{section}.tensor_parallel")


def _find_trainer(c: Config, num_ranks: int, model: ModelConfig | None, found: Findings) -> None:
    """Find ranks that do not make whole replicas of the trainer, and groups or parts of the model
    that they cannot share evenly.
    """
    t, n = c.trainer.tensor_parallel, c.trainer.minibatches_per_step
    replica = c.trainer.replicate * t
    dp_ranks = num_ranks // t
    if num_ranks % replica:
        sizes = {"trainer.replicate": c.trainer.replicate, "trainer.tensor_parallel": t}
        keys = [key for key, size in sizes.items() if size > 1]
        ranks = "1 trainer rank" if num_ranks == 1 else f"{num_ranks} trainer ranks"
        remedy = f"set placement.trainer to a multiple of {replica} ranks"
        found.add(f"{ranks} cannot make whole replicas; {remedy}", *keys)
    else:
        ranks = f"{dp_ranks} trainer ranks" if t == 1 else f"{dp_ranks} sets of {t} trainer ranks"
        if c.splits_prompts:
            shared = ("buffer.completions_per_prompt", "group_size")
            _find_share(ranks, dp_ranks, c.trained_per_prompt, shared, found)
        else:
            _find_share(ranks, dp_ranks, c.groups_per_step, ("groups_per_step",), found)
        if not c.draws_together and not isinstance(c.overcommit, str):
            _find_share(ranks, dp_ranks, c.overcommit, ("overcommit",), found)
        # Each rank cuts its own groups, or its part of every group.
        unit = n if c.splits_prompts else dp_ranks * n
        are_shared = c.splits_prompts or c.groups_per_step % dp_ranks == 0
        if are_shared and c.groups_per_step % unit:
            what = f"{ranks} cannot cut their groups into {n} minibatches each"
            remedy = f"need a multiple of {unit} groups"
            found.add(f"{what}; {remedy}", "groups_per_step", "trainer.minibatches_per_step")
    critic = c.trainer.critic.path and _model_at(c.trainer.critic.path)
    _find_uneven("trainer", t, "model", model, found)
    _find_uneven("trainer", t, "value model", critic or None, found)


def _find_share(
    ranks: str, dp_ranks: int, amount: int, keys: tuple[str, ...], found: Findings
) -> None:
    """Find amounts that data-parallel ranks cannot share evenly."""
    if amount % dp_ranks:
        what = f"{ranks} cannot share {amount} evenly; need a multiple of {dp_ranks}"
        found.add(what, *keys)


def _find_uneven(
    section: str, size: int, noun: str, model: ModelConfig | None, found: Findings
) -> None:
    """Find parts of a model that tensor-parallel ranks cannot share evenly."""
    if model is None or _find_unsplit(section, size, noun, model, found):
        return
    parts = {
        "query heads": model.num_attention_heads,
        "key/value heads": model.num_key_value_heads,
        "hidden units (intermediate_size)": model.intermediate_size,
    }
    uneven = [f"{count} {what}" for what, count in parts.items() if count % size]
    if uneven:
        what = f"the {section} splits the {noun} evenly, but it has {' and '.join(uneven)}"
        found.add(what, f"{section}.tensor_parallel")


def _find_unsplit(section: str, size: int, noun: str, model: ModelConfig, found: Findings) -> bool:
    """Find layers of transformers' modules that so many ranks cannot share. Return whether these
    modules compute the model.
    """
    why = why_not_split(model, size)
    if why:
        remedy = f"set {section}.tensor_parallel=1"
        if section == "trainer":
            remedy += "; more trainer ranks share its layers by FSDP"
        found.add(f"the {noun}: {why}; {remedy}", f"{section}.tensor_parallel")
    return model.implementation == "transformers"


def _model_at(path: str | Path, made_by: str = AUTO) -> ModelConfig | None:
    try:
        return read_config(path, made_by)
    except (OSError, ValueError):
        return None  # reported elsewhere


def judge_models(c: Config) -> dict[str, str]:
    """Return the models that judge evaluations, which the reward's ranks hold together: their
    directories by key.
    """
    found = {}
    if c.gold is not None and c.gold.sharded_model is not None:
        found["eval.gold"] = c.gold.sharded_model
    if c.eval.base is not None:
        found["eval.base"] = c.eval.base
    return found


def _find_shared_models(
    c: Config, placed: dict[str, Ranks], model: ModelConfig | None, found: Findings
) -> None:
    """Find ranks of the reward or the reference that do not make whole copies of its model, or that
    would wait for each other: the ranks of such an executor act as one, led by the first.
    """
    judges = judge_models(c)
    shared = {f"scorer {path}": path for path in c.scorers.values()}
    shared |= {f"model {key}={path}": path for key, path in judges.items()}
    noun = "scorer" if c.scorers else " and ".join(judges)
    if shared:
        size = c.reward.tensor_parallel
        sizes = {"reward.replicate": c.reward.replicate, "reward.tensor_parallel": size}
        _find_copies("reward", placed, sizes, found)
        _find_waits("reward", noun, c, placed, found)
        for name, path in shared.items():
            _find_heads("reward", size, name, _model_at(path), found)
    if not c.reference.placed:
        return
    sizes = {"reference.replicate": c.reference.replicate}
    sizes["reference.tensor_parallel"] = c.reference.tensor_parallel
    _find_copies("reference", placed, sizes, found)
    _find_waits("reference", "reference", c, placed, found)
    asked = {"model": model}
    if c.reference.given:
        asked = {f"model {key}": _model_at(path) for key, path in c.reference.given.items()}
    for name, one in asked.items():
        _find_uneven("reference", c.reference.tensor_parallel, name, one, found)
    both = sorted(set(placed["reward"]) & set(placed["reference"]))
    leader = placed["reward"][0]
    if shared and len(both) > 1 and leader != placed["reference"][0]:
        what = (
            f"ranks {show(both)} would share the {noun} and the reference, which other ranks "
            "lead, so one rank could wait in the first and another in the second for ever; begin "
            f"both with rank {leader}, or place them apart"
        )
        found.add(what, "placement.reward", "placement.reference")


def _find_copies(
    name: str, placed: dict[str, Ranks], sizes: dict[str, int], found: Findings
) -> None:
    """Find ranks of an executor that do not make whole copies. sizes: by key, what divides them."""
    num_ranks = len(placed[name])
    unit = math.prod(sizes.values())
    if num_ranks % unit:
        what = f"{num_ranks} ranks of placement.{name} cannot make whole copies"
        remedy = f"set placement.{name} to a multiple of {unit} ranks"
        found.add(f"{what}; {remedy}", *sizes)


def _find_waits(name: str, noun: str, c: Config, placed: dict[str, Ranks], found: Findings) -> None:
    """Find ranks that would wait for each other, because each works for another executor first. All
    ranks of the executor act as one.

    Without lag the trainer waits for what is scored. But held-out completions are scored while it
    trains, so that one rank must begin both, one after the other.
    """
    ranks = placed[name]
    leader = placed["trainer"][0]
    shared = sorted(set(ranks) & set(placed["trainer"]))
    if len(shared) > 1 and c.synchronous and ranks[0] != leader:
        what = (
            f"ranks {show(shared)} would share the trainer and a {noun} that another rank leads, "
            "so one rank could wait in the first and another in the second for ever; begin both "
            f"with rank {leader}, or place them apart"
        )
        found.add(what, f"placement.{name}", "placement.trainer")
    if len(shared) > 1 and c.synchronous and getattr(c, name).stream:
        what = (
            f"ranks {show(shared)} would share the trainer and a {noun} that reads while others "
            "sample, so one rank could wait in the first and another in the second for ever; "
            f"place them apart, or {name}.stream=false"
        )
        found.add(what, f"placement.{name}", "placement.trainer", f"{name}.stream")
    if len(shared) > 1 and not c.synchronous:
        what = (
            f"ranks {show(shared)} would share the {noun} and the trainer, so one rank could wait "
            "in the first and another in the second for ever; place them apart, or max_lag=0"
        )
        found.add(what, f"placement.{name}", "placement.trainer")
    m = c.generator.tensor_parallel
    generator = placed["generator"]
    for first in range(0, len(generator), m):
        both = sorted(set(ranks) & set(generator[first : first + m]))
        if len(both) > 1 and generator[first] != ranks[0]:
            what = (
                f"ranks {show(both)} would share the {noun} and a replica of the generator that "
                "another rank leads, so one rank could wait in the first and another in the "
                f"second for ever; begin both with rank {generator[first]}, or place them apart"
            )
            found.add(what, f"placement.{name}", "generator.tensor_parallel")


def _find_replicas(c: Config, placed: dict[str, Ranks], world_size: int, found: Findings) -> None:
    """Find replicas of the generator that are not whole, or whose ranks wait for each other."""
    key = "generator.tensor_parallel"
    m = c.generator.tensor_parallel
    generator = list(placed["generator"])
    if len(generator) % m:
        noun = "generator rank" if len(generator) == 1 else "generator ranks"
        example = show(list(range(world_size - m, world_size)))
        remedy = f"set placement.generator to {m} ranks or a multiple, such as {example}"
        if world_size <= m:
            count = f"at least {m + 1} ranks (torchrun --nproc-per-node={m + 1})"
            remedy = f"start {count}, or lower it"
        what = f"{noun} {show(generator)} cannot be split into replicas of {m}"
        found.add(f"{what}; {remedy}", key)
    for first in range(0, len(generator), m):
        replica = generator[first : first + m]
        both = [rank for rank in replica if rank in placed["trainer"]]
        if len(both) < 2:
            continue
        remedy = "place them apart, or max_lag=0"
        if c.synchronous:
            # They take turns: the last save waits for a replica that a rank of the trainer leads.
            if replica[0] in both:
                continue
            remedy = f"begin the replica with rank {both[0]}, or place them apart"
        what = (
            f"ranks {show(sorted(both))} would share a replica and the trainer, so one rank "
            f"could wait in the first and another in the second for ever; {remedy}"
        )
        found.add(what, key, "placement.trainer", "placement.generator")


def _find_rings(c: Config, placed: dict[str, Ranks], found: Findings) -> None:
    """Find three or more executors in a ring, each of which shares a rank with the next: in each,
    one rank could wait for another that is in the next.

    Executors that one rank leads are one here, since they do all in its order. So are those that
    share two ranks: what is wrong with these is found elsewhere.
    """
    sets: list[tuple[str, Ranks]] = [("trainer", placed["trainer"])]
    if c.scorers or judge_models(c):
        sets.append(("reward", placed["reward"]))
    if c.reference.placed:
        sets.append(("reference", placed["reference"]))
    m = c.generator.tensor_parallel
    generator = placed["generator"]
    for first in range(0, len(generator), m):
        sets.append(("generator", generator[first : first + m]))
    joined: list[tuple[set[str], set[int]]] = []
    leads: dict[int, tuple[set[str], set[int]]] = {}  # the first rank -> what it is joined to
    for name, ranks in sets:
        if len(ranks) < 2:
            continue  # waits for nobody
        one = leads.get(ranks[0])
        for other in joined:
            if one is None and len(other[1].intersection(ranks)) > 1:
                one = other
        if one is None:
            one = (set(), set())
            joined.append(one)
        leads[ranks[0]] = one
        one[0].add(name)
        one[1].update(ranks)
    ring = _ring_of(joined)
    if ring:
        keys = sorted({f"placement.{name}" for name in ring})
        what = (
            f"each of {', '.join(sorted(ring))} shares a rank with the next, in a ring, so that "
            "each could wait for the next for ever; place one of them on ranks of its own"
        )
        found.add(what, *keys)


def _ring_of(sets: list[tuple[set[str], set[int]]]) -> set[str]:
    """Return the names of sets that close a ring over the ranks that they share; none without."""
    # Ranks of no two sets can be in no ring, nor sets with fewer than two ranks of others.
    left = list(sets)
    while True:
        counts = Counter(chain.from_iterable(ranks for _, ranks in left))
        kept = []
        for names, ranks in left:
            if sum(counts[rank] > 1 for rank in ranks) > 1:
                kept.append((names, ranks))
        if len(kept) == len(left):
            return set().union(*(names for names, _ in kept))
        left = kept
