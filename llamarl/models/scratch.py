"""A model directory from nothing: a config, a character tokenizer, random weights.

`recipes/sft.py --make-tiny` makes the embedded default model (llamarl/models/tiny) of these.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from llamarl.models.build import Decoder

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


def tiny_directory() -> Path:
    """Where the embedded model lies: a Llama of 1.6 M parameters that adds two-digit numbers right
    about 2 times in 5.
    """
    return Path(__file__).parent / "tiny"


def write_directory(out: str | Path, config: dict, characters: str = CHARACTERS) -> None:
    """Write config.json, generation_config.json and a character tokenizer's two files; no weights.

    config: Hugging Face's, as JSON values. ValueError if its vocab_size is not the tokenizer's.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *characters])}
    if config["vocab_size"] != len(vocabulary):
        raise ValueError(
            f"vocab_size {config['vocab_size']}, but the tokenizer has {len(vocabulary)} tokens; make them equal"
        )
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))

    out = Path(out)
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
    for name, contents in (
        ("config.json", config),
        ("generation_config.json", ids),
        ("tokenizer_config.json", settings),
    ):
        (out / name).write_text(json.dumps(contents, indent=2) + "\n")


@torch.no_grad()
def random_weights(
    decoder: Decoder, *, seed: int, std: float = 0.02, device: str | torch.device = "cpu"
) -> Decoder:
    """Fill a decoder (on the meta device or not): norms 1, biases 0, the rest normal(0, std). Same
    numbers on every device.
    """
    if any(p.is_meta for p in decoder.parameters()):
        decoder.to_empty(device=device)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if name.endswith(".scale"):
            parameter.fill_(1)
        elif name.endswith(".bias"):
            parameter.zero_()
        else:
            values: Tensor = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(values)
    return decoder
