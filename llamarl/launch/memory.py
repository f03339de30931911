"""Predicts the bytes that each executor of a job takes on its ranks, from config files alone.

    for price in prices(job): price.ranks, price.held, price.working

The executors of a rank are stepped in turn, so a rank needs what all of them hold, and the most
that one of them works with. Also predicts the size of a checkpoint on disk.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from llamarl.config.sections.victim import placed_victim
from llamarl.ddma.layout import Destination, Parameter, Source, parameters_to_send
from llamarl.disk.space import free_bytes
from llamarl.inference.schedule import whole_blocks
from llamarl.launch.job import Job
from llamarl.launch.scorers import scorers_of
from llamarl.machine.free_memory import memory_of
from llamarl.memory import (
    GIB,
    ITEMSIZES,
    MOMENTS,
    SLOTS,
    Price,
    Training,
    asking_bytes,
    cache_bytes,
    checkpoint_bytes,
    sampling_bytes,
    update_bytes,
)
from llamarl.models.config import ModelConfig, as_scorer, read_config
from llamarl.models.quantize import quantized_dtype
from llamarl.models.sharding import num_parameters

log = logging.getLogger("llamarl")


def prices(job: Job) -> list[Price]:
    """Return the prices of all models and caches of the job, the trainer's first."""
    found = [*_trainer(job), _generator(job), *_reference(job), *_victim(job)]
    for kind in scorers_of(job.inputs):
        found += kind.memory(job.placement)
    return [*found, *_judges(job)]


def bytes_by_rank(job: Job, found: list[Price]) -> list[int]:
    """Return the bytes that every rank needs: all that is held there, and the most that one part
    works with.
    """
    held = [0] * job.world.size
    working = [0] * job.world.size
    for price in found:
        for rank in price.ranks:
            held[rank] += price.held
            working[rank] = max(working[rank], price.working)
    return [sum(both) for both in zip(held, working)]


def training_of(job: Job) -> Training:
    """Return how a trainer rank computes its updates."""
    t = job.config.trainer
    completions = job.placement.groups_of_update * job.placement.trained_group_size
    return Training(
        itemsize=ITEMSIZES[t.compute_dtype],
        checkpointing=t.activation_checkpointing,
        several=completions > job.placement.longest_microbatch.completions,
        lora_rank=t.lora.rank,
        lora_targets=tuple(t.lora.targets),
        tensor_parallel=t.tensor_parallel,
        shards=_source(job).fsdp,
        moment_bytes=MOMENTS[t.optimizer],
        has_average=t.ema_decay is not None,
        on_cpu=job.world.device.type == "cpu",
    )


# --- Each executor ---


def sent_by(job: Job) -> tuple[list[Parameter], Source, Destination]:
    """Return the weights that travel to the generators, and the topologies that send and receive
    them.
    """
    parameters = _parameters(job, replace(read_config(job.inputs.model_path), lora=job.inputs.lora))
    tensor_parallel = job.config.generator.tensor_parallel
    replicas = len(job.placement["generator"]) // tensor_parallel
    return parameters, _source(job), Destination(tensor_parallel, replicas)


def _source(job: Job) -> Source:
    t = job.config.trainer
    shards = len(job.placement["trainer"]) // (t.replicate * t.tensor_parallel)
    return Source(shards, t.replicate, t.tensor_parallel)


def _parameters(job: Job, model: ModelConfig) -> list[Parameter]:
    """Return the tensors that travel of a model, in the generator's form."""
    g = job.config.generator
    quantized = None
    exclude: tuple[str, ...] = ()
    if g.kind == "native" and g.quantize != "none":
        quantized = quantized_dtype(g.quantize)
        exclude = tuple(g.quantize_exclude)
    return parameters_to_send(model, getattr(torch, job.config.model.dtype), quantized, exclude)


def _bytes_of(
    model: ModelConfig, parameters: list[Parameter], topology: Source | Destination
) -> int:
    """Return the bytes of these tensors on the first rank of a replica."""
    own = [(topology.box(model, p, 0).numel, p.dtype.itemsize) for p in parameters]
    return sum(numel * itemsize for numel, itemsize in own)


def _trainer(job: Job, *, checkpointing: bool | None = None) -> Iterator[Price]:
    """Price the trainer, its critic and its reference. checkpointing: None: the config's."""
    c = job.config
    ranks = job.placement["trainer"]
    model = read_config(job.inputs.model_path)
    training = training_of(job)
    if checkpointing is not None:
        training = replace(training, checkpointing=checkpointing)
    size = job.placement.longest_microbatch
    parameters, source, _ = sent_by(job)
    slots = SLOTS * _bytes_of(model, parameters, source)
    policy = update_bytes(model, size, training)
    weights = job.placement.weights_bytes("trainer", model, c.model.dtype)
    if c.reference.kind == "reset":  # what it takes has slots of its own
        slots += slots if job.inputs.lora else SLOTS * weights
    working = policy.working
    found = []
    if c.trainer.advantages == "gae" and c.trainer.critic.trunk == "own":
        critic_model = read_config(c.trainer.critic.path or job.inputs.model_path)
        if not critic_model.labels:
            critic_model = as_scorer(critic_model)
        critic = update_bytes(critic_model, size, replace(training, lora_rank=0))
        # Policy and critic go forward and backward one after the other, while the gradients of both
        # are held.
        before = critic.gradients + critic.copies if training.several else 0
        working = max(working + before, policy.gradients + policy.copies + critic.working)
        found.append(Price("critic", ranks, critic.held))
    if c.reference.kind == "sharded":
        found.append(Price("reference", ranks, weights))
    yield Price("trainer", ranks, policy.held + slots, working)
    yield from found


