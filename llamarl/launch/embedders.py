"""The embedder that the user gave: its checks before any weight is read, and its settings."""

from __future__ import annotations

from pathlib import Path

from llamarl.launch.job import Job, read_tokenizer
from llamarl.scoring.embedding import EmbedderSettings, check_sentence_encoder
from llamarl.words.choices import START


def check_embedder(job: Job, given: str, key: str) -> None:
    """Check the directory and the tokenizer of an encoder; START is checked elsewhere. ValueError
    that names the key and what is wrong.
    """
    if given == START:
        return
    try:
        with job.weights_may_wait():
            check_sentence_encoder(given)
        read_tokenizer(Path(given), chat=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from error


def embedder_settings(job: Job, given: str) -> EmbedderSettings:
    """Return the settings of an embedder that is given as START or a directory."""
    is_policy = given == START
    return EmbedderSettings(
        path=str(job.model_path) if is_policy else given,
        is_policy=is_policy,
        dtype=job.config.model.dtype,
        microbatch_tokens=job.config.trainer.microbatch_tokens,
    )
