"""A Hugging Face config.json, read and checked. Needs no torch: plans and dry runs start fast."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from llamarl.models.families import FAMILIES, Family

CAUSAL = "ForCausalLM"  # behind a family's name: a language model
SCORER = "ForSequenceClassification"  # its head gives num_labels scores in place of logits
_BIASES = {  # which transformers reads of a family's config.json
    "Llama": ("attention_bias", "mlp_bias"),
    "Qwen3": ("attention_bias",),
}
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


def tiny_directory() -> Path:
    """Where the embedded model lies: a Llama of 1.6 M parameters that adds two-digit numbers right
    about 2 times in 5. benchmarks/make_tiny.py made it.
    """
    return Path(__file__).parent / "tiny"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the decoder's shape depends on. Names are Hugging Face's."""

    architecture: str  # LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None
    max_position_embeddings: int
    tie_word_embeddings: bool  # False in a scorer, which has no logits
    attention_bias: bool
    labels: tuple[str, ...] = ()  # of a sequence-classification model's scores

    @property
    def family(self) -> str:
        """Llama, of LlamaForCausalLM and LlamaForSequenceClassification."""
        return family_of(self.architecture)

    @property
    def traits(self) -> Family:
        """What all models of the family have in common."""
        return FAMILIES[self.family]

    def as_scorer(self) -> ModelConfig:
        """The model of one score on this model's trunk; of a scorer, itself."""
        if self.labels:
            return self
        return dataclasses.replace(
            self,
            architecture=self.family + SCORER,
            tie_word_embeddings=False,
            labels=("LABEL_0",),  # as transformers calls it
        )


def family_of(architecture: str) -> str:
    """What stands before the name of its head."""
    return architecture.removesuffix(CAUSAL).removesuffix(SCORER)


def read_json(file: Path) -> dict:
    """The JSON object that a file holds. ValueError naming it if it holds none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ValueError(f"{file}: not JSON: {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{file}: need a JSON object, this is {type(value).__name__}; fetch it again"
        )
    return value


def read_config(path: str | Path) -> ModelConfig:
    """Read DIR/config.json (or the file itself).

    FileNotFoundError if it is absent; ValueError for an unsupported architecture, sliding-window
    attention in use, or a missing or impossible field, naming the file.
    """
    path = Path(path)
    file = path
    if path.is_dir():
        file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{file}: no such file; "
            "a model directory holds config.json, model.safetensors and tokenizer.json"
        )
    raw = read_json(file)
    architecture = (raw.get("architectures") or ["(none)"])[0]
    problem = _unsupported(raw, architecture) or _malformed(raw)
    if problem:
        raise ValueError(f"{file}: {problem}")
    try:
        return _to_config(raw, architecture)
    except KeyError as error:
        raise ValueError(f"{file}: missing field {error.args[0]}") from error


def _to_config(raw: dict, architecture: str) -> ModelConfig:
    """The record of what config.json says. KeyError for a field that must be there and is not."""
    # transformers 5 writes rope_parameters; 4 wrote rope_theta and rope_scaling.
    rope = dict(raw.get("rope_parameters") or {})
    theta_of_rope = rope.pop("rope_theta", None)
    heads = raw["num_attention_heads"]
    labels = ()
    if architecture.endswith(SCORER):
        named = raw.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # transformers' default
        labels = tuple(named[str(i)] for i in range(len(named)))
    return ModelConfig(
        architecture=architecture,
        labels=labels,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=_head_dim(raw, architecture),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=raw.get("rope_theta") or theta_of_rope or 10000.0,
        rope_scaling=raw.get("rope_scaling") or rope or None,
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        tie_word_embeddings=raw.get("tie_word_embeddings", False) and not labels,
        attention_bias=FAMILIES[family_of(architecture)].qkv_bias,
    )


def _head_dim(raw: dict, architecture: str) -> int:
    """Features of a head: as the config says, or as transformers has it where that says nothing."""
    if raw.get("head_dim"):
        return raw["head_dim"]
    if family_of(architecture) == "Qwen3":
        return 128
    return raw["hidden_size"] // raw["num_attention_heads"]


def _unsupported(raw: dict, architecture: str) -> str | None:
    """What the config asks for and the decoder does not compute, with the remedy; None: nothing."""
    family = family_of(architecture)
    if family not in FAMILIES or not architecture.endswith((CAUSAL, SCORER)):
        return (
            f"architecture {architecture} is not supported; supported: {', '.join(FAMILIES)}, each "
            f"{CAUSAL} or {SCORER}. docs/models.md says how to add one"
        )
    is_mistral = family == "Mistral"
    window = raw.get("sliding_window", 4096 if is_mistral else None)  # transformers' own default
    uses_window = window and raw.get("use_sliding_window", is_mistral)
    if uses_window and window < raw.get("max_position_embeddings", 0):
        return (
            "sliding-window attention is not supported; "
            "set sliding_window to null to attend to everything"
        )
    if raw.get("hidden_act", "silu") != "silu":
        return f"hidden_act {raw['hidden_act']} is not supported; supported: silu"
    for key in _BIASES.get(family, ()):
        if raw.get(key):
            return (
                f"{key} is not supported: it puts biases on projections that are computed without; "
                f"no {family} has it"
            )
    return None


def _malformed(raw: dict) -> str | None:
    """Which field is a count that is none, or should be an object; None: no such field."""
    for key in _COUNTS:
        count = raw.get(key)
        if count is not None and not (type(count) is int and count > 0):
            return f"{key}={count!r}: need a whole number of at least 1; fetch it again"
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key) or {}, dict):
            return f"{key}={raw[key]!r}: need an object with rope_type, or null"
    return None
