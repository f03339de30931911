"""Sizes that come again: few of them, little larger than asked, and no result depends on them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.random_weights import random_weights
from llamarl.config.placement import TINY_MODEL
from llamarl.learning.logprobs import make_head
from llamarl.models.attention import TOKEN_STEPS, PackedAttention, rounded_up
from llamarl.models.build import build_decoder, read_config
from tests.tolerances import of_logprobs


@given(size=st.integers(0, 1 << 20), steps=st.sampled_from([1, 2, 8, 16]))
def test_a_size_is_rounded_up_by_less_than_a_step(size, steps):
    rounded = rounded_up(size, steps=steps)
    assert size <= rounded < size * (1 + 1 / steps) + (size == 0)
    assert rounded_up(rounded, steps=steps) == rounded


def test_there_are_as_many_sizes_as_steps_to_a_power_of_two():
    assert len({rounded_up(size, steps=8) for size in range(1025, 2049)}) == 8
    assert [rounded_up(size, steps=8) for size in (7, 8, 16, 17)] == [7, 8, 16, 18]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_a_decoder_computes_in_vain_changes_no_result_and_no_gradient(dtype):
    """Segments of 70 tokens in all are computed as 72, and 37 labels as 38; each segment alone has
    no padding.
    """
    config = read_config(TINY_MODEL)
    decoder = random_weights(build_decoder(config, dtype=dtype), seed=0)
    tokens = torch.arange(70) % 50
    ends = [0, 33, 47, 70]
    positions = torch.cat([torch.arange(b - a) for a, b in zip(ends, ends[1:])])
    rows = torch.arange(30, 67)
    labels = (rows * 7) % 50
    attention = PackedAttention(torch.tensor(ends))
    assert attention.padding == rounded_up(70, steps=TOKEN_STEPS) - 70 == 2
    logprobs, _ = decoder(tokens, positions, attention, make_head(labels, rows))
    logprobs.sum().backward()
    padded = [p.grad.clone() for p in decoder.parameters()]
    decoder.zero_grad()
    expected = []
    for begin, end in zip(ends, ends[1:]):
        whole = PackedAttention(torch.tensor([0, end - begin]))
        whole.padding = 0
        logits = decoder(tokens[begin:end], positions[begin:end], whole)
        expected.append(logits.log_softmax(1))
    alone = torch.cat(expected)[rows].gather(1, labels[:, None]).squeeze(1)
    alone.sum().backward()
    allowed = of_logprobs(config, size=4.0, dtype=dtype)
    torch.testing.assert_close(logprobs, alone, atol=allowed, rtol=0)
    for own, parameter in zip(padded, decoder.parameters(), strict=True):
        torch.testing.assert_close(own, parameter.grad, atol=len(labels) * allowed, rtol=0)
