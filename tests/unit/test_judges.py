"""What is said of an evaluation is joined, whoever speaks first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llamarl.comm.together import CollectiveCall, RankCalls
from llamarl.evaluation.judges import EvalJudge, Judges, find, spans_of
from llamarl.evaluation.metrics import Evaluation
from llamarl.executor import Executor, ExecutorGroup
from llamarl.tasks.parts import APART, EvalSet
from tests.evaluated import Said, own_set


class Slow(EvalJudge):
    """Says a column of each evaluation, after a given number of pieces of work."""

    def __init__(self, name, num_pieces=1):
        self.name = name
        self._num_pieces = num_pieces

    @property
    def is_computing(self):
        return True

    def judge(self, version, answers):
        for _ in range(self._num_pieces):
            yield
        return {one: Said({self.name: float(version)}) for one in answers}


def evaluation(version, **metrics):
    (one,) = own_set(1)
    return Evaluation(version, {one: []}, metrics)


def reports(judges, count):
    """What it says in so many polls, a list each."""
    return [judges.poll() for _ in range(count)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_an_evaluation_is_reported_when_the_last_judge_has_spoken(delays):
    judges = Judges([Slow(f"eval/{i}", num_pieces) for i, num_pieces in enumerate(delays)])
    judges.begin(evaluation(7, reward=0.5))
    *before, last = reports(judges, max(delays))
    assert not any(before) and judges.oldest is None
    said = {f"eval/{i}": 7.0 for i in range(len(delays))}
    assert last == [(7, {"reward": 0.5} | said)]
    assert judges.poll() == []


def test_a_judge_that_is_alone_begins_before_anything_is_waited_for():
    class Waits(Slow):
        def wait(self, timeout_s):
            raise AssertionError("nothing is under way")

    (one,) = own_set(1)
    assert find(Waits("eval/a", 1), {one: []})[one].metrics() == {"eval/a": 0.0}


def test_several_evaluations_are_each_reported_once_in_their_order():
    judges = Judges([Slow("eval/a", 3), Slow("eval/b", 1)])
    judges.begin(evaluation(2))
    assert reports(judges, 2) == [[], []]
    judges.begin(evaluation(4))
    assert judges.oldest == 2
    assert judges.poll() == [(2, {"eval/a": 2.0, "eval/b": 2.0})]
    assert judges.oldest == 4
    assert reports(judges, 3) == [[], [], [(4, {"eval/a": 4.0, "eval/b": 4.0})]]


def test_without_judges_its_scores_are_all_that_is_said():
    judges = Judges([])
    judges.begin(evaluation(0, reward=1.0))
    assert not judges.is_computing
    assert judges.poll() == [(0, {"reward": 1.0})]


def test_nothing_is_computed_where_nothing_was_begun():
    judge = Slow("eval/a")
    judges = Judges([judge])
    assert judge.is_computing and not judges.is_computing and judges.poll() == []
    judges.begin(evaluation(0))
    assert judges.is_computing
    judges.poll()
    assert not judges.is_computing


@pytest.mark.parametrize("counts", [(1, 4, 2)])
def test_spans_are_those_of_sets_one_after_another(counts):
    sets = [EvalSet(str(i), i * APART, count) for i, count in enumerate(counts)]
    numbers = list(range(sum(counts)))
    spans = spans_of({one: range(one.count) for one in sets})
    found = [numbers[spans[one]] for one in sets]
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
