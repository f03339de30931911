"""Progress: the time that is left, a bar on a terminal and plain lines elsewhere; and what a run
was expected to come to.
"""

import io

import pytest

from llamarl.config.command_line import default_config
from llamarl.config.conversion import to_values
from llamarl.observe import Console
from llamarl.observe.console import CheckpointProgress, Progress, TimeLeft, shown_left
from llamarl.observe.expected import (
    Expectation,
    Stage,
    differing,
    expectation_of,
    read_expectations,
    verdict,
)
from llamarl.observe.samples import SampleFile
from tests.build.console import Clock, Terminal, plain

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
