"""Which size of pieces is tried when, and which is kept."""

import pytest

from llamarl.scoring.ahead import TRIAL, ChunkSearch


def run(search, seconds_of, steps):
    """The sizes that steps were made with."""
    sizes = []
    for number in range(steps):
        sizes.append(search.piece_tokens)
        search.step(seconds_of(search.piece_tokens, number))
    return sizes


def test_each_candidate_is_tried_and_the_fastest_kept_until_the_next_search():
    search = ChunkSearch([64, 16, 32], every=20)
    sizes = run(search, lambda size, _: {16: 3.0, 32: 1.0, 64: 2.0}[size], 29)
    trials = [16] * TRIAL + [32] * TRIAL + [64] * TRIAL
    assert sizes == trials + [32] * (20 - len(trials)) + trials


def test_a_slow_step_and_the_first_of_a_trial_decide_nothing():
    """A step that an evaluation or another candidate's pieces have slowed, or made fast."""
    search = ChunkSearch([16, 32], every=20)
    times = iter([0.1, 2.0, 9.0, 9.0, 9.0, 1.0])
    assert run(search, lambda *_: next(times), 2 * TRIAL)[-1] == 32
    assert search.piece_tokens == 32


def test_a_later_search_may_find_another():
    search = ChunkSearch([16, 32], every=8)
    run(search, lambda size, _: float(size), 8)
    run(search, lambda size, _: 1.0 / size, 2 * TRIAL)
    assert search.piece_tokens == 32


@pytest.mark.parametrize("stop", (0, 4, 10))
def test_a_search_goes_on_from_a_checkpoint(stop):
    def seconds(size, number):
        return size / 16 + number % 2

    whole = ChunkSearch([16, 32, 64], every=11)
    sizes = run(whole, seconds, stop)
    other = ChunkSearch([16, 32, 64], every=11)
    other.load_state_dict(whole.state_dict())
    assert run(other, seconds, 11) == run(whole, seconds, 11) and len(sizes) == stop
    anew = ChunkSearch([8, 16])
    anew.load_state_dict(whole.state_dict())
    assert anew.piece_tokens == 8


def test_too_few_steps_or_no_candidates_are_refused():
    with pytest.raises(ValueError, match="need more than 6"):
        ChunkSearch([1, 2], every=6)
    with pytest.raises(ValueError, match="at least 1"):
        ChunkSearch([])
