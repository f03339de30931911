"""The simulated run, in cases that are worked out on paper: seconds are sums of powers of two, so
that they are exact.
"""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from executors import reward, trainer
from llamarl.planner import flow, stations
from llamarl.planner.clock import VirtualClock
from llamarl.planner.draws import Drawn, draw
from llamarl.planner.simulate import describe, read_lengths, run, simulate_values, table
from llamarl.planner.simulation_settings import Impossible, SimulationSettings
from llamarl.planner.straight import StraightTimings
from llamarl.planner.world import simulate
from tests.house import ROOT

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


def outcome(timings=DECODE, **changed):
    settings = SimulationSettings(**{**SMALL, **changed})
    return simulate(settings, StraightTimings(**timings).timings())


def idle_of(result, executor):
    (one,) = [idle for idle in result.idle if idle.executor == executor]
    return one.share, dict(one.causes)


# --- The clock ---


def test_events_happen_by_time_and_those_of_one_time_in_the_order_in_which_they_were_set():
    clock = VirtualClock()
    seen = []
    for name, seconds in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        clock.after(seconds, lambda name=name: seen.append((clock(), name)))
    assert not clock.run(lambda: False)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]
    assert clock.num_events == 4
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match="at least 0"):
            clock.after(wrong, print)


# --- Steps by hand ---


def test_a_synchronous_step_is_the_sum_of_its_parts():
    timings = dict(
        DECODE,
        prefill_token_s=0.125,
        score_s=0.25,
        publish_s=0.5,
        transfer_s=1.0,
        swap_s=0.25,
    )
    result = outcome(timings, max_lag=0, warmup_steps=1)
    # Transfer 1, swap 0.25, two prompts of 3 tokens 0.75, 8 tokens 4, four scores 1, update 3,
    # publish 0.5.
    assert result.steps_s == (10.5,) * 5
    assert result.step_s == 10.5
    assert result.lags == {0: 5 * 4}
    share, causes = idle_of(result, "generator")
    assert share == pytest.approx(5.5 / 10.5)  # it works for 0.25 + 0.75 + 4
    assert causes.keys() == {"tickets"}
    share, causes = idle_of(result, "trainer")
    assert causes == {"data": pytest.approx(7.0 / 10.5)}
    share, causes = idle_of(result, "reward")
    assert causes == {"data": pytest.approx(9.5 / 10.5)}


@pytest.mark.parametrize("update_s", [1.0, 3.0, 4.0, 8.0])
def test_an_asynchronous_step_is_the_longest_of_its_parts(update_s):
    result = outcome(dict(DECODE, update_s=update_s), max_lag=2, overcommit=4, max_steps=12)
    assert result.steps_s[4:-3] == (max(update_s, 4.0),) * 5


def test_half_the_slots_take_twice_as_long():
    assert outcome(max_lag=0, max_slots=2, warmup_steps=1).step_s == 3.0 + 2 * 4.0


def test_two_generators_take_half_as_long_and_a_slow_one_holds_both_up():
    shared = dict(max_lag=0, max_slots=2, num_generators=2, warmup_steps=1)
    assert outcome(**shared).step_s == 3.0 + 4.0
    assert outcome(**shared, slow_factor=2.0).step_s == 3.0 + 8.0


@pytest.mark.parametrize("longer", [0, 1])
def test_trainers_end_a_step_together(longer, monkeypatch):
    def by_turns(settings, ticket):
        length = 8 if ticket % 2 == longer else 4
        return Drawn(lengths=(length, length), score_times=(1.0, 1.0))

    monkeypatch.setattr(flow, "draw", by_turns)
    timings = dict(DECODE, update_s=1.0, update_token_s=0.0625)
    # Each of two has one group, of 3 + 2 x 8 tokens or of 3 + 2 x 4: its prompt is packed once.
    result = outcome(timings, max_lag=0, num_trainers=2, warmup_steps=1)
    assert result.step_s == 4.0 + 1.0 + 19 * 0.0625


def test_scores_are_made_by_so_many_workers_and_ranks():
    timings = dict(DECODE, score_s=1.0)
    shared = dict(max_lag=0, warmup_steps=1)
    assert outcome(timings, **shared).step_s == 7.0 + 4.0
    assert outcome(timings, **shared, num_workers=4).step_s == 7.0 + 1.0
    assert outcome(timings, **shared, num_rewards=2).step_s == 7.0 + 2.0
    assert outcome(timings, **shared, score_batch=4).step_s == 7.0 + 1.0
    slow = dict(slow_score_share=1.0, slow_score_times=2.0)
    assert outcome(timings, **shared, **slow).step_s == 7.0 + 8.0


