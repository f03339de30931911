"""What evaluation completions come to."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.comm.together import CollectiveCall, RankCalls
from llamarl.evaluation.gold import Judged
from llamarl.evaluation.judges import EvalJudge, Judges, find, spans_of
from llamarl.evaluation.metrics import Evaluation, Evaluations, pass_at_k
from llamarl.evaluation.win_rate import (
    INTERCEPT_DEVIATION,
    SLOPE_DEVIATION,
    length_controlled,
    length_controlled_interval,
    scaled_lengths,
    sigmoid,
    win_rate,
    wins,
)
from llamarl.executor import Executor, ExecutorGroup
from llamarl.launch.checks import check_inputs
from llamarl.models.config import tiny_directory
from llamarl.tasks.parts import APART, EvalSet
from llamarl.types import Outcome
from tests.build.model_directory import copy_tiny
from tests.evaluated import Said, evaluated, own_set
from tests.random_models import swap_tokens
from tests.scorers import write_scorer
from tests.unit.refusals import complaint, job, refusal


@settings(max_examples=40)
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
        """outcome: or the score. Sample 0 is the greedy one, and 1 .. k are those sampled."""
        options = {"tokens": (0,) * length, "version": version}
        options["outcome"] = outcome if isinstance(outcome, Outcome) else Outcome.score(outcome)
        answer = evaluated(text, prompt=prompt, sample=sample, **options)
        evaluation = self._evaluations.add(answer)
        self.finished += [] if evaluation is None else [evaluation]

    def metrics(self):
        """The metrics of the one evaluation that has finished."""
        (evaluation,) = self.finished
        return evaluation.metrics


def test_a_version_is_whole_with_every_sample_of_every_prompt():
    book = Book(own_set(2), num_samples=2)
    answers = {(0, 0): 1.0, (0, 1): 0.0, (0, 2): 1.0, (1, 0): 0.0, (1, 1): Outcome.error("x")}
    for (prompt, sample), outcome in answers.items():
        book.add(prompt, sample, outcome, length=4 if sample else 2)
    assert book.finished == []
    book.add(1, 2, 0.0)
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
        book.add(prompt, sample, 0.0, text=f"old {prompt} {sample}")
    book.add(1, 2, 0.0, text="another version's", version=4)
    again = Outcome.error("it broke")
    book.add(1, 1, again, text="new")
    book.add(1, 2, 0.0, text="last")
    (evaluation,) = book.finished
    (answers,) = evaluation.answers.values()
    texts = [answer.item.text for answer in answers]
    assert texts == ["old 0 0", "old 0 1", "old 0 2", "old 1 0", "new", "last"]
    assert answers[4].outcome == again


def test_what_has_no_score_is_in_no_mean_and_is_counted():
    book = Book(own_set(4), num_samples=1)
    broken = Outcome.error("KeyError: 'a'")
    greedy = [-3.0, broken, Outcome.abstain("why"), broken]
    for prompt, outcome in enumerate(greedy):
        book.add(prompt, 0, outcome)
        book.add(prompt, 1, -1.0 if prompt == 2 else Outcome.error("x"))
    assert book.metrics() == {
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
    for prompt, sample in itertools.product(range(2), range(2)):
        book.add(prompt, sample, Outcome.error("no module x"))
    reason = {"eval/left_out": 2, "eval/left_out_reason": "no module x"}
    assert book.metrics() == {"eval/errors": 4, "eval/length_mean": 2.0} | reason


def test_the_mean_of_scores_other_than_0_and_1_is_no_accuracy_and_stays_none():
    book = Book(own_set(2))
    rows = []
    for version, scores in enumerate([(0.0, 1.0), (0.5, 1.0), (0.0, 0.0)]):
        for prompt, value in enumerate(scores):
            book.add(prompt, 0, value, version=version)
        values = book.finished[-1].metrics
        rows.append((values["eval/reward"], values.get("eval/accuracy")))
    assert rows == [(0.5, 0.5), (0.75, None), (0.0, None)]


@pytest.mark.parametrize("num_samples, success", [(0, 1.0), (2, 0.25)])
def test_a_success_is_a_score_above_the_threshold_without_what_novelty_adds(num_samples, success):
    """Of the sampled ones where there are any."""
    book = Book(own_set(2), num_samples=num_samples, success_above=0.5)
    sampled = [0.6, 0.5, Outcome("score", 2.0, "", success=0.5), Outcome.error("x")]
    for prompt in range(2):
        book.add(prompt, 0, Outcome("score", 0.2, "", success=0.9))
        for sample in range(num_samples):
            book.add(prompt, 1 + sample, sampled[2 * prompt + sample])
    assert book.metrics()["eval/success"] == success


def test_each_set_has_figures_of_its_own_once_all_are_whole():
    sets = (EvalSet("", 0, 1), EvalSet("a", APART, 2), EvalSet("b", 2 * APART, 1))
    book = Book(sets, num_samples=1)
    for number, value in {0: 1.0, APART: 0.0, APART + 1: 1.0}.items():
        book.add(number, 0, value)
        book.add(number, 1, 1.0)
    assert book.finished == []  # b lacks all of its own
    book.add(2 * APART, 0, -2.5, length=6)
    book.add(2 * APART, 1, Outcome.error("x"))
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


# --- Judges ---


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


def evaluation_of(version, **metrics):
    (one,) = own_set(1)
    return Evaluation(version, {one: []}, metrics)


def reports(judges, count):
    """What it says in so many polls, a list each."""
    return [judges.poll() for _ in range(count)]


@settings(max_examples=25)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_an_evaluation_is_reported_when_the_last_judge_has_spoken(delays):
    judges = Judges([Slow(f"eval/{i}", num_pieces) for i, num_pieces in enumerate(delays)])
    judges.begin(evaluation_of(7, reward=0.5))
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
    judges.begin(evaluation_of(2))
    assert reports(judges, 2) == [[], []]
    judges.begin(evaluation_of(4))
    assert judges.oldest == 2
    assert judges.poll() == [(2, {"eval/a": 2.0, "eval/b": 2.0})]
    assert judges.oldest == 4
    assert reports(judges, 3) == [[], [], [(4, {"eval/a": 4.0, "eval/b": 4.0})]]


def test_nothing_is_computed_where_nothing_was_begun_or_nobody_judges():
    judge = Slow("eval/a")
    judges = Judges([judge])
    assert judge.is_computing and not judges.is_computing and judges.poll() == []
    judges.begin(evaluation_of(0))
    assert judges.is_computing
    judges.poll()
    assert not judges.is_computing
    nobody = Judges([])
    nobody.begin(evaluation_of(0, reward=1.0))
    assert not nobody.is_computing and nobody.poll() == [(0, {"reward": 1.0})]


def test_spans_are_those_of_sets_one_after_another():
    sets = [EvalSet(str(i), i * APART, count) for i, count in enumerate((1, 4, 2))]
    spans = spans_of({one: range(one.count) for one in sets})
    assert [list(range(7))[spans[one]] for one in sets] == [[0], [1, 2, 3, 4], [5, 6]]


def test_ranks_that_act_each_by_itself_share_no_calls():
    two, call = Executor(), CollectiveCall(run=lambda value: value)
    two.attach(ExecutorGroup("reward", (0, 1), 0, torch.device("cpu")), {}, {}, None, None)
    with pytest.raises(AssertionError, match="share no calls"):
        RankCalls(two, as_one=False).add("score", call)
    RankCalls(two, as_one=True).add("score", call)


# --- Win rates ---

NAN = math.nan
CONVERGED = 1e-6  # what an optimiser of another kind leaves


def test_ties_count_half_and_what_has_no_score_is_in_no_figure():
    gold = np.array([2.0, 1.0, 0.0, NAN, 5.0])
    against = np.array([1.0, 1.0, 1.0, 0.0, NAN])
    compared = wins(gold, against, np.zeros(5, dtype=bool))
    assert compared[:3].tolist() == [1, 0.5, 0] and np.isnan(compared[3:]).all()
    assert win_rate(compared).share == 0.5
    assert win_rate(np.array([NAN])) is None


def test_the_same_text_is_a_tie_though_its_scores_differ_by_rounding():
    compared = wins(np.array([1.0 + 1e-7, 3.0]), np.array([1.0, NAN]), np.array([True, True]))
    assert compared[0] == 0.5 and np.isnan(compared[1])


@pytest.mark.parametrize(
    "num_won, num_prompts, low, high",
    [(81, 263, 0.2553, 0.3662), (0, 20, 0, 0.1611), (20, 20, 1 - 0.1611, 1)],
)
def test_the_interval_is_wilsons_as_published(num_won, num_prompts, low, high):
    """Newcombe 1998, Interval estimation for the single proportion, table I, method 3."""
    rate = win_rate((np.arange(num_prompts) < num_won).astype(float))
    assert rate.share == num_won / num_prompts and (rate.high == 1) == (num_won == num_prompts)
    assert [rate.low, rate.high] == pytest.approx([low, high], abs=5e-5)


def test_wins_that_are_purely_length_are_none_at_equal_lengths():
    """Answers win exactly where they are longer, most of which they are."""
    longer = np.random.default_rng(1).normal(10, 10, 500).round()
    compared = (longer > 0) + 0.5 * (longer == 0)
    assert win_rate(compared).low > 0.75
    controlled = length_controlled_interval(compared, longer, seed=0)
    assert controlled.low < 0.5 < controlled.high
    assert controlled.share == pytest.approx(0.5, abs=0.05)


def test_wins_that_have_nothing_to_do_with_length_stay():
    draw = np.random.default_rng(2)
    longer = draw.normal(8, 10, 2000).round()
    compared = (draw.random(2000) < 0.7).astype(float)
    assert length_controlled(compared, longer) == pytest.approx(compared.mean(), abs=0.03)


def test_lengths_and_quality_that_cannot_be_told_apart_give_no_number():
    compared = np.array([1.0, 1.0, 0.0])
    longer = np.array([3.0, 4.0, 9.0])
    for lengths in (longer, -longer, np.zeros(3)):
        assert length_controlled(compared, lengths) is None
    assert length_controlled(np.array([NAN]), np.array([1.0])) is None
    # What was not compared does not count: the shorter one has no score.
    assert length_controlled(np.array([1.0, 0.0, NAN]), np.array([3.0, 4.0, -1.0])) is None


def test_the_regression_is_that_of_another_optimiser():
    draw = np.random.default_rng(3)
    longer = draw.normal(2, 10, 60)
    compared = draw.choice([0, 0.5, 1], 60)
    length = torch.tensor(scaled_lengths(longer))
    target = torch.tensor(compared)
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    deviations = torch.tensor([INTERCEPT_DEVIATION, SLOPE_DEVIATION], dtype=torch.float64)
    optimiser = torch.optim.LBFGS([weights], max_iter=500, tolerance_grad=1e-12)

    def closure():
        optimiser.zero_grad()
        logits = weights[0] + weights[1] * length
        lost = torch.nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="sum")
        value = lost + (weights / deviations).square().sum() / 2
        value.backward()
        return value

    optimiser.step(closure)
    expected = float(torch.sigmoid(weights[0].detach()))
    assert length_controlled(compared, longer) == pytest.approx(expected, abs=CONVERGED)


def test_answers_that_always_win_are_no_infinite_regression():
    longer = np.array([-2.0, -1.0, 1.0, 2.0])
    controlled = length_controlled_interval(np.ones(4), longer, seed=0)
    assert 0.95 < controlled.share < 1 and controlled.low > 0.9


def test_sigmoid_far_out():
    assert sigmoid(np.array([-1e4, 0, 1e4])).tolist() == [0, 0.5, 1]


def test_what_is_reported_of_answers_by_hand():
    def item(text, num_tokens):
        return evaluated(text, tokens=(1,) * num_tokens).item

    judged = Judged(
        answers=[item("a", 2), item("b", 4)],
        gold_N=np.array([1.0, NAN]),
        references=[item("c", 1), item("d", 1)],
        against_N=np.array([0.0, 3.0]),
    )
    found = judged.metrics()
    assert found["eval/gold"] == 1 and found["eval/gold_masked"] == 1
    assert found["eval/gold_references"] == 1.5
    assert found["eval/win_rate"] == 1  # of the one that has a score
    assert found["eval/win_rate_length_controlled"] is None  # it is longer
    assert "eval/perplexity" not in found  # that is another judge's
    alone = Judged(answers=[item("a", 2)], gold_N=np.array([1.0]))
    assert alone.metrics() == {"eval/gold": 1, "eval/gold_masked": 0}


# --- Gold scorers and base models that cannot be used: told before anything starts, by key ---


@pytest.mark.parametrize("key", ["eval.gold=module:function", f"eval.base={tiny_directory()}"])
def test_what_would_judge_nothing_is_said(key):
    said = complaint(key, "eval.every=0")
    assert "nothing is evaluated; eval.every=10 eval.num_prompts=500, or eval." in said


def test_a_gold_model_that_cannot_be_used_is_refused(tmp_path):
    gold = f"eval.gold={tmp_path}/gold"
    write_scorer(tmp_path / "gold", labels=("toxic", "fine"))
    said = refusal(gold)
    assert said.startswith("eval.gold_label=null: ") and "toxic, fine" in said
    check_inputs(job(gold, "eval.gold_label=fine").inputs)
    write_scorer(tmp_path / "gold", max_position_embeddings=20)
    assert f"{gold}: its context is 20" in refusal(gold)


def test_a_base_of_other_tokens_has_no_perplexity_of_the_policys(tmp_path):
    base = copy_tiny(tmp_path / "base")
    swap_tokens(base)
    said = f"eval.base={base}: its vocabulary is not that of the policy"
    assert said in refusal(f"eval.base={base}")


def test_rows_without_a_text_under_the_key_are_named_and_may_have_none():
    gold = "eval.gold=my_module:gold"
    said = refusal(gold, "eval.reference_key=summary")
    assert said.startswith("eval.reference_key=summary: held-out row 0 (") and "answer" in said
    check_inputs(job(gold, "eval.reference_key=null").inputs)
