"""Gold alone: what has no score is in no figure, what is no number ends the run, and evaluations
are judged in their order.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch

from llamarl.errors import NotFinite, RewardError
from llamarl.models.config import tiny_directory
from llamarl.scoring import gold as gold_module
from llamarl.scoring.gold import Gold, GoldSettings
from llamarl.scoring.model import ModelScorer
from llamarl.scoring.scorer import Item, Outcome, Scorer
from llamarl.scoring.sharded import ScorerSettings
from llamarl.scoring.weighted import Part
from llamarl.tasks.held_out import EvalSet, own_set
from llamarl.types import Prompt
from tests.scorers import SCORES, write_scorer

CPU = torch.device("cpu")


def item(text, *, prompt=0, tokens=(3, 4)):
    return Item(
        prompt=Prompt(torch.tensor([1 + prompt, 2]), f"prompt {prompt}", {}),
        token_ids=torch.tensor(tokens),
        text=text,
        has_ended=True,
        is_held_out=True,
    )


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


def make(references, *, what=Lengths, base=None, sets=own_set(1000)):
    scorer = None if what is None else Part("lengths", what)
    settings = GoldSettings(
        scorer=scorer,
        base_path=base,
        references=references,
        sets=sets,
        dtype="float32",
        microbatch_tokens=8,
    )
    gold = Gold(settings, CPU)
    gold.start()
    return gold


def judged(gold, count=1):
    """What it says of so many evaluations."""
    found = []
    for _ in range(100):
        found += gold.poll()
        if len(found) == count:
            return [(version, said) for version, (said,) in found]
        gold.wait(0.0)
    raise AssertionError(f"{len(found)} of {count}")


def test_what_has_no_score_is_masked_on_either_side(caplog):
    texts = ("aa", "a", "a", "error")
    gold = make(tuple(item(text) for text in texts))
    gold.begin(0, [item("aaa"), item("abstain"), item("a"), item("aaaa")])
    ((version, said),) = judged(gold)
    assert version == 0
    assert said.gold_N[[0, 2, 3]].tolist() == [3, 1, 4] and math.isnan(said.gold_N[1])
    assert said.wins_N[[0, 2]].tolist() == [1, 0.5] and np.isnan(said.wins_N[[1, 3]]).all()
    assert said.metrics()["eval/gold_masked"] == 1
    assert "1 of 4 reference answers have no score: it broke" in caplog.text
    assert "1 of 4 answers of policy version 0 have no score: nothing to say" in caplog.text


def test_references_are_scored_once_and_evaluations_judged_in_order():
    gold = make((item("aa"),))
    gold.begin(3, [item("a")])
    gold.begin(5, [item("aaa")])
    assert gold.pending == 2
    found = judged(gold, 2)
    assert [(version, said.wins_N.tolist()) for version, said in found] == [(3, [0.0]), (5, [1.0])]
    assert gold.pending == 0 and not gold.is_computing


@pytest.mark.parametrize("references, answers", [(("error",), ("a",)), (("a",), ("error",))])
def test_nothing_that_could_be_scored_ends_the_run(references, answers):
    gold = make(tuple(item(text) for text in references))
    gold.begin(2, [item(text) for text in answers])
    with pytest.raises(RewardError, match="1 of 1 .*it broke; correct what scores"):
        judged(gold)


def test_a_gold_that_abstains_from_all_says_nothing(caplog):
    gold = make((item("a"),))
    gold.begin(0, [item("abstain")])
    ((_, said),) = judged(gold)
    found = said.metrics()
    assert found["eval/gold"] is None and found["eval/win_rate"] is None
    assert found["eval/gold_masked"] == 1 and "nothing to say" in caplog.text


def test_a_log_probability_that_is_no_number_ends_the_run(monkeypatch):
    gold = make(None, what=None, base=str(tiny_directory()))
    nan = torch.full((2,), math.nan, dtype=torch.float64)
    monkeypatch.setattr(gold_module, "completion_logprobs", lambda *_: nan)
    gold.begin(7, [item("a"), item("b", tokens=(5, 6))])
    with pytest.raises(NotFinite, match="policy version 7 to held-out prompt 0 is nan"):
        judged(gold)


def test_a_scorer_of_weights_that_are_no_numbers_gives_no_score(tmp_path):
    write_scorer(tmp_path)
    gold = make(None, what=model(ScorerSettings(path=str(tmp_path), dtype="float32")))
    gold._scorer.scorers["lengths"].model.decoder.score.weight.data[:] = math.nan
    gold.begin(0, [item("a")])
    with pytest.raises(RewardError, match="the score is nan"):
        judged(gold)


def test_models_work_a_microbatch_at_a_call(tmp_path, monkeypatch):
    write_scorer(tmp_path)
    settings = ScorerSettings(path=str(tmp_path), dtype="float32", microbatch_tokens=8)
    gold = make(None, what=model(settings), base=str(tiny_directory()))
    sizes = []
    real = gold_module.completion_logprobs

    def counted(decoder, batch):
        sizes.append(batch.input_ids.numel())
        return real(decoder, batch)

    monkeypatch.setattr(gold_module, "completion_logprobs", counted)
    answers = [item(str(j), prompt=j, tokens=(3, 4, 5)) for j in range(6)]
    gold.begin(0, answers)  # of 4 fed tokens each, two a microbatch
    for expected in (1, 2, 3):
        assert gold.is_computing
        found = [(version, said) for version, (said,) in gold.poll()]
        assert len(sizes) == expected
    found += [] if found else judged(gold)
    assert sizes == [8, 8, 8] and len(found) == 1
    alone = make(None, what=model(settings), base=str(tiny_directory()))
    alone.begin(0, answers[:1])
    ((_, first),) = judged(alone)
    ((_, all_of_them),) = found
    assert all_of_them.gold_N[0] == pytest.approx(first.gold_N[0], abs=SCORES)
    assert len(gold.tensors()) > len(list(gold._base.parameters()))


def test_each_set_is_judged_by_itself():
    sets = (EvalSet("", 0, 2), EvalSet("a", 7, 1))
    gold = make((item("a"), item("a"), item("aaa")), sets=sets)
    gold.begin(4, [item("aa"), item("aaaa"), item("b")])
    found = []
    for _ in range(5):
        found += gold.poll()
    ((version, (own, other)),) = found
    assert version == 4
    assert own.metrics()["eval/gold"] == 3.0 and own.metrics()["eval/win_rate"] == 1.0
    assert other.metrics()["eval/gold"] == 1.0 and other.metrics()["eval/win_rate"] == 0.0


def test_closing_frees_the_source():
    gold = make(None)
    source = gold._scorer.scorers["lengths"]
    gold.begin(0, [item("a")])
    gold.close()
    assert source.closed and gold.pending == 0
