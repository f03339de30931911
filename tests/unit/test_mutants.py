"""benchmarks/mutants.py on a room of one function, whose mutants can be judged by hand."""

import importlib
import json
import sys

import pytest

from tests.launching import ROOT as CHECKOUT

ROOM = """
def larger(a, b):
    if a > b:
        return a
    return b
"""
TEST = """
from room.mutated import larger

def test_larger():
    assert larger(2, 1) == 2
"""
FULL_TEST = TEST + "    assert larger(1, 2) == 2\n"


@pytest.fixture
def tried(monkeypatch, tmp_path):
    """Returns a function that runs the program on a checkout of one room with a test, and returns
    its exit status and results by place.
    """
    monkeypatch.syspath_prepend(str(CHECKOUT / "benchmarks"))
    program = importlib.import_module("mutants")
    root = tmp_path / "checkout"
    monkeypatch.setattr(program, "ROOT", root)
    (root / "room").mkdir(parents=True)
    (root / "room" / "mutated.py").write_text(ROOM)
    file = root / "test_room.py"

    def run(test, *options):
        file.write_text(test)
        given = ["--room", "room", "--tests", str(file), "--json", str(tmp_path / "found.json")]
        monkeypatch.setattr(sys, "argv", ["mutants.py", *given, *options])
        status = program.main()
        found = json.loads((tmp_path / "found.json").read_text())
        return status, {one["key"].partition(" (")[0]: one["result"] for one in found}

    return run


@pytest.mark.slow
def test_what_tests_kill_is_told_and_held_to(tried, tmp_path):
    status, found = tried(FULL_TEST)
    assert status == 0
    # Of two equal numbers either is the larger.
    assert found == {
        "larger, comparison turned: a > b -> a < b": "killed",
        "larger, boundary moved: a > b -> a >= b": "alive",
        "larger, None returned: return a -> return None": "killed",
        "larger, None returned: return b -> return None": "killed",
    }
    before = tmp_path / "before.json"
    before.write_text((tmp_path / "found.json").read_text())
    assert tried(FULL_TEST, "--against", str(before)) == (0, found)
    status, weaker = tried(TEST, "--against", str(before))
    assert status == 1
    assert weaker == found | {"larger, None returned: return b -> return None": "alive"}
