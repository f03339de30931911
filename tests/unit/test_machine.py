"""What is asked of the machine: the fastest way by a clock that the test turns, turns on a device,
and how long threads spin.
"""

from __future__ import annotations

import ast
import json
import os

import pytest
import torch

from llamarl.inference import Engine, SamplingParams, generate
from llamarl.inference.decode import NativeDecode
from llamarl.inference.runner import ModelRunner
from llamarl.machine import choice
from llamarl.machine.choice import CLEARLY_FASTER, fastest
from llamarl.machine.kernels import cache_folder
from llamarl.machine.offload import DeviceSharing
from llamarl.machine.waiting import SPINS, wait_briefly
from llamarl.models.config import tiny_directory
from tests.house import ROOT, python_files

# --- the fastest way ---


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "cache_folder", lambda: tmp_path / "kept")
    return tmp_path / "kept"


class Work:
    """Ways whose calls take the seconds that are given, by a clock of their own."""

    def __init__(self, **seconds: float):
        self.now, self.calls = 0.0, []
        self.ways = {}
        for name, s in seconds.items():
            self.ways[name] = lambda name=name, s=s: self._pass(name, s)

    def _pass(self, name: str, seconds: float) -> None:
        self.now += seconds
        self.calls.append(name)

    def fastest(self, key: str = "") -> str:
        return fastest("work", self.ways, key=key, clock=lambda: self.now)


def test_the_first_way_is_taken_unless_another_is_clearly_faster(own_folder):
    nearly = 1 / CLEARLY_FASTER
    assert Work(tiles=1.0, vectors=1.01 * nearly).fastest("a") == "tiles"
    assert Work(tiles=1.0, vectors=0.99 * nearly).fastest("b") == "vectors"
    work = Work(tiles=1.0, vectors=2.0)
    slow = iter([1.0, 50.0, 1.0, 1.0])  # one slow moment decides nothing
    work.ways["tiles"] = lambda: work._pass("tiles", next(slow))
    assert work.fastest("c") == "tiles"


def test_what_was_found_is_kept_for_the_same_machine_and_key(own_folder):
    assert Work(tiles=2.0, vectors=1.0).fastest() == "vectors"
    again = Work(tiles=1.0, vectors=2.0)
    assert again.fastest() == "vectors" and not again.calls, "not measured again"
    assert Work(tiles=1.0, vectors=2.0).fastest("other shapes") == "tiles"
    # Other ways are another question.
    assert Work(tiles=1.0, vectors=2.0, module=3.0).fastest() == "tiles"


