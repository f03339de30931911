"""Observation: reports from many ranks become rows in step order; resume rewrites nothing; the
pages can be read; and the time that is left, and what a run was expected to come to.
"""

import base64
import html.parser
import io
import json
import types
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.config.command_line import default_config
from llamarl.config.conversion import to_values
from llamarl.observe import Console, Metrics, RowWriter, Trace, build_sinks, is_timing
from llamarl.observe.alarms import LagWatch, LearningWatch, SignalWatch
from llamarl.observe.console import (
    SUPERVISED_COLUMNS,
    CheckpointProgress,
    Progress,
    TimeLeft,
    shown_left,
)
from llamarl.observe.expected import (
    Expectation,
    Stage,
    differing,
    expectation_of,
    read_expectations,
    verdict,
)
from llamarl.observe.plots import BINS, drawn, moving_mean
from llamarl.observe.rates import RateMeter, idle_shares
from llamarl.observe.report import columns_of, facts, write_report
from llamarl.observe.report import main as report_main
from llamarl.observe.samples import SampleFile
from llamarl.observe.sinks import Jsonl, read_rows
from llamarl.observe.trace import merge
from tests.build.console import Clock, Terminal, plain


class Mail:
    """Control of one rank in a fake world; messages pass through JSON as in the real one."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def post(self, rank, topic, payload):
        letter = json.dumps([self.rank, payload], allow_nan=False)
        self.world[rank, topic].append(letter)
        for handler in self.world["on", rank, topic]:
            handler(*json.loads(letter))

    def on(self, topic, handler):
        self.world["on", self.rank, topic].append(handler)


def writer_in(tmp_path, *, every=1000, sinks=(), clock=None):
    """The writer of a run that is evaluated at every so many steps, from step 0 on."""
    due = lambda step: step % every == 0  # noqa: E731
    return RowWriter(tmp_path, list(sinks), eval_due=due, first_step=0, clock=clock or Clock())


def ingest_losses(writer, *steps):
    for step in steps:
        writer.ingest(step, {"loss/value": float(step)})


def rows_in(tmp_path):
    return read_rows(tmp_path / "metrics.jsonl")


def metrics_of(writer, *, world=None, rank=0, leader=0):
    world = defaultdict(list) if world is None else world
    return Metrics(
        rank=rank, leader=leader, control=Mail(rank, world), writer=writer, trace=Trace(rank=rank)
    )


def steps_in(tmp_path):
    return [row["step"] for row in rows_in(tmp_path)]


# --- rows ---


def test_reports_of_several_ranks_and_executors_merge_into_one_row(tmp_path):
    world = defaultdict(list)
    leader = metrics_of(writer_in(tmp_path), world=world, rank=1, leader=1)
    trainer, generator = (metrics_of(None, world=world, rank=rank, leader=1) for rank in (0, 2))
    leader.report(0, {"eval/reward": 0.25})
    generator.report(1, {"parity/logprob_diff_max": 1e-6})
    generator.pump()
    trained = {"loss/value": 0.5, "lag/max": 2}
    trainer.report(1, trained)
    trainer.pump()
    leader.pump()
    baseline, row = rows_in(tmp_path)
    assert baseline["step"] == baseline["policy_version"] == 0 and baseline["eval/reward"] == 0.25
    expected = trained | {"step": 1, "parity/logprob_diff_max": 1e-6}
    assert expected.items() <= row.items()


@pytest.mark.parametrize("elsewhere", [True, False])
def test_an_evaluation_has_the_time_at_which_it_came_while_the_leader_was_in_a_step(
    tmp_path, elsewhere
):
    world, clock = defaultdict(list), Clock()
    leader = metrics_of(writer_in(tmp_path, clock=clock), world=world)
    reward = metrics_of(None, world=world, rank=1)
    clock.now = 2.0
    (reward if elsewhere else leader).report(0, {"eval/reward": 0.25})
    reward.pump()
    clock.now = 5.0
    leader.pump()
    (row,) = rows_in(tmp_path)
    assert row["time/evaluated_s"] == row["time/wall_s"] == 2.0


def test_a_row_waits_for_its_evaluation_and_holds_back_later_rows(tmp_path):
    writer = writer_in(tmp_path, every=2)
    writer.ingest(0, {"eval/reward": 0.1})
    ingest_losses(writer, 1, 2, 3)
    writer.flush()
    assert steps_in(tmp_path) == [0, 1]
    assert writer.is_complete(1) and not writer.is_complete(3), "step 2 is to be evaluated"
    writer.ingest(2, {"eval/reward": 0.2})
    assert writer.is_complete(3) and not writer.is_complete(4), "step 4 is not trained yet"
    writer.flush()
    assert steps_in(tmp_path) == [0, 1, 2, 3]
    *_, second, third = rows_in(tmp_path)
    assert second["eval/reward"] == 0.2 and "eval/reward" not in third


def test_an_abandoned_evaluation_frees_its_row_and_is_warned_of(tmp_path, caplog):
    writer = writer_in(tmp_path, every=2)
    writer.ingest(0, {"eval/reward": 0.1})
    ingest_losses(writer, 1, 2, 3)
    writer.abandon_eval(2)
    writer.flush()
    assert steps_in(tmp_path) == [0, 1, 2, 3]
    assert "evaluation of step 2" in caplog.text


def test_without_a_baseline_evaluation_there_is_no_row_0(tmp_path):
    writer = RowWriter(tmp_path, [], eval_due=lambda step: False, first_step=0)
    writer.flush()
    ingest_losses(writer, 1)
    writer.flush()
    assert steps_in(tmp_path) == [1]


def test_a_lost_report_blocks_no_later_row_and_one_that_comes_too_late_is_dropped(tmp_path, caplog):
    writer = writer_in(tmp_path)
    writer.ingest(0, {"eval/reward": 0.1})
    writer.flush()
    writer.ingest(0, {"eval/reward": 0.9})
    writer.ingest(1, {"reward/mean": 0.5})
    ingest_losses(writer, 2)
    writer.flush()
    assert steps_in(tmp_path) == [0, 1, 2] and rows_in(tmp_path)[0]["eval/reward"] == 0.1
    assert "report of step 1 was lost" in caplog.text
    assert "eval/reward for step 0 dropped" in caplog.text


def test_close_writes_rows_that_lack_only_an_evaluation_and_closes_the_sinks(tmp_path):
    seen = []
    sink = types.SimpleNamespace(write=seen.append, close=lambda: seen.append("closed"))
    writer = writer_in(tmp_path, every=2, sinks=[sink])
    writer.ingest(0, {"eval/reward": 0.1})
    ingest_losses(writer, 1, 2)
    writer.ingest(3, {"reward/mean": 0.0})
    writer.close()
    assert steps_in(tmp_path) == [0, 1, 2]
    assert seen == [*rows_in(tmp_path), "closed"]


@given(data=st.data())
@settings(max_examples=20)
def test_any_arrival_order_of_evaluations_gives_every_row_once_in_order(tmp_path_factory, data):
    last, every = 12, 3
    evals = data.draw(st.permutations(range(0, last + 1, every)))
    reports = [("loss/value", step) for step in range(1, last + 1)]  # the trainer's are in order
    size = len(evals)
    places = data.draw(st.lists(st.integers(0, last), min_size=size, max_size=size))
    for place, step in zip(sorted(places, reverse=True), evals, strict=True):
        reports.insert(place, ("eval/reward", step))
    folder = tmp_path_factory.mktemp("run")
    writer = writer_in(folder, every=every)
    for name, step in reports:
        writer.ingest(step, {name: float(step)})
        writer.flush()
    rows = rows_in(folder)
    assert [row["step"] for row in rows] == list(range(last + 1))
    assert all(row["eval/reward"] == row["step"] for row in rows[::every])
    assert all(row["loss/value"] == row["step"] for row in rows[1:])


# --- values ---


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_non_finite_values_become_null_with_one_warning(tmp_path, caplog, bad):
    metrics = metrics_of(writer_in(tmp_path))
    metrics.report(0, {"eval/reward": 0.0})
    for step in (1, 2):
        metrics.report(step, {"loss/value": bad})
    metrics.pump()
    assert [row["loss/value"] for row in rows_in(tmp_path)[1:]] == [None, None]
    assert len([record for record in caplog.records if "loss/value is" in record.message]) == 1


def test_tensors_and_integers_are_taken_as_numbers_that_no_null_replaces(tmp_path):
    metrics = metrics_of(writer_in(tmp_path))
    for accuracy in (None, torch.tensor(0.5), None):
        metrics.report(0, {"eval/reward": accuracy, "lag/max": 2})
    metrics.pump()
    assert '"lag/max": 2' in (tmp_path / "metrics.jsonl").read_text()
    assert rows_in(tmp_path)[0]["eval/reward"] == 0.5


# --- counters and rates ---


def test_rates_of_a_row_are_counter_differences_summed_over_ranks(tmp_path):
    clock, world = Clock(), defaultdict(list)
    leader = metrics_of(writer_in(tmp_path, clock=clock), world=world)
    others = [metrics_of(None, world=world, rank=rank) for rank in (1, 2)]
    leader.report(0, {"eval/reward": 0.0})
    leader.pump()
    seconds = {"generator/busy_s": 1.5, "generator/idle_s": 0.5}
    seconds |= {"generator/idle_s/room": 0.25, "weights/swap_stall_s": 0.125}
    for step, tokens in ((1, 100), (2, 300)):
        clock.now += 2.0
        for other in others:
            for name, value in (seconds | {"generator/tokens": tokens}).items():
                other.add(name, value)
            other.report(step + 50, {})  # a report takes the counters along at once
            other.pump()
        leader.report(step, {"loss/value": 0.0})
        leader.pump()
    _, first, second = rows_in(tmp_path)
    assert first["generator/tokens_per_s"] == 100 * 2 / 2.0
    assert second["generator/tokens_per_s"] == 300 * 2 / 2.0
    assert second["generator/idle_fraction"] == 0.25
    assert second["generator/idle_fraction/room"] == 0.125
    assert second["weights/swap_stall_s"] == 0.25
    assert second["trainer/idle_fraction"] is None, "nothing was counted for the trainer"
    assert (first["time/wall_s"], second["time/wall_s"]) == (2.0, 4.0)


def test_counters_travel_at_most_once_an_interval_but_reports_at_once():
    world = defaultdict(list)
    metrics = metrics_of(None, world=world, rank=1)
    sent = world[0, "metrics"]
    for _ in range(5):
        metrics.add("x", 1)
        metrics.pump()
    assert len(sent) == 1, "five pumps within an interval sent more than the first"
    metrics.report(1, {"loss/value": 0.0})
    metrics.pump()
    assert len(sent) == 2 and json.loads(sent[1])[1]["counters"] == {"x": 5}
    metrics.pump()
    assert len(sent) == 2, "nothing new, yet something was sent"


def test_rates_of_fast_rows_are_over_a_window_but_stalls_are_exact():
    meter = RateMeter(wall_s=0.0, counters={})
    # Rows every 0.25 s; the generator's counters arrive only with every second row.
    totals = [
        {"generator/tokens": 50 * (row // 2), "weights/swap_stall_s": 1.0 * row}
        for row in range(1, 13)
    ]
    rows = [meter.read(0.25 * row, counters) for row, counters in enumerate(totals, start=1)]
    assert {row["generator/tokens_per_s"] for row in rows[6:]} == {100.0}
    assert [row["weights/swap_stall_s"] for row in rows] == [1.0] * 12


def test_idle_shares_name_the_largest_cause_and_its_knob():
    counters = {"trainer/busy_s": 6.0, "trainer/idle_s": 4.0, "x/y": 1}
    counters |= {"trainer/idle_s/weights": 1.0, "trainer/idle_s/data": 3.0}
    (idle,) = idle_shares(counters)
    assert (idle.executor, idle.share) == ("trainer", 0.4)
    assert idle.causes == (("data", 0.3), ("weights", 0.1))
    assert "overcommit" in idle.knob


# --- resume ---


def play(metrics, steps, *, every, eval_delay=2):
    """Train `steps`; the evaluation of step s is reported eval_delay steps later, as by a busy
    generator.
    """
    for step in steps:
        metrics.add("generator/tokens", 10)
        if step:
            metrics.report(step, {"loss/value": step / 7, "reward/mean": step / 3})
        done = step - eval_delay
        if done >= 0 and done % every == 0:
            metrics.report(done, {"eval/reward": done / 11})
        metrics.pump()


def without_timing(tmp_path):
    found = []
    for row in rows_in(tmp_path):
        found.append({name: value for name, value in row.items() if not is_timing(name)})
    return found


@pytest.mark.parametrize("killed_at, torn", [(5, False), (8, True)])
def test_a_killed_and_resumed_file_equals_an_uninterrupted_one(tmp_path, killed_at, torn):
    whole = metrics_of(writer_in(tmp_path / "whole", every=4))
    play(whole, range(13), every=4)
    whole.close()

    cut = tmp_path / "cut"
    first = metrics_of(writer_in(cut, every=4))
    play(first, range(6), every=4)  # row 4 still waits for its evaluation, which comes with step 6
    state = json.loads(json.dumps(first.state_dict(5)))
    play(first, range(6, killed_at + 1), every=4)
    if torn:
        with open(cut / "metrics.jsonl", "a") as file:
            file.write('{"step": 99, "loss/va')  # killed in the middle of a write

    second = metrics_of(writer_in(cut, every=4))
    second.load_state_dict(state)
    play(second, range(6, 13), every=4)
    second.close()
    assert without_timing(cut) == without_timing(tmp_path / "whole")


def test_a_row_that_the_checkpoint_missed_is_taken_from_the_file(tmp_path):
    first = writer_in(tmp_path)
    first.ingest(0, {"eval/reward": 0.5})
    ingest_losses(first, 1)
    state = first.state_dict(2)  # the trainer's report of step 2 was still on its way
    ingest_losses(first, 2, 3)
    first.flush()
    second = writer_in(tmp_path)
    second.load_state_dict(state)
    second.ingest(3, {"loss/value": 3.5})
    second.flush()
    assert [row.get("loss/value") for row in rows_in(tmp_path)] == [None, 1.0, 2.0, 3.5]


def test_an_evaluation_that_was_under_way_of_earlier_weights_holds_up_no_row_after_a_resume(
    tmp_path,
):
    first = writer_in(tmp_path, every=2)
    first.ingest(0, {"eval/reward": 0.5})
    ingest_losses(first, 1, 2, 3, 4)
    first.flush()
    second = writer_in(tmp_path, every=2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(4))))
    assert not second.is_complete(4), "the checkpoint's own version is evaluated again"
    second.ingest(4, {"eval/reward": 0.75})
    second.flush()
    assert second.is_complete(4) and steps_in(tmp_path) == [0, 1, 2, 3, 4]


def test_wall_time_and_counters_go_on_over_a_resume(tmp_path):
    clock = Clock()
    first = writer_in(tmp_path, clock=clock)
    first.ingest(0, {"eval/reward": 0.5})
    first.set_counters(0, {"generator/tokens": 70})
    clock.now = 10.0
    state = first.state_dict(0)
    clock.now = 500.0  # the time that it lay killed does not count
    second = writer_in(tmp_path, clock=clock)
    second.load_state_dict(state)
    second.set_counters(0, {"generator/tokens": 30})
    clock.now = 510.0
    second.ingest(1, {"loss/value": 1.0})
    second.flush()
    row = rows_in(tmp_path)[-1]
    assert row["time/wall_s"] == 20.0 and row["generator/tokens_per_s"] == 3.0
    assert "generated  5 tokens/s" in second.summary()


def test_a_fresh_start_keeps_an_earlier_runs_file_under_another_name(tmp_path):
    for accuracy in (0.1, 0.2, 0.3):
        writer = writer_in(tmp_path)
        writer.ingest(0, {"eval/reward": accuracy})
        writer.close()
    files = tmp_path.glob("metrics*.jsonl")
    kept = {path.name: read_rows(path)[0]["eval/reward"] for path in files}
    assert kept == {"metrics.1.jsonl": 0.1, "metrics.2.jsonl": 0.2, "metrics.jsonl": 0.3}


# --- sinks and console ---


@pytest.mark.parametrize("line, said", [("{oops", "not JSON"), ("[1]", "not a metrics row")])
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, said):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=rf"metrics\.jsonl:2: {said}"):
        read_rows(file)


def test_truncate_keeps_earlier_rows_byte_for_byte(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0,   "a": 1}\n{"step": 1}\n{"step": 2}\n{"ste')
    sink = Jsonl(file)
    assert sink.truncate(1) == [{"step": 1}, {"step": 2}]
    assert file.read_text() == '{"step": 0,   "a": 1}\n'
    sink.write({"step": 1, "b": 2})
    assert read_rows(file) == [{"step": 0, "a": 1}, {"step": 1, "b": 2}]


ROW = {
    "step": 12,
    "reward/mean": 0.4531,
    "eval/reward": 0.412,
    "eval/accuracy": 0.412,
    "lag/mean": 1.24,
    "lag/max": 2,
    "loss/value": 0.0123,
    "grad_norm": 0.8125,
    "generator/tokens_per_s": 18230.0,
    "generator/idle_fraction": 0.03,
    "trainer/idle_fraction": None,
    "time/step_s": 0.31,
}


def shown(*rows, stream=None, **options):
    """The lines that a console makes of rows."""
    out = stream or io.StringIO()
    console = Console(stream=out, **options)
    for row in rows:
        console.write(row)
    return [line.rstrip() for line in plain(out.getvalue()).splitlines()]


def test_a_plain_console_line_names_what_it_shows():
    assert shown(ROW, {"step": 13}, max_steps=200) == [
        "step 12/200  reward 0.453  accuracy 41.2%  lag 1.2/2  loss 0.0123  grad 0.812  tok/s "
        "18.2k  idle g/t 3%/-  s/step 0.31",
        "step 13/200",
    ]


def test_a_job_without_a_generator_shows_its_trainers_idle_share_alone():
    row = {"step": 3, "loss/value": 0.5, "trainer/idle_fraction": 0.25}
    row |= {"generator/idle_fraction": None, "time/step_s": 2.0}
    lines = shown(row, columns=SUPERVISED_COLUMNS)
    assert lines == ["step 3  loss 0.5000  idle 25%  s/step 2"]


ALL_ERRORS = {
    "eval/errors": 500,
    "eval/left_out": 500,
    "eval/left_out_reason": "ModuleNotFoundError: No module named 'x'",
}


def test_an_evaluation_of_errors_alone_has_no_figure_on_the_console():
    abstained = {"eval/left_out": 2, "eval/errors": 0, "eval/left_out_reason": "x"}
    partly = {"eval/reward": 0.5, "eval/accuracy": 0.5, "eval/left_out": 3, "eval/errors": 4}
    partly |= {"eval/left_out_reason": "KeyError"}
    assert shown({"step": 0} | ALL_ERRORS, {"step": 1} | abstained, {"step": 2} | partly) == [
        "step 0  held-out -- (all 500 are errors: ModuleNotFoundError: No module named 'x')",
        "step 1  held-out -- (all 2 are abstentions: x)",
        "step 2  accuracy 50.0% (3 errors left out: KeyError)",
    ]


OF_SETS = {
    "eval/reward": 0.5,
    "eval/accuracy": 0.5,
    "eval/a/reward": 0.25,
    "eval/a/accuracy": 0.25,
    "eval/b/reward": -2.5,
    "eval/c/errors": 3,
    "eval/c/left_out": 3,
    "eval/c/left_out_reason": "KeyError",
}


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_each_set_has_a_line_of_its_own_on_the_console(stream):
    first, *lines = shown({"step": 2} | OF_SETS, stream=stream())[-4:]
    assert "50.0%" in first
    assert lines == [
        "held-out a accuracy 25.0%",
        "held-out b reward -2.500",
        "held-out c reward -- (all 3 are errors: KeyError)",
    ]


def test_each_set_is_in_the_summary_and_has_curves_in_the_report(tmp_path):
    writer = writer_in(tmp_path, every=1)
    writer.ingest(0, OF_SETS)
    later = {"eval/a/reward": 0.75, "eval/a/accuracy": 0.75, "eval/b/reward": 1.5}
    writer.ingest(1, {"loss/value": 1.0} | OF_SETS | later)
    writer.flush()
    summary = writer.summary()
    assert "accuracy   50.0% -> 50.0%" in summary
    assert "held out   a accuracy 25.0% -> 75.0%" in summary
    assert "held out   b reward -2.5 -> 1.5" in summary
    writer.close()
    page = Page(write_report(tmp_path).read_text())
    titles = [alt for alt, _ in page.images if alt.startswith("Evaluation")]
    assert titles == ["Evaluation", "Evaluation: a", "Evaluation: b"]
    known = dict(facts(columns_of(rows_in(tmp_path))))
    assert known["accuracy"] == "50.0% → 50.0%" and known["accuracy, a"] == "25.0% → 75.0%"
    assert known["reward, held-out prompts, b"] == "-2.5 → 1.5"


def test_a_row_whose_evaluation_came_to_nothing_is_whole_and_has_no_mean(tmp_path):
    writer = writer_in(tmp_path, every=1)
    metrics = metrics_of(writer)
    metrics.report(0, ALL_ERRORS)
    metrics.report(1, {"loss/value": 1.0, "eval/reward": 0.5, "eval/accuracy": 0.5})
    metrics.pump()
    first, second = writer.file.read()
    assert first["eval/left_out_reason"] == ALL_ERRORS["eval/left_out_reason"]
    assert not {"eval/reward", "eval/accuracy"} & set(first) and second["eval/reward"] == 0.5
    assert writer.is_complete(1) and "accuracy   50.0% -> 50.0%" in writer.summary()
    columns = columns_of([first, second])
    assert "eval/left_out_reason" not in columns
    assert np.isnan(columns["eval/accuracy"][0]) and columns["eval/accuracy"][1] == 0.5


def test_the_mean_of_graded_scores_is_not_called_an_accuracy(tmp_path):
    assert shown({"step": 1, "eval/reward": 2.25}) == ["step 1  held-out 2.250"]
    writer = writer_in(tmp_path, every=1)
    writer.ingest(0, {"eval/reward": 0.0, "eval/accuracy": 0.0})
    writer.ingest(1, {"loss/value": 1.0, "eval/reward": 2.25})
    writer.flush()
    assert "held out   reward 0 -> 2.25" in writer.summary()
    known = dict(facts(columns_of(rows_in(tmp_path))))
    assert known["reward, held-out prompts"] == "0 → 2.25" and "accuracy" not in known


def test_a_terminal_gets_an_aligned_table_within_80_columns():
    later = ROW | {"eval/reward": None, "eval/accuracy": None}
    header, first, second = shown(ROW, later, stream=Terminal(), max_steps=200)
    assert len(header) == len(first) == len(second) < 80
    ends = {header.index("reward") + len("reward")}
    ends |= {line.index("0.453") + len("0.453") for line in (first, second)}
    assert len(ends) == 1


# --- summary, trace, report ---


def small_run(tmp_path):
    clock = Clock()
    metrics = metrics_of(writer_in(tmp_path, every=10, clock=clock))
    for step in range(21):
        clock.now += 2.0
        for executor, cause, idle_s in (("generator", "room", 0.5), ("trainer", "data", 1.5)):
            metrics.add(f"{executor}/busy_s", 2.0 - idle_s)
            metrics.add(f"{executor}/idle_s", idle_s)
            metrics.add(f"{executor}/idle_s/{cause}", idle_s)
        metrics.add("generator/tokens", 100)
        if step:
            names = ("reward/mean", "loss/value", "entropy", "ratio/max", "lag/max")
            values = dict.fromkeys(names, (step + 1) / 100)
            metrics.report(step, values | {"kl/ref": None, "time/step_s": 2.0})
        if step % 10 == 0:
            value = 0.4 + step / 100
            metrics.report(step, {"eval/reward": value, "eval/accuracy": value})
        metrics.pump()
    return metrics


def test_the_summary_says_before_after_speed_idleness_and_where(tmp_path):
    metrics = small_run(tmp_path)
    metrics.close()
    text = metrics.writer.summary()
    assert "accuracy   40.0% -> 60.0%" in text
    assert "20 steps in 42.0 s" in text and "generated  50 tokens/s" in text
    assert "trainer 75% (data 75%)" in text and "generator 25% (room 25%)" in text
    assert str(tmp_path / "metrics.jsonl") in text


def test_traces_hold_the_newest_spans_and_merge_with_a_lane_per_executor_and_rank(tmp_path):
    files = []
    for rank in (0, 1):
        trace = Trace(rank, capacity=3)
        for number in range(5):
            executor = "trainer" if number % 2 else "generator"
            trace.add(executor, f"step {number}", 10.0 + number, 10.5 + number)
        files.append(tmp_path / f"trace.rank{rank}.json")
        trace.dump(files[-1])
    merge(files, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert trace["otherData"]["dropped_spans"] == 4
    assert [span["name"] for span in spans if span["pid"] == 0] == ["step 2", "step 3", "step 4"]
    assert {(span["pid"], span["tid"]) for span in spans} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert all(span["dur"] == 500_000 for span in spans) and min(span["ts"] for span in spans) == 0
    assert spans[1]["ts"] - spans[0]["ts"] == pytest.approx(1e6, abs=2)  # rounded to microseconds


class Page(html.parser.HTMLParser):
    """Its images, what it links to, and its texts."""

    def __init__(self, text):
        super().__init__()
        self.images, self.links = [], []
        self.words = []
        self.handle_data = self.words.append
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            attrs = dict(attrs)
            self.images.append((attrs["alt"], attrs["src"]))
            attrs = attrs.items()
        urls = [value for name, value in attrs if name in ("href", "src")]
        self.links += [url for url in urls if not url.startswith("data:")]


def test_the_report_is_self_contained_and_shows_curves_causes_and_knobs(tmp_path):
    small_run(tmp_path).close()
    (tmp_path / "config.yaml").write_text("task: <script>alert(1)</script>\n")
    text = write_report(tmp_path).read_text()
    page = Page(text)
    assert page.links == [] and "<script>alert" not in text
    titles = {alt for alt, _ in page.images}
    assert {"Reward", "Evaluation", "Entropy", "Ratio, raw", "Lag", "Idle: trainer"} <= titles
    assert "KL to the reference" not in titles
    assert "Not measured in this run: Gold score, Win rate, " in text
    assert ", KL to the reference, KL to the generator" in text
    for _, source in page.images:
        assert b"</svg>" in base64.b64decode(source.removeprefix("data:image/svg+xml;base64,"))
    assert "40.0% → 60.0%" in page.words and "data 75%" in page.words
    assert any("overcommit" in word for word in page.words)


def test_the_report_command_says_what_is_wrong(tmp_path, capsys):
    assert report_main([str(tmp_path)]) == 2
    assert "metrics.jsonl: no such file" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    assert report_main([str(tmp_path)]) == 2
    assert "no rows yet" in capsys.readouterr().err


def test_a_long_curve_is_drawn_by_the_least_and_the_greatest_of_each_bin():
    values = np.zeros(20_000)
    values[7_001] = 5.0
    values[12_345] = -3.0
    places = drawn(values)
    assert len(places) <= 2 * BINS + 2 and (np.diff(places) > 0).all()
    assert {0, 7_001, 12_345, 19_999} <= set(places)
    # Each bin of 20 has a place.
    assert set(range(BINS)) == set(places // 20)
    assert drawn(values[: 2 * BINS]).tolist() == list(range(2 * BINS))
    # The moving mean ignores gaps and is shorter at the ends.
    got = moving_mean(np.array([1.0, np.nan, 3.0, 5.0]), width=3)
    assert got.tolist() == [1.0, 2.0, 4.0, 4.0]


# --- A run without a signal ---


FLAT = {"reward/mean": 0.0, "reward/std": 0.0, "completion/truncated_fraction": 0.75}


def test_a_run_whose_first_steps_bring_no_signal_says_what_to_try(caplog):
    watch = SignalWatch()
    for step in range(1, 6):
        watch.write(FLAT | {"step": step})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "first 3 steps brought no signal" in record.message
    assert "max_new_tokens (75% of completions are cut off)" in record.message
    assert "numeric_match" in record.message
    assert max(map(len, record.message.splitlines())) <= 100


def said_of(ages: list[float], caplog, sync_period: int = 1) -> list[str]:
    """What a watch says of the newest data's ages, step by step."""
    caplog.clear()
    watch = LagWatch(sync_period)
    for step, age in enumerate(ages, start=1):
        watch.write({"step": step, "lag/mean": 2.0 * step, "buffer/age_min": age})
    return [record.message for record in caplog.records]


