"""tests/order.py: what may take long starts first."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamarl.scoring.pool import RewardPool
from tests.build.job import finished_job
from tests.launching import ForkedJob, environment
from tests.order import long_files_first


def collected(file, name, *, fixtures=(), **names):
    """A test as pytest collects it: its file's names, and the fixtures that it takes."""
    module = SimpleNamespace(**names)
    return SimpleNamespace(path=Path(file), name=name, fixturenames=list(fixtures), module=module)


def order(items):
    long_files_first(items)
    return [f"{item.path}{item.name}" for item in items]


def test_files_of_many_tests_come_before_those_of_few_and_keep_their_order():
    items = [collected("a", 1), collected("b", 2), collected("c", 1), collected("b", 1)]
    assert order(items) == ["b2", "b1", "a1", "c1"]


@pytest.mark.parametrize(
    "starting",
    [{"fixtures": ["pool"]}, {"fixtures": ["runs"]}, {"run": ForkedJob}, {"run": finished_job}]
    + [{"env": environment}, {"subprocess": subprocess}, {"Pool": RewardPool}],
)
def test_a_file_that_starts_processes_comes_first_as_a_whole(starting):
    items = [collected("a", 1), collected("a", 2), collected("a", 3)]
    items += [collected("b", 2), collected("b", 1, **starting)]
    assert order(items) == ["b2", "b1", "a1", "a2", "a3"]


def test_this_session_has_that_order(request):
    """Says something where several files are run, as in a run of all."""
    items = request.session.items
    before = [item.nodeid for item in items]
    again = list(items)
    long_files_first(again)
    assert [item.nodeid for item in again] == before
