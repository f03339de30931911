"""Scorers against transformers' ...ForSequenceClassification, and their directories in and out."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from llamarl.models.attention import PackedAttention
from llamarl.models.config import read_config
from llamarl.models.hf import export, named_parameters_hf
from llamarl.models.loading import load_scorer, training_decoder
from llamarl.models.scorer import scorer_fields, scores_at
from llamarl.models.sharding import num_parameters
from tests.random_models import SIZES, save_drawn
from tests.tolerances import rounding

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("float32_products")]

CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_labels=1, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, num_labels=1, sliding_window=None, head_dim=16),
    "qwen2": Qwen2Config(**SIZES, num_labels=3, id2label={0: "toxic", 1: "rude", 2: "fine"}),
    "gpt_neox": GPTNeoXConfig(**SIZES, num_labels=1),
    "gpt2": GPT2Config(**SIZES, num_labels=2),
    "qwen3": Qwen3Config(**SIZES, num_labels=1, head_dim=8, tie_word_embeddings=True),
}
SCORES = rounding(terms=48, depth=2 * 3, size=2.0)  # width and layers, and how scores deviate
LENGTHS = (7, 23, 12)
CPU = torch.device("cpu")


def sequences() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(1, SIZES["vocab_size"], (n,), generator=draw) for n in LENGTHS]


def scores_of(decoder) -> torch.Tensor:
    """[N, C] of the sequences, packed end to end."""
    tokens = sequences()
    lengths = torch.tensor([len(t) for t in tokens])
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    positions = torch.cat([torch.arange(int(n)) for n in lengths])
    with torch.no_grad():
        return decoder(
            torch.cat(tokens),
            positions,
            PackedAttention(cu_seqlens),
            scores_at(cu_seqlens[1:] - 1),
        )


@torch.no_grad()
def transformers_scores(model) -> torch.Tensor:
    return torch.cat([model(tokens[None]).logits for tokens in sequences()])


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_of_transformers(name, tmp_path):
    theirs = save_drawn(AutoModelForSequenceClassification.from_config(CONFIGS[name]), tmp_path)
    ours = load_scorer(tmp_path, device=CPU, dtype=torch.float32)
    torch.testing.assert_close(scores_of(ours), transformers_scores(theirs), rtol=0, atol=SCORES)
    assert num_parameters(ours.config) == sum(p.numel() for p in ours.parameters())


def test_labels_are_named(tmp_path):
    save_drawn(AutoModelForSequenceClassification.from_config(CONFIGS["qwen2"]), tmp_path)
    config = read_config(tmp_path)
    assert config.labels == ("toxic", "rude", "fine")
    assert config.family == "Qwen2"


def test_a_scorer_begins_as_a_language_model_and_loads_in_transformers(tmp_path):
    save_drawn(AutoModelForCausalLM.from_config(CONFIGS["llama"]), tmp_path / "policy")
    made = training_decoder(
        tmp_path / "policy", mesh=None, device=CPU, compute_dtype=torch.float32, score_seed=3
    )
    spread = float(made.score.weight.detach().std())
    assert spread == pytest.approx((SIZES["hidden_size"] + 1) ** -0.5, rel=0.5)
    export(
        named_parameters_hf(made),
        tmp_path / "policy",
        tmp_path / "scorer",
        dtype=torch.float32,
        fields=scorer_fields(made.config, tmp_path / "policy"),
    )
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scorer")
    assert theirs.config.num_labels == 1
    torch.testing.assert_close(
        scores_of(made.eval()), transformers_scores(theirs.eval()), rtol=0, atol=SCORES
    )
    # Trained on, it keeps its head.
    again = training_decoder(
        tmp_path / "scorer", mesh=None, device=CPU, compute_dtype=torch.float32, score_seed=4
    )
    assert torch.equal(again.score.weight, made.score.weight)


def test_the_trunk_is_the_language_models(tmp_path):
    save_drawn(AutoModelForCausalLM.from_config(CONFIGS["llama"]), tmp_path)
    made = training_decoder(
        tmp_path, mesh=None, device=CPU, compute_dtype=torch.float32, score_seed=3
    )
    held = load_file(tmp_path / "model.safetensors")
    for name, parameter in named_parameters_hf(made):
        if name != "score.weight":
            assert torch.equal(parameter, held[name]), name


def test_a_language_model_is_no_scorer(tmp_path):
    save_drawn(AutoModelForCausalLM.from_config(CONFIGS["llama"]), tmp_path)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no score head"):
        load_scorer(tmp_path, device=CPU, dtype=torch.float32)


def test_an_end_token_stands_for_an_absent_pad(tmp_path):
    save_drawn(AutoModelForCausalLM.from_config(CONFIGS["llama"]), tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"pad_token_id": None, "eos_token_id": [5, 6]}))
    fields = scorer_fields(read_config(tmp_path).as_scorer(), tmp_path)
    assert fields["pad_token_id"] == 5
