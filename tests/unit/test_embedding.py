"""Embeddings of texts against transformers, and their distances against the formula's own words."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModel, AutoTokenizer

from llamarl.models.config import tiny_directory
from llamarl.scoring.embedding import (
    EmbedderSettings,
    check_sentence_encoder,
    load_embedder,
    mean_pairwise_distance,
)
from tests.scorers import write_encoder

CPU = torch.device("cpu")
TEXTS = ["12+34=46", "7", "", "1+1=2 1+1=2 1+1=2", "99+1=100"]


def pairs_one_by_one(vectors):
    """The mean over pairs of 1 - cos, by the letter."""
    distances = []
    for one, other in itertools.combinations(vectors, 2):
        lengths = np.linalg.norm(one) * np.linalg.norm(other)
        cosine = float(one @ other) / lengths if lengths else 0.0
        distances.append(1 - cosine)
    return sum(distances) / len(distances)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.integers(1, 5), st.integers(0, 2**31))
def test_the_distance_is_the_mean_over_pairs(count, width, seed):
    vectors = np.random.default_rng(seed).normal(size=(count, width))
    vectors[0] *= seed % 2  # now and then one of zeros
    got = mean_pairwise_distance(torch.tensor(vectors))
    assert got == pytest.approx(pairs_one_by_one(vectors), abs=1e-9)
    assert math.isnan(mean_pairwise_distance(torch.tensor(vectors[:1])))


def of_transformers(directory, texts, **how):
    """The mean of the last hidden states of each text alone, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    means = []
    for text in texts:
        ids = tokenizer(text, **how)["input_ids"] or [tokenizer.eos_token_id]
        with torch.no_grad():
            means.append(model(torch.tensor([ids])).last_hidden_state[0].mean(0))
    return torch.stack(means)


@pytest.mark.parametrize("budget", [8, 1000])
def test_the_policy_embeds_as_transformers_means_its_hidden_states(budget):
    made = EmbedderSettings(str(tiny_directory()), True, "float32", budget)
    vectors = load_embedder(made, CPU).embed(TEXTS)
    expected = of_transformers(tiny_directory(), TEXTS, add_special_tokens=False)
    assert torch.allclose(vectors, expected, atol=1e-5)
    assert not torch.allclose(vectors[0], vectors[4], atol=1e-2)


def test_an_encoder_embeds_without_what_texts_are_padded_with(tmp_path):
    write_encoder(tmp_path)
    made = EmbedderSettings(str(tmp_path), False, "float32", 1000)
    texts = [text for text in TEXTS if text]
    vectors = load_embedder(made, CPU).embed(texts)
    assert torch.allclose(vectors, of_transformers(tmp_path, texts), atol=1e-5)


def test_an_encoder_is_refused_without_safetensors_or_a_known_config(tmp_path):
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        check_sentence_encoder(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ValueError, match="transformers cannot read its config.json"):
        check_sentence_encoder(str(tmp_path))