def test_a_run_to_which_no_newer_data_comes_says_so_once_and_what_to_try(caplog):
    (message,) = said_of([float(step) for step in range(60)], caplog)
    assert "is 19 steps old, 1.0 steps older at each of the\nlast 20 steps" in message
    assert "overcommit" in message and "reward.num_workers" in message
    assert max(map(len, message.splitlines())) <= 100


@pytest.mark.parametrize(
    "ages, said",
    [
        # from step 30 on nothing new comes; before that, what is on its way came
        ([*(5.0 + step % 2 for step in range(30)), *(5.0 + step for step in range(30))], 1),
        # a step now and then that brings something, of which the next knows nothing
        ([float(step) - 3 * (step % 7 == 0) for step in range(60)], 1),
        # until what is on its way has come for the first time, and ever after
        ([min(float(step), 8.0) for step in range(200)], 0),
        # slowly older, as where answers become longer
        ([0.3 * step for step in range(200)], 0),
        ([float(step) for step in range(19)], 0),
        # what was late has just come
        ([*(float(step) for step in range(19)), 3.0], 0),
        # a single step is odd
        ([*[1.0] * 30, 400.0, *[1.0] * 30], 0),
        # within a sync period of 50 steps
        ([2.0 + step % 50 for step in range(400)], 0),
    ],
)
def test_a_few_odd_steps_hide_nothing_and_what_grows_old_as_it_should_is_not_warned_of(
    ages, said, caplog
):
    assert len(said_of(ages, caplog, sync_period=50 if len(ages) == 400 else 1)) == said