def test_a_decode_step_costs_what_its_rows_and_their_context_cost():
    timings = dict(decode_s=0.0, decode_row_s=0.25, update_s=3.0)
    assert outcome(timings, max_lag=0, warmup_steps=1).step_s == 3.0 + 8 * 4 * 0.25
    timings = dict(decode_s=0.0, decode_context_s=0.0625, update_s=3.0)
    # A row has 3 tokens of context, then 4, ..., then 10.
    want = 4 * sum(range(3, 11)) * 0.0625
    assert outcome(timings, max_lag=0, warmup_steps=1).step_s == 3.0 + want


# --- Weights ---


def test_weights_that_travel_longer_than_a_step_hold_the_trainer_up():
    timings = dict(decode_s=0.03125, update_s=1.0, transfer_s=5.0)
    settings = dict(max_lag=8, overcommit=16, max_steps=24, warmup_steps=8)
    result = outcome(timings, **settings)
    assert result.step_s == 5.0  # they leave one after another
    _, causes = idle_of(result, "trainer")
    assert causes == {"weights": pytest.approx(4 / 5)}
    # Three on their way at once do not make the way shorter.
    assert outcome(timings, **settings, weight_slots=3).step_s == 5.0


def test_without_updates_in_flight_a_generator_drains_first():
    # One token every half second, one ticket after another: version 1 comes while the second is
    # sampled, which keeps the first version to its end either way; the swap comes 0.5 s earlier
    # in flight.
    shared = dict(max_lag=4, overcommit=6, max_slots=4, length_sigma=0.7, max_steps=30)
    timings = dict(DECODE, swap_s=1.0)
    in_flight = outcome(timings, **shared, in_flight_updates=True)
    drained = outcome(timings, **shared, in_flight_updates=False)
    assert drained.mean_lag > in_flight.mean_lag
    assert drained.max_lag <= 4


def test_weights_may_be_published_every_second_step_only():
    # A batch takes 4 s, two batches may be of one version, and a version leaves in 2 s. Version 0
    # is there at 2 s, its batches at 6 and 10, which are trained on by 9 and 13; version 2 is there
    # at 15, and so on.
    timings = dict(DECODE, publish_s=2.0)
    settings = dict(max_lag=1, overcommit=2, stops_generators=True, publish_every=2)
    result = outcome(timings, **settings)
    assert result.steps_s == (9.0, 6.0, 7.0, 6.0, 7.0, 6.0)
    assert result.lags == {0: 12, 1: 12}


@pytest.mark.parametrize(
    "changed, step_s",
    [
        (dict(), 4.0),  # the generator's 4 s a batch are more than the trainer's 1 + 2
        # It stops between its chunks of 2 s until the version is there, 3 s after its last batch.
        (dict(stops_generators=True), 5.0),
        # And reads 2 prompts, and at the swap 4 rows of 3 + 4 tokens again: 28 tokens before its
        # last chunk, while the prompts are read before it stops.
        (dict(stops_generators=True, recompute_kv=True), 5.0 + 28 / 64),
    ],
)
def test_a_generator_may_stand_still_while_weights_leave_and_read_its_rows_again(changed, step_s):
    timings = dict(decode_s=0.5, update_s=1.0, publish_s=2.0)
    if "recompute_kv" in changed:
        timings["prefill_token_s"] = 1 / 64
    result = outcome(timings, max_lag=1, overcommit=2, warmup_steps=2, **changed)
    assert result.steps_s == (step_s,) * 4


# --- Staleness ---


def test_constants_are_those_of_the_executors():
    assert stations.SHORT_S == trainer.SHORT_S
    assert stations.MAX_PENDING == reward.MAX_PENDING


