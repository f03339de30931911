"""Scorers against transformers' ...ForSequenceClassification, and their directories in and out; and
how likely a model finds answers, however they are packed.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from llamarl.learning.sft import completion_logprobs, pack_pairs, pair_of
from llamarl.models.attention import PackedAttention
from llamarl.models.config import as_scorer, read_config, tiny_directory
from llamarl.models.hf import export, named_parameters_hf
from llamarl.models.loading import load_scorer, training_decoder
from llamarl.models.scorer import scorer_fields, scores_at
from llamarl.models.sharding import num_parameters
from tests.build.model_directory import change_json
from tests.decoding import our_decoder
from tests.evaluated import evaluated, logprobs_by_transformers
from tests.random_models import SIZES, save_drawn
from tests.tolerances import of_logprobs, rounding

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("float32_products")]

CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_labels=1, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, num_labels=1, sliding_window=None, head_dim=16),
    "qwen2": Qwen2Config(**SIZES, num_labels=3, id2label={0: "toxic", 1: "rude", 2: "fine"}),
    "gpt_neox": GPTNeoXConfig(**SIZES, num_labels=1),
    "gpt2": GPT2Config(**SIZES, num_labels=2),
    "gemma2": Gemma2Config(**SIZES, num_labels=1, head_dim=8, sliding_window=8),
    "qwen3": Qwen3Config(**SIZES, num_labels=1, head_dim=8, tie_word_embeddings=True),
}
SCORES = rounding(terms=48, depth=2 * 3, size=2.0)  # width and layers, and how scores deviate
LENGTHS = (7, 23, 12)
CPU = torch.device("cpu")
LOGITS = 4.0  # their standard deviation, of the tiny model
NUM_ANSWERS = 6


def sequences() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(1, SIZES["vocab_size"], (n,), generator=draw) for n in LENGTHS]


@torch.no_grad()
def scores_of(decoder) -> torch.Tensor:
    """[N, C] of the sequences, packed end to end."""
    ends = F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    head = scores_at(ends[1:] - 1)
    return decoder(torch.cat(sequences()), positions, PackedAttention(ends), head)


@torch.no_grad()
def transformers_scores(model) -> torch.Tensor:
    return torch.cat([model(tokens[None]).logits for tokens in sequences()])


def assert_same_scores(ours, theirs):
    wanted = transformers_scores(theirs)
    torch.testing.assert_close(scores_of(ours), wanted, rtol=0, atol=SCORES)


def load(path):
    return load_scorer(path, device=CPU, dtype=torch.float32)


def begin(path, seed):
    """A scorer that begins as the language model, or the scorer, of a directory."""
    how = {"mesh": None, "device": CPU, "compute_dtype": torch.float32}
    return training_decoder(path, score_seed=seed, **how)


@pytest.fixture
def policy(tmp_path):
    return language_model("llama", tmp_path / "policy")


def language_model(name, path):
    save_drawn(AutoModelForCausalLM.from_config(CONFIGS[name]), path)
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_of_transformers(name, tmp_path):
    theirs = save_drawn(AutoModelForSequenceClassification.from_config(CONFIGS[name]), tmp_path)
    ours = load(tmp_path)
    assert_same_scores(ours, theirs)
    assert num_parameters(ours.config) == sum(p.numel() for p in ours.parameters())
    config = read_config(tmp_path)
    if name == "qwen2":
        assert (config.family, config.labels) == ("Qwen2", ("toxic", "rude", "fine"))


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt2", "gemma2"])
def test_a_scorer_begins_as_a_language_model_and_loads_in_transformers(name, tmp_path):
    policy = language_model(name, tmp_path / "policy")
    made = begin(policy, seed=3)
    spread = float(made.output_weight.detach().std())
    assert spread == pytest.approx((SIZES["hidden_size"] + 1) ** -0.5, rel=0.5)
    held = load_file(policy / "model.safetensors")
    for parameter_name, parameter in named_parameters_hf(made):
        is_drawn = parameter_name == "score.weight"
        assert is_drawn or torch.equal(parameter, held[parameter_name]), parameter_name
    path = tmp_path / "scorer"
    fields = scorer_fields(made.config, policy)
    export(named_parameters_hf(made), policy, path, dtype=torch.float32, fields=fields)
    theirs = AutoModelForSequenceClassification.from_pretrained(path)
    assert theirs.config.num_labels == 1
    assert_same_scores(made.eval(), theirs.eval())
    # Trained on, it keeps its head.
    assert torch.equal(begin(path, seed=4).output_weight, made.output_weight)


def test_a_language_model_is_no_scorer(policy):
    with pytest.raises(ValueError, match="LlamaForCausalLM has no score head"):
        load(policy)


def test_a_family_without_scorers_in_transformers_begins_none(tmp_path):
    save_drawn(AutoModelForCausalLM.from_config(GraniteConfig(**SIZES)), tmp_path)
    with pytest.raises(ValueError, match="no ForSequenceClassification of granite"):
        begin(tmp_path, seed=3)


def test_an_end_token_stands_for_an_absent_pad(policy):
    change_json(policy / "config.json", pad_token_id=None, eos_token_id=[5, 6])
    fields = scorer_fields(as_scorer(read_config(policy)), policy)
    assert fields["pad_token_id"] == 5


# --- How likely answers are ---


def answered():
    draw = torch.Generator().manual_seed(0)

    def tokens(most):
        size = int(torch.randint(1, most, (1,), generator=draw))
        return tuple(torch.randint(1, 14, (size,), generator=draw).tolist())

    asked = [(tokens(8), tokens(12)) for _ in range(NUM_ANSWERS)]
    return [evaluated("", prompt_ids=prompt, tokens=answer).item for prompt, answer in asked]


@pytest.mark.parametrize("together", [1, 4, NUM_ANSWERS])
def test_log_probabilities_of_answers_are_those_of_transformers(together):
    decoder, items = our_decoder(tiny_directory()).eval(), answered()
    found = []
    for first in range(0, NUM_ANSWERS, together):
        batch = items[first : first + together]
        pairs = [pair_of(item.prompt.prompt_ids, item.token_ids) for item in batch]
        found += completion_logprobs(decoder, pack_pairs(pairs)).tolist()
    for value, item, expected in zip(found, items, logprobs_by_transformers(items), strict=True):
        tolerance = item.token_ids.numel() * of_logprobs(decoder.config, size=LOGITS)
        assert value == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("prompt, answer", [([], [1]), ([1], [])])
def test_nothing_to_be_likely_is_refused(prompt, answer):
    with pytest.raises(ValueError, match="without tokens"):
        pair_of(torch.tensor(prompt, dtype=torch.int64), torch.tensor(answer, dtype=torch.int64))
