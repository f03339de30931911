"""The memory that a part of a job takes on its ranks, from configuration files alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from llamarl.config.placement import Ranks
from llamarl.inference.room import numbers_of_token
from llamarl.launch.job import Job
from llamarl.learning.losses import resolve_loss
from llamarl.learning.losses.common import has_mark
from llamarl.learning.memory import MicrobatchSize, held_numbers, longest_microbatch
from llamarl.models.config import ModelConfig, read_config
from llamarl.models.sharding import num_parameters
from llamarl.words.choices import START

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Price:
    """The memory that one part of the job takes on each of its ranks, in bytes.

    name: for people. held: taken all the time. working: taken at the peak of a step, on top of it.
    """

    name: str
    ranks: Ranks
    held: int
    working: int = 0

    @property
    def total(self) -> int:
        """held and working together."""
        return self.held + self.working


def microbatch_of(job: Job) -> MicrobatchSize:
    """Return the longest microbatch of the trainer that the config allows."""
    c = job.config
    return longest_microbatch(
        prompt_tokens=c.longest - c.max_new_tokens,
        completion_tokens=c.max_new_tokens,
        group_size=group_size_of(job),
        budget_tokens=c.trainer.microbatch_tokens,
        whole_groups=has_mark(resolve_loss(c.loss.fn), "whole_groups"),
        num_groups=groups_of_update(job),
    )


def group_size_of(job: Job) -> int:
    """Return how many completions of one prompt a rank trains on."""
    if job.config.splits_prompts:
        return job.config.trained_per_prompt // job.num_dp_ranks
    return job.config.group_size


def groups_of_update(job: Job) -> int:
    """Return how many groups a rank has in one optimizer update."""
    c = job.config
    ranks = 1 if c.splits_prompts else job.num_dp_ranks
    return max(1, c.groups_per_step // (ranks * c.trainer.minibatches_per_step))


def itemsize_of(dtype: str) -> int:
    """Return the bytes of a number."""
    return getattr(torch, dtype).itemsize


def cache_bytes(model: ModelConfig, tokens: int, dtype: str, split: int = 1) -> int:
    """Return the bytes of the keys and values of so many tokens."""
    return tokens * numbers_of_token(model, split) * itemsize_of(dtype)


def asking_bytes(job: Job, model: ModelConfig, dtype: str) -> int:
    """Return the bytes of a forward without gradients: a layer's hidden units, and a chunk of
    logits.
    """
    size = microbatch_of(job)
    numbers = size.tokens * (4 * model.hidden_size + 3 * model.intermediate_size)
    if not model.labels:
        numbers += min(size.labels, 1024) * model.vocab_size
    return numbers * itemsize_of(dtype)


def held_by_reward(job: Job, model: ModelConfig, dtype: str) -> int:
    """Return the bytes of a model on each of the reward's ranks, which hold it together."""
    r = job.config.reward
    shards = len(job.placement["reward"]) // (r.replicate * r.tensor_parallel)
    numbers = held_numbers(model, tensor_parallel=r.tensor_parallel, shards=shards)
    return numbers * itemsize_of(dtype)


def embedder_bytes(job: Job, given: str) -> int:
    """Return the bytes of an embedder, given as START or a directory."""
    itemsize = itemsize_of(job.config.model.dtype)
    if given == START:
        return num_parameters(read_config(job.model_path)) * itemsize
    return encoder_numbers(given) * itemsize


def encoder_numbers(path: str | Path) -> int:
    """Return how many numbers a model has that transformers reads, by its config.json. It is built
    without memory.
    """
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