RANDOM = st.fixed_dictionaries(
    dict(
        max_steps=st.integers(2, 12),
        max_lag=st.integers(0, 4),
        overcommit=st.sampled_from([0, 1, 3, 8, "auto", "oppo", "window"]),
        on_deadline=st.sampled_from(["wait", "truncate"]),
        groups_per_step=st.sampled_from([2, 4, 6]),
        group_size=st.integers(1, 3),
        num_generators=st.integers(1, 4),
        num_trainers=st.integers(1, 2),
        num_rewards=st.integers(1, 2),
        num_workers=st.integers(1, 3),
        max_slots=st.integers(3, 12),
        chunk_tokens=st.integers(1, 9),
        in_flight_updates=st.sampled_from([None, True, False]),
        max_seconds=st.sampled_from([None, 2.0]),
        channel_capacity=st.sampled_from([1, 5, 4096]),
        length_mean=st.floats(1.0, 40.0),
        length_sigma=st.floats(0.0, 1.5),
        straggler_share=st.sampled_from([0.0, 0.1]),
        straggler_times=st.just(10.0),
        slow_factor=st.sampled_from([1.0, 4.0]),
        seed=st.integers(0, 9),
    )
)
SECONDS = st.fixed_dictionaries(
    {
        name: st.sampled_from([0.0, 0.01, 0.3, 2.0])
        for name in ("decode_s", "update_s", "score_s", "publish_s", "transfer_s", "swap_s")
    }
)


@examples(max_examples=150, deadline=None)
@given(chosen=RANDOM, seconds=SECONDS)
def test_no_setting_breaks_the_bound_and_each_group_is_trained_on_once(chosen, seconds):
    if chosen["max_lag"] == 0:
        chosen["overcommit"] = 0
    seconds = {**seconds, "decode_s": seconds["decode_s"] or 0.01}
    settings = SimulationSettings(**{**SMALL, **chosen})
    result = simulate(settings, StraightTimings(**seconds).timings())
    count = settings.max_steps * settings.groups_per_step * settings.group_size
    assert sum(result.lags.values()) == count
    assert max(result.lags) <= settings.max_lag and min(result.lags) >= 0
    assert len(result.steps_s) == settings.max_steps
    form = result.closed_form
    # Little's law, over time and over takes: a whole run begins and ends with nothing started.
    assert form.mean_started == pytest.approx(form.groups_per_s * form.mean_life_s)
    if settings.max_slots // settings.group_size * settings.group_size == settings.max_slots:
        assert form.little_lag == pytest.approx(result.mean_lag)


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
    assert result.closed_form.lag == 1 + 6 / 2
    assert result.lags == {behind + 3: 40 * 4}


def test_the_governor_is_the_real_one():
    slow = outcome(dict(DECODE, decode_s=4.0), max_lag=3, overcommit="auto", max_steps=40)
    fast = outcome(dict(DECODE, decode_s=0.015625), max_lag=3, overcommit="auto", max_steps=40)
    assert slow.mean_overcommit > fast.mean_overcommit
    # OPPO's rule adds a group a step while the reward rises: w + 1 rewards, then up to 3 batches.
    oppo = outcome(max_lag=3, overcommit="oppo", max_steps=30, reward_noise=0.0)
    assert oppo.mean_overcommit == pytest.approx((11 * 1 + 2 + 3 + 4 + 5 + 15 * 6) / 30)


# --- What goes wrong ---


def test_a_dead_generators_tickets_start_again_and_the_rest_goes_on():
    # Each of two generators samples one group of a batch, in 4 s. The second dies after 2 s: its
    # ticket starts again on the first, which then makes all batches, in 8 s.
    result = outcome(
        max_slots=2,
        num_generators=2,
        death_at_s=2.0,
        max_steps=4,
        max_lag=1,
    )
    assert result.num_restarted == 1
    assert sum(result.lags.values()) == 4 * 4
    assert result.steps_s[0] == 4.0 + 4.0 + 3.0
    assert result.steps_s[-1] == 8.0
    _, causes = idle_of(result, "generator")
    assert causes["death"] == pytest.approx((result.seconds - 2.0) / result.seconds / 2)


def test_what_a_dead_generator_had_sent_of_a_group_is_not_counted_in_the_next_attempt(monkeypatch):
    """Completions of 2 and 8 tokens, 1 s and 4 s. The second generator dies at 1.5 s, when its
    ticket's first completion is being scored, which takes 4 s. The first one starts that ticket
    again at 4 s, and its second completion is scored at 4 + 4 + 4 s.
    """
    drawn = Drawn(lengths=(2, 8), score_times=(1.0, 1.0))
    monkeypatch.setattr(flow, "draw", lambda settings, ticket: drawn)
    result = outcome(
        dict(DECODE, score_s=4.0),
        max_slots=2,
        num_generators=2,
        num_workers=4,
        chunk_tokens=2,
        death_at_s=1.5,
        max_lag=1,
        max_steps=2,
    )
    assert result.num_restarted == 1
    assert result.steps_s[0] == 12.0 + 3.0


