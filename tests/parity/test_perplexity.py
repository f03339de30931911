"""How likely a model finds answers: equal to transformers', however they are packed."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from llamarl.learning.sft import completion_logprobs, pack_pairs, pair_of
from llamarl.models.build import build_decoder
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.hf import load_weights
from tests.tolerances import of_logprobs

CPU = torch.device("cpu")
LOGITS = 4.0  # their standard deviation, of the tiny model
NUM_ANSWERS = 6

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("float32_products")]


@pytest.fixture(scope="module")
def decoder():
    config = read_config(tiny_directory())
    return load_weights(build_decoder(config), tiny_directory(), device=CPU).eval()


@pytest.fixture(scope="module")
def answered():
    draw = torch.Generator().manual_seed(0)

    def tokens(most):
        size = int(torch.randint(1, most, (1,), generator=draw))
        return torch.randint(1, 14, (size,), generator=draw)

    return [(tokens(8), tokens(12)) for _ in range(NUM_ANSWERS)]


@torch.no_grad()
def transformers_logprob(model, prompt_ids, token_ids):
    """Of an answer alone, without padding."""
    ids = torch.cat([prompt_ids, token_ids])
    logprobs = model(ids[None]).logits[0].double().log_softmax(-1)
    first = prompt_ids.numel() - 1
    return sum(float(logprobs[first + i, token]) for i, token in enumerate(token_ids.tolist()))


@pytest.mark.parametrize("together", [1, 4, NUM_ANSWERS])
def test_log_probabilities_of_answers_are_those_of_transformers(decoder, answered, together):
    model = AutoModelForCausalLM.from_pretrained(tiny_directory(), dtype=torch.float32).eval()
    found = []
    for first in range(0, NUM_ANSWERS, together):
        pairs = [pair_of(*ids) for ids in answered[first : first + together]]
        found += completion_logprobs(decoder, pack_pairs(pairs)).tolist()
    for value, (prompt_ids, token_ids) in zip(found, answered, strict=True):
        tolerance = token_ids.numel() * of_logprobs(decoder.config, size=LOGITS)
        expected = transformers_logprob(model, prompt_ids, token_ids)
        assert value == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("prompt, answer", [([], [1]), ([1], [])])
def test_nothing_to_be_likely_is_refused(prompt, answer):
    with pytest.raises(ValueError, match="without tokens"):
        pair_of(torch.tensor(prompt, dtype=torch.int64), torch.tensor(answer, dtype=torch.int64))
