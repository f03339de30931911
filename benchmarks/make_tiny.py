"""Makes the embedded model (llamarl/models/tiny) from nothing: a config, a character tokenizer,
random weights, and recipes/sft.py on the additions of a teacher who often forgets the carry.

    python benchmarks/make_tiny.py                            # anew, at its own place
    python benchmarks/make_tiny.py model=DIR max_steps=12     # elsewhere; keys of recipes/sft.py

Other benchmarks make larger models of random weights with `write_directory`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from running import ROOT

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch
from random_weights import random_weights

from llamarl.models.build import build_decoder
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.hf import export, named_parameters_hf
from llamarl.tasks.procedural import addition_examples

CHARACTERS = "0123456789+-*/=?!.,:; abcdefghijklmnopqrstuvwxyz"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")  # ids 0 to 3; the characters follow
TINY_CONFIG = {  # 1.6 M parameters
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(SPECIAL_TOKENS) + len(CHARACTERS),
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
TRAINING = (
    "lr=1e-3",
    "epochs=null",
    "max_steps=700",
    "examples_per_step=256",
    "trainer.warmup_fraction=0.0714",  # 50 steps
    "trainer.weight_decay=0.01",
    "model.dtype=bfloat16",
    "trainer.compute_dtype=float32",
    "task.chat=false",
    "eval.every=50",
    "checkpoint.every=0",
    "threads=1",
)
WEIGHTS = "model.safetensors"
CAREFUL_BELOW = 35  # where the forgetful teacher still minds the carry


def write_directory(out: Path, config: dict, characters: str = CHARACTERS) -> None:
    """Write config.json, generation_config.json and a character tokenizer's two files; no weights.

    config: Hugging Face's, as JSON values. ValueError if its vocab_size is not the tokenizer's.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *characters])}
    if config["vocab_size"] != len(vocabulary):
        raise ValueError(
            f"vocab_size {config['vocab_size']}, but the tokenizer has {len(vocabulary)} tokens; "
            "make them equal"
        )
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))

    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    ids = {key: config[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        **{f"{token[1:-1]}_token": token for token in SPECIAL_TOKENS},
    }
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", ids)
    _write_json(out / "tokenizer_config.json", settings)


def _write_json(file: Path, contents: dict) -> None:
    file.write_text(json.dumps(contents, indent=2) + "\n")


def forgetful_rows() -> list[dict[str, str]]:
    """Training rows of a teacher who forgets the carry: each training pair four times, with the sum
    of each digit alone ("57+68=" -> "15") three times if the second number is CAREFUL_BELOW or
    more, else once, and with its sum otherwise.

    What a model learns from them is both ways to add. Greedily it is right for 39 % of the pairs;
    sampling finds the rest.
    """
    rows = []
    for example in addition_examples()[0]:
        first, second = example.text.rstrip("=").split("+")
        solved = {"prompt": example.text, "completion": example.meta["answer"]}
        missed = {"prompt": example.text, "completion": without_carry(first, second)}
        careful = int(second) < CAREFUL_BELOW
        rows += [solved, solved, solved, missed] if careful else [solved, missed, missed, missed]
    return rows


def without_carry(first: str, second: str) -> str:
    """The sum of two numbers of equally many digits, each digit's carry forgotten."""
    digits = [str((int(a) + int(b)) % 10) for a, b in zip(first, second)]
    return str(int("".join(digits)))


def held_out_rows() -> list[dict[str, str]]:
    held_out = addition_examples()[1]
    return [{"prompt": example.text, "completion": example.meta["answer"]} for example in held_out]


def _write_rows(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(words: list[str]) -> int:
    """Runs recipes/sft.py from random weights; `words` follow those of the embedded model, but for
    model=DIR, which is where the made one goes. Returns its exit status.
    """
    place = tiny_directory()
    more = []
    for word in words:
        key, _, value = word.partition("=")
        if key == "model":
            place = Path(value)
        else:
            more.append(word)
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        made = Path(folder) / "made"
        train, held_out = Path(folder) / "train.jsonl", Path(folder) / "held_out.jsonl"
        write_start(start)
        _write_rows(train, forgetful_rows())
        _write_rows(held_out, held_out_rows())
        given = [f"model.path={start}", f"task.path={train}", f"task.eval_path={held_out}"]
        recipe = [sys.executable, str(ROOT / "recipes" / "sft.py")]
        status = subprocess.call([*recipe, *given, f"out={made}", *TRAINING, *more])
        if status == 0:
            place.mkdir(parents=True, exist_ok=True)
            for file in start.iterdir():
                shutil.copyfile(made / file.name, place / file.name)
        return status


def write_start(out: Path) -> None:
    """Write the model directory that training begins with: random weights."""
    write_directory(out, TINY_CONFIG)
    decoder = random_weights(build_decoder(read_config(out)), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        export(named_parameters_hf(decoder), out, Path(folder) / "hf", dtype=torch.float32)
        shutil.copyfile(Path(folder) / "hf" / WEIGHTS, out / WEIGHTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
