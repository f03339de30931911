"""Hugging Face directories in and out: parameter names, safetensors, tokenizer.

Weights are the same numbers on both sides, so a round trip is bit-exact.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from llamarl.errors import BadWeights
from llamarl.models.config import ModelConfig, oversized, read_config
from llamarl.models.decoder import Decoder
from llamarl.models.directory import (
    NAMED_TEMPLATES,
    TOKENIZER_FILES,
    SafetensorsDir,
    check_files,
    read_json,
    refuse_unfit,
)
from llamarl.models.fsdp import NamedTensors, fill
from llamarl.models.shape import HEADS, RECREATED
from llamarl.models.sharding import Shape, parameter_shapes, stored_shapes

if TYPE_CHECKING:
    from llamarl.models.converted import ConvertedWeights, StoredForm

    Weights: TypeAlias = SafetensorsDir | ConvertedWeights

# transformers' names for a tokenizer that is its tokenizer.json and nothing more.
PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
# transformers loads the tokenizer that tokenizer_config.json names for these types of models; for
# others (qwen2, mistral) it knows directories that name the wrong one.
TAKEN_AT_WORD = ("llama", "qwen3", "gpt_neox", "gpt2")
# What a chat template that asks for today is told, so that prompts are the same on every day. It is
# what Llama 3.2's writes of itself where it cannot ask.
TEMPLATE_DATE = date(2024, 7, 26)
_DATE_CODES = (*"aAbBcdefFGHIjmMpSTuUVwWxXyYzZ", "-d", "-m")  # strftime's
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
_SEAT = "transformers."  # where a decoder has transformers' model, which has its own names
_ROWS = 4096  # of a head that are compared at once
_LAYER = re.compile(r"(?<=layers\.)\d+")
_COPIED = ("config.json", "generation_config.json", *TOKENIZER_FILES, "NOTICE")
SHARD_BYTES = 4 << 30  # of exported files; also the most that export holds in memory


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a decoder's parameter. KeyError if it has none."""
    if name.startswith(_SEAT):
        return name.removeprefix(_SEAT)
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
    """Yield (Hugging Face name, parameter) in the decoder's order, adapters included. Wrapper
    prefixes of checkpointing are dropped.
    """
    for name, parameter in decoder.named_parameters():
        yield hf_name(name.replace("_checkpoint_wrapped_module.", "")), parameter


def check_weights(
    source: SafetensorsDir,
    shapes: Mapping[str, Shape],
    *,
    may_lack: Collection[str] = (),
    may_have: tuple[str, ...] = (*HEADS, *RECREATED),
    whose: str = "config.json",
) -> None:
    """Raise ValueError naming each tensor that is absent, unknown, of integers, or of another shape
    than in `shapes`, by its name in the directory. Reads no numbers. may_lack: names that need not
    be there. may_have: ends of names of others that may be. whose: the shapes.
    """
    missing = shapes.keys() - source.file_of.keys() - set(may_lack)
    problems = [f"{name}: absent" for name in missing]
    for name in source.file_of:
        if name in shapes:
            problems += source.problems_of(name, shapes[name])
        elif not name.endswith(may_have):
            problems.append(f"{name}: not in this architecture")
    refuse_unfit(source.path, problems, whose)


def check_encoder_directory(path: Path) -> None:
    """Check that a directory which transformers itself is to load has files of its own, sizes to be
    believed and weights of floating-point numbers. ValueError or FileNotFoundError.
    """
    check_files(path)
    file = path / "config.json"
    raw = read_json(file)
    problem = oversized(raw)
    if problem:
        raise ValueError(f"{file}: {problem}")
    source = SafetensorsDir(path)
    for name in source.file_of:
        if not name.endswith(("position_ids", "token_type_ids")):  # of older encoders' inputs
            refuse_unfit(path, source.problems_of(name))


def weights_of(path: str | Path, config: ModelConfig, *, may_lack: Collection[str] = ()) -> Weights:
    """Return a directory's weights, checked against its config.json. See SafetensorsDir and
    check_weights for errors.
    """
    if not is_as_named(path, config, may_lack=may_lack):
        from llamarl.models.converted import ConvertedWeights

        return ConvertedWeights(Path(path), config, may_lack=may_lack)
    source = SafetensorsDir(path)
    shapes = stored_shapes(config)
    check_weights(source, shapes, may_lack=may_lack)
    if config.tie_word_embeddings:
        _check_tied(source, embedding=next(iter(shapes)))
    return source


