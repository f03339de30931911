"""Gold alone: what has no score is in no figure, and evaluations are judged in their order."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from llamarl.errors import RewardError
from llamarl.evaluation.gold import Gold, GoldSettings
from llamarl.scoring.model import ModelScorer
from llamarl.scoring.scorer import Scorer, site_alone
from llamarl.scoring.sharded import ScorerSettings
from llamarl.scoring.weighted import Part
from llamarl.tasks.held_out import EvalSet, own_set
from llamarl.types import Outcome
from tests.evaluated import evaluated
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


def make(references, *, what=Lengths, sets=own_set(1000)):
    settings = GoldSettings(scorer=Part("lengths", what), references=references, sets=sets)
    gold = Gold(settings, site_alone(CPU))
    gold.load()
    gold.start()
    return gold


def judged(gold, count=1):
    """What it says of so many evaluations."""
    found = []
    for _ in range(100):
        found += gold.findings()
        if len(found) == count:
            return [(version, said) for version, (said,) in found]
        gold.wait(0.0)
    raise AssertionError(f"{len(found)} of {count}")


def test_what_has_no_score_is_masked_on_either_side(caplog):
    texts = ("aa", "a", "a", "error")
    gold = make(tuple(item(text) for text in texts))
    gold.begin(0, answers("aaa", "abstain", "a", "aaaa"))
    ((version, said),) = judged(gold)
    assert version == 0
    assert said.gold_N[[0, 2, 3]].tolist() == [3, 1, 4] and math.isnan(said.gold_N[1])
    assert said.wins_N[[0, 2]].tolist() == [1, 0.5] and np.isnan(said.wins_N[[1, 3]]).all()
    assert said.metrics()["eval/gold_masked"] == 1
    assert "1 of 4 reference answers have no score: it broke" in caplog.text
    assert "1 of 4 completions of policy version 0 have no score: nothing to say" in caplog.text


def test_references_are_scored_once_and_evaluations_judged_in_order():
    gold = make((item("aa"),))
    gold.begin(3, answers("a"))
    gold.begin(5, answers("aaa"))
    assert gold.pending == 2
    found = judged(gold, 2)
    assert [(version, said.wins_N.tolist()) for version, said in found] == [(3, [0.0]), (5, [1.0])]
    assert gold.pending == 0 and not gold.is_computing


@pytest.mark.parametrize("reference, answer", [("error", "a"), ("a", "error")])
def test_nothing_that_could_be_scored_ends_the_run(reference, answer):
    gold = make((item(reference),))
    gold.begin(2, answers(answer))
    with pytest.raises(RewardError, match="1 of 1 .*it broke; correct the gold scorer"):
        judged(gold)


def test_a_gold_that_abstains_from_all_says_nothing(caplog):
    gold = make((item("a"),))
    gold.begin(0, answers("abstain"))
    ((_, said),) = judged(gold)
    found = said.metrics()
    assert found["eval/gold"] is None and found["eval/win_rate"] is None
    assert found["eval/gold_masked"] == 1 and "nothing to say" in caplog.text


def test_a_scorer_of_weights_that_are_no_numbers_gives_no_score(tmp_path):
    write_scorer(tmp_path)
    gold = make(None, what=model(ScorerSettings(path=str(tmp_path), dtype="float32")))
    gold._scorer.model.decoder.score.weight.data[:] = math.nan
    gold.begin(0, answers("a"))
    with pytest.raises(RewardError, match="the score is nan"):
        judged(gold)


def test_a_model_works_a_microbatch_at_a_call(tmp_path):
    write_scorer(tmp_path)
    settings = ScorerSettings(path=str(tmp_path), dtype="float32", microbatch_tokens=8)
    gold = make(None, what=model(settings))
    asked = []
    for prompt in range(6):  # of 4 tokens each, two a microbatch
        ids = (1 + prompt, 2)
        asked.append(evaluated(str(prompt), prompt=prompt, prompt_ids=ids, tokens=(3, 5)))
    gold.begin(0, asked)
    found = []
    for _ in range(3):
        assert not found and gold.is_computing
        found += gold.findings()
    assert not gold.is_computing
    ((_, (all_of_them,)),) = found
    alone = make(None, what=model(settings))
    alone.begin(0, asked[:1])
    ((_, first),) = judged(alone)
    assert all_of_them.gold_N[0] == pytest.approx(first.gold_N[0], abs=SCORES)
    assert len(list(gold.tensors())) > 0


def test_sampled_answers_are_no_concern_of_it():
    gold = make(None)
    gold.begin(0, [evaluated("aa"), evaluated("aaaa", sample=1), evaluated("a", prompt=1)])
    ((_, said),) = judged(gold)
    assert said.gold_N.tolist() == [2, 1]


def test_each_set_is_judged_by_itself():
    sets = (EvalSet("", 0, 2), EvalSet("a", 7, 1))
    gold = make((item("a"), item("a"), item("aaa")), sets=sets)
    gold.begin(4, answers("aa", "aaaa", "b"))
    found = []
    for _ in range(5):
        found += gold.poll()
    ((version, columns),) = found
    assert version == 4
    assert columns["eval/gold"] == 3.0 and columns["eval/win_rate"] == 1.0
    assert columns["eval/a/gold"] == 1.0 and columns["eval/a/win_rate"] == 0.0


def test_a_gold_model_runs_beside_a_part_of_the_reward_of_its_name(tmp_path):
    write_scorer(tmp_path)
    settings = ScorerSettings(path=str(tmp_path), dtype="float32")
    site = site_alone(CPU)
    reward = ModelScorer("lengths", settings, site)
    reward.load()
    scorer = Part("lengths", model(settings))
    gold = Gold(GoldSettings(scorer=scorer, references=None, sets=own_set(1)), site)
    gold.load()
    gold.start()
    gold.begin(0, answers("a"))
    ((_, said),) = judged(gold)
    reward.submit(0, item("a"))
    reward.release([0])
    ((_, outcome),) = reward.poll()
    assert said.gold_N[0] == pytest.approx(outcome.value, abs=SCORES)


def test_closing_frees_the_source():
    gold = make(None)
    gold.begin(0, answers("a"))
    gold.close()
    assert gold._scorer.closed and gold.pending == 0
