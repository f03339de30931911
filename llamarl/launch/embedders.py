"""What embeds texts, as the user gave it: looked at before any weight is read, and as settings."""

from __future__ import annotations

from pathlib import Path

from llamarl.launch.job import Job, read_tokenizer
from llamarl.scoring.embedding import EmbedderSettings, check_sentence_encoder
from llamarl.words.choices import START


def check_embedder(job: Job, given: str, key: str) -> None:
    """Look at the directory and the tokenizer of an encoder; START is looked at elsewhere.
    ValueError naming the key and what is wrong.
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
    """Return what an embedder, given as START or a directory, is."""
    is_policy = given == START
    return EmbedderSettings(
        path=str(job.model_path) if is_policy else given,
        is_policy=is_policy,
        dtype=job.config.model.dtype,
        microbatch_tokens=job.config.trainer.microbatch_tokens,
    )