def test_only_a_run_without_a_bound_on_lag_has_its_lag_watched(tmp_path):
    for free_running, kinds in ((None, {LearningWatch}), (1, {LearningWatch, LagWatch})):
        metrics = default_config().metrics
        sinks = build_sinks(tmp_path, max_steps=1, metrics=metrics, free_running=free_running)
        assert {type(sink) for sink in sinks} & {LearningWatch, LagWatch} == kinds


def test_one_step_with_a_signal_is_enough_and_a_resumed_run_is_past_its_first_steps(caplog):
    watch, resumed = SignalWatch(), SignalWatch()
    for step in range(1, 9):
        watch.write(FLAT | {"step": step, "reward/std": float(step == 3)})
        resumed.write(FLAT | {"step": 39 + step})
    assert not caplog.records


def watched(rewards, caplog, first=0, entropy=None) -> list[str]:
    """What a watch says of a job's rewards, step by step."""
    caplog.clear()
    watch = LearningWatch()
    for step, reward in enumerate(rewards, start=first):
        row = {"step": step, "reward/mean": reward, "reward/std": 0.4, "lr": 1e-6}
        watch.write(row | ({} if entropy is None else {"entropy": entropy[step]}))
    return [record.message for record in caplog.records]


def test_a_reward_that_does_not_move_is_said_once_with_its_rate(caplog):
    still = [0.5 + 0.1 * (-1) ** step for step in range(90)]
    (message,) = watched(still, caplog)
    assert "has not moved in 41 steps at lr 1e-06" in message and "a larger lr" in message
    assert watched(still, caplog, first=50) == []  # resumed: the report has all rows
    assert watched([reward + step / 90 for step, reward in enumerate(still)], caplog) == []


