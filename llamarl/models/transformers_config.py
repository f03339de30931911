"""What transformers knows of a model directory: its model without memory, the ModelConfig of one,
and weights whose tensors are cut otherwise on disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from llamarl.models.shape import HARMLESS, ModelConfig

_RANDOM = re.compile(r".*(dropout|pdrop|jitter_noise|layerdrop)")  # noise of training
# Layers without a state beside attention.
_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
_GROWING = {"dynamic"}  # angles that depend on the longest sequence of a pass


def base_of(model: Any) -> Any:
    """Return a model of transformers without its head."""
    base = model.get_decoder()
    return model.model if base is model else base


def stored_buffers(model: Any) -> list[tuple[str, Tensor]]:
    """Return the buffers that a directory holds, by name: biases of routers, scales of layers."""
    stored = model.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in model.named_buffers() if name in stored]


def layers_of(model: Any) -> nn.ModuleList:
    """Return the blocks of a model of transformers. ValueError if it has no list of them."""
    base = base_of(model)
    for name in ("layers", "h", "blocks"):
        layers = getattr(base, name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise ValueError(f"{type(model).__name__}: no list of layers in its decoder")


# --- Building ---


@contextmanager
def _without_memory() -> Iterator[None]:
    """Let every parameter that is made be on the meta device; buffers get their numbers."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            held = torch.empty_like(parameter, device="meta")
            parameter = nn.Parameter(held, requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        with no_init_weights():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def transformers_model(fields: str, dtype: torch.dtype) -> Any:
    """Return transformers' model of a config.json's fields, its parameters on the meta device. A
    tied head is left out: the embedding is its weight.
    """
    raw = json.loads(fields)
    config = AutoConfig.for_model(**raw)
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in vars(part).copy().items():
            if _RANDOM.fullmatch(name) and isinstance(value, float):
                setattr(part, name, 0.0)
    with _without_memory():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    if config.get_text_config().tie_word_embeddings:
        model.lm_head = nn.Identity()
    return model.eval()


# --- config.json ---


def transformers_config(file: Path, raw: dict) -> ModelConfig:
    """Return the config of a decoder that transformers computes. ValueError naming the file for one
    that transformers does not know, or that cannot be computed here.
    """
    kept = {key: value for key, value in raw.items() if not _is_noise(key)}
    try:
        return _config_of(json.dumps(kept, sort_keys=True))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _is_noise(key: str) -> bool:
    kept = ("model_type", "architectures", "pad_token_id", "bos_token_id", "eos_token_id")
    named = key.endswith("bias") or key in kept
    return HARMLESS.fullmatch(key) is not None and not named


@lru_cache(maxsize=16)
def _config_of(fields: str) -> ModelConfig:
    raw = json.loads(fields)
    architecture = (raw.get("architectures") or ["(none)"])[0]
    try:
        model = transformers_model(fields, torch.float32)
    except Exception as error:  # each class of transformers has checks of its own
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{architecture}: transformers makes no decoder of it ({what})") from error
    made = type(model).__name__
    if made != architecture:
        raise ValueError(
            f"{architecture}: transformers makes {made} of model_type={raw.get('model_type')!r}; "
            "write the one that is meant in both fields"
        )
    text = model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    kinds = {str(part.get("rope_type")) for part in parts}
    growing = sorted(kinds & _GROWING)
    if growing:
        raise ValueError(
            f"{architecture}: rope_type {growing[0]} turns a token by angles that depend on the "
            "other sequences of its pass"
        )
    places = getattr(text, "max_position_embeddings", None) or 2048
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk and "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        places = min(places, chunk)  # within the first chunk all tokens before are seen
    if "longrope" in kinds:
        # Beyond it other factors would hold for all sequences of a pass, short ones too.
        places = min(places, rope.get("original_max_position_embeddings") or places)
    heads = text.num_attention_heads
    shapes = {}
    for name, parameter in model.named_parameters():
        shapes[name] = tuple(parameter.shape)
    in_layers = set(layers_of(model).modules())
    linears = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module in in_layers:
            linears.append(name)
    return ModelConfig(
        architecture=architecture,
        implementation="transformers",
        fields=fields,
        shapes=tuple(shapes.items()),
        linears=tuple(linears),
        buffers=tuple((name, tuple(b.shape)) for name, b in stored_buffers(model)),
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=_units(text),
        num_hidden_layers=len(layers_of(model)),
        num_attention_heads=heads,
        num_key_value_heads=_field(text, "num_key_value_heads") or heads,
        head_dim=_field(text, "head_dim") or text.hidden_size // heads,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        max_position_embeddings=places,
        tie_word_embeddings=bool(text.tie_word_embeddings),
        attention_bias=False,
        is_read_alone=_carries_state(model, text),
    )


def _carries_state(model: Any, text: Any) -> bool:
    """Whether layers carry a state from token to token that is not attention's."""
    kinds = set(getattr(text, "layer_types", None) or ())
    return bool(getattr(model, "_is_stateful", False)) or not kinds <= _ATTENDING


def _units(text: Any) -> int:
    """Return the hidden units that a token passes through in a layer: all its experts', or an
    MLP's.
    """
    width = _field(text, "intermediate_size") or 4 * text.hidden_size
    width = max(width) if isinstance(width, list) else width
    experts = getattr(text, "num_experts_per_tok", None)
    return (getattr(text, "moe_intermediate_size", None) or width) * (experts or 1)


def _field(text: Any, name: str) -> Any:
    """Return a field of a config, the largest of those that its layers have; None without one."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # transformers': layers have values of their own
        return max(getattr(of_layer, name) for of_layer in text.per_layer_config)


# --- Weights ---


class ConvertedWeights:
    """The weights of a directory whose tensors are not called, or cut, as transformers' parameters
    are: transformers reads them all, into host memory. It has what SafetensorsDir has of them.
    """

    def __init__(self, path: Path, config: ModelConfig):
        self.path = path
        read: Any = AutoModelForCausalLM.from_pretrained(
            path,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype="auto",
            output_loading_info=True,
        )
        model, report = read
        problems = [f"{name}: absent" for name in report["missing_keys"]]
        problems += [f"{name}: not in this architecture" for name in report["unexpected_keys"]]
        problems += [f"{name}: another shape" for name in report["mismatched_keys"]]
        if problems:
            listed = "\n  ".join(sorted(problems)[:20])
            raise ValueError(f"{path}: weights do not fit config.json:\n  {listed}")
        wanted = dict(config.shapes + config.buffers)
        held = model.state_dict()
        self.file_of = {name: held[name] for name in wanted}

    def get_slice(self, name: str) -> Tensor:
        """Return a tensor."""
        return self.file_of[name]


def as_stored(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of a directory of this family, by transformers' names for its parameters
    and their shapes.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(transformers_model(config.fields, torch.float32), tensors)
