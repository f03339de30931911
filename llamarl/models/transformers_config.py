"""What transformers knows of a model directory: its model without memory, and the ModelConfig of
one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as SCORERS,
)

from llamarl.models.fsdp import NamedTensors
from llamarl.models.shape import HARMLESS, HEADS, LABEL, SCORER, ModelConfig, Shapes
from llamarl.models.sharding import BY_COLUMNS, BY_ROWS, EXPERTS, WHOLE, without_numbers

_RANDOM = re.compile(r".*(dropout|pdrop|jitter_noise|layerdrop)")  # noise of training
# Layers without a state beside attention.
_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}


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
def without_memory(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Let every parameter that is made be on the meta device, in this dtype if one is given;
    buffers get their numbers.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            held = torch.empty_like(parameter, device="meta", dtype=dtype)
            parameter = nn.Parameter(held, requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        with no_init_weights():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def transformers_model(fields: str, dtype: torch.dtype) -> Any:
    """Return transformers' model of a config.json's fields, its parameters on the meta device: a
    language model, or one that scores sequences. A tied head is left out, because the embedding is
    its weight, and so is what reads images or sounds.
    """
    made = whole_model(fields, dtype)
    _leave_out_other_parts(made)
    return made


def whole_model(fields: str, dtype: torch.dtype) -> Any:
    """Return transformers' model with the parts that are no decoder."""
    raw = json.loads(fields)
    config = AutoConfig.for_model(**raw)
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in vars(part).copy().items():
            if _RANDOM.fullmatch(name) and isinstance(value, float):
                setattr(part, name, 0.0)
    with without_memory():
        made = _kind_of(raw).from_config(config, dtype=dtype, trust_remote_code=False)
    if _is_tied(made):
        made.lm_head = nn.Identity()
    return made.eval()


def _kind_of(raw: dict) -> Any:
    """Return the class of transformers that makes and reads models with a config.json's head."""
    architecture = raw["architectures"][0]
    if architecture.endswith(SCORER):
        return AutoModelForSequenceClassification
    is_seeing = SEEING.get(raw["model_type"]) == architecture
    return AutoModelForImageTextToText if is_seeing else AutoModelForCausalLM


def _is_tied(made: Any) -> bool:
    """Whether a model's head is its embedding."""
    return any(name.endswith(HEADS) for name in made.all_tied_weights_keys)


def _leave_out_other_parts(made: Any) -> None:
    """Take the parts out of a model that are neither its decoder nor a head."""
    decoder = base_of(made)
    for parent in list(made.modules()):
        inside = set(parent.modules())
        if decoder not in inside or parent is decoder:
            continue
        for name, child in list(parent.named_children()):
            if decoder not in set(child.modules()) and name not in ("lm_head", "score"):
                setattr(parent, name, None)


# --- config.json ---


def transformers_config(raw: dict) -> ModelConfig:
    """Return the config of a decoder that transformers computes. ValueError for one that
    transformers does not know, or that cannot be computed here.
    """
    kept = {key: value for key, value in raw.items() if not _is_noise(key)}
    return _config_of(json.dumps(kept, sort_keys=True))


def _is_noise(key: str) -> bool:
    kept = ("model_type", "architectures", "pad_token_id", "bos_token_id", "eos_token_id")
    named = key.endswith("bias") or key in kept
    return HARMLESS.fullmatch(key) is not None and not named


