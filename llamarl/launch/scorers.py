"""Checks the models that score, before any weight is read, and predicts their bytes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from llamarl.config.schema import Config
from llamarl.inference.room import whole_blocks
from llamarl.launch.job import Job, ScoredText, read_tokenizer
from llamarl.launch.templates import template_file
from llamarl.memory import (
    ITEMSIZES,
    Price,
    asking_bytes,
    cache_bytes,
    encoder_numbers,
    weights_bytes,
)
from llamarl.models.config import ModelConfig, read_config
from llamarl.models.sharding import num_parameters
from llamarl.words.choices import START

log = logging.getLogger("llamarl")


def stream_cache_tokens(
    config: Config, placement: Mapping[str, Sequence[int]], name: Literal["reward", "reference"]
) -> int:
    """Return the tokens that the cache of a model which reads ahead holds, per data-parallel rank
    of the executor `name`. By default there are as many as all generators' slots need.
    """
    settings = getattr(config, name)
    if settings.cache_tokens is not None:
        return settings.cache_tokens
    replicas = len(placement["generator"]) // config.generator.tensor_parallel
    caches = len(placement[name]) // settings.tensor_parallel
    samples = -(-replicas * config.generator.max_slots // caches)
    return samples * whole_blocks(config.longest)


def asked_by_reward(job: Job, name: str, path: str, dtype: str, cache_tokens: int = 0) -> Price:
    """Return the price of a model that the reward's ranks hold together and ask."""
    r = job.config.reward
    ranks = job.placement["reward"]
    model = read_config(path)
    held = weights_bytes(
        model, dtype, len(ranks), tensor_parallel=r.tensor_parallel, replicate=r.replicate
    )
    held += cache_bytes(model, cache_tokens, dtype, r.tensor_parallel)
    return Price(name, ranks, held, asking_bytes(model, job.longest_microbatch, dtype))


def embedder_bytes(job: Job, given: str) -> int:
    """Return the bytes of an embedder, given as START or a directory."""
    itemsize = ITEMSIZES[job.config.model.dtype]
    if given == START:
        return num_parameters(read_config(job.model_path)) * itemsize
    return encoder_numbers(given) * itemsize


@contextmanager
def chat_template_of(path: Path, job: Job) -> Iterator[None]:
    """Turn errors of a directory's chat template into a ValueError that names its file."""
    from jinja2 import TemplateError

    try:
        yield
    except TemplateError as error:
        file = template_file(path)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        remedy = "unset task.system_prompt" if job.config.task.system_prompt else "correct it"
        raise ValueError(
            f"{file}: its chat template failed ({what}); {remedy}, or set task.chat=false"
        ) from error


def check_context(scored: ScoredText, config: ModelConfig, given: str) -> None:
    """Raise ValueError if a model's context is shorter than the longest sequence. given: how the
    user named the model.
    """
    longest = scored.longest
    context = config.max_position_embeddings
    if longest > context:
        raise ValueError(
            f"{given}: its context is {context} tokens, but "
            f"{scored.longest_keys} = {longest}; lower one of them"
        )


def other_tokens(job: Job, path: Path) -> bool:
    """Whether the directory has a tokenizer that gives a token of the policy's another id."""
    if not (path / "tokenizer_config.json").is_file():
        return False
    theirs = read_tokenizer(path, chat=False).get_vocab()
    ours = job.tokenizer.get_vocab()
    return any(theirs.get(token) != index for token, index in ours.items())
