"""The embedder that the user gave: its checks before any weight is read, and its settings."""

from __future__ import annotations

from pathlib import Path

from llamarl.launch.inputs import JobInputs
from llamarl.launch.model_directory import read_tokenizer
from llamarl.memory import ITEMSIZES, encoder_numbers
from llamarl.models.config import read_config
from llamarl.models.sharding import num_parameters
from llamarl.scoring.embedding import EmbedderSettings, check_sentence_encoder
from llamarl.words.choices import START


def check_embedder(inputs: JobInputs, given: str, key: str) -> None:
    """Check the directory and the tokenizer of an encoder; START is checked elsewhere. ValueError
    that names the key and what is wrong.
    """
    if given == START:
        return
    try:
        with inputs.weights_may_wait():
            check_sentence_encoder(given)
        read_tokenizer(Path(given), chat=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from error


def embedder_settings(inputs: JobInputs, given: str) -> EmbedderSettings:
    """Return the settings of an embedder that is given as START or a directory."""
    is_policy = given == START
    return EmbedderSettings(
        path=str(inputs.model_path) if is_policy else given,
        is_policy=is_policy,
        dtype=inputs.config.model.dtype,
        microbatch_tokens=inputs.config.trainer.microbatch_tokens,
    )


def embedder_bytes(inputs: JobInputs, given: str) -> int:
    """Return the bytes of an embedder that is given as START or a directory."""
    itemsize = ITEMSIZES[inputs.config.model.dtype]
    if given == START:
        return num_parameters(read_config(inputs.model_path)) * itemsize
    return encoder_numbers(given) * itemsize
