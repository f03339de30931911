"""Canaries: what travels, which prompts they are, and what does not pass."""

import json
from types import SimpleNamespace

import pytest
import torch

from llamarl.errors import ParityError
from llamarl.models.parity import (
    FIRST_PROMPTS,
    FIRST_TOKENS,
    LATER_SCORED,
    LATER_TOKENS,
    MARKS,
    Agreement,
    Canary,
    Mark,
    ParityLimits,
    Sequence,
    canary_sequences,
    check_canary,
    check_marks,
    marks_of,
)
from llamarl.models.sharded_state import Shard
from llamarl.models.sharding import Box

NAN, INF = float("nan"), float("inf")


def check(canary, got, tolerance=0.01):
    agreement = Agreement(ParityLimits.of(fixed=tolerance))
    return check_canary(canary, torch.tensor(got), agreement, version=7, rank=3)


def canary_of(*logprobs: float) -> Canary:
    return Canary([Sequence(list(range(len(logprobs) + 1)), 1)], list(logprobs), [], [])


def test_a_canary_survives_json():
    canary = Canary(
        [Sequence([1, 5, 9], 1), Sequence([4, 4], 1)],
        [-0.1, -2.5, -1e-9],
        [[3, 1]],
        [[-0.5, -1.25]],
        [Mark("norm", [2], 0.1), Mark("head", [0, 3], -1e-9)],
    )
    assert Canary.from_json(json.loads(json.dumps(canary.to_json()))) == canary


def test_the_root_mean_square_counts_as_if_the_lacking_tokens_were_equal():
    """Differences 0.5 and 0.25 in three tokens of 64: sqrt(0.3125 / 64) = 0.0699. Rows have that
    of the three alone.
    """
    worst, found = check(canary_of(-1.0, -2.0, -3.0), [-1.0, -2.5, -3.25], tolerance=0.07)
    assert (worst, found) == (0.5, pytest.approx((0.3125 / 3) ** 0.5))
    with pytest.raises(ParityError, match=r"rank 3 .* version 7: .* 0.06988 .*, more than 0.069"):
        check(canary_of(-1.0, -2.0, -3.0), [-1.0, -2.5, -3.25], tolerance=0.069)


def test_prompts_that_are_noise_to_the_model_name_its_tokenizer(caplog):
    """-13 and -15 nats: less than -10.8, what each of 49,152 equally likely tokens has."""
    check(canary_of(-13.0, -15.0), [-13.0, -15.0])
    assert "gives the tokens of the prompts -14.0 nats each" in caplog.text
    with pytest.raises(ParityError) as error:
        check(canary_of(-13.0, -15.0), [-13.0, -12.0])
    assert "is the tokenizer in model.path another model's?" in error.value.__notes__[0]
    caplog.clear()
    check(canary_of(-3.0, -5.0), [-3.0, -5.0])
    assert not caplog.text


@pytest.mark.parametrize("start, most", [(0.02, 0.06), (0.0, 0.01)])
def test_later_versions_are_held_to_three_times_what_the_start_gave_or_to_the_floor(start, most):
    agreement = Agreement(ParityLimits(first=0.2, floor=0.01, growth=3.0))
    assert agreement.check(100 * start**2, 100, "the start") == pytest.approx(start)
    within = 0.99 * most
    assert agreement.check(100 * within**2, 100, "one within") == pytest.approx(within)
    with pytest.raises(ParityError, match=f"one beyond: .* {most} .the start .* gave {start:g}"):
        agreement.check(100 * (1.01 * most) ** 2, 100, "one beyond")


def test_few_tokens_are_compared_with_those_of_the_versions_before():
    """One outlier of 0.45 in eight tokens passes: sqrt((64 0.01^2 + 0.45^2) / 72) = 0.0539. Tokens
    that are off by 0.1 do at first, and not for ever: 40 beside the start's 64 make 0.0625.
    """
    limits = ParityLimits(first=0.2, floor=0.06, growth=3.0)
    outlier = Agreement(limits)
    outlier.check(64 * 0.01**2, 64, "the start")
    assert outlier.check(0.45**2, 8, "an outlier") == pytest.approx(0.0539, abs=1e-4)
    steady = Agreement(limits)
    steady.check(64 * 0.01**2, 64, "the start")
    for _ in range(4):
        steady.check(8 * 0.1**2, 8, "eight tokens")
    with pytest.raises(ParityError):
        steady.check(8 * 0.1**2, 8, "eight tokens")


@pytest.mark.parametrize("place, wrong", [(0, NAN), (2, -INF)])
def test_what_is_not_a_number_does_not_pass_wherever_it_stands(place, wrong):
    right = [-1.0, -2.0, -3.0]
    broken = [wrong if i == place else x for i, x in enumerate(right)]
    for trainers, generators in ((right, broken), (broken, right), (broken, broken)):
        with pytest.raises(ParityError):
            check(canary_of(*trainers), generators, tolerance=1e6)
    # Another number of tokens is a mistake, not a difference.
    with pytest.raises(ValueError):
        check(canary_of(*right), right[:2])


def prompts_of(*lengths: int):
    return [SimpleNamespace(prompt_ids=torch.arange(n) + 100 * i) for i, n in enumerate(lengths)]


def test_a_run_starts_with_its_first_prompts_whole():
    prompts = prompts_of(5, FIRST_TOKENS + 9, 1, 2, 8)
    *sequences, own = canary_sequences(prompts, 0, first=True)
    assert FIRST_PROMPTS == 4
    whole = [list(range(5)), list(range(100, 100 + FIRST_TOKENS)), [300, 301]]
    assert sequences == [Sequence(ids, 1) for ids in whole]
    assert [own] == canary_sequences(prompts, 0, first=False), "the same after a resume"


