"""The native pass by each of its kernels: the same numbers up to rounding, and a row's bits
whatever lies beside it.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.random_weights import random_weights
from llamarl.inference import Engine
from llamarl.inference.decode import NativeDecode
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import tiny_directory

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("threads_of_machine")]

MAX_LEN = 32
ROWS = 70  # two tiles of rows and more than one block
# bfloat16 activations differ in their last bit where sums in another order round differently, layer
# by layer.
BFLOAT16_LOGITS = 0.05

# The inputs of the second model's products are no whole tiles (48), or only some are (64 but 80).
NO_TILES = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
SOME_TILES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
NARROW = {"head_dim": 16, "intermediate_size": 80}
SHAPES = {"tiny": {}, "no_tiles": NO_TILES | NARROW, "some_tiles": SOME_TILES | NARROW}


def native_engine(shape: str, dtype: torch.dtype) -> Engine:
    config = dataclasses.replace(read_config(tiny_directory()), **SHAPES[shape])
    decoder = random_weights(build_decoder(config), seed=3)
    if not NativeDecode.fits(decoder, torch.device("cpu"), dtype):
        pytest.skip("no C compiler, or LLAMARL_NATIVE=0: the module decodes")
    return Engine(decoder, max_slots=ROWS, max_len=MAX_LEN, dtype=dtype)


def ways(engine: Engine) -> list[str]:
    return ["tiles", "vectors"] if engine._runner.native.has_tiles else ["vectors"]


@torch.inference_mode()
def logits(engine: Engine, way: str, rows: slice = slice(0, ROWS)) -> torch.Tensor:
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
        together = logits(engine, way)
        for first, end in ((0, 1), (3, 10), (5, 21), (1, 33), (2, 35), (6, ROWS)):
            part = logits(engine, way, slice(first, end))
            assert torch.equal(part, together[:, first:end]), (way, first, end)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_tiles_and_vectors_give_the_modules_logits(shape):
    engine = native_engine(shape, torch.bfloat16)
    exact = build_decoder(engine.decoder.config, device="cpu")
    exact.load_state_dict({name: p.float() for name, p in engine.decoder.state_dict().items()})
    truth = logits(Engine(exact, max_slots=ROWS, max_len=MAX_LEN), "vectors")
    found = [logits(engine, way) for way in ways(engine)]
    for made in found:
        assert (made - truth).abs().max() < BFLOAT16_LOGITS * truth.std()
    if shape == "tiny" and len(found) > 1:
        assert not torch.equal(*found), "whole tiles sum in another order"