def test_an_entropy_that_grows_with_the_reward_is_said_once(caplog):
    rising = [0.1 + 0.01 * step for step in range(90)]
    (message,) = watched(rising, caplog, entropy=[2.2 + 0.05 * step for step in range(90)])
    assert "Entropy has grown while the reward rose" in message and "smaller lr" in message


# --- The time that is left ---


def test_the_time_left_goes_by_the_pace_of_the_newest_readings():
    left = TimeLeft()
    assert left.of(10) is None and left.of(0) == 0.0
    left.note(0, 0.0)
    left.note(10, 100.0)
    assert left.of(10) == 100.0
    for done in range(11, 40):  # ten times as fast from here on
        left.note(done, 100.0 + (done - 10))
    assert left.of(10) == 10.0
    left.note(5, 200.0)  # it begins anew
    assert left.of(10) is None
    late = TimeLeft()
    late.note(0, 35.6)  # the end of the first evaluation, during which step 1 was trained
    late.note(1, 21.3)
    assert late.of(39) is None
    late.note(2, 31.3)
    assert late.of(38) == pytest.approx(380.0)


@pytest.mark.parametrize(
    "seconds, want",
    [(None, ""), (0.0, ""), (0.2, "1s"), (59.4, "59s"), (130, "2m10s"), (11100, "3h05m")],
)
def test_a_time_is_short(seconds, want):
    assert shown_left(seconds) == want


