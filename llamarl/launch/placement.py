"""Placement: the ranks of each executor, and how a job's work is dealt out over them. A hardware
profile may choose how many ranks train and how many generate (placement.sheet).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Literal

from llamarl.config.command_line import Config
from llamarl.config.placement import TINY_MODEL, Ranks, placement_of
from llamarl.config.sections.buffer import ReplayBufferSettings
from llamarl.inference.schedule import whole_blocks
from llamarl.learning.losses import resolve_loss
from llamarl.learning.losses.common import has_mark
from llamarl.learning.replay import lag_bound
from llamarl.memory import (
    GIB,
    MicrobatchSize,
    Price,
    asking_bytes,
    cache_bytes,
    longest_microbatch,
    weights_bytes,
)
from llamarl.models.config import ModelConfig, read_config
from llamarl.planner.profile import read_profile
from llamarl.planner.search import SearchSettings, best_of
from llamarl.tickets.ledger import free_overcommit


class Placement(dict[str, Ranks]):
    """Executor name -> its ranks, with 4 ranks: {"generator": (2, 3), "reward": (3,), "trainer":
    (0, 1)}. A recipe may add an executor of its own.
    """

    def __init__(self, config: Config, world_size: int):
        super().__init__(placement_of(config, world_size))
        self.config = config

    @property
    def num_generators(self) -> int:
        """How many replicas of the generator there are. The ranks that share a copy of the model
        are one.
        """
        return len(self["generator"]) // self.config.generator.tensor_parallel

    @property
    def sync_period(self) -> int:
        """Steps after which new groups join the buffer."""
        buffer = self.config.buffer
        return buffer.sync_period if isinstance(buffer, ReplayBufferSettings) else 1

    @property
    def num_on_their_way(self) -> int:
        """How many groups may be between the ledger and the trainer, if nothing bounds the lag."""
        c = self.config
        overcommit = c.overcommit
        if isinstance(overcommit, str):
            overcommit = free_overcommit(c.groups_per_step, self.num_generators)
        return c.groups_per_step + overcommit

    @property
    def num_dp_ranks(self) -> int:
        """How many data-parallel ranks the trainer has."""
        return len(self["trainer"]) // self.config.trainer.tensor_parallel

    @property
    def shares_replicas(self) -> bool:
        """Whether replicas of the generator share ranks with the trainer, and take turns with
        it.
        """
        if not self.config.synchronous or self.config.generator.tensor_parallel == 1:
            return False
        return len(set(self["trainer"]) & set(self["generator"])) > 1

    @property
    def trained_group_size(self) -> int:
        """How many completions of one prompt a trainer rank trains on."""
        if self.config.splits_prompts:
            return self.config.trained_per_prompt // self.num_dp_ranks
        return self.config.group_size

    @property
    def groups_of_update(self) -> int:
        """How many groups a trainer rank has in one optimizer update."""
        c = self.config
        # Ranks that split prompts have completions of every group.
        ranks = 1 if c.splits_prompts else self.num_dp_ranks
        return max(1, c.groups_per_step // (ranks * c.trainer.minibatches_per_step))

    @property
    def longest_microbatch(self) -> MicrobatchSize:
        """The longest microbatch of the trainer that the config allows."""
        c = self.config
        return longest_microbatch(
            prompt_tokens=c.longest - c.max_new_tokens,
            completion_tokens=c.max_new_tokens,
            group_size=self.trained_group_size,
            budget_tokens=c.trainer.microbatch_tokens,
            whole_groups=has_mark(resolve_loss(c.loss.fn), "whole_groups"),
            num_groups=self.groups_of_update,
        )

    @property
    def num_buffers(self) -> int:
        """How many buffers feed the trainer: one for each data-parallel rank, or one for all."""
        return 1 if self.config.draws_together else self.num_dp_ranks

    @property
    def replay_lag(self) -> int | None:
        """The most steps that a completion drawn from a replay buffer may be old; None if max_lag
        sets no bound.
        """
        c = self.config
        if c.max_lag is None:
            return None
        assert isinstance(c.buffer, ReplayBufferSettings), "called only with a replay buffer"
        return lag_bound(
            max_lag=c.max_lag,
            completions_per_step=c.groups_per_step // self.num_buffers * c.group_size,
            group_size=c.group_size,
            sync_period=c.buffer.sync_period,
            max_size=c.buffer.max_size // self.num_buffers,
        )

    @property
    def hosts(self) -> str:
        """Which ranks host which executors, in words."""
        tensor_parallel = self.config.generator.tensor_parallel
        hosts = {name: ranges(ranks) for name, ranks in self.items()}
        if tensor_parallel > 1:
            hosts["generator"] += f" (tensor parallel {tensor_parallel})"
        return "  ".join(f"{name} {ranks}" for name, ranks in hosts.items())

    def stream_cache_tokens(self, name: Literal["reward", "reference"]) -> int:
        """Return the tokens that the cache of a model which reads ahead holds, per data-parallel
        rank of the executor `name`. By default there are as many as all generators' slots need.
        """
        settings = getattr(self.config, name)
        if settings.cache_tokens is not None:
            return settings.cache_tokens
        caches = len(self[name]) // settings.tensor_parallel
        # Each cache reads its share of the completions that all generators sample at once.
        samples = -(-self.num_generators * self.config.generator.max_slots // caches)
        return samples * whole_blocks(self.config.longest)

    def weights_bytes(
        self, name: Literal["trainer", "reward", "reference"], model: ModelConfig, dtype: str
    ) -> int:
        """Return the bytes of a model on each rank of the executor `name`, which share it."""
        settings = getattr(self.config, name)
        return weights_bytes(
            model,
            dtype,
            len(self[name]),
            tensor_parallel=settings.tensor_parallel,
            replicate=settings.replicate,
        )

    def stream_cache(self, model: ModelConfig, dtype: str) -> tuple[int, int]:
        """Return the tokens and the bytes of the cache in which a model reads ahead, on each rank
        of the reward.
        """
        tokens = self.stream_cache_tokens("reward")
        return tokens, cache_bytes(model, tokens, dtype, self.config.reward.tensor_parallel)

    def asked_by_reward(self, name: str, path: str, dtype: str, *, ahead: bool = False) -> Price:
        """Return the price of a model that the reward's ranks hold together and ask. ahead: it
        reads completions while these are sampled.
        """
        model = read_config(path)
        held = self.weights_bytes("reward", model, dtype)
        if ahead:
            _, num_bytes = self.stream_cache(model, dtype)
            held += num_bytes
        working = asking_bytes(model, self.longest_microbatch, dtype)
        return Price(name, self["reward"], held, working)


def ranges(ranks: Collection[int]) -> str:
    """Return ascending numbers with runs of more than two as first-last: "0-255,511"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = []
    for run in runs:
        if len(run) > 2:
            words.append(f"{run[0]}-{run[-1]}")
        else:
            words += map(str, run)
    return ",".join(words)


