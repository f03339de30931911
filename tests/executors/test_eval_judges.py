"""The judges of evaluations alone, gold, diversity and perplexity: what has no score is in no
figure, and each set is judged by itself.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch

from llamarl.errors import NotFinite, RewardError
from llamarl.evaluation import diversity as diversity_module
from llamarl.evaluation import perplexity as perplexity_module
from llamarl.evaluation.diversity import TEXTS_A_CALL, Diversity
from llamarl.evaluation.gold import Gold
from llamarl.evaluation.judges import advance
from llamarl.evaluation.perplexity import Likelihood, Perplexity
from llamarl.models.config import read_config, tiny_directory
from llamarl.scoring.model import ModelScorer
from llamarl.scoring.scorer import site_alone
from llamarl.scoring.weighted import WeightedPart
from llamarl.tasks.parts import EvalSet
from tests.build.job import finished_job
from tests.build.kind_settings import model_settings
from tests.evaluated import begun, columns_of, evaluated, finished, logprobs_by_transformers
from tests.executors.fakes import FakeScorer
from tests.launching import SMALL
from tests.scorers import SCORES, write_scorer
from tests.tolerances import of_logprobs


def alone():
    return site_alone(torch.device("cpu"))


def set_up(judge):
    judge.load()
    judge.start()
    return judge


def answers(*texts):
    """A greedy answer to each prompt, in order."""
    return [evaluated(text, prompt=prompt) for prompt, text in enumerate(texts)]


def judged(judge, answers, **options):
    """What it says of an evaluation of one set."""
    (said,) = finished(judge, begun(judge, answers, **options))
    return said


# --- Gold ---


class Slow(FakeScorer):
    """Scores a text by its length, once it is asked a second time."""

    def __init__(self, site):
        super().__init__()
        self._ready = []

    @property
    def pending(self):
        return len(self.known) + len(self._ready)

    def poll(self):
        done, self._ready = self._ready, super().poll()
        return done


def gold(*references, source=Slow, site=None):
    items = tuple(evaluated(text).item for text in references) or None
    return set_up(Gold(site or alone(), scorer=WeightedPart("lengths", source), references=items))


def by_model(path, **changes):
    write_scorer(path)
    return partial(ModelScorer, "lengths", model_settings(path, **changes))


def test_what_has_no_score_is_masked_on_either_side(caplog):
    said = judged(gold("aa", "a", "a", "error"), answers("aaa", "abstain", "a", "aaaa"))
    assert said.gold_N[[0, 2, 3]].tolist() == [3, 1, 4] and math.isnan(said.gold_N[1])
    assert said.wins_N[[0, 2]].tolist() == [1, 0.5] and np.isnan(said.wins_N[[1, 3]]).all()
    assert said.metrics()["eval/gold_masked"] == 1
    assert "1 of 4 reference answers have no score: it broke" in caplog.text
    assert "1 of 4 completions of policy version 0 have no score: nothing to say" in caplog.text


def test_references_are_scored_once_for_all_evaluations():
    judge = gold("aa")
    works = [begun(judge, answers("a"), version=3), begun(judge, answers("aaa"), version=5)]
    found = [finished(judge, work) for work in works]
    assert [said.wins_N.tolist() for (said,) in found] == [[0.0], [1.0]]
    assert not judge.is_computing


@pytest.mark.parametrize("reference, answer", [("error", "a"), ("a", "error")])
def test_nothing_that_could_be_scored_ends_the_run(reference, answer):
    with pytest.raises(RewardError, match="1 of 1 .*it broke; correct the gold scorer"):
        judged(gold(reference), answers(answer))


def test_a_gold_that_abstains_from_all_says_nothing(caplog):
    found = judged(gold("a"), answers("abstain")).metrics()
    assert found["eval/gold"] is None and found["eval/win_rate"] is None
    assert found["eval/gold_masked"] == 1 and "nothing to say" in caplog.text


def test_a_scorer_of_weights_that_are_no_numbers_gives_no_score(tmp_path):
    judge = gold(source=by_model(tmp_path))
    judge._scorer.model.decoder.score.weight.data[:] = math.nan
    with pytest.raises(RewardError, match="the score is nan"):
        judged(judge, answers("a"))


def test_a_model_works_a_microbatch_at_a_call(tmp_path):
    source = by_model(tmp_path, microbatch_tokens=8)
    judge = gold(source=source)
    asked = []
    for prompt in range(6):  # of 4 tokens each, two a microbatch
        asked.append(evaluated("", prompt=prompt, prompt_ids=(1 + prompt, 2), tokens=(3, 5)))
    work = begun(judge, asked)
    found = None
    for _ in range(3):
        assert found is None and judge.is_computing
        found = advance(work)
    assert not judge.is_computing
    (all_of_them,) = found.values()
    first = judged(gold(source=source), asked[:1])
    assert all_of_them.gold_N[0] == pytest.approx(first.gold_N[0], abs=SCORES)
    assert len(list(judge.tensors())) > 0


def test_sampled_answers_are_no_concern_of_gold_and_closing_it_frees_the_source():
    judge = gold()
    said = judged(judge, [evaluated("aa"), evaluated("aaaa", sample=1), evaluated("a", prompt=1)])
    assert said.gold_N.tolist() == [2, 1]
    judge.close()
    assert judge._scorer.is_closed


def test_gold_judges_each_set_by_itself():
    sets = (EvalSet("", 0, 2), EvalSet("a", 2, 1))
    judge = gold("a", "a", "aaa")
    columns = columns_of(judge, answers("aa", "aaaa", "b"), version=4, sets=sets)
    assert columns["eval/gold"] == 3.0 and columns["eval/win_rate"] == 1.0
    assert columns["eval/a/gold"] == 1.0 and columns["eval/a/win_rate"] == 0.0


def test_a_gold_model_runs_beside_a_part_of_the_reward_of_its_name(tmp_path):
    source = by_model(tmp_path)
    site = alone()
    reward = source(site)
    reward.load()
    said = judged(gold(source=source, site=site), answers("a"))
    reward.submit(0, evaluated("a").item)
    reward.release([0])
    ((_, outcome),) = reward.poll()
    assert said.gold_N[0] == pytest.approx(outcome.value, abs=SCORES)


# --- Diversity ---


DIRECTIONS = {"east": [1.0, 0.0], "north": [0.0, 1.0], "west": [-1.0, 0.0]}


class ByWord:
    """Embeds the words of DIRECTIONS, and remembers how many at a time."""

    def __init__(self):
        self.calls = []

    def embed(self, texts):
        self.calls.append(len(texts))
        return torch.tensor([DIRECTIONS[text] for text in texts])

    def tensors(self):
        return []


@pytest.fixture
def embedder(monkeypatch):
    made = ByWord()
    monkeypatch.setattr(diversity_module, "load_embedder", lambda settings, device: made)
    return made


def of_prompts(*sampled, first=0):
    """A greedy answer to each prompt, and these sampled ones."""
    found = []
    for prompt, texts in enumerate(sampled, start=first):
        for sample, text in enumerate(["greedy", *texts]):
            found.append(evaluated(text, prompt=prompt, sample=sample))
    return found


def test_it_is_the_mean_over_a_sets_prompts_of_the_distance_among_a_prompts_answers(embedder):
    own = of_prompts(["east", "east"], ["east", "west"], ["north", "east"])
    of_a = of_prompts(["east", "east"], ["north", "east"], first=9)
    sets = (EvalSet("", 0, 3), EvalSet("a", 9, 2))
    columns = columns_of(set_up(Diversity(alone(), settings=None)), own + of_a, sets=sets)
    wanted = {"eval/diversity": (0 + 2 + 1) / 3, "eval/a/diversity": 0.5}
    assert columns == pytest.approx(wanted)


def test_it_works_in_pieces(embedder):
    diversity = set_up(Diversity(alone(), settings=None))
    work = begun(diversity, of_prompts(["east", "north"] * TEXTS_A_CALL))
    assert embedder.calls == [] and diversity.is_computing
    assert advance(work) is None and embedder.calls == [TEXTS_A_CALL]
    assert advance(work) is not None and embedder.calls == [TEXTS_A_CALL, TEXTS_A_CALL]


@pytest.mark.slow
def test_a_run_reports_it_beside_what_gold_says(tmp_path):
    overrides = ("eval.gold=tests.launching:unhurried", "eval.reference_key=null")
    overrides += ("eval.embedder=start", "eval.num_samples=3", "max_steps=2")
    rows = finished_job(*SMALL, *overrides, run_dir=tmp_path / "run").rows
    assert [row["step"] for row in rows if row.get("eval/diversity") is not None] == [0, 2]
    for row in (rows[0], rows[2]):
        assert 0 < row["eval/diversity"] < 2 and row["eval/gold"] is not None


# --- Perplexity ---


EXACT = 1e-12
LOGIT = 8.0  # at most so large
ANSWERS = [
    evaluated("a", prompt=0, prompt_ids=(1, 2, 5), tokens=(3, 4, 6, 7)),
    evaluated("b", prompt=1, prompt_ids=(4,), tokens=(8,)),
    evaluated("sampled", prompt=1, sample=1, prompt_ids=(4,), tokens=(9, 9)),
    evaluated("c", prompt=2, prompt_ids=(2, 2), tokens=(5, 6)),
]
GREEDY = [answer.item for answer in ANSWERS if answer.completion.greedy]


def perplexity(*, microbatch_tokens=8):
    path = str(tiny_directory())
    how = {"dtype": "float32", "microbatch_tokens": microbatch_tokens}
    return set_up(Perplexity(alone(), path=path, **how))


def test_it_is_what_transformers_says_of_the_greedy_answers():
    likelihood = judged(perplexity(), ANSWERS)
    wanted = logprobs_by_transformers(GREEDY)
    tolerance = 4 * of_logprobs(read_config(tiny_directory()), size=LOGIT)  # the longest has four
    assert likelihood.logprobs_N == pytest.approx(wanted, rel=0, abs=tolerance)
    assert likelihood.num_tokens_N.tolist() == [4, 1, 2]
    found = likelihood.metrics()["eval/perplexity"]
    assert found == pytest.approx(math.exp(-wanted.sum() / 7), rel=tolerance)


def test_it_is_that_of_a_token_by_hand():
    likelihood = Likelihood(num_tokens_N=np.array([2, 4]), logprobs_N=np.array([-2.0, -1.0]))
    assert likelihood.perplexity == pytest.approx(math.exp(3 / 6), abs=EXACT)


def test_each_sets_perplexity_is_measured_by_itself():
    judge = perplexity()
    sets = (EvalSet("", 0, 1), EvalSet("a", 1, 2))
    own, other = finished(judge, begun(judge, ANSWERS, sets=sets))
    columns = columns_of(perplexity(), ANSWERS)
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
    answers = []
    for prompt in range(6):  # of 4 fed tokens each, two a microbatch
        answers.append(evaluated("", prompt=prompt, prompt_ids=(1 + prompt, 2), tokens=(3, 4, 5)))
    work = begun(perplexity(microbatch_tokens=8), answers)
    for expected in (1, 2, 3):
        found = advance(work)
        assert len(sizes) == expected
    assert sizes == [8, 8, 8] and len(found) == 1


def test_a_log_probability_that_is_no_number_ends_the_run(monkeypatch):
    nan = torch.full((3,), math.nan, dtype=torch.float64)
    monkeypatch.setattr(perplexity_module, "completion_logprobs", lambda *_: nan)
    work = begun(perplexity(microbatch_tokens=100), ANSWERS, version=7)
    said = "policy version 7's completion of held-out prompt 0 is nan"
    with pytest.raises(NotFinite, match=said):
        advance(work)