@lru_cache(maxsize=16)
def _config_of(fields: str) -> ModelConfig:
    raw = json.loads(fields)
    architecture = (raw.get("architectures") or ["(none)"])[0]
    try:
        model = whole_model(fields, torch.float32)
    except Exception as error:  # each class of transformers has checks of its own
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{architecture}: transformers makes no decoder of it ({what})") from error
    made = type(model).__name__
    if made != architecture:
        raise ValueError(
            f"{architecture}: transformers makes {made} of model_type={raw.get('model_type')!r}; "
            "write the one that is meant in both fields"
        )
    is_tied = _is_tied(model)
    stored = dict(model.named_parameters()) | dict(stored_buffers(model))
    _leave_out_other_parts(model)
    text = model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    kinds = {str(part.get("rope_type")) for part in parts}
    if "dynamic" in kinds:
        raise ValueError(
            f"{architecture}: rope_type dynamic turns a token by angles that depend on the longest "
            "sequence of its pass"
        )
    places = getattr(text, "max_position_embeddings", None) or 2048
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk and "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        places = min(places, chunk)  # within the first chunk all tokens before are seen
    if "longrope" in kinds:
        # Beyond it other factors would hold for all sequences of a pass, short ones too.
        places = min(places, rope.get("original_max_position_embeddings") or places)
    labels: tuple[str, ...] = ()
    if architecture.endswith(SCORER):
        _check_head(model, architecture)
        named = model.config.id2label
        labels = tuple(str(named[i]) for i in range(len(named)))
    heads = text.num_attention_heads
    parameters = dict(model.named_parameters())
    buffers = dict(stored_buffers(model))
    carried = [item for item in stored.items() if item[0] not in {**parameters, **buffers}]
    in_layers = set(layers_of(model).modules())
    linears = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module in in_layers:  # subclasses may return more
            linears.append(name)
    head_dim = _field(text, "head_dim") or text.hidden_size // heads
    kv_heads = _field(text, "num_key_value_heads") or heads
    return ModelConfig(
        architecture=architecture,
        implementation="transformers",
        fields=fields,
        shapes=_shapes(parameters.items()),
        linears=tuple(linears),
        buffers=_shapes(buffers.items()),
        carried=_shapes(carried),
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=_units(text),
        num_hidden_layers=len(layers_of(model)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=places,
        tie_word_embeddings=is_tied,
        labels=labels,
        is_read_alone=_carries_state(model, text),
        **_plan_of(model, in_layers, math.gcd(heads, kv_heads), head_dim),
    )


def _shapes(named: NamedTensors) -> Shapes:
    return tuple((name, tuple(tensor.shape)) for name, tensor in named)


def transformers_scorer(config: ModelConfig) -> ModelConfig:
    """Return the config of a model with one score on a language model's trunk. ValueError if
    transformers has none of its family.
    """
    raw = json.loads(config.fields)
    architecture = SCORERS.get(raw["model_type"])
    if architecture is None:
        raise ValueError(
            f"{config.architecture}: transformers has no {SCORER} of {raw['model_type']}, so it "
            "cannot score sequences; take a model of another family"
        )
    raw |= {"architectures": [architecture], "id2label": {"0": LABEL}, "tie_word_embeddings": False}
    made = _config_of(json.dumps(raw, sort_keys=True))
    return dataclasses.replace(made, lora=config.lora)


def _check_head(model: Any, architecture: str) -> None:
    """Raise ValueError unless a model's scores are `score.weight` times the hidden states."""
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear) or score.bias is not None:
        raise ValueError(f"{architecture}: its head is another than one linear map, score.weight")


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


# --- How tensor-parallel ranks share the layers ---


def _plan_of(
    model: Any, in_layers: Collection[nn.Module], heads: int, head_dim: int
) -> dict[str, Any]:
    """Return the fields of a ModelConfig that say how ranks share a model of transformers.

    in_layers: the modules of its layers. heads: divides all its counts of heads. head_dim: of
    layers that have none of their own.
    """
    kinds: dict[str, str] = dict(model.tp_plan)
    kinds |= {name: kind for name, kind in model.ep_plan.items() if kind == EXPERTS}
    plan = {}
    split_heads = 0
    problems = []
    for name, module in model.named_modules():
        kind = kinds.get(without_numbers(name))
        if kind is None or module not in in_layers:
            continue
        plan[without_numbers(name)] = kind
        if kind in BY_ROWS + BY_COLUMNS and type(module) is not nn.Linear:
            problems.append(f"{name} is no nn.Linear")
        elif kind == EXPERTS and not _are_alike(module):
            problems.append(f"{name} computes experts in a way of its own")
        elif kind not in (*BY_ROWS, *BY_COLUMNS, EXPERTS, WHOLE):
            problems.append(f"{name} is {kind} in transformers' plan")
        if kind != "colwise":
            continue
        around = name.rpartition(".")[0]
        block = model.get_submodule(around)
        for inner, _ in block.named_parameters(prefix=around):
            # It may be of each head, or see a part of the features.
            if without_numbers(inner.rpartition(".")[0]) not in kinds:
                problems.append(f"transformers' plan leaves out {inner}")
        if hasattr(block, "layer_idx"):
            own = getattr(block, "head_dim", head_dim)
            split_heads = math.gcd(split_heads, heads, module.out_features // own)
    if not plan:
        problems.append("transformers has no plan for it")
    return {
        "plan": tuple(plan.items()),
        "split_heads": split_heads,
        "unsplit": problems[0] if problems else "",
    }


def _are_alike(experts: Any) -> bool:
    """Whether experts can leave out those of other ranks, and every parameter has a row of each."""
    named = experts.named_parameters()
    return hasattr(experts, "_is_expert_parallel") and all(
        "." not in name and len(parameter) == experts.num_experts for name, parameter in named
    )