@examples(max_examples=60, deadline=None)
@given(
    chosen=RANDOM,
    death_at_s=st.floats(0.0, 20.0),
)
def test_a_death_at_any_time_loses_no_group(chosen, death_at_s):
    chosen["max_lag"] = max(1, chosen["max_lag"])
    chosen["num_generators"] = max(2, chosen["num_generators"])
    settings = SimulationSettings(**{**SMALL, **chosen}, death_at_s=death_at_s)
    result = simulate(settings, StraightTimings(decode_s=0.1, score_s=0.2).timings())
    count = settings.max_steps * settings.groups_per_step * settings.group_size
    assert sum(result.lags.values()) == count
    assert max(result.lags) <= settings.max_lag


def test_a_full_channel_holds_the_generator_up(monkeypatch):
    monkeypatch.setattr(stations, "MAX_PENDING", 1)
    timings = dict(decode_s=0.015625, update_s=0.125, score_s=1.0)
    shared = dict(max_lag=8, overcommit=16, max_steps=12)
    result = outcome(timings, **shared, channel_capacity=2)
    assert idle_of(result, "generator")[1]["room"] > 0.5
    # Two in the inbox, two in the outbox, and what one chunk may bring beyond: 4 rows.
    assert result.most_waiting <= 2 + 2 + 4
    wide = outcome(timings, **shared)
    assert "room" not in idle_of(wide, "generator")[1]
    assert wide.most_waiting > 8
    # The worker is the slow side either way: four completions a step, a second each.
    assert result.steps_s[6] == wide.steps_s[6] == 4.0


def test_truncate_ends_a_straggler_that_alone_holds_up_a_step():
    # Every second completion or so is ten times as long.
    shared = dict(
        max_lag=1,
        overcommit=2,
        max_slots=16,
        straggler_share=0.1,
        straggler_times=40.0,
        max_steps=30,
    )
    waits = outcome(**shared)
    ends = outcome(**shared, on_deadline="truncate")
    assert waits.num_aborted == 0 and ends.num_aborted > 0
    assert ends.step_s < waits.step_s
    limited = outcome(**shared, max_seconds=4.0)
    assert limited.num_aborted > 0 and limited.step_s < waits.step_s


# --- Chance, and no clock ---


def test_a_simulation_reads_no_clock(monkeypatch):
    def refuse(*args):
        raise AssertionError("a simulation has no time but its own")

    with monkeypatch.context() as patched:
        for name in ("time", "monotonic", "perf_counter", "process_time", "sleep"):
            patched.setattr(time, name, refuse)
        result = outcome(max_lag=2, overcommit="auto", length_sigma=1.0, on_deadline="truncate")
    assert len(result.steps_s) == 6


@pytest.mark.slow
@pytest.mark.bitwise("a simulation is a function of its settings, in every process")
def test_the_same_settings_give_the_same_bits_in_every_process():
    code = (
        "from llamarl.planner.simulate import simulate_values\n"
        "values = dict(max_steps='9', max_lag='3', overcommit='oppo', num_generators='3',"
        " length_sigma='1', score_s='0.1', transfer_s='0.3')\n"
        "print(repr(simulate_values(values)))"
    )
    texts = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        texts.add(done.stdout)
    assert len(texts) == 1


def test_another_seed_gives_other_lengths():
    settings = SimulationSettings(length_sigma=1.0)
    other = dataclasses.replace(settings, seed=1)
    assert draw(settings, 5) == draw(settings, 5)
    assert draw(settings, 5) != draw(other, 5)


def test_lengths_have_the_mean_that_was_asked_for():
    settings = SimulationSettings(length_mean=200.0, length_sigma=0.8, max_new_tokens=100_000)
    lengths = []
    for ticket in range(2000):
        lengths += draw(settings, ticket).lengths
    mean = sum(lengths) / len(lengths)
    # The deviation of a length is 200 sqrt(exp(0.64) - 1) = 189, and of the mean of 16,000 1.5.
    assert abs(mean - 200.5) < 6  # rounded up, so half a token more
    cut = dataclasses.replace(settings, max_new_tokens=150)
    assert max(max(draw(cut, ticket).lengths) for ticket in range(100)) == 150