def is_as_named(path: str | Path, config: ModelConfig, *, may_lack: Collection[str] = ()) -> bool:
    """Whether a directory's tensors have transformers' names for its parameters, each with its
    shape, so that they are read and written one by one. Those of our own decoder must have them.
    may_lack: names that need not be there.
    """
    if config.implementation != "transformers":
        return True
    source = SafetensorsDir(path)
    shapes = stored_shapes(config)
    return all(
        name in source.file_of and tuple(source.get_slice(name).get_shape()) == shape
        for name, shape in shapes.items()
        if name in source.file_of or name not in may_lack
    )


def _check_tied(source: SafetensorsDir, *, embedding: str) -> None:
    """Raise ValueError if a tied model's directory has a head that is not its embedding. Reads
    numbers only if it has a head.
    """
    for name in source.file_of:
        if not name.endswith(HEADS):
            continue
        head_VD = source.get_slice(name)
        embedding_VD = source.get_slice(embedding)
        num_rows = embedding_VD.get_shape()[0]
        is_same = head_VD.get_shape() == embedding_VD.get_shape() and all(
            torch.equal(head_VD[i : i + _ROWS], embedding_VD[i : i + _ROWS])
            for i in range(0, num_rows, _ROWS)
        )
        if not is_same:
            raise ValueError(
                f"{source.path}: {name} differs from {embedding}, but config.json says "
                "tie_word_embeddings=true; if the head is meant, set it to false there"
            )


@torch.no_grad()
def load_weights(
    decoder: Decoder,
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    may_lack: Collection[str] = (),
) -> Decoder:
    """Fill a decoder (on the meta device or not), one tensor at a time, from a model directory.
    Returns it.

    Sharded parameters (DTensor) read their own rows only, and a tensor-parallel decoder its own
    part of each. Adapters are left as they are, and what the directory lacks of `may_lack`.
    ValueError naming tensors that are absent, unknown, or of another shape; nothing is loaded by
    halves then. BadWeights for one that holds NaN or infinite numbers.
    """
    config = decoder.config
    source = weights_of(path, config, may_lack=may_lack)
    shapes = parameter_shapes(config)
    if any(parameter.is_meta for parameter in decoder.parameters()):
        decoder.to_empty(device=device)
    for name, parameter in named_parameters_hf(decoder):
        if name in shapes and name in source.file_of:  # no adapter
            check_finite(name, fill(decoder, name, parameter, source.get_slice(name)), path)
    load_buffers(decoder, path, source)
    return decoder


def buffers_in(
    path: str | Path, config: ModelConfig, source: Weights | None = None
) -> dict[str, Tensor]:
    """Return the buffers that a directory holds. No update changes them, so they do not travel with
    versions of the weights. source: the directory's opened weights.
    """
    if not config.buffers:
        return {}
    source = source or weights_of(path, config)
    return {name: source.get_slice(name)[...] for name, _ in config.buffers}


@torch.no_grad()
def load_buffers(decoder: Decoder, path: str | Path, source: Weights | None = None) -> None:
    """Fill the buffers that a directory holds. source: as of buffers_in."""
    stored = buffers_in(path, decoder.config, source)
    for name, buffer in decoder.named_buffers():
        if name.removeprefix(_SEAT) in stored:
            buffer.copy_(stored[name.removeprefix(_SEAT)])


def stored_form(path: str | Path, config: ModelConfig) -> StoredForm | None:
    """Return how a directory calls and cuts its tensors; None if as the decoder's parameters."""
    if is_as_named(path, config):
        return None
    from llamarl.models.converted import StoredForm

    return StoredForm(config)


def check_finite(name: str, tensor: Tensor, path: str | Path) -> None:
    """Raise BadWeights if a tensor of the directory `path` holds NaN or infinite numbers."""
    if tensor.dtype.itemsize == 1:  # torch has no isfinite for float8
        tensor = tensor.float()
    num_bad = tensor.numel() - int(tensor.isfinite().sum())
    if num_bad:
        raise BadWeights(
            f"{path}: {name} holds {num_bad:,} numbers that are NaN or infinite; fetch the "
            "directory again, or take an earlier checkpoint"
        )


