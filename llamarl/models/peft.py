"""PEFT's adapter directories, in and out: adapter_config.json and adapter_model.safetensors, as
peft, transformers and vLLM read and write them. Also the merged directory beside one.

Names are those of the model in transformers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from llamarl.models.config import ModelConfig, read_config
from llamarl.models.decoder import Decoder
from llamarl.models.directory import SafetensorsDir, check_files, read_json
from llamarl.models.fsdp import fill
from llamarl.models.hf import check_finite, check_weights, export, weights_of
from llamarl.models.loading import frozen_decoder
from llamarl.models.lora import adapters_of, lay_side_by_side
from llamarl.models.shape import Lora
from llamarl.models.sharding import LORA_A, LORA_B, adapter_shapes, parameter_shapes

CONFIG = "adapter_config.json"
STEM = "adapter_model"  # of the file of weights
WEIGHTS = f"{STEM}.safetensors"
_PREFIX = "base_model.model."
_ENDS = {LORA_A: ".lora_A.weight", LORA_B: ".lora_B.weight"}
# Fields of an adapter_config.json that change what is computed -> what they are where they do not.
_PLAIN = {
    "use_dora": False,
    "use_rslora": False,
    "use_qalora": False,
    "bias": "none",
    "lora_bias": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
}
_WARN_FROM = 0.1  # of an update that rounding takes

log = logging.getLogger(__name__)


def adapter_beside(out: str | Path) -> Path:
    """Return the adapter directory that lies beside an exported one: adapter/ beside hf/."""
    out = Path(out)
    return out.with_name(out.name.replace("hf", "adapter", 1))


def export_adapted(
    adapters: Mapping[str, Tensor],
    lora: Lora,
    base: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype,
) -> None:
    """Write whole adapters, by Hugging Face name, as a PEFT directory, and merged with the weights
    in `base` as a directory `out` that transformers loads without peft.

    W + s B A is made in float32 and rounded once, to dtype. The log says what share of s B A that
    takes.
    """
    adapters = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in adapters.items()}
    config = read_config(base)
    save_adapter(adapters, lora, base, adapter_beside(out))
    export(_merged(adapters, lora, config, base, out, dtype), base, out, dtype=dtype)


def save_adapter(
    adapters: Mapping[str, Tensor], lora: Lora, base: str | Path, out: str | Path
) -> None:
    """Write whole adapters, by Hugging Face name, as a PEFT directory. Its config leaves
    out the fields that have peft's defaults: releases before a field refuse it.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    save_file(
        {_peft_name(name): tensor.contiguous() for name, tensor in adapters.items()},
        out / WEIGHTS,
        metadata={"format": "pt"},
    )
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).absolute()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(lora.targets),
        "inference_mode": True,
    }
    (out / CONFIG).write_text(json.dumps(fields, indent=2))


def _peft_name(name: str) -> str:
    for ours, theirs in _ENDS.items():
        if name.endswith(ours):
            return _PREFIX + name.removesuffix(ours) + theirs
    raise KeyError(f"{name} is no adapter")


