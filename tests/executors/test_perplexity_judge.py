"""Perplexity alone: what it is, how much it reads at a call, and what ends a run."""

import math

import numpy as np
import pytest
import torch

from llamarl.errors import NotFinite
from llamarl.evaluation import perplexity as perplexity_module
from llamarl.evaluation.judges import advance
from llamarl.evaluation.perplexity import (
    Likelihood,
    Perplexity,
)
from llamarl.models.config import read_config, tiny_directory
from llamarl.scoring.scorer import site_alone
from llamarl.tasks.parts import EvalSet
from tests.evaluated import begun, columns_of, evaluated, finished
from tests.executors.likelihoods import logprobs_by_transformers
from tests.tolerances import of_logprobs

EXACT = 1e-12
LOGIT = 8.0  # at most so large
ANSWERS = [
    evaluated("a", prompt=0, prompt_ids=(1, 2, 5), tokens=(3, 4, 6, 7)),
    evaluated("b", prompt=1, prompt_ids=(4,), tokens=(8,)),
    evaluated("sampled", prompt=1, sample=1, prompt_ids=(4,), tokens=(9, 9)),
    evaluated("c", prompt=2, prompt_ids=(2, 2), tokens=(5, 6)),
]
GREEDY = [answer.item for answer in ANSWERS if answer.completion.greedy]


def make(*, microbatch_tokens=8):
    judge = Perplexity(
        site_alone(torch.device("cpu")),
        path=str(tiny_directory()),
        dtype="float32",
        microbatch_tokens=microbatch_tokens,
    )
    judge.load()
    judge.start()
    return judge


def test_it_is_what_transformers_says_of_the_greedy_answers():
    judge = make()
    (likelihood,) = finished(judge, begun(judge, ANSWERS))
    wanted = logprobs_by_transformers(GREEDY)
    tolerance = 4 * of_logprobs(read_config(tiny_directory()), size=LOGIT)  # the longest has four
    assert likelihood.logprobs_N == pytest.approx(wanted, rel=0, abs=tolerance)
    assert likelihood.num_tokens_N.tolist() == [4, 1, 2]
    perplexity = math.exp(-wanted.sum() / 7)
    assert likelihood.metrics()["eval/perplexity"] == pytest.approx(perplexity, rel=tolerance)


def test_it_is_that_of_a_token_by_hand():
    likelihood = Likelihood(num_tokens_N=np.array([2, 4]), logprobs_N=np.array([-2.0, -1.0]))
    assert likelihood.perplexity == pytest.approx(math.exp(3 / 6), abs=EXACT)


def test_each_set_is_measured_by_itself():
    judge = make()
    sets = (EvalSet("", 0, 1), EvalSet("a", 1, 2))
    own, other = finished(judge, begun(judge, ANSWERS, sets=sets))
    columns = columns_of(make(), ANSWERS)
    every = np.concatenate([own.logprobs_N, other.logprobs_N])
    assert (own.num_tokens_N.tolist(), other.num_tokens_N.tolist()) == ([4], [1, 2])
    assert columns["eval/perplexity"] == pytest.approx(math.exp(-every.sum() / 7), rel=EXACT)


def test_a_call_reads_a_microbatch(monkeypatch):
    sizes = []
    real = perplexity_module.completion_logprobs

    def counted(decoder, batch):
        sizes.append(batch.input_ids.numel())
        return real(decoder, batch)

    monkeypatch.setattr(perplexity_module, "completion_logprobs", counted)
    judge = make(microbatch_tokens=8)
    answers = []
    for prompt in range(6):  # of 4 fed tokens each, two a microbatch
        answers.append(evaluated("", prompt=prompt, prompt_ids=(1 + prompt, 2), tokens=(3, 4, 5)))
    work = begun(judge, answers)
    for expected in (1, 2, 3):
        found = advance(work)
        assert len(sizes) == expected
    assert sizes == [8, 8, 8] and len(found) == 1


def test_a_log_probability_that_is_no_number_ends_the_run(monkeypatch):
    nan = torch.full((3,), math.nan, dtype=torch.float64)
    monkeypatch.setattr(perplexity_module, "completion_logprobs", lambda *_: nan)
    judge = make(microbatch_tokens=100)
    work = begun(judge, ANSWERS, version=7)
    with pytest.raises(
        NotFinite, match="policy version 7's completion of held-out prompt 0 is nan"
    ):
        advance(work)