def test_rows_tell_of_the_last_sequence_and_all_are_checked():
    """Differences 0.5 in the first sequence, 0.25 and 0 in the last."""
    canary = Canary([Sequence([1, 5], 1), Sequence([4, 4, 4], 1)], [-1.0, -2.0, -3.0], [], [])
    told = check(canary, [-1.5, -2.25, -3.0], tolerance=0.07)
    assert told == (0.25, pytest.approx(0.25 / 2**0.5))
    with pytest.raises(ParityError):
        check(canary, [-1.5, -2.25, -3.0], tolerance=0.069)


@pytest.mark.parametrize(
    "length, given",
    [(LATER_TOKENS + 5, LATER_TOKENS - LATER_SCORED), (LATER_SCORED + 2, 2), (3, 1), (2, 1)],
)
def test_later_versions_score_the_end_of_one_prompt(length, given):
    (sequence,) = canary_sequences(prompts_of(length, 50), 0, first=False)
    assert sequence == Sequence(list(range(min(length, LATER_TOKENS))), given)


def test_later_versions_take_turns_and_prompts_too_short_to_score_have_a_substitute():
    prompts = prompts_of(5, 6, 7, 8)
    checked = [canary_sequences(prompts, version, first=False)[0] for version in range(5)]
    assert [one.token_ids[0] for one in checked] == [0, 100, 200, 300, 0]
    for short, first in ((prompts_of(1, 1, 1, 1), True), (prompts_of(1), False)):
        assert canary_sequences(short, 0, first=first) == [Sequence([0, 0], 1)]


def test_a_token_counts_as_an_outlier_at_most_and_what_is_not_finite_as_it_is():
    """One of 64 tokens is 3 nats off: (2.5 x 0.2)^2 = 0.25 of 9, so that the rest decides."""
    limits = ParityLimits.of("bfloat16")
    differences = torch.full((64,), 0.05, dtype=torch.float64)
    differences[7] = 3.0
    assert float(limits.squares(differences)) == pytest.approx(63 * 0.05**2 + 0.25)
    for wrong in (NAN, INF):
        differences[7] = wrong
        assert not limits.squares(differences).isfinite()


def test_outliers_count_in_full_at_the_start_alone():
    limits = ParityLimits(first=0.2, floor=0.1, growth=2.0)
    with pytest.raises(ParityError):
        Agreement(limits).check(100 * 0.21**2, 100, "the start", counted=100 * 0.1**2)
    agreement = Agreement(limits)
    agreement.check(100 * 0.05**2, 100, "the start")
    assert agreement.check(9.0, 100, "an outlier", counted=100 * 0.09**2) == pytest.approx(0.09)
    with pytest.raises(ParityError):
        agreement.check(9.0, 100, "many", counted=100 * 0.11**2)


def test_a_low_temperature_widens_the_limits():
    cold, warm, usual = (ParityLimits.of("bfloat16", temperature=t) for t in (0.5, 2.0, 1.0))
    assert warm == usual == ParityLimits.of("float32", "bfloat16"), "the coarsest dtype decides"
    assert usual.first > ParityLimits.of("float32").first
    assert (cold.first, cold.floor) == (2 * usual.first, 2 * usual.floor)


ROWS = Box((4, 0), (3, 2))  # what the trainer's rank holds of a parameter [8, 2]


def shards_of_weights():
    nothing = Shard("short", torch.nn.Parameter(torch.empty(0, 2)), Box((1, 0), (0, 2)))
    matrix = torch.nn.Parameter(torch.tensor([[0.5, -0.25], [-0.125, 2.0], [3.0, 0.0]]))
    vector = torch.nn.Parameter(torch.tensor([1.0, -0.5, 2.0]))
    return [nothing, Shard("long", matrix, ROWS), Shard("norm", vector, Box((0,), (3,)))]


def test_marks_are_the_smallest_weights_of_rows_at_their_places_in_the_whole():
    marks = marks_of(shards_of_weights(), 7)
    assert len(marks) == MARKS and marks == marks_of(shards_of_weights(), 7)
    assert {(mark.name, tuple(mark.place), mark.value) for mark in marks} == {
        ("long", (4, 1), -0.25),
        ("long", (5, 0), -0.125),
        ("long", (6, 1), 0.0),
        ("norm", (1,), -0.5),
    }
    assert marks_of(shards_of_weights(), 8) != marks
    assert marks_of(shards_of_weights()[:1], 7) == []


def test_marks_are_compared_in_the_dtype_and_the_box_that_are_held():
    """1.003 rounds to 1 in bfloat16, whose next number is 1.0078125."""
    marks = [Mark("a", [5, 1], 1.003), Mark("a", [0, 0], 7.0), Mark("elsewhere", [0], 7.0)]
    weights = torch.ones(2, 2, dtype=torch.bfloat16)
    held = {"a": (Box((4, 0), (2, 2)), weights)}
    check_marks(marks, held, version=7, rank=3)
    weights[1, 1] = 1.0078125
    said = r"rank 3 .* version 7, .* 1 of 3 .* a has 1.007812 at \[5, 1\], not 1$"
    with pytest.raises(ParityError, match=said):
        check_marks(marks, held, version=7, rank=3)
    quantised = {"a": (Box((4, 0), (2, 2)), torch.ones(2, 2, dtype=torch.int8))}
    check_marks([Mark("a", [5, 1], 0.1)], quantised, version=7, rank=3)
