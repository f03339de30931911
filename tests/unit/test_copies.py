"""Digests see what changes. Copies of a bucket's parts have the digest that their sender finds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.ddma.payload import Copier, fold

METHODS = ["xxh3", "device"]  # the device's works on a CPU too
WORD = 1 << 64


def noise(size):
    return (
        torch.arange(size).mul_(2654435761).bitwise_right_shift_(7).remainder_(251).to(torch.uint8)
    )


def digest(flat, method):
    return fold([Copier(method).digest(flat)])


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=40)
@given(st.integers(1, 5 * 4096), st.data())
def test_a_digest_sees_any_changed_byte_and_swaps(method, size, data):
    flat = noise(size)
    before = digest(flat, method)
    assert -(2**63) <= before < 2**63
    i, j = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    flat[i] ^= data.draw(st.integers(1, 255))
    assert digest(flat, method) != before != digest(noise(size)[:-1], method)
    flat = noise(size)
    if method == "xxh3" and flat[i] != flat[j]:
        flat[i], flat[j] = flat[j].item(), flat[i].item()
        assert digest(flat, method) != before


def test_folding_sees_the_order():
    assert fold([1, 2]) != fold([2, 1])
    assert fold([-1 % WORD]) == fold([-1]) == -1


def on_device_by_definition(data: bytes) -> int:
    """The sums of the words in each of 512 columns, weighted, and the bytes behind the last whole
    row (payload.py).
    """
    in_rows = len(data) // 4096 * 4096
    of_rows = 0
    for at in range(0, in_rows, 8):
        column = at // 8 % 512
        of_rows += int.from_bytes(data[at : at + 8], "little") * (2 * column + 1)
    of_tail = sum(byte * (2 * i + 257) for i, byte in enumerate(data[in_rows:]))
    return of_rows * 1000003 + of_tail + len(data)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 3 * 4096), st.integers(0, 70)), min_size=1, max_size=4))
def test_a_devices_digests_are_their_definition_however_many_are_taken_together(runs):
    whole = noise(4 * 4096)
    flats = [whole[first : first + size] for size, first in runs]
    by_hand = [on_device_by_definition(flat.numpy().tobytes()) for flat in flats]
    copier = Copier("device")
    for flat, expected in zip(flats, by_hand):
        assert copier.digest(flat) % WORD == expected % WORD
    assert copier.digest_all(flats) == fold(by_hand)


def view_of(kind: str, dtype: torch.dtype, rows: int, width: int, first: int) -> torch.Tensor:
    """[rows, width] of zeros: whole, or a part of the columns of something wider; or [rows x
    width].
    """
    if kind == "flat":
        return torch.zeros(first + rows * width, dtype=dtype)[first:]
    if kind == "whole":
        return torch.zeros(rows, width, dtype=dtype)
    return torch.zeros(rows, width + first + 3, dtype=dtype)[:, first : first + width]


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["flat", "whole", "columns"]),
            st.sampled_from(DTYPES),
            st.integers(1, 20),
            st.integers(1, 300),
            st.integers(0, 9),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 20),
    st.booleans(),
)
def test_parts_of_a_run_go_to_their_places_with_the_digests_that_their_sender_finds(
    method, kinds, gap, received_in_place
):
    targets = [view_of(*kind) for kind in kinds]
    parts = []
    at = 0
    for target in targets:
        at = -(-(at + gap) // 8) * 8
        parts.append((at, target))
        at += target.nbytes
    source = noise(at)
    if received_in_place:
        parts = [
            (start, source[start : start + t.nbytes].view(t.dtype).view(t.shape))
            for start, t in parts
        ]
    sent = [
        source[start : start + t.nbytes].view(t.dtype).view(t.shape).clone() for start, t in parts
    ]
    around = [t._base.clone() for t in targets if t._is_view()]
    found = Copier(method).copy_parts(source, parts)
    assert found == fold(Copier(method).digest(s) for s in sent) and torch.equal(source, noise(at))
    assert all(
        torch.equal(t.contiguous().view(torch.uint8), s.view(torch.uint8))
        for (_, t), s in zip(parts, sent)
    )
    if not received_in_place:
        for target in targets:
            target.zero_()
    views = [t for t in targets if t._is_view()]
    assert all(torch.equal(t._base, before) for t, before in zip(views, around))
