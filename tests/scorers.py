"""Small models that score, for tests: the tiny model's tokenizer and a random trunk and head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig

from llamarl.learning.scoring import Asked
from llamarl.models.config import tiny_directory

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def write_scorer(path: Path, *, labels: tuple[str, ...] = ("reward",), seed: int = 0, **sizes):
    """A random Llama that scores, with the tiny model's tokens; returns transformers' model of it.

    Its weights are so large that each of them shows in a score.
    """
    tiny = json.loads((tiny_directory() / "config.json").read_text())
    given = {
        "vocab_size": tiny["vocab_size"],
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "id2label": dict(enumerate(labels)),
    }
    model = AutoModelForSequenceClassification.from_config(LlamaConfig(**(given | sizes)))
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        parameter.data = noise * 0.2 + (parameter.dim() == 1)
    model.save_pretrained(path)
    for name in TOKENIZER:
        shutil.copyfile(tiny_directory() / name, path / name)
    return model.eval()


def asked_for(num_prompts: int, group_size: int, *, seed: int = 0, vocab: int = 20) -> list[Asked]:
    """Random prompts with completions of uneven lengths."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(longest: int) -> torch.Tensor:
        length = int(torch.randint(1, longest, (1,), generator=draw))
        return torch.randint(1, vocab, (length,), generator=draw)

    asked = []
    for _ in range(num_prompts):
        asked.append(Asked(tokens(9), tuple(tokens(30) for _ in range(group_size))))
    return asked


@torch.no_grad()
def transformers_scores(model, asked: list[Asked], label: int = 0) -> torch.Tensor:
    """[N]: each sequence alone, without padding, at its last token whatever that is."""
    scores = []
    for one in asked:
        for completion in one.completions:
            ids = torch.cat([one.prompt_ids, completion])
            hidden_TD = model.model(ids[None]).last_hidden_state[0]
            scores.append(model.score(hidden_TD[-1])[label])
    return torch.stack(scores)