def test_a_pipe_gets_a_line_now_and_then_and_short_work_none():
    out, clock = io.StringIO(), Clock()
    with Progress("answers", 100, unit="completions", stream=out, clock=clock) as progress:
        for _ in range(25):
            clock.now += 1.0
            progress.advance()
    assert out.getvalue().splitlines() == [
        "answers  10/100 completions  left 1m30s",
        "answers  20/100 completions  left 1m20s",
    ]
    short = io.StringIO()
    with Progress("answers", 3, stream=short, clock=Clock()) as progress:
        progress.advance(3)
    assert short.getvalue() == ""


def test_no_time_is_foretold_by_the_first_of_those_that_are_under_way_together():
    out, clock = io.StringIO(), Clock()
    with Progress("answers", 100, stream=out, clock=clock, at_once=8) as progress:
        clock.now = 60.0
        progress.advance()  # its seven fellows end now, too
        clock.now = 80.0
        progress.advance(19)
    assert out.getvalue().splitlines() == ["answers  1/100", "answers  20/100  left 5m20s"]


def test_a_terminal_gets_a_bar_that_goes_away():
    out, clock = Terminal(), Clock()
    with Progress("answers", 4, unit="completions", stream=out, clock=clock) as progress:
        clock.now = 5.0
        progress.advance()
        for said in ("answers", "1/4 completions", "left 15s"):
            assert said in plain(out.getvalue())
    assert out.getvalue().endswith("\x1b[2K")  # the line is empty again