UNUSABLE = {
    "cut off": "{",
    "a list": "[]",
    "unknown": '{"way": "unknown"}',
    "a list of ways": '{"way": ["vectors"]}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", UNUSABLE.values(), ids=UNUSABLE)
def test_a_kept_choice_that_cannot_be_used_is_measured_anew(own_folder, content):
    Work(tiles=2.0, vectors=1.0).fastest()
    (file,) = own_folder.glob("choice-*.json")
    file.write_text(content)
    assert Work(tiles=2.0, vectors=1.0).fastest() == "vectors"
    assert json.loads(file.read_text())["way"] == "vectors"


def test_where_nothing_can_be_kept_it_is_measured_each_time_with_a_warning(
    own_folder, monkeypatch, caplog
):
    own_folder.write_text("a file where the folder should be")
    assert Work(tiles=2.0, vectors=1.0).fastest() == "vectors"
    assert "will be measured again" in caplog.text
    caplog.clear()

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(choice, "cache_folder", cache_folder)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", homeless)
    assert Work(tiles=2.0, vectors=1.0).fastest() == "vectors"
    assert "will be measured again" in caplog.text and "set XDG_CACHE_HOME" in caplog.text


def the_engine(**options) -> Engine:
    return Engine.from_hf(
        tiny_directory(), dtype="float32", max_slots=4, max_len=32, device="cpu", **options
    )


@pytest.mark.parametrize("way", ["vectors", "module"])
def test_an_engine_takes_the_way_that_was_found_fastest(monkeypatch, way):
    if not NativeDecode.fits(the_engine().decoder, torch.device("cpu"), torch.float32):
        pytest.skip("the native kernels are not there: only the module decodes")
    asked = []

    def chosen(what, ways, *, key):
        asked.append(list(ways))
        for work in ways.values():
            work()
        return way

    monkeypatch.setattr("llamarl.inference.runner.fastest", chosen)
    engine, usual = the_engine(reproducible=False), the_engine()
    prompts, params = [[1, 7, 14], [1, 9]], SamplingParams(12, temperature=0.0)
    completions = generate(engine, prompts, params)
    assert len(asked) == 1 and set(asked[0]) >= {"vectors", "module"}
    native = engine._runner.native
    assert native is None if way == "module" else not native.use_tiles
    for (ours,), (theirs,) in zip(completions, generate(usual, prompts, params)):
        torch.testing.assert_close(
            ours.generator_logprobs, theirs.generator_logprobs, atol=1e-4, rtol=0
        )


def test_a_reproducible_engine_asks_no_clock(monkeypatch):
    monkeypatch.setattr(ModelRunner, "_fastest_way", lambda self: pytest.fail("asked a clock"))
    generate(the_engine(), [[1, 7]], SamplingParams(2))


# --- turns on a device ---


def bytes_held(tensors) -> int:
    storages = [t.untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.fixture
def pair():
    a, b = [torch.arange(12.0).view(3, 4), torch.ones(5, dtype=torch.int8)], [torch.full((7,), 2.0)]
    turns = DeviceSharing(["a", "b"])
    turns.join("a", lambda: a)
    turns.join("b", lambda: b)
    return turns, a, b


def test_only_the_holder_has_its_bytes_and_views_survive(pair):
    turns, a, b = pair
    assert bytes_held(a) == bytes_held(b) == 0
    assert turns.claim("a") and not turns.claim("a")
    assert bytes_held(b) == 0 and torch.equal(a[0], torch.arange(12.0).view(3, 4))
    assert a[1].tolist() == [1] * 5
    view = a[0][1]
    view += 100
    assert turns.claim("b") and bytes_held(a) == 0 and b[0].tolist() == [2.0] * 7
    turns.claim("a")
    assert view.tolist() == [104.0, 105.0, 106.0, 107.0] and torch.equal(a[0][1], view)
    # Executors that did not join take no turn.
    assert not turns.claim("reward") and turns.holder == "a" and bytes_held(a) > 0


def test_shared_storages_move_once_and_new_tensors_join_at_the_next_turn():
    base = torch.arange(10.0)
    held = [base, base[2:4]]
    turns = DeviceSharing(["a", "b"])
    turns.join("a", lambda: held)
    assert bytes_held(held) == 0
    turns.join("b", lambda: [])
    turns.claim("a")
    held.append(torch.ones(3))
    turns.claim("b")
    assert bytes_held(held) == 0
    turns.claim("a")
    assert held[1].tolist() == [2.0, 3.0] and held[2].tolist() == [1.0] * 3


# --- waiting threads ---


WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@pytest.mark.parametrize(
    "given, wanted",
    [
        ({}, {"GOMP_SPINCOUNT": str(SPINS)}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_waiting_threads_spin_briefly_unless_the_user_sets_how(monkeypatch, given, wanted):
    for name in WAITING:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    wait_briefly()
    assert {name: os.environ[name] for name in WAITING if name in os.environ} == wanted


def first_import(file, packages: set[str]) -> str | None:
    """Which of these packages a program imports first, by its top level."""
    for node in ast.parse(file.read_text()).body:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            if name.partition(".")[0] in packages:
                return name.partition(".")[0]
    return None


def test_every_program_that_computes_imports_the_package_before_torch():
    ours = {"llamarl", "executors"}
    late = []
    for file in python_files("recipes", "benchmarks"):
        if first_import(file, ours) and first_import(file, {"torch", *ours}) == "torch":
            late.append(file.relative_to(ROOT).as_posix())
    assert late == []
