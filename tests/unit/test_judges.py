"""What is said of an evaluation is joined, whoever speaks first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llamarl.comm.together import CollectiveCall, RankCalls
from llamarl.evaluation.judges import EvalJudge, Judges, spans_of
from llamarl.executor import Executor, ExecutorGroup
from llamarl.tasks.held_out import APART, EvalSet
from llamarl.types import Outcome
from tests.evaluated import evaluated


class Slow(EvalJudge):
    """Says a column of each evaluation, a given number of polls after it began."""

    def __init__(self, name, num_polls=1):
        self.name = name
        self.given = {}  # by version
        self._num_polls = num_polls
        self._left = {}

    @property
    def is_computing(self):
        return True

    def begin(self, version, answers):
        self.given[version] = answers
        self._left[version] = self._num_polls

    def poll(self):
        done = []
        for version in list(self._left):
            self._left[version] -= 1
            if self._left[version] <= 0:
                del self._left[version]
                done.append((version, {self.name: float(version)}))
        return done


def reports(judges, count):
    """What it says in so many polls, a list each."""
    return [judges.poll() for _ in range(count)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_an_evaluation_is_reported_when_the_last_judge_has_spoken(delays):
    judges = Judges([Slow(f"eval/{i}", num_polls) for i, num_polls in enumerate(delays)])
    judges.begin(7, {"eval/reward": 0.5})
    *before, last = reports(judges, max(delays))
    assert not any(before) and judges.oldest is None
    said = {f"eval/{i}": 7.0 for i in range(len(delays))}
    assert last == [(7, {"eval/reward": 0.5} | said)]
    assert judges.poll() == []


def test_several_evaluations_are_each_reported_once():
    judges = Judges([Slow("eval/a", 3), Slow("eval/b", 1)])
    judges.begin(2, {})
    assert reports(judges, 2) == [[], []]
    judges.begin(4, {})
    assert judges.oldest == 2
    assert judges.poll() == [(2, {"eval/a": 2.0, "eval/b": 2.0})]
    assert judges.oldest == 4
    assert reports(judges, 2) == [[], [(4, {"eval/a": 4.0, "eval/b": 4.0})]]


def test_without_judges_its_scores_are_all_that_is_said():
    judges = Judges([])
    judges.keep(evaluated("a"))
    judges.begin(0, {"eval/reward": 1.0})
    assert not judges.is_computing
    assert judges.poll() == [(0, {"eval/reward": 1.0})]


def test_nothing_is_computed_where_nothing_was_begun():
    judge = Slow("eval/a")
    judges = Judges([judge])
    assert judge.is_computing and not judges.is_computing and judges.poll() == []


def test_judges_see_the_answers_of_a_version_in_order_and_the_newest_of_those_asked_twice():
    judge = Slow("eval/a")
    judges = Judges([judge])
    places = ((1, 1), (0, 2), (1, 0), (0, 0), (0, 1), (1, 2))
    for prompt, sample in places:
        judges.keep(evaluated(f"old {prompt} {sample}", prompt=prompt, sample=sample, version=3))
    judges.keep(evaluated("another version's", version=4))
    again = Outcome.error("it broke")
    judges.keep(evaluated("new", prompt=1, sample=1, version=3, outcome=again))
    judges.begin(3, {})
    texts = [answer.item.text for answer in judge.given[3]]
    assert texts == ["old 0 0", "old 0 1", "old 0 2", "old 1 0", "new", "old 1 2"]
    assert judge.given[3][4].outcome == again
    judges.begin(4, {})
    assert [answer.item.text for answer in judge.given[4]] == ["another version's"]


@pytest.mark.parametrize("counts", [(3,), (2, 1), (1, 4, 2)])
def test_spans_are_those_of_sets_one_after_another(counts):
    sets = [EvalSet(str(i), i * APART, count) for i, count in enumerate(counts)]
    numbers = list(range(sum(counts)))
    found = [numbers[begin:end] for begin, end in spans_of(sets)]
    assert [len(own) for own in found] == list(counts) and sum(found, []) == numbers


def test_ranks_that_act_each_by_itself_share_no_calls():
    class Mail:
        def post(self, *message):
            raise AssertionError(message)

    class Two(Executor):
        name = "reward"

    two = Two()
    group = ExecutorGroup("reward", (0, 1), 0, torch.device("cpu"))
    two.attach(group, {}, {}, Mail(), None)
    with pytest.raises(AssertionError, match="share no calls"):
        RankCalls(two, as_one=False).add("score", CollectiveCall(run=lambda value: value))
    RankCalls(two, as_one=True).add("score", CollectiveCall(run=lambda value: value))
