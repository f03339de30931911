"""A Hugging Face config.json, read and checked. Needs no torch: plans and dry runs start fast."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llamarl.models.directory import architecture_in, check_files, read_json
from llamarl.models.families import CAUSAL, FAMILIES, Family
from llamarl.models.shape import AUTO, HARMLESS, LABEL, SCORER, ModelConfig, family_of

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# The most of each that is believed: far above any model, and far below what fills memory or takes
# minutes to count through.
_MOST_LAYERS = 10_000
_MOST_FEATURES = 1 << 24
_MOST = {
    "vocab_size": 1 << 31,
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), _MOST_LAYERS),
    **dict.fromkeys(("n_embd", "n_inner", "n_head", "d_model"), _MOST_FEATURES),
    "hidden_size": _MOST_FEATURES,
    "intermediate_size": _MOST_FEATURES,
    "num_attention_heads": _MOST_FEATURES,
    "num_key_value_heads": _MOST_FEATURES,
    "head_dim": _MOST_FEATURES,
}


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number of at least 0."""
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _is_base(value: Any) -> bool:
    """Whether a value may be a base of angles. One of 1 turns all features alike."""
    return _is_number(value) and value >= 1


# What the value of a field must be, if it has one, and how that is said.
_NEEDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_COUNTS, (_is_count, "a whole number of at least 1")),
    "rms_norm_eps": (_is_number, "a finite number of at least 0"),
    "rope_theta": (_is_base, "a finite number of at least 1"),
    **dict.fromkeys(
        ("tie_word_embeddings", "use_sliding_window"),
        (lambda value: isinstance(value, bool), "true or false"),
    ),
    "sliding_window": (_is_number, "a whole number of tokens, or null"),
    **dict.fromkeys(
        ("rope_parameters", "rope_scaling"),
        (lambda value: not value or isinstance(value, dict), "an object with rope_type, or null"),
    ),
}
# Fields that this file reads, by the names that Llama's have. Those that choose tensors, such as
# attention_bias, need no reading: a tensor that is absent or unknown is refused.
_READ = {
    *_NEEDS,
    "hidden_act",
    "original_max_position_embeddings",
    "id2label",
}
_FULL = "full_attention"  # of a layer that attends to everything before it


def tiny_directory() -> Path:
    """Return where the embedded model lies: a Llama of 1.6 M parameters that adds two-digit numbers
    right about 2 times in 5. benchmarks/make_tiny.py made it.
    """
    return Path(__file__).parent / "tiny"


def read_config(path: str | Path, made_by: str = AUTO) -> ModelConfig:
    """Read DIR/config.json (or the file itself). made_by: one of IMPLEMENTATIONS, which says whose
    modules compute the decoder.

    FileNotFoundError if it is absent; ValueError for a directory whose files lie elsewhere, a model
    that these modules do not compute, or a missing or impossible field, naming the file.
    """
    path = Path(path)
    file = path
    if path.is_dir():
        check_files(path)
        file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{file}: no such file; "
            "a model directory holds config.json, model.safetensors and tokenizer.json"
        )
    raw = read_json(file)
    try:
        return _config_in(raw, made_by)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _config_in(raw: dict, made_by: str) -> ModelConfig:
    """Read the values of a config.json. Errors: read_config's, which name no file."""
    architecture = architecture_in(raw)
    name = family_of(architecture)
    family = FAMILIES.get(name)
    _refuse(_malformed(raw) if family else oversized(raw))
    is_ours = _is_native(raw, name, family) if family else "model_type" not in raw
    if made_by == "native" and not is_ours:
        raise ValueError(
            f"our own modules do not compute {architecture}; model.implementation=auto"
        )
    if not is_ours or made_by == "transformers":
        from llamarl.models.transformers_config import transformers_config

        return transformers_config(raw)
    if family is None or architecture not in (name + CAUSAL, name + SCORER):
        known = [name + CAUSAL for name in FAMILIES]
        raise ValueError(
            f"architecture {architecture} is not supported; supported: {', '.join(known)}, and "
            f"{SCORER} of each. docs/models.md says how to add one"
        )
    _refuse(unknown_fields(raw, family))
    try:
        return _to_config(raw, architecture, family)
    except KeyError as error:
        raise ValueError(f"missing field {error.args[0]}") from error


def _refuse(problem: str | None) -> None:
    if problem:
        raise ValueError(problem)


def _to_config(raw: dict, architecture: str, family: Family) -> ModelConfig:
    """Make the record of what config.json says. KeyError for a required field that is missing."""
    # transformers 5 writes rope_parameters; 4 wrote rope_theta and rope_scaling. Where a value
    # stands in several places, the order is that of transformers 5.
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    rope.pop("partial_rotary_factor", None)  # which is 1
    outer_length = raw.get("original_max_position_embeddings")
    if outer_length is not None and rope.get("rope_type", rope.get("type")) in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = outer_length
    hidden_size = raw["hidden_size"]
    heads = raw["num_attention_heads"]
    labels: tuple[str, ...] = ()
    if architecture.endswith(SCORER):
        named = raw.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # transformers' default
        if not isinstance(named, dict) or named.keys() != {str(i) for i in range(len(named))}:
            raise ValueError(
                f"id2label={named!r}: need an object with a name under each of 0, 1, ...; fetch it "
                "again"
            )
        labels = tuple(str(named[str(i)]) for i in range(len(named)))
    return ModelConfig(
        architecture=architecture,
        labels=labels,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or family.head_dim or hidden_size // heads,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=rope or None,
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        tie_word_embeddings=raw.get("tie_word_embeddings", False) and not labels,
        attention_bias=family.qkv_bias,
    )