def export(
    named_tensors: NamedTensors,
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
    config = read_config(like)
    others = config.buffers + config.carried
    if others:
        source = weights_of(like, config)
        kept = [(name, source.get_slice(name)[...]) for name, _ in others]
        named_tensors = itertools.chain(named_tensors, kept)
    form = stored_form(like, config)
    if form is not None:
        rounded = ((name, tensor.detach().to("cpu", dtype)) for name, tensor in named_tensors)
        named_tensors = form.tensors(rounded)
    _write_shards(named_tensors, out, dtype)
    for name in _COPIED:
        if (like / name).is_file():
            shutil.copyfile(like / name, out / name)
    if (like / NAMED_TEMPLATES).is_dir():
        shutil.copytree(like / NAMED_TEMPLATES, out / NAMED_TEMPLATES, dirs_exist_ok=True)
    raw = read_json(like / "config.json")
    key = "dtype" if "dtype" in raw else "torch_dtype"
    raw[key] = str(dtype).removeprefix("torch.")
    raw |= fields or {}
    (out / "config.json").write_text(json.dumps(raw, indent=2))


def _write_shards(named_tensors: NamedTensors, out: Path, dtype: torch.dtype) -> None:
    """Write model.safetensors, or shards of it and their index."""
    names_of_shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total_bytes = 0

    def flush() -> None:
        file = out / f"shard-{len(names_of_shards)}.safetensors"
        save_file(pending, file, metadata={"format": "pt"})
        names_of_shards.append(list(pending))
        pending.clear()

    for name, tensor in named_tensors:
        tensor = tensor.detach().to("cpu", dtype).contiguous()
        pending_bytes = sum(held.nbytes for held in pending.values())
        if pending and pending_bytes + tensor.nbytes > SHARD_BYTES:
            flush()
        # A copy, so that the parameter may change while later ones are gathered.
        pending[name] = tensor.clone()
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
    """Load the directory's own tokenizer, whose chat template sees TEMPLATE_DATE and no clock."""
    tokenizer = stored_tokenizer(path)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str) and "strftime_now" in template:
        tokenizer.chat_template = _without_clock(template)
    return tokenizer


def _without_clock(template: str) -> str:
    """Return a chat template with a strftime_now of its own, in the place of transformers', whose
    arguments can be no functions.
    """
    written = "format"
    for code in _DATE_CODES:
        written += f"|replace('%{code}', '{TEMPLATE_DATE.strftime('%' + code)}')"
    # The newline belongs to the tag: transformers' templates are read with trim_blocks.
    return f"{{% macro strftime_now(format) %}}{{{{ {written} }}}}{{% endmacro %}}\n{template}"


def stored_tokenizer(path: str | Path):
    """Load the directory's own tokenizer as its files have it: no hub is asked, and no code of the
    directory is run.
    """
    if Path(path).is_dir():
        check_files(Path(path))
    if not (Path(path) / "tokenizer_config.json").is_file():
        raise FileNotFoundError(
            f"{path}: no tokenizer_config.json; a model directory needs its tokenizer"
        )
    import transformers

    kind: Any = transformers.AutoTokenizer
    if _says_plain_tokenizer(Path(path)):
        # What AutoTokenizer would make of it too. To find out, it loads the model's configuration
        # class, and with that the compiler, DTensors and half of transformers: two CPU seconds.
        kind = transformers.PreTrainedTokenizerFast
    return kind.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _says_plain_tokenizer(path: Path) -> bool:
    """Whether a directory says that its tokenizer is its tokenizer.json and nothing more, of a
    model type for which transformers takes its word. False also for files that cannot be read: it
    says what is wrong with them.
    """
    files = ("tokenizer.json", "tokenizer_config.json", "config.json")
    if not all((path / file).is_file() for file in files):
        return False
    try:
        tokenizer = read_json(path / "tokenizer_config.json")
        model = read_json(path / "config.json")
    except ValueError:
        return False
    is_plain = tokenizer.get("tokenizer_class") in PLAIN_TOKENIZERS
    return is_plain and "auto_map" not in tokenizer and model.get("model_type") in TAKEN_AT_WORD


# Vocabularies are padded to round sizes: Qwen3 has 151,936 rows for 151,669 tokens. A row without a
# token is no text, so it is left out of the sampled distribution and of every softmax over it.
def absent_ids(tokenizer, vocab_size: int) -> list[int]:
    """Return the ids below vocab_size that a tokenizer of transformers has no token for."""
    return sorted(set(range(vocab_size)).difference(tokenizer.get_vocab().values()))


def absent_rows(path: str | Path, vocab_size: int, device: str | torch.device) -> Tensor | None:
    """Return the absent ids [A] int64 of a model directory. None if its tokenizer has a token for
    each row, or if there is no tokenizer, so that nobody reads ids as text.
    """
    if not (Path(path) / "tokenizer_config.json").is_file():
        return None
    absent = absent_ids(load_tokenizer(path), vocab_size)
    return torch.tensor(absent, device=device) if absent else None