def _generator(job: Job) -> Price:
    g = job.config.generator
    ranks = job.placement["generator"]
    model = read_config(job.inputs.model_path)
    if g.kind == "vllm":  # it takes a share of what is free
        return Price("generator", ranks, int(g.gpu_memory_utilization * _free(job)))
    parameters, _, destination = sent_by(job)
    weights = _bytes_of(model, parameters, destination)
    held = SLOTS * weights
    if job.inputs.lora:  # beside weights that are read once
        base = _bytes_of(model, _parameters(job, model), destination)
        weights += base
        held += weights
    held += _laid_out(job, weights)
    tokens = g.cache_tokens or g.max_slots * whole_blocks(job.config.longest_asked)
    tokens += job.config.kept_tokens
    held += cache_bytes(model, tokens, job.config.model.dtype, g.tensor_parallel)
    return Price("generator", ranks, held, sampling_bytes(model, g.max_slots))


def _free(job: Job) -> int:
    return memory_of(job.world.device) or 0


def _laid_out(job: Job, weights: int) -> int:
    """Return the bytes of the second copy of weights that a CPU's kernels need."""
    return weights if job.world.device.type == "cpu" else 0


def _reference(job: Job) -> Iterator[Price]:
    r = job.config.reference
    if not r.placed:
        return
    dtype = job.config.model.dtype
    ranks = job.placement["reference"]
    for path in job.inputs.reference_paths:
        model = read_config(path)
        weights = job.placement.weights_bytes("reference", model, dtype)
        # The second one receives the next version, unless that is of adapters alone.
        held = weights if r.kind == "frozen" or job.inputs.lora else 2 * weights
        if r.stream:
            tokens = job.placement.stream_cache_tokens("reference")
            held += cache_bytes(model, tokens, dtype, r.tensor_parallel)
        working = asking_bytes(model, job.placement.longest_microbatch, dtype)
        name = "reference"
        if r.given:
            name = f"reference {path}"
        yield Price(name, ranks, held, working)


def _victim(job: Job) -> Iterator[Price]:
    if job.inputs.victim_path is None:
        return
    v = placed_victim(job.config.victim)
    model = read_config(job.inputs.victim_path)
    weights = num_parameters(model) * ITEMSIZES[v.dtype]
    held = weights + _laid_out(job, weights)
    held += cache_bytes(model, v.max_slots * whole_blocks(v.longest), v.dtype)
    yield Price("victim", job.placement["victim"], held, sampling_bytes(model, v.max_slots))


def _judges(job: Job) -> Iterator[Price]:
    """Yield the prices of the models that judge evaluations. An embedder is whole on the reward's
    first rank.
    """
    c = job.config
    ranks = job.placement["reward"]
    if c.eval.base is not None:
        yield job.placement.asked_by_reward("eval.base", c.eval.base, c.model.dtype)
    if c.eval.embedder is not None:
        yield Price("eval.embedder", ranks[:1], job.inputs.embedder(c.eval.embedder).num_bytes)


# --- In words ---


def rank_map(job: Job, found: list[Price]) -> list[str]:
    """Return lines that say which ranks host what and how much it takes. Equal neighbours share a
    line.
    """
    texts = []
    for rank, num_bytes in enumerate(bytes_by_rank(job, found)):
        hosted = [name for name, ranks in job.placement.items() if rank in ranks]
        texts.append((", ".join(hosted), f"{num_bytes / GIB:.2f} GiB"))
    lines = []
    first = 0
    for (hosted_here, size), equal in itertools.groupby(texts):
        end = first + len(list(equal))
        said = f"{hosted_here or '(nothing)'}, {size}"
        if end - first == 1:
            lines.append(f"rank {first:<4}{said}")
        else:
            lines.append(f"ranks {first}-{end - 1}: {said}{' each' if hosted_here else ''}")
        first = end
    return lines


def memory_lines(job: Job, found: list[Price]) -> list[str]:
    """Return lines about what each part takes, and about the trainer's step with activation
    checkpointing.
    """
    lines = []
    for price in found:
        said = f"memory   {price.name}: {price.held / GIB:.2f} GiB held"
        if price.working:
            said += f" and {price.working / GIB:.2f} at the peak of a step"
        where = "a rank" if len(price.ranks) > 1 else f"on rank {price.ranks[0]}"
        lines.append(f"{said}, {where}")
    without, saved = (_working(job, checkpointing) for checkpointing in (False, True))
    lines.append(
        f"         an update with sequences of {job.config.longest:,} tokens: "
        f"{without / GIB:.2f} GiB, or {saved / GIB:.2f} with trainer.activation_checkpointing=true"
    )
    return lines


