"""Hugging Face directories in and out: parameter names, safetensors, tokenizer.

Weights are the same numbers under other names on both sides (no permutation), so a round trip is
bit-exact.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from llamarl.models.config import read_json
from llamarl.models.fsdp import held_box, local
from llamarl.models.protocol import LanguageModel
from llamarl.models.sharding import Box, Shape, parameter_shapes

_NAMES = (  # decoder name -> Hugging Face name
    ("tok_embeddings.weight", "model.embed_tokens.weight"),
    ("norm.scale", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
    ("score.weight", "score.weight"),
    ("layers.{}.sa_norm.scale", "model.layers.{}.input_layernorm.weight"),
    ("layers.{}.mlp_norm.scale", "model.layers.{}.post_attention_layernorm.weight"),
    ("layers.{}.attn.q_proj.", "model.layers.{}.self_attn.q_proj."),
    ("layers.{}.attn.k_proj.", "model.layers.{}.self_attn.k_proj."),
    ("layers.{}.attn.v_proj.", "model.layers.{}.self_attn.v_proj."),
    ("layers.{}.attn.output_proj.", "model.layers.{}.self_attn.o_proj."),
    ("layers.{}.attn.q_norm.scale", "model.layers.{}.self_attn.q_norm.weight"),
    ("layers.{}.attn.k_norm.scale", "model.layers.{}.self_attn.k_norm.weight"),
    ("layers.{}.mlp.w1.", "model.layers.{}.mlp.gate_proj."),
    ("layers.{}.mlp.w2.", "model.layers.{}.mlp.down_proj."),
    ("layers.{}.mlp.w3.", "model.layers.{}.mlp.up_proj."),
)
_LAYER = re.compile(r"(?<=layers\.)\d+")
_COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
    "chat_template.jinja",
    "NOTICE",
)
SHARD_BYTES = 4 << 30  # of exported files; also the most that export holds in memory


def hf_name(name: str) -> str:
    """The Hugging Face name of a decoder's parameter. KeyError if it has none."""
    layer = _LAYER.search(name)
    pattern = _LAYER.sub("{}", name)
    for ours, theirs in _NAMES:
        if pattern.startswith(ours):
            renamed = theirs + pattern.removeprefix(ours)
            if layer:
                renamed = renamed.replace("{}", layer.group())
            return renamed
    raise KeyError(f"{name} has no Hugging Face name; add it to llamarl/models/hf.py")