def test_a_slow_checkpoint_tells_its_parts_and_each_begins_anew():
    out, clock = io.StringIO(), Clock()
    tell = CheckpointProgress(stream=out, clock=clock)
    for now, step, part in ((0.0, 20, 1), (30.0, 20, 2), (30.0, 40, 1), (60.0, 40, 4)):
        clock.now = now
        tell(step, part, 4)
    assert out.getvalue().splitlines() == [
        "checkpoint of step 20  2/4 parts  left 30s",
        "checkpoint of step 40  4/4 parts",
    ]


# --- On the console ---


def test_a_plain_line_ends_with_the_time_left_and_a_terminal_has_a_bar_under_the_table():
    out, terminal = io.StringIO(), Terminal()
    for stream, steps in ((out, (1, 2, 10)), (terminal, (1, 2))):
        console = Console(max_steps=10, stream=stream)
        for step in steps:
            console.write({"step": step, "reward/mean": 0.5, "time/wall_s": 2.0 * step})
        console.close()
    assert out.getvalue().splitlines() == [
        "step 1/10  reward 0.500",
        "step 2/10  reward 0.500  left 16s",
        "step 10/10  reward 0.500",
    ]
    shown = plain(terminal.getvalue())
    assert "2/10 steps" in shown and "left 16s" in shown


