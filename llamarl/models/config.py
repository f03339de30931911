"""A Hugging Face config.json, read and checked. Needs no torch: plans and dry runs start fast."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from llamarl.models.families import FAMILIES, Family

SCORER = "ForSequenceClassification"  # its head gives num_labels scores in place of logits
_HEADS = (SCORER, *dict.fromkeys(family.causal for family in FAMILIES.values()))
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
    activation: str = "silu"  # of the MLP
    rotary_dim: int | None = None  # features of a head that are turned; None: all
    parallel_residual: bool = False  # attention and MLP read the same residual stream

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
    for head in _HEADS:
        if architecture.endswith(head):
            return architecture.removesuffix(head)
    return architecture


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
    problem = _unknown(architecture)
    if problem:
        raise ValueError(f"{file}: {problem}")
    family = FAMILIES[family_of(architecture)]
    problem = _unsupported(raw, architecture, family) or _malformed(raw, family)
    if architecture.endswith(SCORER):
        problem = problem or _misnamed(raw)
    if problem:
        raise ValueError(f"{file}: {problem}")
    try:
        return _to_config(_renamed(raw, family), architecture, family)
    except KeyError as error:
        field = error.args[0]
        name = family.fields.get(field, field)
        raise ValueError(f"{file}: missing field {name}") from error


def _renamed(raw: dict, family: Family) -> dict:
    """The fields of config.json under the names that Llama's have."""
    renamed = dict(raw)
    for ours, theirs in family.fields.items():
        if theirs in raw:
            renamed[ours] = raw[theirs]
    return renamed


def _to_config(raw: dict, architecture: str, family: Family) -> ModelConfig:
    """The record of what config.json says. KeyError for a field that must be there and is not."""
    # transformers 5 writes rope_parameters; 4 wrote rope_theta and rope_scaling.
    rope = dict(raw.get("rope_parameters") or {})
    theta_of_rope = rope.pop("rope_theta", None)
    fraction_of_rope = rope.pop("partial_rotary_factor", None)
    hidden_size = raw["hidden_size"]
    heads = raw["num_attention_heads"]
    head_dim = hidden_size // heads
    kv_heads = heads
    if not family.fused:  # its transformers know neither
        head_dim = raw.get("head_dim") or family.head_dim or head_dim
        kv_heads = raw.get("num_key_value_heads") or heads
    rotary_dim = None
    if family.rotary_fraction < 1:
        fraction = family.rotary_fraction
        if fraction:
            fraction = raw.get("rotary_pct", fraction_of_rope or fraction)
        rotary_dim = int(head_dim * fraction)
    units = raw.get("intermediate_size")
    if units is None and family.widening:
        units = family.widening * hidden_size
    labels = ()
    if architecture.endswith(SCORER):
        named = raw.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # transformers' default
        labels = tuple(str(named[str(i)]) for i in range(len(named)))
    is_parallel = family.parallel_residual and raw.get("use_parallel_residual", True)
    return ModelConfig(
        architecture=architecture,
        labels=labels,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=raw["intermediate_size"] if units is None else units,
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=raw.get("rms_norm_eps", family.norm_eps),
        rope_theta=raw.get("rope_theta") or theta_of_rope or 10000.0,
        rope_scaling=raw.get("rope_scaling") or rope or None,
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        tie_word_embeddings=raw.get("tie_word_embeddings", family.tied) and not labels,
        attention_bias=family.qkv_bias,
        activation=raw.get("hidden_act", family.activations[0]),
        rotary_dim=rotary_dim,
        parallel_residual=is_parallel,
    )


def _unknown(architecture: str) -> str | None:
    """That there is no such family, or no such head of one; None: there is."""
    family = FAMILIES.get(family_of(architecture))
    name = family_of(architecture)
    if family is not None and architecture in (name + family.causal, name + SCORER):
        return None
    known = [name + family.causal for name, family in FAMILIES.items()]
    return (
        f"architecture {architecture} is not supported; supported: {', '.join(known)}, and "
        f"{SCORER} of each. docs/models.md says how to add one"
    )


def _unsupported(raw: dict, architecture: str, family: Family) -> str | None:
    """What the config asks for and the decoder does not compute, with the remedy; None: nothing."""
    is_mistral = family_of(architecture) == "Mistral"
    window = raw.get("sliding_window", 4096 if is_mistral else None)  # transformers' own default
    uses_window = window and raw.get("use_sliding_window", is_mistral)
    if uses_window and window < raw.get("max_position_embeddings", 0):
        return (
            "sliding-window attention is not supported; "
            "set sliding_window to null to attend to everything"
        )
    field = family.fields.get("hidden_act", "hidden_act")
    activation = raw.get(field, family.activations[0])
    if activation not in family.activations:
        return f"{field} {activation} is not supported; supported: {', '.join(family.activations)}"
    for key, value in family.fixed.items():
        if raw.get(key) not in (None, value):
            return (
                f"{key}={raw[key]} is not supported: every {family_of(architecture)} that is known "
                f"has {value}, and its layers are computed so"
            )
    return None


def _malformed(raw: dict, family: Family) -> str | None:
    """Which field is a count that is none, or should be an object; None: no such field."""
    for key in _COUNTS:
        key = family.fields.get(key, key)
        count = raw.get(key)
        if count is not None and not (type(count) is int and count > 0):
            return f"{key}={count!r}: need a whole number of at least 1; fetch it again"
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key) or {}, dict):
            return f"{key}={raw[key]!r}: need an object with rope_type, or null"
    fraction = raw.get("rotary_pct", 1)
    if not (isinstance(fraction, int | float) and 0 <= fraction <= 1):
        return f"rotary_pct={fraction!r}: need a share of a head's features, from 0 to 1"
    return None


def _misnamed(raw: dict) -> str | None:
    """That a scorer's labels are not names by their numbers; None: they are, or it names none."""
    named = raw.get("id2label") or {}
    if isinstance(named, dict) and named.keys() == {str(i) for i in range(len(named))}:
        return None
    return f"id2label={named!r}: need an object with a name under each of 0, 1, ...; fetch it again"
