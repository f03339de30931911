"""What evaluation completions come to."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.evaluation.metrics import Evaluations, pass_at_k
from llamarl.tasks.parts import APART, EvalSet
from llamarl.types import Outcome
from tests.evaluated import evaluated, own_set


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0, -1.0]), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_mean_best_of_every_choice_of_k(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    choices = list(itertools.combinations(scores, k))
    assert pass_at_k(scores, k) == pytest.approx(sum(map(max, choices)) / len(choices))


def test_pass_at_k_by_hand_and_out_of_range():
    assert pass_at_k([1, 0, 0, 0], 2) == 0.5  # three of six pairs hold the right one
    assert pass_at_k([0.0] * 600 + [1.0] * 600, 600) == pytest.approx(1.0)
    for k in (0, 3):
        with pytest.raises(ValueError, match=f"pass@{k} of 2 samples: need k from 1 to 2"):
            pass_at_k([1.0, 0.0], k)


class Book:
    """Evaluations, which are told of prompts, samples and outcomes."""

    def __init__(self, sets, **options):
        self._evaluations = Evaluations(sets, **options)
        self.finished = []

    def add(self, prompt, sample, outcome, *, length=2, version=3, text=""):
        """Sample 0 is the greedy one, and 1 .. k are those sampled."""
        tokens = (0,) * length
        answer = evaluated(
            text, prompt=prompt, sample=sample, tokens=tokens, version=version, outcome=outcome
        )
        evaluation = self._evaluations.add(answer)
        if evaluation is not None:
            self.finished.append(evaluation)

    def metrics(self):
        """The metrics of the one evaluation that has finished."""
        (evaluation,) = self.finished
        return evaluation.metrics


def scored(value):
    return Outcome("score", value, "")


def test_a_version_is_whole_with_every_sample_of_every_prompt():
    book = Book(own_set(2), num_samples=2)
    answers = {
        (0, 0): scored(1.0),
        (0, 1): scored(0.0),
        (0, 2): scored(1.0),
        (1, 0): scored(0.0),
        (1, 1): Outcome("error", math.nan, "x"),
    }
    for (prompt, sample), outcome in answers.items():
        book.add(prompt, sample, outcome, length=4 if sample else 2)
    assert book.finished == []
    book.add(1, 2, scored(0.0))
    assert [evaluation.version for evaluation in book.finished] == [3]
    assert book.metrics() == {
        "eval/reward": 0.5,
        "eval/accuracy": 0.5,
        "eval/errors": 1,
        "eval/length_mean": 2.0,
        "eval/pass_at_1_sampled": 0.25,  # 1/2 of prompt 0, and 0 of the one sample that has a score
        "eval/pass_at_k": 0.5,
    }


def test_answers_of_a_version_are_in_order_and_the_newest_of_those_asked_twice():
    book = Book(own_set(2), num_samples=2)
    for prompt, sample in ((1, 1), (0, 2), (1, 0), (0, 0), (0, 1)):
        book.add(prompt, sample, scored(0.0), text=f"old {prompt} {sample}")
    book.add(1, 2, scored(0.0), text="another version's", version=4)
    again = Outcome.error("it broke")
    book.add(1, 1, again, text="new")
    book.add(1, 2, scored(0.0), text="last")
    (evaluation,) = book.finished
    (answers,) = evaluation.answers.values()
    texts = [answer.item.text for answer in answers]
    assert texts == ["old 0 0", "old 0 1", "old 0 2", "old 1 0", "new", "last"]
    assert answers[4].outcome == again


def error(reason):
    return Outcome.error(reason)


def test_what_has_no_score_is_in_no_mean_and_is_counted():
    book = Book(own_set(4), num_samples=1)
    greedy = [scored(-3.0), error("KeyError: 'a'"), Outcome.abstain("why"), error("KeyError: 'a'")]
    for prompt, outcome in enumerate(greedy):
        book.add(prompt, 0, outcome)
        book.add(prompt, 1, scored(-1.0) if prompt == 2 else error("x"))
    values = book.metrics()
    assert values == {
        "eval/reward": -3.0,  # of the one that has a score; a 0 for an error would beat it
        "eval/errors": 5,
        "eval/length_mean": 2.0,
        "eval/left_out": 3,
        "eval/left_out_reason": "KeyError: 'a'",
        "eval/pass_at_1_sampled": -1.0,
        "eval/pass_at_k": -1.0,
    }


def test_an_evaluation_of_errors_alone_has_no_mean():
    book = Book(own_set(2), num_samples=1, success_above=0.5)
    for prompt in range(2):
        for sample in range(2):
            book.add(prompt, sample, error("ModuleNotFoundError: No module named 'x'"))
    values = book.metrics()
    assert values == {
        "eval/errors": 4,
        "eval/length_mean": 2.0,
        "eval/left_out": 2,
        "eval/left_out_reason": "ModuleNotFoundError: No module named 'x'",
    }


@pytest.mark.parametrize("score", [0.5])
def test_the_mean_of_scores_other_than_0_and_1_is_no_accuracy_and_stays_none(score):
    book = Book(own_set(2))
    rows = []
    for version, scores in enumerate([(0.0, 1.0), (score, 1.0), (0.0, 0.0)]):
        for prompt, value in enumerate(scores):
            book.add(prompt, 0, scored(value), version=version)
        values = book.finished[-1].metrics
        rows.append((values["eval/reward"], values.get("eval/accuracy")))
    assert rows == [(0.5, 0.5), ((score + 1) / 2, None), (0.0, None)]


@pytest.mark.parametrize("num_samples, success", [(0, 1.0), (2, 0.25)])
def test_a_success_is_a_score_above_the_threshold_without_what_novelty_adds(num_samples, success):
    """Of the sampled ones where there are any."""
    book = Book(own_set(2), num_samples=num_samples, success_above=0.5)
    sampled = [scored(0.6), scored(0.5), Outcome("score", 2.0, "", success=0.5)]
    sampled.append(Outcome("error", math.nan, "x"))
    for prompt in range(2):
        book.add(prompt, 0, Outcome("score", 0.2, "", success=0.9))
        for sample in range(num_samples):
            book.add(prompt, 1 + sample, sampled[2 * prompt + sample])
    values = book.metrics()
    assert values["eval/success"] == success


def test_each_set_has_figures_of_its_own_once_all_are_whole():
    sets = (EvalSet("", 0, 1), EvalSet("a", APART, 2), EvalSet("b", 2 * APART, 1))
    book = Book(sets, num_samples=1)
    values = {0: 1.0, APART: 0.0, APART + 1: 1.0}
    for number, value in values.items():
        book.add(number, 0, scored(value), length=2)
        book.add(number, 1, scored(1.0))
    assert book.finished == []  # b lacks all of its own
    book.add(2 * APART, 0, scored(-2.5), length=6)
    book.add(2 * APART, 1, error("x"))
    assert book.metrics() == {
        "eval/reward": 1.0,
        "eval/accuracy": 1.0,
        "eval/errors": 0,
        "eval/length_mean": 2.0,
        "eval/pass_at_1_sampled": 1.0,
        "eval/pass_at_k": 1.0,
        "eval/a/reward": 0.5,
        "eval/a/accuracy": 0.5,
        "eval/a/errors": 0,
        "eval/a/length_mean": 2.0,
        "eval/a/pass_at_1_sampled": 1.0,
        "eval/a/pass_at_k": 1.0,
        "eval/b/reward": -2.5,  # graded, which makes the accuracy of no other set one
        "eval/b/errors": 1,
        "eval/b/length_mean": 6.0,
    }
