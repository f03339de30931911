"""What is asked of the machine: the fastest way by a clock that the test turns, turns on a device,
how long threads spin; and native code, whose arguments are looked at first, and of which only this
user's libraries are loaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import stat
import warnings

import pytest
import torch

from llamarl.inference import Engine, SamplingParams, decode, generate
from llamarl.inference.decode import NativeDecode
from llamarl.inference.requests import Partial
from llamarl.inference.runner import ModelRunner
from llamarl.inference.sampler import sample
from llamarl.machine import choice, kernels
from llamarl.machine.choice import CLEARLY_FASTER, fastest
from llamarl.machine.kernels import cache_folder
from llamarl.machine.offload import DeviceSharing
from llamarl.machine.waiting import SPINS, wait_briefly
from llamarl.models.config import tiny_directory
from tests.build.job import run_python
from tests.decoding import CONFIG, MAX_LEN, random_decoder
from tests.house import python_files, text_of

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


def test_every_program_that_computes_imports_the_package_before_torch():
    ours = {"llamarl", "executors"}
    late = []
    for file in python_files("recipes", "benchmarks"):
        lines = [
            line for line in text_of(file).splitlines() if line.startswith(("import ", "from "))
        ]
        packages = [re.split(r"[ .]", line)[1] for line in lines]
        first = next((name for name in packages if name in {"torch", *ours}), None)
        if first == "torch" and ours & set(packages):
            late.append(file.name)
    assert late == []


VOCABULARY = CONFIG.vocab_size
needs_compiler = pytest.mark.skipif(
    kernels.library("train") is None, reason="no C compiler, or LLAMARL_NATIVE=0"
)


# --- What C is called with ---


def small_engine():
    return Engine(random_decoder(), max_slots=4, max_len=MAX_LEN)


def partial(token_ids, logprobs=1, prompt_ids=(1, 2)):
    return Partial(
        stream=0,
        ticket=3,
        sample_index=0,
        prompt_ids=torch.tensor(prompt_ids),
        token_ids=torch.tensor(token_ids),
        generator_logprobs=torch.zeros(logprobs),
        policy_versions=torch.zeros(len(token_ids), dtype=torch.int64),
        params=SamplingParams(max_new_tokens=4),
    )


def bad_calls() -> dict:
    """Calls of everything that hands indices to native code, each with one that is not there."""
    engine = small_engine()
    engine.score_all([1, 2], [3])  # makes room for a row
    runner, cache = engine._runner, engine._cache
    one = torch.tensor([1])
    rows = cache.rows
    end = cache.capacity
    logits, half = torch.zeros(2, 5), torch.full((2,), 0.5, dtype=torch.float64)
    pair = torch.tensor([0, 0])
    calls = {
        "submit": lambda: engine.submit(0, [1, VOCABULARY], SamplingParams(max_new_tokens=1)),
        "submit_partial, prompt": lambda: engine.submit_partial(partial([3], prompt_ids=(1, -1))),
        "submit_partial, token": lambda: engine.submit_partial(partial([VOCABULARY])),
        "submit_partial, logprobs": lambda: engine.submit_partial(partial([3], logprobs=2)),
        "submit_partial, dtype": lambda: engine.submit_partial(partial([1.0])),
        "score_all, token": lambda: engine.score_all([1, 2], [3, VOCABULARY + 5, 4]),
        "score_all, negative": lambda: engine.score_all([1, 2], [3, -1]),
        "score_all, last": lambda: engine.score_all([1, 2], [VOCABULARY]),
        "score_all, length": lambda: engine.score_all([1, 2], [3] * MAX_LEN),
        "score": lambda: engine.score([1, 2], [VOCABULARY]),
        "decode, slot": lambda: runner.decode(rows, one, one, 2),
        "decode, negative slot": lambda: runner.decode(-1, one, one, 2),
        "decode, place": lambda: runner.decode(0, one, torch.tensor([end]), end + 1),
        "prefill, slot": lambda: runner.prefill(rows, [torch.tensor([1, 2])], [1]),
        "prefill, token": lambda: runner.prefill(0, [torch.tensor([1, VOCABULARY])], [1]),
        "prefill, length": lambda: runner.prefill(0, [torch.ones(end + 1).long()], [1]),
        "extend, slot": lambda: runner.prefill(rows, [one], [1], starts=[0]),
        "extend, place": lambda: runner.prefill(0, [one], [1], starts=[end]),
        "extend, token": lambda: runner.prefill(0, [one * VOCABULARY], [1], starts=[0]),
        "reserve": lambda: cache.reserve(1, cache.max_len + 1),
        "sample, uniforms": lambda: sample(logits, half[:1]),
        "sample, precision": lambda: sample(logits, half.float()),
        "sample, greedy": lambda: sample(logits, half, torch.tensor([True])),
        "sample, vocabulary": lambda: sample(logits[:, :0], half),
    }
    if runner.native:
        sparse = torch.zeros(4, dtype=torch.int64)[::2]
        calls |= {
            "native, place": lambda: runner.native(one, one * end, cache, torch.tensor([0])),
            "native, negative place": lambda: runner.native(one, -one, cache, torch.tensor([0])),
            "native, output": lambda: runner.native(one, one, cache, torch.tensor([0]), one),
            "native, dtype": lambda: runner.native(one.int(), one, cache, torch.tensor([0])),
            "native, counts": lambda: runner.native(one, one, cache, pair),
            "native, layout": lambda: runner.native(pair, sparse, cache, pair),
        }
    return calls


def accepted() -> list[str]:
    """Those bad calls that raise nothing."""
    found = []
    for name, call in bad_calls().items():
        try:
            call()
            found.append(name)
        except (ValueError, IndexError):
            pass
    return found


@pytest.mark.parametrize("way", ["native", "module"])
def test_an_index_that_is_not_there_is_an_error_before_any_memory_is_read(way, monkeypatch):
    if way == "module":
        monkeypatch.setattr(NativeDecode, "fits", staticmethod(lambda *_: False))
    assert accepted() == []


@pytest.mark.slow
def test_it_is_one_under_python_dash_O_too():
    code = "from tests.unit.test_machine import accepted; print(accepted())"
    assert run_python("-O", "-c", code).splitlines()[-1] == "[]"


def test_what_is_asked_of_the_engine_in_vain_leaves_it_as_it_was():
    engine = small_engine()
    before = engine.score([1, 2], [3, 4])
    told = f"token ids to score 3..{VOCABULARY} .* vocabulary of {VOCABULARY}"
    with pytest.raises(ValueError, match=told):
        engine.score_all([1, 2], [3, VOCABULARY])
    assert torch.equal(engine.score([1, 2], [3, 4]), before)


# --- The structs that Python and C share ---


class _Step(ctypes.Structure):
    """One field more than Step of decode.c."""

    _fields_ = [*decode._Step._fields_, ("more", ctypes.c_uint64)]


class _Unheard(ctypes.Structure):
    _fields_ = [("number", ctypes.c_uint64)]


IN_C = ctypes.sizeof(decode._Step)
IN_C_AND_PYTHON = f"{IN_C} bytes in C and {IN_C + 8} in Python"


@needs_compiler
@pytest.mark.parametrize("struct, told", [(_Step, IN_C_AND_PYTHON), (_Unheard, "struct Unheard")])
def test_a_struct_of_another_size_in_C_switches_its_kernels_off(struct, told):
    with pytest.warns(UserWarning, match=told):
        assert kernels.library("decode", "-fopenmp", structs=(struct,)) is None


# --- Whose libraries are loaded ---


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("LLAMARL_NATIVE", "LLAMARL_NATIVE_ARCH"):
        monkeypatch.delenv(name, raising=False)
    kernels.library.cache_clear()
    yield tmp_path / "llamarl"
    kernels.library.cache_clear()


def loaded_again():
    kernels.library.cache_clear()
    return kernels.library("train")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The library of a cache that tests copy, which is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        kernels.library.cache_clear()
        assert kernels.library("train") is not None
        (made,) = kernels.cache_folder().iterdir()
    return made


@pytest.fixture
def made(fresh, compiled):
    """The one library of the cache."""
    shutil.copytree(compiled.parent, fresh)
    return fresh / compiled.name


@needs_compiler
def test_the_cache_is_open_to_its_owner_alone(fresh):
    before = os.umask(0)
    try:
        assert kernels.library("train") is not None
    finally:
        os.umask(before)
    (made,) = fresh.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (fresh, made)] == [0o700, 0o700]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loaded_again() is not None


@needs_compiler
@pytest.mark.parametrize("which, bits", [("folder", 0o702), ("file", 0o720)])
def test_a_library_that_others_may_write_is_not_loaded(fresh, made, which, bits):
    made.unlink()
    made.write_bytes(b"another's")  # a library of theirs would run as soon as it is loaded
    planted = fresh if which == "folder" else made
    planted.chmod(bits)
    with pytest.warns(UserWarning, match=f"{planted} belongs to another user, or others may"):
        loaded = loaded_again()
    assert loaded.has_tiles() in (0, 1)
    assert made.read_bytes() == b"another's"


@needs_compiler
def test_a_library_of_another_user_is_not_loaded(fresh, made, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(UserWarning, match=f"{fresh} belongs to another user"):
        assert loaded_again() is not None


def test_a_user_without_a_home_has_pytorchs_operations_and_a_warning(fresh, monkeypatch):
    def nobody(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(OSError, match="set XDG_CACHE_HOME"):
        kernels.cache_folder()
    monkeypatch.setattr(kernels.shutil, "which", lambda name: "/bin/sh")
    said = "train: going on with PyTorch's operations, .* set XDG_CACHE_HOME"
    with pytest.warns(UserWarning, match=said):
        assert loaded_again() is None


# --- The instruction set ---


@pytest.fixture
def compiler(fresh, monkeypatch, tmp_path):
    """A compiler that notes its arguments, and refuses those that are in its file `refused`."""
    real = shutil.which(os.environ.get("CC", "cc"))
    script = tmp_path / "noting-cc"
    script.write_text(
        "#!/bin/sh\n"
        f'for word in "$@"; do echo "$word" >> {tmp_path}/words\n'
        f'grep -qxe "$word" {tmp_path}/refused && echo "unknown $word" >&2 && exit 1; done\n'
        # The instruction set is noted and left out: this CPU may not have it.
        "for word; do shift; "
        'case "$word" in -march=*|-mcpu=*) ;; *) set -- "$@" "$word";; esac; done\n'
        f'exec {real} "$@"\n'
    )
    script.chmod(0o700)
    (tmp_path / "refused").touch()
    monkeypatch.setenv("CC", str(script))
    return tmp_path


@needs_compiler
def test_the_instruction_set_is_chosen_and_part_of_the_name(compiler, fresh, monkeypatch):
    for arch in ("x86-64-v3", "armv8-a"):
        monkeypatch.setenv("LLAMARL_NATIVE_ARCH", arch)
        assert loaded_again() is not None
        assert f"-march={arch}" in (compiler / "words").read_text().split()
    assert len(list(fresh.glob("train-*.so"))) == 2


@needs_compiler
@pytest.mark.parametrize(
    "machine, flag", [("x86_64", "-march=native"), ("aarch64", "-mcpu=native")]
)
def test_native_is_said_as_the_compilers_of_the_machine_know_it(
    compiler, monkeypatch, machine, flag
):
    monkeypatch.setattr(kernels.platform, "machine", lambda: machine)
    assert kernels.library("train") is not None
    words = (compiler / "words").read_text().split()
    assert [word for word in words if word.startswith("-m")] == [flag]
    assert "-fno-strict-aliasing" in words


@needs_compiler
def test_only_native_is_exchanged_for_the_default_of_a_compiler_that_refuses_it(
    compiler, monkeypatch
):
    monkeypatch.setattr(kernels.platform, "machine", lambda: "x86_64")
    (compiler / "refused").write_text("-march=native\n-march=z80\n")
    with pytest.warns(UserWarning, match="refuses -march=native; compiled for its default"):
        assert kernels.library("train") is not None
    monkeypatch.setenv("LLAMARL_NATIVE_ARCH", "z80")
    with pytest.warns(UserWarning, match="unknown -march=z80"):
        assert loaded_again() is None