def test_every_so_many_steps_the_newest_sample_is_shown_once(tmp_path):
    samples = SampleFile(tmp_path)
    completion = {"reward": 1.0, "ids": [1], "text": ["[red]yes"]}
    group = {"prompt": "?", "completions": [completion, completion | {"reward": 0.0}]}
    samples.keep(3, lambda: {"groups": [], "shown": [group]})
    for stream in (io.StringIO(), Terminal()):
        console = Console(stream=stream, samples=samples, show_every=2)
        for step in (1, 2, 3, 4):
            console.write({"step": step})
        lines = [line.rstrip() for line in plain(stream.getvalue()).splitlines()]
        assert lines.count("  sample of step 3: '?'") == 1
        assert "    best  1  '[red]yes'" in lines  # no markup
        assert lines.index("  sample of step 3: '?'") > 1
    never = io.StringIO()
    Console(stream=never, samples=samples).write({"step": 2})
    assert "sample" not in never.getvalue()


# --- What was expected ---


def stage(name, first, last, mean, within):
    where = {"column": "eval/accuracy", "first": first, "last": last}
    return Stage(name=name, **where, mean=mean, within=within, otherwise=f"look at {name}")


EXPECTED = Expectation(
    overrides=(),
    stages=(stage("the start", 0, 0, 0.4, 0.02), stage("the end", 9, 10, 0.97, 0.01)),
)


