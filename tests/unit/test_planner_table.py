"""LlamaRL's step times from the hardware profile of H100s (benchmarks/llamarl_table.py)."""

import importlib.util
import sys

import pytest

from llamarl.models.sharding import num_parameters
from llamarl.planner.profile import read_profile
from tests.house import ROOT


@pytest.fixture(scope="module")
def table():
    """benchmarks/llamarl_table.py, as a module."""
    file = ROOT / "benchmarks" / "llamarl_table.py"
    spec = importlib.util.spec_from_file_location("llamarl_table", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["llamarl_table"] = module
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("llamarl_table")


def test_the_models_are_llamas_of_these_sizes(table):
    sizes = [num_parameters(row.model) for row in table.TABLE]
    assert [round(size / 1e9) for size in sizes] == [8, 71, 406]


def test_every_figure_is_within_a_quarter_and_three_were_not_set(table):
    found = table.predictions(read_profile("h100"))
    assert len(found) == 6
    assert all(abs(one["error"]) <= 0.25 for one in found), found
    predicted = [(one["model"], one["system"]) for one in found if not one["is_set"]]
    assert predicted == [
        ("70B", "synchronous"),
        ("70B", "asynchronous"),
        ("405B", "asynchronous"),
    ]


def test_the_free_values_are_those_that_the_8b_row_gives(table):
    """Both of its figures to 1 %, and its asynchronous one is set by the layer's time alone."""
    profile = table.with_layer(read_profile("h100"), table.LAYER_S)
    first = table.TABLE[0]
    own_s = table.asynchronous(first, profile).step_s
    assert own_s == pytest.approx(first.asynchronous_s, rel=0.01)
    assert table.synchronous(first, profile).step_s == pytest.approx(first.synchronous_s, rel=0.01)
    slower = table.with_layer(profile, 2 * table.LAYER_S)
    assert table.asynchronous(first, slower).step_s > 1.2 * own_s


def test_what_is_not_explained_is_not_hidden(table):
    """Memory alone predicts the baseline's 405B much too short."""
    profile = table.with_layer(read_profile("h100"), table.LAYER_S)
    last = table.TABLE[-1]
    assert table.synchronous(last, profile).step_s < 0.5 * last.synchronous_s
    assert ("405B", "synchronous") in table.SET_ON


def test_a_rising_function_is_solved(table):
    assert table.solve(lambda x: x**2, 9.0, 0.1, 100.0) == pytest.approx(3.0)
