"""The simulated run, in cases that are worked out on paper: seconds are sums of powers of two, so
that they are exact.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from executors import trainer
from llamarl.planner import simulate as simulating
from llamarl.planner.__main__ import main
from llamarl.planner.costs import Timings
from llamarl.planner.simulate import SimulationSettings, lines_of_words, simulate
from tests.build.job import run_python

# Two groups of two completions of 8 tokens, in one batch.
SMALL = dict(
    max_steps=6,
    groups_per_step=2,
    group_size=2,
    max_slots=4,
    chunk_tokens=4,
    prompt_tokens=3,
    length_mean=8.0,
    length_sigma=0.0,
    overcommit=0,
)
DECODE = dict(decode_s=0.5, update_s=3.0)  # 8 tokens take 4 s


def outcome(seconds=DECODE, **changed):
    return simulate(SimulationSettings(**{**SMALL, **seconds, **changed}))


def timings(**changed):
    """Seconds that depend on sizes."""
    given = dict(
        decode_s=lambda rows, context: 0.5,
        prefill_s=lambda tokens: 0.0,
        update_s=lambda completions, tokens: 3.0,
        score_s=lambda completions: 0.0,
        publish_s=0.0,
        transfer_s=0.0,
        swap_s=0.0,
    )
    return Timings(**given | changed)


def step_of(changed, **settings):
    """The seconds of a synchronous step, of parts whose seconds depend on sizes."""
    run = SimulationSettings(**{**SMALL, "max_lag": 0, "warmup_steps": 1, **settings})
    return simulate(run, timings(**changed)).step_s


def test_a_synchronous_step_is_the_sum_of_its_parts():
    seconds = dict(DECODE, score_s=0.25, publish_s=0.5, transfer_s=1.0, swap_s=0.25)
    result = outcome(seconds, max_lag=0, warmup_steps=1)
    # Transfer 1, swap 0.25, 8 tokens 4, four scores 1, update 3, publish 0.5.
    assert result.steps_s == (9.75,) * 5
    assert result.step_s == 9.75
    assert result.lags == {0: 5 * 4}
    assert result.idle["generator"] == pytest.approx(1 - 4.25 / 9.75)
    assert result.idle["trainer"] == pytest.approx(1 - 3.5 / 9.75)
    assert result.idle["reward"] == pytest.approx(1 - 1.0 / 9.75)


@pytest.mark.parametrize("update_s", [3.0, 8.0])
def test_an_asynchronous_step_is_the_longest_of_its_parts(update_s):
    result = outcome(dict(DECODE, update_s=update_s), max_lag=2, overcommit=4, max_steps=12)
    assert result.steps_s[4:-3] == (max(update_s, 4.0),) * 5


@pytest.mark.parametrize("max_lag, step_s", [(0, 1.0 + 2.0), (1, 2.0)])
def test_generators_that_wait_share_what_may_start(max_lag, step_s):
    """Each samples one group of two rows in 2 s. One that started both groups would take 4 s."""
    settings = dict(max_lag=max_lag, num_generators=2, max_slots=8, warmup_steps=2)
    run = SimulationSettings(**{**SMALL, **settings})
    seconds = timings(decode_s=lambda rows, context: rows / 8, update_s=lambda *sizes: 1.0)
    assert simulate(run, seconds).step_s == step_s


@pytest.mark.parametrize("longer", [0, 1])
def test_trainers_end_a_step_together(longer, monkeypatch):
    def by_turns(settings, ticket):
        return [8, 8] if ticket % 2 == longer else [4, 4]

    monkeypatch.setattr(SimulationSettings, "lengths", by_turns)
    # Each of two has one group, of 3 + 2 x 8 tokens or of 3 + 2 x 4: its prompt is packed once.
    update_s = {"update_s": lambda completions, tokens: 1.0 + tokens / 16}
    assert step_of(update_s, num_trainers=2) == 4.0 + 1.0 + 19 / 16


@pytest.mark.parametrize(
    "settings, step_s",
    [
        ({"max_slots": 2, "num_generators": 2}, 3.0 + 4.0),  # each takes half
        ({"score_s": 1.0}, 7.0 + 4.0),
        ({"score_s": 1.0, "num_workers": 2}, 7.0 + 2.0),
        ({"score_s": 1.0, "num_workers": 4}, 7.0 + 1.0),
    ],
)
def test_generators_and_workers_share_their_work(settings, step_s):
    assert outcome(**settings, max_lag=0, warmup_steps=1).step_s == step_s


def test_a_decode_step_costs_what_its_rows_and_their_context_cost():
    assert step_of({"decode_s": lambda rows, context: 0.25 * rows}) == 3.0 + 8 * 4 * 0.25
    # A row has 3 tokens of context, then 4, ..., then 10.
    want = 4 * sum(range(3, 11)) / 16
    assert step_of({"decode_s": lambda rows, context: context / 16}) == 3.0 + want


def test_a_prompt_is_read_once_for_the_completions_that_start_together():
    by_token = {"prefill_s": lambda tokens: tokens / 16}
    assert step_of(by_token) == 7.0 + 2 * 3 / 16
    # With two slots the second group starts once the first has ended.
    assert step_of(by_token, max_slots=2) == 11.0 + 2 * 3 / 16


def test_weights_that_travel_longer_than_a_step_hold_the_trainer_up():
    seconds = dict(decode_s=0.03125, update_s=1.0, transfer_s=5.0)
    result = outcome(seconds, max_lag=8, overcommit=16, max_steps=24, warmup_steps=8)
    assert result.step_s == 5.0  # they leave one after another
    assert result.idle["trainer"] == pytest.approx(4 / 5)


def test_without_updates_in_flight_a_generator_drains_first():
    shared = dict(max_lag=4, overcommit=6, max_slots=4, length_sigma=0.7, max_steps=30)
    seconds = dict(DECODE, swap_s=1.0)
    in_flight = outcome(seconds, **shared, in_flight_updates=True)
    drained = outcome(seconds, **shared, in_flight_updates=False)
    assert drained.mean_lag > in_flight.mean_lag
    assert max(drained.lags) <= 4


def test_the_constant_is_that_of_the_executor():
    assert simulating.SHORT_S == trainer.SHORT_S


RANDOM = st.fixed_dictionaries(
    dict(
        max_steps=st.integers(2, 12),
        max_lag=st.integers(0, 4),
        overcommit=st.sampled_from([0, 1, 3, 8, "auto", "oppo", "window"]),
        groups_per_step=st.sampled_from([2, 4, 6]),
        group_size=st.integers(1, 3),
        num_generators=st.integers(1, 4),
        num_trainers=st.integers(1, 2),
        num_workers=st.integers(1, 3),
        max_slots=st.integers(3, 12),
        chunk_tokens=st.integers(1, 9),
        in_flight_updates=st.sampled_from([None, True, False]),
        length_mean=st.floats(1.0, 40.0),
        length_sigma=st.floats(0.0, 1.5),
        seed=st.integers(0, 9),
        decode_s=st.sampled_from([0.01, 0.3, 2.0]),
    )
    | {
        name: st.sampled_from([0.0, 0.01, 0.3, 2.0])
        for name in ("update_s", "score_s", "publish_s", "transfer_s", "swap_s")
    }
)


@examples(max_examples=40, deadline=None)
@given(chosen=RANDOM)
def test_no_setting_breaks_the_bound_and_each_group_is_trained_on_once(chosen):
    if chosen["max_lag"] == 0:
        chosen["overcommit"] = 0
    settings = SimulationSettings(**{**SMALL, **chosen})
    result = simulate(settings)
    count = settings.max_steps * settings.groups_per_step * settings.group_size
    assert sum(result.lags.values()) == count
    assert max(result.lags) <= settings.max_lag and min(result.lags) >= 0
    assert len(result.steps_s) == settings.max_steps
    assert all(0 <= share <= 1 for share in result.idle.values())


@pytest.mark.parametrize("transfer_s, behind", [(0.0, 1), (0.25, 2)])
def test_a_full_window_has_the_closed_forms_lag(transfer_s, behind):
    """A generator that makes eight batches a step stands idle, and starts a ticket as soon as a
    take makes room: with the version that the step begins with if that is there, or with the one
    before if it is on its way.
    """
    result = outcome(
        dict(decode_s=0.015625, update_s=4.0, transfer_s=transfer_s),
        max_lag=8,
        overcommit=6,
        max_steps=60,
        warmup_steps=20,
        max_slots=64,
    )
    assert result.closed_form_lag == 1 + 6 / 2
    assert result.lags == {behind + 3: 40 * 4}


def test_the_governor_is_the_real_one(monkeypatch):
    def overcommit(result):
        return 2 * (result.closed_form_lag - 1)

    slow = outcome(dict(DECODE, decode_s=4.0), max_lag=4, overcommit="auto", max_steps=40)
    fast = outcome(dict(DECODE, decode_s=0.015625), max_lag=4, overcommit="auto", max_steps=40)
    assert overcommit(slow) > overcommit(fast)
    # OPPO's rule adds a group a step while the reward rises: w + 1 rewards, then up to 3 batches.
    monkeypatch.setattr(SimulationSettings, "reward", lambda settings, step: step / 100)
    oppo = outcome(max_lag=3, overcommit="oppo", max_steps=12)
    assert overcommit(oppo) == pytest.approx((11 * 1 + 2) / 12)


def test_a_simulation_reads_no_clock(monkeypatch):
    with monkeypatch.context() as patched:
        for name in ("time", "monotonic", "perf_counter", "process_time", "sleep"):
            patched.setattr(time, name, None)
        result = outcome(max_lag=2, overcommit="auto", length_sigma=1.0)
    assert len(result.steps_s) == 6


@pytest.mark.slow
def test_the_same_settings_give_the_same_bits_in_every_process():
    """Whatever order a process gives the members of its sets."""
    code = (
        "from llamarl.planner.simulate import SimulationSettings, simulate\n"
        "print(repr(simulate(SimulationSettings(max_steps=9, max_lag=3, overcommit='oppo',"
        " num_generators=3, length_sigma=1, score_s=0.1, transfer_s=0.3))))"
    )
    texts = {run_python("-c", code, PYTHONHASHSEED=seed) for seed in ("1", "2")}
    assert len(texts) == 1 and "steps_s=" in texts.pop()


def test_lengths_follow_seed_and_ticket_and_have_the_mean_that_was_asked_for():
    settings = SimulationSettings(length_mean=200.0, length_sigma=0.8, max_new_tokens=100_000)
    assert settings.lengths(5) == replace(settings, max_lag=3).lengths(5)
    assert settings.lengths(5) != replace(settings, seed=1).lengths(5)
    lengths = []
    for ticket in range(500):
        lengths += settings.lengths(ticket)
    mean = sum(lengths) / len(lengths)
    # The deviation of a length is 200 sqrt(exp(0.64) - 1) = 189, and of the mean of 4,000 3.
    assert abs(mean - 200.5) < 12  # rounded up, so half a token more
    cut = replace(settings, max_new_tokens=150)
    assert max(max(cut.lengths(ticket)) for ticket in range(100)) == 150


@pytest.mark.parametrize(
    "changed, key",
    [
        (dict(groups_per_step=3, num_trainers=2), "groups_per_step"),
        (dict(max_slots=1), "max_slots"),
        (dict(warmup_steps=6), "warmup_steps"),
        (dict(max_lag=0, overcommit=2), "overcommit"),
        (dict(decode_s=0, update_s=0), "decode_s"),
    ],
)
def test_what_cannot_go_on_is_refused(changed, key):
    with pytest.raises(ValueError, match=f"^{key}: "):
        outcome(**changed)


def test_a_mean_over_steps_of_no_seconds_is_refused():
    """Eight groups of equal lengths end at once: enough for several steps of 0 s."""
    ahead = dict(groups_per_step=1, overcommit=8, max_lag=8, max_slots=16)
    with pytest.raises(ValueError, match="^warmup_steps: "):
        outcome(update_s=0, max_steps=8, warmup_steps=7, **ahead)


@pytest.mark.parametrize(
    "words, reason",
    [
        (["max_lags=2"], "unknown key; did you mean max_lag?"),
        (["max_lag="], "max_lag=: need KEY=VALUE"),
        (["decode_s=-1"], "decode_s=-1 "),
        (["overcommit=much"], "overcommit=much "),
        (["max_lag=0", "overcommit=4"], "overcommit: max_lag=0 allows none"),
        (["max_lag=1,2", "overcommit=1,2", "seed=1,2"], "a table has two sides"),
    ],
)
def test_the_command_refuses_what_it_cannot_use(capsys, words, reason):
    assert main(["simulate", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("llamarl.planner: ") and reason in said.err


def test_two_keys_of_several_values_make_a_table():
    words = ["overcommit=0,2", "max_lag=0,1", "max_steps=4", "groups_per_step=2"]
    lines = list(lines_of_words(words))
    assert lines[0].split() == ["overcommit", "max_lag=0", "max_lag=1"]
    result = simulate(SimulationSettings(max_lag=1, overcommit=2, max_steps=4, groups_per_step=2))
    cell = f"{result.step_s:.2f} s {result.mean_lag:.1f}/{max(result.lags)}"
    assert lines[2].split(maxsplit=2)[1:] == ["-", cell]