def _working(job: Job, checkpointing: bool) -> int:
    """Return the bytes at the peak of a trainer's step, with activation checkpointing or not."""
    return next(_trainer(job, checkpointing=checkpointing)).working


def warn_of_memory(job: Job, found: list[Price]) -> None:
    """Warn if this machine's ranks, or this rank's GPU, need more than is free."""
    if job.world.is_imagined:
        return
    free = memory_of(job.world.device)
    if free is None:
        return
    by_rank = bytes_by_rank(job, found)
    neighbours = [rank for rank in range(job.world.size) if job.world.shares_memory(rank)]
    needed = sum(by_rank[rank] for rank in neighbours)
    if needed <= free:
        return
    ranks = f"rank {neighbours[0]}"
    if len(neighbours) > 1:
        ranks = f"the {len(neighbours)} ranks of this machine"
    log.warning(
        "memory: %s will take %.2f GiB, and %.2f are free. %s",
        ranks,
        needed / GIB,
        free / GIB,
        _remedies(job, found, neighbours),
    )


def _remedies(job: Job, found: list[Price], ranks: list[int]) -> str:
    """Return, in words, how to lower the part that takes most on these ranks."""
    c = job.config
    shares = {price: price.total * len(set(price.ranks) & set(ranks)) for price in found}
    largest = max(shares, key=lambda price: shares[price])
    if largest.name == "generator" and c.generator.kind == "vllm":
        return "The generator takes most of it; lower generator.gpu_memory_utilization"
    if largest.name == "generator":
        return "The generator takes most of it; lower generator.max_slots or generator.cache_tokens"
    if largest.name not in ("trainer", "critic"):
        return f"Most of it is for {largest.name}; use a smaller model, or give it more ranks"
    remedies = []
    if not c.trainer.activation_checkpointing:
        saved = (_working(job, False) - _working(job, True)) / GIB
        remedies.append(f"trainer.activation_checkpointing=true ({saved:.2f} GiB less a rank)")
    remedies += ["a lower trainer.microbatch_tokens, task.max_prompt_tokens or max_new_tokens"]
    remedies += ["trainer.lora.rank=16, trainer.optimizer=adamw8bit, or more trainer ranks"]
    return f"The trainer takes most of it; {'; '.join(remedies)}"


def announce_memory(job: Job) -> None:
    """Print at a run's start, on rank 0, what sequences beyond the budget of a microbatch take.
    Warn if memory is too small.
    """
    c = job.config
    found = prices(job)
    if c.longest > c.trainer.microbatch_tokens:
        taken = _working(job, c.trainer.activation_checkpointing) / GIB
        remedy = ""
        if not c.trainer.activation_checkpointing:
            saved = _working(job, True) / GIB
            remedy = f", {saved:.2f} with trainer.activation_checkpointing=true"
        budget = f"trainer.microbatch_tokens={c.trainer.microbatch_tokens}"
        print(
            f"memory   sequences of up to {c.longest:,} tokens, beyond {budget}: an update works "
            f"with {taken:.2f} GiB a trainer rank{remedy}"
        )
    warn_of_memory(job, found)


# --- The disk ---


def checkpoint_bytes_of(job: Job) -> int:
    """Return about how many bytes a checkpoint of this run takes."""
    c = job.config
    training = training_of(job)
    export_itemsize = getattr(torch, c.model.dtype).itemsize
    total = checkpoint_bytes(read_config(job.inputs.model_path), training, export_itemsize)
    if c.trainer.advantages == "gae" and c.trainer.critic.trunk == "own":
        critic = read_config(c.trainer.critic.path or job.inputs.model_path)
        total += checkpoint_bytes(critic, replace(training, lora_rank=0), 0)
    return math.ceil(total)


def warn_of_disk(job: Job) -> None:
    """Warn if the disk of the run directory has no room for the checkpoints that are there at once:
    those that are kept, and one in writing.
    """
    c = job.config
    folder = job.files.directory.path / "checkpoints"
    made = math.ceil(c.max_steps / c.checkpoint.every) if c.checkpoint.every else 1
    there = len(list(folder.glob("step_*")))
    missing = min(made, c.checkpoint.keep + 1 - min(there, c.checkpoint.keep))
    size = checkpoint_bytes_of(job)
    free = free_bytes(folder)
    if missing * size > free:
        log.warning(
            "%s: the disk has %.2f GiB free, and %d more checkpoints of about %.2f GiB need %.2f "
            "(checkpoint.keep=%d and one in writing). Make room, or lower checkpoint.keep",
            folder,
            free / GIB,
            missing,
            size / GIB,
            missing * size / GIB,
            c.checkpoint.keep,
        )