def _merged(
    adapters: Mapping[str, Tensor],
    lora: Lora,
    config: ModelConfig,
    base: str | Path,
    out: str | Path,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of `base`, with its adapter if it has one, in dtype. At the end, log what
    rounding took.
    """
    source = weights_of(base, config)
    update = lost = 0.0  # squares
    for name in parameter_shapes(config):
        if name not in source.file_of:
            continue
        weight = source.get_slice(name)[...]
        a = adapters.get(name.removesuffix(".weight") + LORA_A)
        if a is None:
            yield name, weight
            continue
        b = adapters[name.removesuffix(".weight") + LORA_B]
        weight = weight.float()
        change = (b @ a) * lora.scaling
        merged = (weight + change).to(dtype)
        seen = merged.float() - weight.to(dtype).float()
        update += float(change.square().sum(dtype=torch.float64))
        lost += float((seen - change).square().sum(dtype=torch.float64))
        yield name, merged
    share = (lost / update) ** 0.5 if update else 0.0
    log.log(
        logging.WARNING if share > _WARN_FROM else logging.INFO,
        "%s/: rounding W + s B A to %s takes %.1f %% of the update s B A; %s/ has all of it",
        Path(out).name,
        str(dtype).removeprefix("torch."),
        100 * share,
        adapter_beside(out).name,
    )


def lora_in(path: str | Path) -> tuple[Lora, str | None]:
    """Return the settings of a PEFT directory, and the model that it says it belongs to.

    FileNotFoundError or ValueError naming the file and what of it cannot be used.
    """
    path = Path(path)
    check_files(path)
    file = path / CONFIG
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; a PEFT directory has it and {WEIGHTS}")
    fields = read_json(file)
    if fields.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type={fields.get('peft_type')}, need LORA")
    for field, plain in _PLAIN.items():
        value = fields.get(field)
        if value not in (None, plain):
            raise ValueError(
                f"{file}: {field}={value} is not supported; merge the adapter with "
                "peft's merge_and_unload, and give the result as model.path"
            )
    start = fields.get("init_lora_weights", True)
    if isinstance(start, str) and start.startswith(("pissa", "olora", "loftq", "corda")):
        raise ValueError(
            f"{file}: init_lora_weights={start} changes the weights beside the adapter; save it "
            "with peft's path_initial_model_for_weight_conversion"
        )
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    targets = fields.get("target_modules")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise ValueError(f"{file}: r={rank}, lora_alpha={alpha}: need numbers above 0")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ValueError(f"{file}: target_modules={targets}: need a list of names")
    names = tuple(sorted({target.split(".")[-1] for target in targets}))
    named = fields.get("base_model_name_or_path")
    return Lora(rank, float(alpha), names), named if isinstance(named, str) else None


def check_adapter(path: str | Path, config: ModelConfig) -> dict[str, Tensor]:
    """Return a PEFT directory's adapters by our names, in float32, for a model whose config has
    such adapters. ValueError or FileNotFoundError naming what does not fit.
    """
    path = Path(path)
    lora = config.lora
    assert lora is not None, "the config has adapters"
    found, _ = lora_in(path)
    differences = []
    for key, ours, theirs in (
        ("rank", lora.rank, found.rank),
        ("alpha", lora.alpha, found.alpha),
        ("targets", sorted(lora.targets), sorted(found.targets)),
    ):
        if ours != theirs:
            shown = f"[{','.join(theirs)}]" if isinstance(theirs, list) else theirs
            differences.append(f"trainer.lora.{key}={shown}")
    if differences:
        raise ValueError(f"{path / CONFIG}: its adapters need {' '.join(differences)}")
    source = SafetensorsDir(path, stem=STEM)
    shapes = {_peft_name(name): shape for name, shape in adapter_shapes(config).items()}
    whose = f"adapters of this model's {', '.join(lora.targets)}"
    check_weights(source, shapes, may_have=(), whose=whose)
    adapters = {}
    for name in adapter_shapes(config):
        adapters[name] = source.get_slice(_peft_name(name))[...].float()
        check_finite(name, adapters[name], path)
    return adapters


@torch.no_grad()
def load_adapter(decoder: Decoder, path: str | Path) -> None:
    """Fill a decoder's adapters, each rank its part, from a PEFT directory. See check_adapter for
    errors.
    """
    whole = check_adapter(path, decoder.config)
    for name, parameter in adapters_of(decoder):
        fill(decoder, name, parameter, whole[name])


def load_policy(
    path: str | Path,
    adapter: str | Path | None,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
) -> Decoder:
    """Return the decoder of a Hugging Face directory, with the adapters of a PEFT directory beside
    its weights if one is given. Errors: frozen_decoder's, check_adapter's.
    """
    lora = None if adapter is None else lora_in(adapter)[0]
    decoder = frozen_decoder(path, mesh=None, device=torch.device(device), dtype=dtype, lora=lora)
    if adapter is not None:
        load_adapter(decoder, adapter)
        lay_side_by_side(decoder)
    return decoder
