"""The models that score, as the user gave them: looked at before any weight is read."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from llamarl.config.rewards import ModelSourceSettings
from llamarl.config.schema import Config
from llamarl.errors import NoWeights
from llamarl.inference.cache import whole_blocks
from llamarl.launch.job import Job, Scored, read_model, read_tokenizer
from llamarl.launch.templates import template_file
from llamarl.models.config import ModelConfig
from llamarl.models.scorer import label_of
from llamarl.scoring.classifier import check_encoder
from llamarl.scoring.transcript import Transcript, same_tokens

log = logging.getLogger("llamarl")


def check_scorers(job: Job) -> None:
    """Directory, labels, weights and tokenizer of every model that scores. ValueError or
    OSError naming what is wrong.
    """
    for key, scorer in job.config.scorers.items():
        check_scorer(job, scorer, job.scored, key=f"{key}.path", label_key=f"{key}.label")
        if job.config.reward.stream and transcript_of(scorer, job.scored) is not None:
            raise ValueError(
                f"reward.stream=true {key}.path={scorer.path}: it has another vocabulary than the "
                "policy, so that its tokens are not known before a completion has ended; "
                "reward.stream=false, or a scorer of the policy's tokens"
            )
    for key, part in job.config.reward_parts.items():
        if part.kind == "encoder":
            with job.weights_may_wait(), naming(key, part.path, part.label):
                check_encoder(part.path, part.label, part.max_tokens)


def stream_cache_tokens(
    config: Config, placement: Mapping[str, Sequence[int]], name: Literal["reward", "reference"]
) -> int:
    """Places of the cache of each model that reads completions while these are sampled, per
    data-parallel rank of the executor `name`: where it is not set, as many as all generators' slots
    need.
    """
    settings = getattr(config, name)
    if settings.cache_tokens is not None:
        return settings.cache_tokens
    replicas = len(placement["generator"]) // config.generator.tensor_parallel
    caches = len(placement[name]) // settings.tensor_parallel
    samples = -(-replicas * config.generator.max_slots // caches)
    return samples * whole_blocks(config.longest)


@contextmanager
def naming(key: str, path: str, label: str | None) -> Iterator[None]:
    """Have a ValueError inside say which keys gave the encoder."""
    try:
        yield
    except NoWeights:
        raise
    except ValueError as error:
        given = f"{key}.path={path} {key}.label={label or 'null'}"
        raise ValueError(f"{given}: {error}") from error


def check_scorer(
    job: Job, scorer: ModelSourceSettings, scored: Scored, *, key: str, label_key: str
) -> ModelConfig:
    """Directory, label, weights and tokenizer of a model that scores this. ValueError or
    OSError.
    """
    config = read_model(scorer.path)
    if not config.labels:
        raise ValueError(
            f"{key}={scorer.path}: {config.architecture} is a language model, without a "
            "head that scores; need a ...ForSequenceClassification directory"
        )
    try:
        label_of(config, scorer.label)
    except ValueError as error:
        raise ValueError(f"{label_key}={scorer.label or 'null'}: {scorer.path} {error}") from error
    job.check_weights(scorer.path, config)
    _check_length(job, key, scorer, scored, config)
    return config


def _check_length(
    job: Job, key: str, scorer: ModelSourceSettings, scored: Scored, config: ModelConfig
) -> None:
    """That it reads the longest sequence; of other tokens, that its chat template takes it."""
    transcript = transcript_of(scorer, scored)
    if transcript is not None:
        if job.world.rank == 0:
            how = "its chat template" if transcript.chat else "plain text"
            log.warning(
                "%s=%s has another vocabulary than the %s: it reads completions anew, as %s",
                key,
                scorer.path,
                "policy" if scored.tokenizer is job.tokenizer else "victim",
                how,
            )
        with chat_template_of(Path(scorer.path), job):
            transcript.ids(job.task.train_prompt(0).asked, "", has_ended=True)
        return
    check_context(scored, config, f"{key}={scorer.path}")


@contextmanager
def chat_template_of(path: Path, job: Job) -> Iterator[None]:
    """Have what a directory's chat template raises inside be a ValueError that names its file."""
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


def check_context(scored: Scored, config: ModelConfig, given: str) -> None:
    """ValueError if a model, which is given so, does not read the longest sequence."""
    longest = scored.longest
    context = config.max_position_embeddings
    if longest > context:
        raise ValueError(
            f"{given}: its context is {context} tokens, but "
            f"{scored.longest_keys} = {longest}; lower one of them"
        )


def transcript_of(scorer: ModelSourceSettings, scored: Scored) -> Transcript | None:
    """How a model reads what was sampled in other tokens than its own; None where they are the
    same.
    """
    theirs = read_tokenizer(Path(scorer.path), chat=scored.chat)
    if same_tokens(scored.tokenizer, theirs):
        return None
    return Transcript(theirs, chat=scored.chat, system_prompt=scored.system_prompt)


def other_tokens(job: Job, path: Path) -> bool:
    """Whether the directory's tokenizer, where it has one, gives a token of the policy's another
    id.
    """
    if not (path / "tokenizer_config.json").is_file():
        return False
    theirs = read_tokenizer(path, chat=False).get_vocab()
    ours = job.tokenizer.get_vocab()
    return any(theirs.get(token) != index for token, index in ours.items())
