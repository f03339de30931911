"""Several runs of a setting: what is typical of them, and a run that was disturbed."""

import itertools
import shutil
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.planner.fit import fit_runs, shown_sheet
from llamarl.planner.repeats import by_setting, strays, trimmed_mean
from llamarl.planner.sheet import read_sheet
from tests.unit.made_runs import two_ranks

H100 = read_sheet("h100")
CPU = replace(H100, device=replace(H100.device, kind="cpu", gpus_per_node=2))
# Alone an update takes 1/8 s a group. Beside other work it takes twice as long, and so do two ranks
# that train together, whose sum of gradients takes another 1/16 s.
CELLS = {
    "apart 4": {"groups": 4, "trainer_s": 0.5, "step_s": 1.0, "max_lag": 0},
    "apart 8": {"groups": 8, "trainer_s": 1.0, "step_s": 1.6, "max_lag": 0},
    "both 8": {"groups": 8, "trainer_s": 1.125, "step_s": 1.8, "max_lag": 0, "trainers": 2},
    "ahead 4": {"groups": 4, "trainer_s": 0.7, "step_s": 0.75, "max_lag": 1},
    "ahead 8": {"groups": 8, "trainer_s": 1.4, "step_s": 1.5, "max_lag": 1},
}
TURNS = (0.98, 1.0, 1.02)  # of a cell's seconds


def made(folder, cell, times):
    """A run of a cell whose pieces all take so many times their seconds."""
    about = CELLS[cell]
    slower = {name: about[name] * times for name in ("trainer_s", "step_s")}
    slower["generator_s"] = 0.25 * times
    return two_ranks(folder, **about | slower)


def fitted(runs):
    return fit_runs(runs, CPU, prompt_tokens=6.0).measured


def figures(measured):
    """Seconds, and the crowding, that a prediction is made of."""
    return {
        "update": measured.microbatch.at(184, 184 * 8),
        "large update": measured.microbatch.at(368, 368 * 8),
        "decode": measured.decode.at(16, 16 * 11),
        "crowding": 1 + measured.crowding,
    }


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """Three runs of each cell, by cell."""
    folder = tmp_path_factory.mktemp("runs")
    found = {cell: [] for cell in CELLS}
    for cell, (turn, factor) in itertools.product(CELLS, enumerate(TURNS)):
        found[cell].append(made(folder / f"{cell} {turn}", cell, factor))
    return found


@pytest.fixture(scope="module")
def before(quiet):
    """The sheet of all these runs."""
    return fit_runs(list(itertools.chain.from_iterable(quiet.values())), CPU, prompt_tokens=6.0)


@pytest.mark.parametrize("cell", CELLS)
def test_one_disturbed_run_of_three_moves_a_sheet_by_a_few_percent(quiet, before, tmp_path, cell):
    odd = made(tmp_path / "odd", cell, 2.0)
    runs = []
    for name, own in quiet.items():
        runs += [odd, *own[1:]] if name == cell else own
    after = fit_runs(runs, CPU, prompt_tokens=6.0)
    for name, value in figures(after.measured).items():
        assert value == pytest.approx(figures(before.measured)[name], rel=0.05), name
    assert not any("busy" in note for note in before.notes)
    named = [line for line in shown_sheet(after) if line.startswith("stray")]
    assert len(named) == 1 and "odd" in named[0]


def test_a_disturbed_asynchronous_run_cannot_outdo_synchronous_ones(quiet, tmp_path):
    """Two ranks that train together take 2.25 times what half a batch takes alone, so that the
    crowding is 1.25 at most, whatever a single asynchronous run says.
    """
    alone = [quiet[cell][1] for cell in ("apart 4", "apart 8")]
    slow = made(tmp_path / "slow", "ahead 4", 5.0)
    assert fitted([*alone, slow]).crowding > 2.0
    assert fitted([*alone, slow, quiet["both 8"][1]]).crowding == pytest.approx(1.25, abs=0.01)


def test_runs_of_one_setting_differ_in_their_seed_and_length_alone(tmp_path):
    about = CELLS["apart 4"]
    first = two_ranks(tmp_path / "a", "seed=1", **about)
    again = two_ranks(tmp_path / "b", "seed=2", "max_steps=7", **about)
    other = two_ranks(tmp_path / "c", "lr=0.1", **about)
    fewer = tmp_path / "d"
    shutil.copytree(first, fewer)
    (fewer / "trace.rank1.json").unlink()
    assert by_setting([first, other, again, fewer]) == [[first, again], [other], [fewer]]


def test_a_run_far_from_the_median_of_its_setting_is_named(tmp_path):
    a, b, c, d = (tmp_path / name for name in "abcd")
    steps_s = {a: 1.0, b: 1.1, c: 2.0, d: 9.0}
    (said,) = strays(steps_s, [[a, b, c], [d]])
    assert said.startswith("c: 2 s a step, +82% of the median of 3 runs")


@given(st.lists(st.floats(0.5, 2.0), min_size=5, max_size=30), st.floats(0.0, 1e6))
def test_a_trimmed_mean_lies_among_the_values_whatever_one_of_them_is(values, wild):
    assert min(values) - 1e-9 <= trimmed_mean([*values[1:], wild]) or wild < min(values)
    assert trimmed_mean([*values, wild]) <= max(values) + 1e-9
    assert trimmed_mean([1.0, 2.0, 3.0, 4.0, 100.0]) == 3.0
    assert trimmed_mean([1.0, 4.0]) == 2.5