@pytest.mark.parametrize(
    "values, said",
    [
        ({0: 0.41, 9: 0.96, 10: 0.97}, "as expected: 97.0 % ± 1.0"),
        ({0: 0.43, 10: 0.97}, "not as expected at the start: eval/accuracy 43.0%, expected "),
        ({0: 0.4, 9: 0.9, 10: 0.97}, "not as expected at the end: eval/accuracy 93.5%, expected "),
        ({0: 0.4}, "nothing to compare: no row from step 9 has eval/accuracy"),
    ],
)
def test_the_first_stage_that_differs_is_named(values, said):
    rows = [{"step": step, "eval/accuracy": value} for step, value in values.items()]
    found = verdict(EXPECTED, rows)
    assert found.startswith(said)
    assert ("look at" in found) == found.startswith("not as")


@pytest.mark.parametrize(
    "override, is_known", [("seed=3", True), ("placement.trainer=[0]", True), ("lr=1e-4", False)]
)
def test_an_expectation_holds_only_for_its_settings(override, is_known):
    assert (expectation_of(default_config(overrides=[override])) is not None) == is_known


def test_every_expectation_is_of_settings_that_there_are():
    for one in read_expectations():
        config = default_config(overrides=one.overrides)
        assert not differing(to_values(config), to_values(config))
        assert one.stages[-1].last == config.max_steps
        assert list(one.stages) == sorted(one.stages, key=lambda stage: stage.last)
