"""What a trainer's memory is predicted to hold, beside what autograd holds and what an update
allocates.
"""

import importlib
import os
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.random_weights import random_weights
from llamarl.learning.logprobs import make_head
from llamarl.memory import (
    MicrobatchSize,
    Training,
    layer_elements,
    longest_microbatch,
)
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder
from llamarl.models.config import read_config, tiny_directory
from tests.launching import ROOT

pytestmark = pytest.mark.timeout(300)


def test_the_longest_microbatch_is_of_one_prompt_where_a_group_is_over_the_budget():
    sizes = dict(prompt_tokens=4500, completion_tokens=64, group_size=2)
    assert longest_microbatch(**sizes, budget_tokens=1024) == MicrobatchSize(1, 1, 4500, 64)
    assert longest_microbatch(**sizes, budget_tokens=4629) == MicrobatchSize(1, 2, 4500, 64)
    assert longest_microbatch(**sizes, budget_tokens=9300) == MicrobatchSize(2, 4, 4500, 64)
    whole = longest_microbatch(**sizes, budget_tokens=1024, whole_groups=True)
    assert whole == MicrobatchSize(1, 2, 4500, 64) and whole.tokens == 4628


counts_bytes = pytest.mark.skipif(
    "machines/noisy" in os.environ.get("PYTHONPATH", ""),
    reason="noisy products make tensors of their own",
)


def held_bytes(layers: int, size: MicrobatchSize, dtype: torch.dtype, checkpointing: bool) -> int:
    """Bytes of what autograd holds after the forward of a microbatch, but for the weights."""
    values = read_config(tiny_directory())
    config = replace(values, num_hidden_layers=layers, max_position_embeddings=8192)
    decoder = random_weights(build_decoder(config, dtype=dtype), seed=0).train()
    decoder.activation_checkpointing = checkpointing
    lengths = [size.prompt_tokens] + [size.completion_tokens] * size.completions
    parents = [-1] + [0] * size.completions
    starts = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.randint(0, config.vocab_size, (size.tokens,))
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.arange(size.prompt_tokens, size.tokens)
    weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    held = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention = PackedAttention(starts, torch.tensor(parents))
        out = decoder(tokens, positions, attention, make_head(tokens[rows], rows))
    total = sum(storage.nbytes() for storage in held.values())
    del out
    return total


@counts_bytes
@pytest.mark.parametrize("size", [(1, 1, 1500, 100), (1, 1, 100, 1500), (1, 4, 1000, 64)], ids=str)
def test_what_a_layer_holds_is_what_is_counted(size):
    """The second of two layers, so that what all layers share is not of it."""
    size = MicrobatchSize(*size)
    one, two = (held_bytes(layers, size, torch.float32, False) for layers in (1, 2))
    counted = 4 * layer_elements(read_config(tiny_directory()), size, Training(itemsize=4))
    assert two - one == pytest.approx(counted, rel=0.05)


def test_a_checkpointed_layer_holds_what_comes_into_it():
    size = MicrobatchSize(1, 1, 1500, 100)
    one, two = (held_bytes(layers, size, torch.float32, True) for layers in (1, 2))
    width = read_config(tiny_directory()).hidden_size
    assert two - one == pytest.approx(4 * size.tokens * width, rel=0.05)


@pytest.fixture(scope="module")
def benchmark():
    """benchmarks/memory.py, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("memory")
        sys.modules.pop("memory")


SMALL = (96, 256, 2, 4, 2, 24, 1500)
# Of 2,100 labels the logits are more than are kept, and those of a chunk less than the gradients.
CHUNKED = (512, 256, 1, 4, 2, 24, 17000)


UPDATES: list[dict[str, object]] = [
    {"groups": 1},
    {"groups": 3},
    {"checkpointing": True},
    {"checkpointing": True, "group": 6, "whole_groups": True},
    {"lora": 4, "reference": "adapters_off"},
    {"critic": "own", "groups": 1},
    {"critic": "own", "checkpointing": True, "tied": False},
    {"reference": "sharded"},
    {"prompt": 60, "completion": 40, "group": 4},
    {"shape": CHUNKED, "prompt": 20, "completion": 700, "group": 3, "budget": 4000},
]


SHOWN_BY_OTHERS = ({"checkpointing": True}, {"critic": "own", "groups": 1})


def kinds_of_updates():
    """Each kind in float32, and in bfloat16 the first; the others, which show no other bytes a
    number, are slow tests, and so are the large one and those that others show a part of.
    """
    slow = [pytest.mark.slow]
    for fields in UPDATES:
        name = " ".join(f"{key}={value}" for key, value in fields.items())
        marks = slow if "shape" in fields or fields in SHOWN_BY_OTHERS else []
        yield pytest.param(fields, "float32", id=f"{name} float32", marks=marks)
        marks = [] if fields is UPDATES[0] else slow
        yield pytest.param(fields, "bfloat16", id=f"{name} bfloat16", marks=marks)


@counts_bytes
@pytest.mark.filterwarnings("ignore:.*longer than trainer.microbatch_tokens")
@pytest.mark.parametrize("fields, dtype", list(kinds_of_updates()))
def test_what_an_update_allocates_at_its_peak_is_what_is_predicted(benchmark, fields, dtype):
    is_large = "shape" in fields
    if is_large and dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("takes minutes on a CPU without instructions for bfloat16")
    case = benchmark.Case(**{"shape": SMALL, "dtype": dtype} | fields)
    _, measured = benchmark.counted(case)
    assert 0.9 <= benchmark.predicted(case) / measured <= 1.1
