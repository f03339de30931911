"""How likely a model finds answers: equal to transformers', however they are packed."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from llamarl.learning.perplexity import Answered, answer_logprobs, pack_answers
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

    return [Answered(tokens(8), tokens(12)) for _ in range(NUM_ANSWERS)]


@torch.no_grad()
def transformers_logprob(model, one):
    """Of an answer alone, without padding."""
    ids = torch.cat([one.prompt_ids, one.token_ids])
    logprobs = model(ids[None]).logits[0].double().log_softmax(-1)
    first = one.prompt_ids.numel() - 1
    return sum(float(logprobs[first + i, token]) for i, token in enumerate(one.token_ids.tolist()))


@pytest.mark.parametrize("budget", [1, 20, 1000])
def test_log_probabilities_of_answers_are_those_of_transformers(decoder, answered, budget):
    model = AutoModelForCausalLM.from_pretrained(tiny_directory(), dtype=torch.float32).eval()
    found = torch.full((NUM_ANSWERS,), math.nan, dtype=torch.float64)
    batches = pack_answers(answered, budget_tokens=budget)
    assert (len(batches) == 1) == (budget == 1000)
    for batch in batches:
        assert batch.input_ids.numel() <= budget or batch.places.numel() == 1
        found[batch.places] = answer_logprobs(decoder, batch, CPU)
    for value, one in zip(found.tolist(), answered):
        tolerance = one.token_ids.numel() * of_logprobs(decoder.config, size=LOGITS)
        assert value == pytest.approx(transformers_logprob(model, one), abs=tolerance)


def test_the_shift_by_hand():
    """As the docstring of AnswerBatch has it."""
    first = Answered(torch.tensor([10, 11]), torch.tensor([12, 13]))
    second = Answered(torch.tensor([20]), torch.tensor([21]))
    (batch,) = pack_answers([first, second], budget_tokens=10)
    assert batch.input_ids.tolist() == [10, 11, 12, 20]
    assert batch.positions.tolist() == [0, 1, 2, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 4]
    assert batch.rows.tolist() == [1, 2, 3]
    assert batch.labels.tolist() == [12, 13, 21]
    assert batch.answers.tolist() == [0, 0, 1]
    assert batch.places.tolist() == [0, 1]


@pytest.mark.parametrize("prompt, answer", [([], [1]), ([1], [])])
def test_nothing_to_be_likely_is_refused(prompt, answer):
    with pytest.raises(ValueError, match="without tokens"):
        Answered(torch.tensor(prompt, dtype=torch.int64), torch.tensor(answer, dtype=torch.int64))
