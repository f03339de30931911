"""Slots of the K/V cache are copied as if each were alone, and rows hand out what is theirs."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from llamarl.inference.cache import SlotCache
from llamarl.inference.requests import Request
from llamarl.inference.rows import Rows
from llamarl.inference.sampler import SamplingParams
from llamarl.inference.schedule import Sample
from tests.decoding import random_decoder

SLOTS, PLACES = 12, 16


def filled_cache() -> SlotCache:
    cache = SlotCache(random_decoder(), SLOTS, PLACES, SLOTS * PLACES)
    cache.reserve(SLOTS, PLACES)
    generator = torch.Generator().manual_seed(0)
    for layer in cache.layers:
        layer.copy_(torch.rand(layer.shape, generator=generator))
    return cache


@st.composite
def pairs(draw):
    """Sources, some of them several times, and targets, of which none is a source."""
    slots = draw(st.permutations(range(SLOTS)))
    num_sources = draw(st.integers(1, SLOTS - 1))
    targets = slots[num_sources:]
    if draw(st.booleans()):
        targets = sorted(targets)
    one_of = st.sampled_from(slots[:num_sources])
    sources = draw(st.lists(one_of, min_size=len(targets), max_size=len(targets)))
    if draw(st.booleans()):
        sources = sorted(sources)
    return sources, targets


@given(pairs(), st.integers(1, PLACES))
def test_what_is_copied_together_is_what_is_copied_slot_by_slot(sources_and_targets, length):
    sources, targets = sources_and_targets
    cache = filled_cache()
    expected = [layer.clone() for layer in cache.layers]
    cache.copy(torch.tensor(sources), torch.tensor(targets), length)
    for layer, before in zip(cache.layers, expected):
        for one, other in zip(sources, targets):
            before[:, other, :, :length] = before[:, one, :, :length]
        assert torch.equal(layer[:, :, :, :length], before[:, :, :, :length])


def sample(stop_token_ids: tuple[int, ...], number: int) -> Sample:
    params = SamplingParams(4, stop_token_ids=stop_token_ids)
    return Sample(Request(0, number, torch.tensor([1, 5]), params, end=1), 0)


def test_each_row_keeps_its_own_stop_tokens_however_many_others_have():
    rows = Rows(4, 8, torch.device("cpu"))
    rows.start(0, [sample((2,), 0), sample((), 1)])
    rows.start(2, [sample((3, 4, 5), 2)])
    rows.start(1, [sample((6,), 3)])
    assert rows.stops[:3].tolist() == [[2, -1, -1], [6, -1, -1], [3, 4, 5]]


def test_rows_hand_out_as_many_tokens_as_each_has():
    rows = Rows(4, 8, torch.device("cpu"))
    rows.start(0, [sample((2,), number) for number in range(3)])
    rows.count[:3] = torch.tensor([2, 0, 3])
    for table in (rows.tokens, rows.logprobs, rows.versions):
        table[:3] = torch.arange(24).view(3, 8).to(table.dtype)
    rows.mask[:3] = torch.tensor([[True], [True], [False]])
    found = rows.recorded([2, 0, 1])
    assert [one.token_ids.tolist() for one in found] == [[16, 17, 18], [0, 1], []]
    assert [one.generator_logprobs.tolist() for one in found] == [[16, 17, 18], [0, 1], []]
    assert [one.policy_versions.tolist() for one in found] == [[16, 17, 18], [0, 1], []]
    assert [one.loss_mask.tolist() for one in found] == [[False] * 3, [True] * 2, []]
    assert rows.recorded([]) == []
