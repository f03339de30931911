"""The native pass by each of its kernels: the same numbers up to rounding, and a row's bits
whatever lies beside it.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llamarl.inference import Engine, SamplingParams
from llamarl.inference.decode import NativeDecode, _bounds
from llamarl.models.build import build_decoder, random_weights, read_config
from llamarl.models.config import tiny_directory
from llamarl.native.helper import Helper
from tests.decoding import drain
from tests.helping import LastFirst

pytestmark = pytest.mark.machine

MAX_LEN = 32
ROWS = 70  # two tiles of rows and more than one block
# bfloat16 activations differ in their last bit where sums in another order round differently, layer
# by layer.
BFLOAT16_LOGITS = 0.05

# The inputs of the second model's products are no whole tiles (48), or only some are (64 but 80).
SHAPES = {
    "tiny": {},
    "no_tiles": {
        "hidden_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 80,
    },
    "some_tiles": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 80,
    },
}


def native_engine(shape: str, dtype: torch.dtype) -> Engine:
    config = dataclasses.replace(read_config(tiny_directory()), **SHAPES[shape])
    decoder = random_weights(build_decoder(config), seed=3)
    if not NativeDecode.fits(decoder, torch.device("cpu"), dtype):
        pytest.skip("no C compiler, or LLAMARL_NATIVE=0: the module decodes")
    return Engine(decoder, max_slots=ROWS, max_len=MAX_LEN, dtype=dtype)


def ways(engine: Engine) -> list[str]:
    return ["tiles", "vectors"] if engine._runner.native.has_tiles else ["vectors"]


@torch.inference_mode()
def logits(engine: Engine, way: str, rows: slice) -> torch.Tensor:
    """Of a few tokens one after the other in each of these slots."""
    engine._runner.take(way)
    engine._runner.refresh()
    engine._cache.reserve(ROWS, MAX_LEN)
    slots = torch.arange(ROWS)[rows]
    out = []
    for position in range(3):
        tokens = (slots * 7 + position) % 31 + 4
        positions = torch.full_like(slots, position)
        out.append(engine._runner.native(tokens, positions, engine._cache, slots))
    return torch.stack(out)


@pytest.mark.bitwise("the decode kernel sums a row alike whatever rows lie beside it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_row_has_the_same_bits_among_any_other_rows(shape, dtype):
    engine = native_engine(shape, dtype)
    for way in ways(engine):
        together = logits(engine, way, slice(0, ROWS))
        for rows in (
            slice(0, 1),
            slice(3, 10),
            slice(5, 21),
            slice(1, 33),
            slice(2, 35),
            slice(6, ROWS),
        ):
            assert torch.equal(logits(engine, way, rows), together[:, rows]), (way, rows)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_tiles_and_vectors_give_the_modules_logits(shape):
    engine = native_engine(shape, torch.bfloat16)
    exact = build_decoder(engine.decoder.config, device="cpu")
    exact.load_state_dict({name: p.float() for name, p in engine.decoder.state_dict().items()})
    other = Engine(exact, max_slots=ROWS, max_len=MAX_LEN, dtype=torch.float32)
    truth = logits(other, "vectors", slice(0, ROWS))
    spread = truth.std()
    for way in ways(engine):
        error = (logits(engine, way, slice(0, ROWS)) - truth).abs().max()
        assert error < BFLOAT16_LOGITS * spread, way


def test_tiles_are_really_other_instructions():
    """Where there are tiles, they sum in another order than vectors: the two do not give the same
    bits everywhere.
    """
    engine = native_engine("tiny", torch.bfloat16)
    if len(ways(engine)) < 2:
        pytest.skip("this CPU has no tile instructions for bfloat16")
    assert not torch.equal(
        logits(engine, "tiles", slice(0, ROWS)), logits(engine, "vectors", slice(0, ROWS))
    )


def sampled(engine: Engine, helper) -> dict:
    """Completions of prompts of all lengths, some of them several times; a part comes later, and so
    is prefilled beside rows that decode.
    """
    engine.take_help(helper)
    params = SamplingParams(9, min_new_tokens=2, stop_token_ids=(2, 5, 7), seed=4)
    for ticket in range(30):
        prompt_ids = torch.arange(1 + ticket % 11) + ticket % 7
        engine.submit(ticket, prompt_ids, dataclasses.replace(params, n=2 + ticket % 3))
        if ticket == 12:
            engine.step(3)
    return drain(engine, chunk=2)


@pytest.mark.bitwise("a helper changes no bit")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_completions_are_the_same_bits_whoever_computes_their_rows(shape, dtype):
    alone = sampled(native_engine(shape, dtype), None)
    owner = LastFirst()
    with Helper() as helper:
        for helping in (owner, helper):
            found = sampled(native_engine(shape, dtype), helping)
            assert found.keys() == alone.keys()
            for key, completion in alone.items():
                assert torch.equal(found[key].token_ids, completion.token_ids)
                assert torch.equal(found[key].generator_logprobs, completion.generator_logprobs)
    assert owner.num_done > 10


def test_without_a_helper_the_owner_does_it_all_again():
    engine = native_engine("tiny", torch.float32)
    owner = LastFirst()
    sampled(engine, owner)
    num_done = owner.num_done
    sampled(engine, None)
    assert owner.num_done == num_done > 0


def test_after_an_error_nothing_of_the_pass_is_left():
    engine = native_engine("tiny", torch.float32)
    kernel = engine._runner.native
    calls = []

    def failing(*given):
        calls.append(given)
        raise MemoryError

    with Helper() as helper:
        engine.take_help(helper)
        for ticket in range(60):
            engine.submit(ticket, [1, 5], SamplingParams(4))
        kernel._run = failing
        with pytest.raises(MemoryError):
            engine.step(1)
        num_calls = len(calls)
        helper.finish()
        assert len(calls) == num_calls > 0


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80))
def test_parts_hold_every_row_once_and_no_slot_is_cut(lengths):
    slots_N = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    bounds = _bounds(slots_N)
    assert bounds[0] == 0 and bounds[-1] == len(slots_N)
    assert bounds == sorted(set(bounds)) and len(bounds) <= 5
    for at in bounds[1:-1]:
        assert slots_N[at] != slots_N[at - 1]
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    assert len(sizes) == 1 or min(sizes) >= 24