# --- The command ---


def test_what_cannot_be_simulated_is_said_at_once():
    with pytest.raises(Impossible) as said:
        SimulationSettings(
            groups_per_step=3, num_trainers=2, max_slots=1, max_lag=0, overcommit=2, death_at_s=1.0
        )
    text = str(said.value)
    for key in ("groups_per_step=3", "max_slots=1", "overcommit=2", "num_generators", "max_lag=0"):
        assert key in text
    for values, words in (
        ({"max_steps": "few"}, "max_steps=few: need a whole number"),
        ({"decode_s": "-1"}, "decode_s=-1.0: need at least 0 seconds"),
        ({"overcommit": "much"}, "overcommit=much"),
        ({"publish_every": "3"}, "publish_every=3, max_lag=1"),
    ):
        with pytest.raises(ValueError, match=words):
            simulate_values(values)


def test_the_command_describes_one_run_and_draws_it(tmp_path, capsys):
    picture = tmp_path / "run.svg"
    assert run(["max_steps=4", "max_lag=2", "score_s=0.1", "-o", str(picture)]) == 0
    said = capsys.readouterr().out
    for word in ("4 steps", "generator", "trainer", "closed form", "by Little", "lag   1"):
        assert word in said
    text = picture.read_text()
    assert "generator 0" in text and "1 + overcommit / B" in text and "trainer" in text


def test_an_aborted_and_a_restarted_run_are_described():
    result = outcome(max_slots=2, num_generators=2, death_at_s=2.0, max_seconds=1.0)
    said = describe(result)
    assert f"restarted     {result.num_restarted} tickets" in said
    assert f"aborted       {result.num_aborted} completions" in said


def test_the_command_refuses_what_it_does_not_know(tmp_path, capsys):
    for arguments, words in (
        (["max_lags=2"], "max_lags: unknown key; did you mean max_lag?"),
        (["max_lag"], "max_lag: need KEY=VALUE"),
        (["max_lag=1,2", "overcommit=1,2", "seed=1,2"], "a table has two sides"),
        (["max_lag=1,2", "-o", "a.svg"], "a picture is of one run"),
        (["max_steps=2", "-o", "a.pdf"], "ends in .svg or .png"),
        (["max_steps=2", "--lengths", str(tmp_path / "none")], "No such file"),
    ):
        assert run(arguments) == 2
        assert words in capsys.readouterr().err


def test_two_keys_of_several_values_make_a_table():
    values = {"max_lag": ["0", "1"], "overcommit": ["0", "2"], "max_steps": ["4"]}
    lines = table(values, ["overcommit", "max_lag"], lengths=(4,))
    assert lines[0].split() == ["overcommit", "max_lag=0", "max_lag=1"]
    result = simulate_values({"max_lag": "1", "overcommit": "2", "max_steps": "4"}, lengths=(4,))
    cell = f"{result.step_s:.2f} s {result.mean_lag:.1f}/{result.max_lag}"
    assert lines[2].split(maxsplit=2)[1:] == ["-", cell]


def test_one_key_of_several_values_makes_a_line_each(capsys):
    assert run(["max_lag=1,2,3", "max_steps=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[0].startswith("max_lag")


def test_lengths_are_read_from_numbers_or_from_a_runs_metrics(tmp_path):
    numbers = tmp_path / "lengths.txt"
    numbers.write_text("5\n7\n")
    assert read_lengths(numbers) == (5, 7)
    rows = tmp_path / "metrics.jsonl"
    rows.write_text('{"step": 0, "completion/length_mean": 5.6}\n{"step": 1}\n')
    assert read_lengths(rows) == (6,)
    for text in ("five\n", "", '{"step": 1}\n'):
        numbers.write_text(text)
        with pytest.raises(ValueError, match="lengths.txt"):
            read_lengths(numbers)


def test_hundreds_of_ranks_are_no_other_case():
    result = outcome(
        dict(decode_s=0.25, update_s=4.0, score_s=0.25),
        num_generators=256,
        num_trainers=16,
        num_rewards=8,
        groups_per_step=512,
        max_slots=4,
        max_lag=2,
        overcommit=512,
        max_steps=3,
    )
    assert sum(result.lags.values()) == 3 * 512 * 2
