"""Win rates: by hand, by published intervals, and with length held equal."""

import math

import numpy as np
import pytest
import torch

from llamarl.evaluation.gold import Judged
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
from tests.evaluated import evaluated

NAN = math.nan
CONVERGED = 1e-6  # what an optimiser of another kind leaves


def of(num_won, num_prompts):
    values = np.zeros(num_prompts)
    values[:num_won] = 1
    return win_rate(values)


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
    [
        (81, 263, 0.2553, 0.3662),
        (0, 20, 0, 0.1611),
    ],
)
def test_the_interval_is_wilsons_as_published(num_won, num_prompts, low, high):
    """Newcombe 1998, Interval estimation for the single proportion, table I, method 3."""
    rate = of(num_won, num_prompts)
    assert rate.share == num_won / num_prompts
    assert rate.low == pytest.approx(low, abs=5e-5) and rate.high == pytest.approx(high, abs=5e-5)


def test_a_certain_win_has_an_interval_too():
    rate = of(20, 20)
    assert rate.high == 1 and rate.low == pytest.approx(1 - 0.1611, abs=5e-5)


def purely_long(num_prompts, shift):
    """Answers that win exactly where they are longer, most of which they are."""
    longer = np.random.default_rng(1).normal(shift, 10, num_prompts).round()
    return (longer > 0) + 0.5 * (longer == 0), longer


def test_wins_that_are_purely_length_are_none_at_equal_lengths():
    compared, longer = purely_long(500, 10)
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
    assert length_controlled(compared, np.array([3.0, 4.0, 9.0])) is None  # all longer
    assert length_controlled(compared, np.array([-3.0, -4.0, -9.0])) is None
    assert length_controlled(compared, np.zeros(3)) is None
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