def named_parameters_hf(decoder: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(Hugging Face name, parameter), in the decoder's order, adapters included. Wrapper prefixes
    of checkpointing are dropped.
    """
    for name, parameter in decoder.named_parameters():
        yield hf_name(name.replace("_checkpoint_wrapped_module.", "")), parameter


class SafetensorsDir:
    """The tensors of a model directory, read one at a time or by slice; sharded (index.json) or
    single.

    FileNotFoundError or ValueError naming the file when one is missing, truncated or not
    safetensors.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        index = self.path / "model.safetensors.index.json"
        single = self.path / "model.safetensors"
        if index.is_file():
            files = sorted(set(_weight_map(index).values()))
        elif single.is_file():
            files = [single.name]
        else:
            raise FileNotFoundError(
                f"{single}: no such file; weights are loaded from safetensors only"
            )
        self.file_of = {}  # name of a tensor -> the opened file
        for name in files:
            file = self.path / name
            if not file.is_file():
                raise FileNotFoundError(f"{file}: no such file, but the index names it")
            try:
                opened = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{file}: not a whole safetensors file ({error}); fetch it again"
                ) from error
            self.file_of.update(dict.fromkeys(opened.keys(), opened))

    def get_slice(self, name: str):
        """A lazily sliced tensor."""
        return self.file_of[name].get_slice(name)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file. ValueError naming the index if it says no such thing."""
    named = read_json(index).get("weight_map")
    is_map = isinstance(named, dict) and named
    if not (is_map and all(isinstance(file, str) for file in named.values())):
        raise ValueError(f"{index}: no weight_map from tensors to files; fetch it again")
    return named


def check_weights(
    source: SafetensorsDir, shapes: Mapping[str, Shape], *, may_lack: Collection[str] = ()
) -> None:
    """ValueError naming what is absent, unknown, or of another shape than `shapes` by Hugging Face
    names. Reads no numbers. may_lack: names that need not be there.
    """
    missing = shapes.keys() - source.file_of.keys() - set(may_lack)
    problems = [f"{name}: absent" for name in missing]
    for name in source.file_of:
        if name in shapes:
            shape = tuple(source.get_slice(name).get_shape())
            if shape != shapes[name]:
                problems.append(f"{name}: shape {shape}, the config says {shapes[name]}")
        # A tied head, and what older files keep of the rotary tables, is made anew.
        elif name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
            problems.append(f"{name}: not in this architecture")
    if problems:
        listed = "\n  ".join(sorted(problems)[:20])
        raise ValueError(f"{source.path}: weights do not fit config.json:\n  {listed}")


@torch.no_grad()
def load_weights(
    decoder: LanguageModel,
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    may_lack: Collection[str] = (),
) -> LanguageModel:
    """Fill a decoder (on the meta device or not), one tensor at a time, from a model directory.
    Returns it.

    Sharded parameters (DTensor) read their own rows only, and a tensor-parallel decoder its own
    part of each. Adapters are left as they are, and what the directory lacks of `may_lack`.
    ValueError naming tensors that are absent, unknown, or of another shape; nothing is loaded by
    halves then.
    """
    source = SafetensorsDir(path)
    shapes = parameter_shapes(decoder.config)
    check_weights(source, shapes, may_lack=may_lack)
    if any(parameter.is_meta for parameter in decoder.parameters()):
        decoder.to_empty(device=device)
    for name, parameter in named_parameters_hf(decoder):
        if name in shapes and name in source.file_of:  # adapters are in neither
            held = held_box(decoder, name, parameter)
            part = held.within(Box.whole(shapes[name]))
            local(parameter).copy_(source.get_slice(name)[part])
    return decoder


def export(
    named_tensors: Iterable[tuple[str, Tensor]],
    like: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype,
    fields: Mapping[str, object] | None = None,
) -> None:
    """Write a directory that `transformers` loads: tensors as they come (at most SHARD_BYTES held),
    the rest from `like`. fields: of config.json, in place of those in `like`'s.
    """
    out = Path(out)
    like = Path(like)
    out.mkdir(parents=True, exist_ok=True)
    _write_shards(named_tensors, out, dtype)
    for name in _COPIED:
        if (like / name).is_file():
            shutil.copyfile(like / name, out / name)
    config = json.loads((like / "config.json").read_text())
    key = "dtype" if "dtype" in config else "torch_dtype"
    config[key] = str(dtype).removeprefix("torch.")
    config |= fields or {}
    (out / "config.json").write_text(json.dumps(config, indent=2))


def _write_shards(
    named_tensors: Iterable[tuple[str, Tensor]], out: Path, dtype: torch.dtype
) -> None:
    """Write model.safetensors, or shards of it and their index."""
    names_of_shards = []
    pending = {}
    pending_bytes = 0
    total_bytes = 0

    def flush() -> None:
        file = out / f"shard-{len(names_of_shards)}.safetensors"
        save_file(pending, file, metadata={"format": "pt"})
        names_of_shards.append(list(pending))
        pending.clear()

    for name, tensor in named_tensors:
        tensor = tensor.detach().to("cpu", dtype).contiguous()
        if pending and pending_bytes + tensor.nbytes > SHARD_BYTES:
            flush()
            pending_bytes = 0
        # A copy, so that the parameter may change while later ones are gathered.
        pending[name] = tensor.clone()
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    if len(names_of_shards) == 1:
        (out / "shard-0.safetensors").rename(out / "model.safetensors")
        return
    weight_map = {}
    count = len(names_of_shards)
    for i, names in enumerate(names_of_shards):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        made = out / f"shard-{i}.safetensors"
        made.rename(out / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))


def load_tokenizer(path: str | Path):
    """The directory's own tokenizer, from its files alone (no hub is asked)."""
    from transformers import AutoTokenizer

    if not (Path(path) / "tokenizer_config.json").is_file():
        raise FileNotFoundError(
            f"{path}: no tokenizer_config.json; a model directory needs its tokenizer"
        )
    return AutoTokenizer.from_pretrained(path, local_files_only=True)