def as_scorer(config: ModelConfig) -> ModelConfig:
    """Return the config of a model with one score on a language model's trunk; a scorer's own
    config is returned as it is. ValueError if no such model can be made.
    """
    if config.labels:
        return config
    if config.implementation == "transformers":
        from llamarl.models.transformers_config import transformers_scorer

        return transformers_scorer(config)
    if config.implementation == "torchtune":
        raise ValueError(f"{config.builder} makes a language model, and no score head; model=hf")
    return dataclasses.replace(
        config,
        architecture=family_of(config.architecture) + SCORER,
        tie_word_embeddings=False,
        labels=(LABEL,),
    )


def _is_native(raw: dict, name: str, family: Family) -> bool:
    """Whether our own layers compute a model of the family with this name."""
    is_mistral = name == "Mistral"
    window = raw.get("sliding_window", 4096 if is_mistral else None)  # transformers' own default
    uses_window = window and raw.get("use_sliding_window", is_mistral)
    if uses_window and window < raw.get("max_position_embeddings", 0):
        return False
    fixed = {"hidden_act": "silu", **family.fixed}
    return all(raw.get(key) in (None, value) for key, value in fixed.items())


def unknown_fields(raw: dict, family: Family) -> str | None:
    """Name the fields of a config.json that are set and unknown, because the model could then be
    another than the computed one; None without any.
    """
    known = _READ | family.fixed.keys()
    unknown = []
    for key, value in raw.items():
        is_off = not value
        if key == "layer_types" and isinstance(value, list):
            is_off = all(kind == _FULL for kind in value)
        if not (key in known or is_off or HARMLESS.fullmatch(key)):
            unknown.append(f"{key}={value!r:.60}")
    if not unknown:
        return None
    return (
        f"{', '.join(sorted(unknown))}: not known of this family, so the model may be another than "
        "the one that would be computed. If its layers are as without it, take it out of "
        "config.json, or put it into `fixed` of the family (docs/models.md)"
    )


def _malformed(raw: dict) -> str | None:
    """Name the field that has the wrong type or an impossible value; None without one."""
    for key, (is_right, need) in _NEEDS.items():
        value = raw.get(key)
        if value is not None and not is_right(value):
            return f"{key}={value!r}: need {need}; fetch it again"
    problem = oversized(raw)
    for key in ("rope_parameters", "rope_scaling"):
        problem = problem or _malformed_rope(raw.get(key) or {}, key)
    return problem


def _malformed_rope(rope: dict, name: str) -> str | None:
    """Name the value of rope_parameters or rope_scaling that is wrong; None if there is none."""
    for key, value in rope.items():
        if isinstance(value, dict):
            return f"{name}.{key}: rotary positions that differ by layer are not supported"
    theta = rope.get("rope_theta")
    if not (theta is None or _is_base(theta)):
        return f"{name}.rope_theta={theta!r}: need a finite number of at least 1"
    fraction = rope.get("partial_rotary_factor")
    if fraction not in (None, 1):
        return f"{name}.partial_rotary_factor={fraction!r}: heads of this family are turned whole"
    return None


def check_sizes(config: ModelConfig) -> None:
    """Raise ValueError for sizes that contradict each other, so that no decoder can be computed."""
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key/value heads evenly")
    if config.head_dim < 1:
        raise ValueError(f"hidden_size={config.hidden_size} is too small for {heads} heads")
    if config.head_dim % 2:
        raise ValueError(
            f"{config.head_dim} features of a head are turned in pairs; need an even number"
        )


def oversized(raw: dict) -> str | None:
    """Name the field of a config.json, or of one of its parts, that is larger than in any model;
    None without one.
    """
    for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        for key, most in _MOST.items():
            count = part.get(key)
            if isinstance(count, int) and count > most:
                return f"{key}={count}: need at most {most:,}; fetch it again"
    return None


# Several fields of a config.json may hold one value, and absent fields have defaults. Trainer and
# generator read them alike, so only a comparison with transformers finds that they read another
# model. These fields are compared:
_COMPARED = (*_COUNTS, "rms_norm_eps", "tie_word_embeddings")
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
    for name in _COMPARED:
        other = getattr(theirs, name, None)
        is_left_out = name == "tie_word_embeddings" and bool(config.labels)
        if other is None or is_left_out:
            continue
        yield name, getattr(config, name), other
    yield "hidden_act", "silu", getattr(theirs, "hidden_act", "silu")
    theirs.standardize_rope_params()  # as its models do, once all fields are there
    rope = getattr(theirs, "rope_parameters", None) or {}
    ours = config.rope_scaling or {}
    yield "rope_theta", config.rope_theta, rope.get("rope_theta", config.rope_theta)
    kind = ours.get("rope_type", ours.get("type", "default"))
    yield "rope_type", kind, rope.get("rope_type", "default")
    if kind != "default":
        for key in sorted((ours.keys() | rope.keys()).difference(_ROPE)):
            yield f"rope_parameters.{key}", ours.get(key), rope.get(key)
    yield "partial_rotary_factor", 1.0, rope.get("partial_rotary_factor", 1.0)
