"""llamarl/scoring/pairs.py: which completions make a pair, and which of them is better."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.scoring.pairs import Candidate, PairCounts, PairRule, label, row_of

SCORES = st.lists(st.sampled_from([math.nan, -1.0, 0.0, 0.5, 2.0]), min_size=2, max_size=6)
PAIRINGS = ("all", "best_worst", "random")


def rule(pairing="all", **given):
    settings = {"compares": False, "label_noise": 0.0, "margin_coef": 0.0, "seed": 0} | given
    return PairRule(pairing=pairing, **settings)


def candidate(place, text=None):
    text = text or f"answer {place}"
    return Candidate(origin=place, text=text, token_ids=tuple(text.encode()))


def test_best_and_worst_are_the_highest_and_the_lowest():
    of = rule("best_worst").pairs_of
    assert of({0: 1.0, 1: -2.0, 2: 3.0, 3: math.nan}) == [(2, 1)]
    assert of({0: 1.0, 1: 1.0, 2: 1.0}) == [(0, 2)]  # which is a tie
    assert of({0: 1.0, 1: math.nan}) == []
    # A source that compares is asked about each pair alone.
    assert rule("best_worst", compares=True).batches(0, 4) == [(0, 1, 2, 3)]
    assert rule(compares=True).batches(0, 4) == list(itertools.combinations(range(4), 2))


def test_a_random_pair_is_any_with_equal_chance():
    num_prompts, share = 1000, 1 / 6
    counts = Counter()
    for number in range(num_prompts):
        counts.update(rule("random").batches(number, 4))
    deviation = math.sqrt(num_prompts * share * (1 - share))
    assert set(counts) == set(itertools.combinations(range(4), 2))
    assert all(abs(count - num_prompts * share) < 5 * deviation for count in counts.values())


@given(SCORES, st.sampled_from(PAIRINGS), st.booleans(), st.integers(0, 50))
def test_pairs_rank_by_score_and_hold_nothing_else(scores, pairing, compares, number):
    """Every pair that the rule makes has two places with different finite scores, none twice, and
    the higher one is chosen.
    """
    of = rule(pairing, compares=compares)
    seen = set()
    for batch in of.batches(number, len(scores)):
        own = {place: scores[place] for place in batch}
        for one, other in of.pairs_of(own):
            assert one in batch and other in batch and one != other
            assert frozenset((one, other)) not in seen
            seen.add(frozenset((one, other)))
            both = (scores[one], scores[other])
            pair = label(candidate(one), candidate(other), both, is_flipped=False)
            if both[0] == both[1]:
                assert pair == "tie"
            else:
                assert pair.chosen_score > pair.rejected_score
                assert scores[pair.chosen.origin] == pair.chosen_score
                assert scores[pair.rejected.origin] == pair.rejected_score
    finite = [score for score in scores if not math.isnan(score)]
    count = len(finite)
    wanted = {"all": count * (count - 1) // 2, "best_worst": min(1, count // 2)}
    if pairing in wanted:
        assert len(seen) == wanted[pairing]
    if pairing == "best_worst" and seen:
        ((one, other),) = of.pairs_of(dict(enumerate(scores)))
        assert (scores[one], scores[other]) == (max(finite), min(finite))


def test_a_flipped_pair_keeps_its_scores():
    good, bad = candidate(0), candidate(1)
    pair = label(good, bad, (3.0, 1.0), is_flipped=True)
    assert (pair.chosen, pair.rejected) == (bad, good)
    assert (pair.chosen_score, pair.rejected_score, pair.difference) == (1.0, 3.0, 2.0)
    pair = label(bad, good, (1.0, 3.0), is_flipped=True)
    assert (pair.chosen, pair.rejected) == (bad, good)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_share_of_flipped_pairs_is_the_noise(noise):
    num_prompts = 1000
    noisy = rule(label_noise=noise, seed=3)
    flipped = [noisy.is_flipped(number, (0, 1)) for number in range(num_prompts)]
    deviation = math.sqrt(num_prompts * noise * (1 - noise))
    assert abs(sum(flipped) - num_prompts * noise) <= 5 * deviation
    again = [noisy.is_flipped(number, (1, 0)) for number in range(num_prompts)]
    assert flipped == again  # of the pair, in whatever order
    if noise == 0.2:
        other = rule(label_noise=noise, seed=4)
        assert flipped != [other.is_flipped(number, (0, 1)) for number in range(num_prompts)]


def test_a_row_has_the_form_of_its_prompt():
    pair = label(candidate(0, "2"), candidate("answer", "3"), (0.5, 2.0), is_flipped=False)
    assert row_of(pair, "1+2=", number=7, margin_coef=2.0) == {
        "prompt": "1+2=",
        "chosen": "3",
        "rejected": "2",
        "margin": 3.0,
        "chosen_score": 2.0,
        "rejected_score": 0.5,
        "chosen_sample": "answer",
        "rejected_sample": 0,
        "flipped": False,
        "number": 7,
    }
    turns = [{"role": "user", "content": "1+2="}]
    row = row_of(pair, turns, number=7, margin_coef=0.0)
    assert row["prompt"] == turns and row["margin"] == 0.0
    assert row["chosen"] == [{"role": "assistant", "content": "3"}]


def test_tallies_add_up():
    whole = PairCounts(prompts=2, pairs=1, difference=3.0, longest=9, compared=4, order_ties=1)
    whole.add(PairCounts(prompts=1, pairs=2, difference=0.0, longest=5, compared=4))
    assert (whole.prompts, whole.pairs, whole.longest) == (3, 3, 9)
    lines = "\n".join(whole.table())
    assert "mean margin   1\n" in lines and "87.5% of 8 comparisons" in lines
