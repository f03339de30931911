"""Compares what is read of a config.json with what transformers reads of it.

Several places of the file may hold one value, and absent fields have defaults. Trainer and
generator read them alike, so no comparison of both finds that the model is another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamarl.models.config import ModelConfig, unknown_fields
from llamarl.models.directory import read_json

_COMPARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "use_parallel_residual",
    "tie_word_embeddings",
)
_OURS = {"hidden_act": "activation", "use_parallel_residual": "parallel_residual"}
_ROPE = ("rope_theta", "partial_rotary_factor", "rope_type", "type")  # compared apart


def check_as_transformers_reads(path: Path, config: ModelConfig) -> None:
    """Raise ValueError naming each value of a directory's config.json that transformers reads
    otherwise, and fields that are not known whose default is not off. A model type that
    transformers does not know is not compared.
    """
    file = path / "config.json" if path.is_dir() else path
    raw = read_json(file)
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if raw.get("model_type") not in CONFIG_MAPPING:
        return
    try:
        theirs = AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each class of transformers has checks of its own
        raise ValueError(f"{file}: transformers refuses it: {error}") from error
    differing = [
        f"{name} is {ours!r} here and {other!r} in transformers"
        for name, ours, other in _values(config, theirs)
        if ours != other
    ]
    if differing:
        listed = "\n  ".join(differing)
        raise ValueError(
            f"{file}: transformers reads another model:\n  {listed}\n"
            "Write the value that is meant in the one place where transformers writes it"
        )
    problem = unknown_fields(theirs.to_dict(), config.traits)
    if problem:
        raise ValueError(f"{file}, with transformers' defaults: {problem}")


def _values(config: ModelConfig, theirs: Any) -> Iterator[tuple[str, object, object]]:
    """Yield (name, our value, transformers' value) of what both know."""
    family = config.traits
    for name in _COMPARED:
        field = family.fields.get(name, name)
        other = getattr(theirs, field, None)
        is_left_out = name == "tie_word_embeddings" and bool(config.labels)
        if family.fused and name in ("num_key_value_heads", "head_dim"):
            is_left_out = True  # its class knows neither
        if other is None or is_left_out:
            continue
        yield field, getattr(config, _OURS.get(name, name)), other
    if family.rotary_fraction == 0:
        return
    theirs.standardize_rope_params()  # as its models do, once all fields are there
    rope = getattr(theirs, "rope_parameters", None) or {}
    ours = config.rope_scaling or {}
    yield "rope_theta", config.rope_theta, rope.get("rope_theta", config.rope_theta)
    kind = ours.get("rope_type", ours.get("type", "default"))
    yield "rope_type", kind, rope.get("rope_type", "default")
    if kind != "default":
        for key in sorted((ours.keys() | rope.keys()).difference(_ROPE)):
            yield f"rope_parameters.{key}", ours.get(key), rope.get(key)
    turned = config.head_dim if config.rotary_dim is None else config.rotary_dim
    fraction = rope.get("partial_rotary_factor", 1.0)
    yield "rotary features of a head", turned, int(config.head_dim * fraction)
