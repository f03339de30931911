"""Native code: what it is given is looked at first; only this user's libraries are loaded."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import stat
import warnings

import pytest
import torch

from llamarl.inference import decode
from llamarl.inference.decode import NativeDecode
from llamarl.inference.engine import Engine
from llamarl.inference.requests import Partial
from llamarl.inference.sampler import SamplingParams, sample
from llamarl.machine import kernels
from tests.build.job import run_python
from tests.decoding import CONFIG, MAX_LEN, random_decoder

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


def outcomes() -> dict[str, str]:
    """What each bad call raises, by name."""
    found = {}
    for name, call in bad_calls().items():
        try:
            call()
            found[name] = "nothing"
        except (ValueError, IndexError) as error:
            found[name] = type(error).__name__
    return found


@pytest.mark.parametrize("way", ["native", "module"])
def test_an_index_that_is_not_there_is_an_error_before_any_memory_is_read(way, monkeypatch):
    if way == "module":
        monkeypatch.setattr(NativeDecode, "fits", staticmethod(lambda *_: False))
    assert {name: found for name, found in outcomes().items() if found == "nothing"} == {}


@pytest.mark.slow
def test_it_is_one_under_python_dash_O_too():
    code = "from tests.unit.test_native import outcomes; import json; print(json.dumps(outcomes()))"
    assert json.loads(run_python("-O", "-c", code).splitlines()[-1]) == outcomes()


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
    monkeypatch.delenv("LLAMARL_NATIVE", raising=False)
    monkeypatch.delenv("LLAMARL_NATIVE_ARCH", raising=False)
    kernels.library.cache_clear()
    yield tmp_path / "llamarl"
    kernels.library.cache_clear()


def loaded_again():
    kernels.library.cache_clear()
    return kernels.library("train")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@needs_compiler
def test_the_cache_is_open_to_its_owner_alone(fresh):
    before = os.umask(0)
    try:
        assert kernels.library("train") is not None
    finally:
        os.umask(before)
    (made,) = fresh.iterdir()
    assert (mode(fresh), mode(made)) == (0o700, 0o700)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loaded_again() is not None


@needs_compiler
@pytest.mark.parametrize("which, bits", [("folder", 0o702), ("file", 0o720)])
def test_a_library_that_others_may_write_is_not_loaded(fresh, which, bits):
    assert kernels.library("train") is not None
    (made,) = fresh.iterdir()
    made.unlink()
    made.write_bytes(b"another's")  # a library of theirs would run as soon as it is loaded
    planted = fresh if which == "folder" else made
    planted.chmod(bits)
    with pytest.warns(UserWarning, match=f"{planted} belongs to another user, or others may"):
        loaded = loaded_again()
    assert loaded is not None
    assert loaded.has_tiles() in (0, 1)
    assert made.read_bytes() == b"another's"


@needs_compiler
def test_a_library_of_another_user_is_not_loaded(fresh, monkeypatch):
    assert kernels.library("train") is not None
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(UserWarning, match=f"{fresh} belongs to another user"):
        assert loaded_again() is not None


def test_a_user_without_a_home_has_pytorchs_operations_and_a_warning(fresh, monkeypatch):
    def nobody(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(OSError, match="set XDG_CACHE_HOME"):
        kernels.cache_folder()
    monkeypatch.setattr(kernels.shutil, "which", lambda name: "/bin/sh")
    with pytest.warns(
        UserWarning, match="train: going on with PyTorch's operations, .* set XDG_CACHE_HOME"
    ):
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
    "machine, flag",
    [("x86_64", "-march=native"), ("aarch64", "-mcpu=native")],
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
def test_a_compiler_that_refuses_native_compiles_for_its_default(compiler, monkeypatch):
    monkeypatch.setattr(kernels.platform, "machine", lambda: "x86_64")
    (compiler / "refused").write_text("-march=native\n")
    with pytest.warns(UserWarning, match="refuses -march=native; compiled for its default"):
        assert kernels.library("train") is not None


@needs_compiler
def test_an_instruction_set_given_by_name_is_never_exchanged(compiler, monkeypatch):
    (compiler / "refused").write_text("-march=z80\n")
    monkeypatch.setenv("LLAMARL_NATIVE_ARCH", "z80")
    with pytest.warns(UserWarning, match="unknown -march=z80"):
        assert kernels.library("train") is None