# --- Chosen by a hardware profile ---


def planned_placement(config: Config, world_size: int) -> tuple[Config, str]:
    """Return the configuration with the ranks whose predicted step is shortest, and that step in
    words. Without placement.sheet, or on one rank, they are as given and "".

    ValueError if the profile cannot be read, or if no split fits its memory.
    """
    name = config.placement.sheet
    if name is None or world_size == 1:
        return config, ""
    profile = read_profile(name)
    memory = profile.device.memory_gib * GIB * profile.assumed("memory_share")
    found, _ = best_of(_settings(config), profile, gpus=world_size, memory=memory)
    best = found.asynchronous
    if best is None:
        raise ValueError(
            f"placement.sheet={name}: no split of {world_size} ranks into trainers and generators "
            "fits; leave it out, and give placement.trainer and placement.generator"
        )
    first = best.plan.trainer.gpus
    placement = dataclasses.replace(
        config.placement,
        trainer=list(range(first)),
        generator=list(range(first, first + best.plan.generator.gpus)),
    )
    words = f"{best.step_s:.3g} s a step by {name}"
    synchronous = found.synchronous
    if synchronous is not None and synchronous.step_s <= best.step_s:
        words += (
            f"; the best synchronous one {synchronous.step_s:.3g} s: "
            "asynchrony is not expected to pay"
        )
    return dataclasses.replace(config, placement=placement), words


def _settings(config: Config) -> SearchSettings:
    return SearchSettings(
        path=str(config.model.path or TINY_MODEL),
        dtype=config.model.dtype,
        compute_dtype=config.trainer.compute_dtype,
        optimizer=config.trainer.optimizer,
        checkpointing=config.trainer.activation_checkpointing,
        trainer_tensor=config.trainer.tensor_parallel,
        generator_tensor=config.generator.tensor_parallel,
        quantize=getattr(config.generator, "quantize", "none"),
        groups_per_step=config.groups_per_step,
        group_size=config.group_size,
        max_prompt_tokens=config.task.max_prompt_tokens,
        max_new_tokens=config.max_new_tokens,
        length_sigma=0.0,  # not known before the run, and nor are the mean lengths
        max_lag=config.max_lag or 1,
        overcommit=config.overcommit if isinstance(config.overcommit, int) else None,
    )
