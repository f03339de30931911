"""Small models that score, for tests: the tiny model's tokenizer and a random trunk and head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
)

from llamarl.models.config import tiny_directory
from llamarl.scoring.sharded import ScoreRequest
from tests.random_models import save_drawn
from tests.tolerances import rounding

SCORES = rounding(terms=24, depth=2 * 2, size=2.0)  # width and layers, and how scores deviate
LABELS = ("mild", "toxic", "odd")  # of an encoder
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def write_scorer(path: Path, *, labels: tuple[str, ...] = ("reward",), seed: int = 0, **sizes):
    """A random Llama that scores, with the tiny model's tokens; returns transformers' own."""
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
    save_drawn(model, path, seed=seed)
    for name in TOKENIZER:
        shutil.copyfile(tiny_directory() / name, path / name)
    return model


def write_encoder(path: Path, labels: tuple[str, ...] = LABELS):
    """A random BERT that classifies, with the tiny model's tokens; returns transformers' own."""
    config = BertConfig(
        vocab_size=52,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=40,
        pad_token_id=0,
        id2label=dict(enumerate(labels)),
    )
    model = save_drawn(BertForSequenceClassification(config), path)
    for name in TOKENIZER:
        shutil.copyfile(tiny_directory() / name, path / name)
    return model


def spoil_head(path: Path) -> None:
    """Make every score of a scorer overflow; each of its weights is a number."""
    file = path / "model.safetensors"
    held = load_file(file)
    held["model.norm.weight"].fill_(3e38)
    held["score.weight"].fill_(3e38)
    save_file(held, file, metadata={"format": "pt"})


def asked_for(
    num_prompts: int, group_size: int, *, seed: int = 0, vocab: int = 20
) -> list[ScoreRequest]:
    """Random prompts with completions of uneven lengths."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(longest: int) -> torch.Tensor:
        length = int(torch.randint(1, longest, (1,), generator=draw))
        return torch.randint(1, vocab, (length,), generator=draw)

    asked = []
    for _ in range(num_prompts):
        asked.append(ScoreRequest(tokens(9), tuple(tokens(30) for _ in range(group_size))))
    return asked


@torch.no_grad()
def score_of(model, ids_T: torch.Tensor, label: int = 0) -> torch.Tensor:
    """Of one sequence alone, without padding, at its last token whatever that is."""
    hidden_TD = model.model(ids_T[None]).last_hidden_state[0]
    return model.score(hidden_TD[-1])[label]


def transformers_scores(model, asked: list[ScoreRequest], label: int = 0) -> torch.Tensor:
    """[N]: each sequence alone."""
    scores = []
    for one in asked:
        for completion in one.completions:
            ids = torch.cat([one.prompt_ids, completion])
            scores.append(score_of(model, ids, label))
    return torch.stack(scores)
