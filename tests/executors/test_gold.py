"""Gold alone: what has no score is in no figure, and evaluations are judged in their order."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from llamarl.errors import RewardError
from llamarl.evaluation.gold import Gold
from llamarl.evaluation.judges import advance
from llamarl.scoring.model import ModelScorer
from llamarl.scoring.scorer import Scorer, site_alone
from llamarl.scoring.weighted import WeightedPart
from llamarl.tasks.parts import EvalSet
from llamarl.types import Outcome
from tests.build.kind_settings import model_settings
from tests.evaluated import begun, columns_of, evaluated, finished
from tests.scorers import SCORES, write_scorer

CPU = torch.device("cpu")


def item(text):
    return evaluated(text).item


def answers(*texts):
    """A greedy answer to each prompt, in order."""
    return [evaluated(text, prompt=prompt) for prompt, text in enumerate(texts)]


class Lengths(Scorer):
    """A source that scores a text by its length, once it is asked a second time; "error" and
    "abstain" are what they say.
    """

    name = "lengths"

    def __init__(self, site):
        self._asked = []
        self._ready = []
        self.closed = False

    @property
    def pending(self):
        return len(self._asked) + len(self._ready)

    def submit(self, key, item):
        self._asked.append((key, item.text))

    def poll(self):
        done = self._ready
        self._ready = [(key, self._outcome(text)) for key, text in self._asked]
        self._asked = []
        return done

    def _outcome(self, text):
        if text == "error":
            return Outcome.error("it broke")
        if text == "abstain":
            return Outcome.abstain("nothing to say")
        return Outcome("score", float(len(text)), "")

    def wait(self, timeout_s):
        return True

    def close(self):
        self.closed = True


def model(settings):
    return partial(ModelScorer, "lengths", settings)


def make(references, *, what=Lengths):
    gold = Gold(site_alone(CPU), scorer=WeightedPart("lengths", what), references=references)
    gold.load()
    gold.start()
    return gold


def judged(gold, answers, **options):
    """What it says of an evaluation of one set."""
    (said,) = finished(gold, begun(gold, answers, **options))
    return said


def test_what_has_no_score_is_masked_on_either_side(caplog):
    texts = ("aa", "a", "a", "error")
    gold = make(tuple(item(text) for text in texts))
    said = judged(gold, answers("aaa", "abstain", "a", "aaaa"))
    assert said.gold_N[[0, 2, 3]].tolist() == [3, 1, 4] and math.isnan(said.gold_N[1])
    assert said.wins_N[[0, 2]].tolist() == [1, 0.5] and np.isnan(said.wins_N[[1, 3]]).all()
    assert said.metrics()["eval/gold_masked"] == 1
    assert "1 of 4 reference answers have no score: it broke" in caplog.text
    assert "1 of 4 completions of policy version 0 have no score: nothing to say" in caplog.text


def test_references_are_scored_once_for_all_evaluations():
    gold = make((item("aa"),))
    works = [begun(gold, answers("a"), version=3), begun(gold, answers("aaa"), version=5)]
    found = [finished(gold, work) for work in works]
    assert [said.wins_N.tolist() for (said,) in found] == [[0.0], [1.0]]
    assert not gold.is_computing


@pytest.mark.parametrize("reference, answer", [("error", "a"), ("a", "error")])
def test_nothing_that_could_be_scored_ends_the_run(reference, answer):
    gold = make((item(reference),))
    with pytest.raises(RewardError, match="1 of 1 .*it broke; correct the gold scorer"):
        judged(gold, answers(answer))


def test_a_gold_that_abstains_from_all_says_nothing(caplog):
    gold = make((item("a"),))
    found = judged(gold, answers("abstain")).metrics()
    assert found["eval/gold"] is None and found["eval/win_rate"] is None
    assert found["eval/gold_masked"] == 1 and "nothing to say" in caplog.text


def test_a_scorer_of_weights_that_are_no_numbers_gives_no_score(tmp_path):
    write_scorer(tmp_path)
    gold = make(None, what=model(model_settings(tmp_path)))
    gold._scorer.model.decoder.score.weight.data[:] = math.nan
    with pytest.raises(RewardError, match="the score is nan"):
        judged(gold, answers("a"))


def test_a_model_works_a_microbatch_at_a_call(tmp_path):
    write_scorer(tmp_path)
    settings = model_settings(tmp_path, microbatch_tokens=8)
    gold = make(None, what=model(settings))
    asked = []
    for prompt in range(6):  # of 4 tokens each, two a microbatch
        ids = (1 + prompt, 2)
        asked.append(evaluated(str(prompt), prompt=prompt, prompt_ids=ids, tokens=(3, 5)))
    work = begun(gold, asked)
    found = None
    for _ in range(3):
        assert found is None and gold.is_computing
        found = advance(work)
    assert not gold.is_computing
    (all_of_them,) = found.values()
    first = judged(make(None, what=model(settings)), asked[:1])
    assert all_of_them.gold_N[0] == pytest.approx(first.gold_N[0], abs=SCORES)
    assert len(list(gold.tensors())) > 0


def test_sampled_answers_are_no_concern_of_it():
    gold = make(None)
    said = judged(gold, [evaluated("aa"), evaluated("aaaa", sample=1), evaluated("a", prompt=1)])
    assert said.gold_N.tolist() == [2, 1]


def test_each_set_is_judged_by_itself():
    sets = (EvalSet("", 0, 2), EvalSet("a", 2, 1))
    gold = make((item("a"), item("a"), item("aaa")))
    columns = columns_of(gold, answers("aa", "aaaa", "b"), version=4, sets=sets)
    assert columns["eval/gold"] == 3.0 and columns["eval/win_rate"] == 1.0
    assert columns["eval/a/gold"] == 1.0 and columns["eval/a/win_rate"] == 0.0


def test_a_gold_model_runs_beside_a_part_of_the_reward_of_its_name(tmp_path):
    write_scorer(tmp_path)
    settings = model_settings(tmp_path)
    site = site_alone(CPU)
    reward = ModelScorer("lengths", settings, site)
    reward.load()
    scorer = WeightedPart("lengths", model(settings))
    gold = Gold(site, scorer=scorer, references=None)
    gold.load()
    gold.start()
    said = judged(gold, answers("a"))
    reward.submit(0, item("a"))
    reward.release([0])
    ((_, outcome),) = reward.poll()
    assert said.gold_N[0] == pytest.approx(outcome.value, abs=SCORES)


def test_closing_frees_the_source():
    gold = make(None)
    begun(gold, answers("a"))
    gold.close()
    assert gold._scorer.closed
