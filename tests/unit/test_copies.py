"""Copies with their digests: against PyTorch's copies, and the lanes' digest against its definition
in plain integers.
"""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.ddma.copies import Copier, Parts, fold
from llamarl.machine import kernels
from llamarl.machine.copying import copy_kernels_version

needs_kernel = pytest.mark.skipif(not copy_kernels_version(), reason="needs a C compiler")
METHODS = [
    "xxh3",
    "device",
    pytest.param("lanes", marks=needs_kernel),
]  # the device's works on a CPU too
WORD = 1 << 64


def noise(size):
    return (
        torch.arange(size).mul_(2654435761).bitwise_right_shift_(7).remainder_(251).to(torch.uint8)
    )


def digest(flat, method):
    return fold([Copier(method).digest(flat)])


def lanes_by_definition(data: bytes) -> int:
    """What the comment in machine/copy.c says."""
    lanes = [0x9E3779B97F4A7C15 * (i + 1) % WORD for i in range(32)]
    padded = data + bytes(-len(data) % 256)
    for at in range(0, len(padded), 8):
        lane, word = lanes[at // 8 % 32], int.from_bytes(padded[at : at + 8], "little")
        lanes[at // 8 % 32] = ((lane & 0xFFFFFFFF) * 0xFFFFFB3B + (lane >> 32) + word) % WORD
    h = len(data) * 0x9E3779B97F4A7C15 % WORD
    for lane in lanes:
        h = (h ^ lane) * 0xFF51AFD7ED558CCD % WORD
        h ^= h >> 32
    return h


def sees_swap(method, i, j):
    """Whether a digest must change with the exchange of two unequal bytes. Lanes do not see that of
    a byte in the upper half of a word with its like in the lower half of the word a stripe on.
    """
    return method == "xxh3" or (method == "lanes" and abs(i - j) != 256 - 4)


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
    if flat[i] != flat[j] and sees_swap(method, i, j):
        flat[i], flat[j] = flat[j].item(), flat[i].item()
        assert digest(flat, method) != before


def test_folding_sees_the_order():
    assert fold([1, 2]) != fold([2, 1])
    assert fold([-1 % WORD]) == fold([-1]) == -1


@needs_kernel
@settings(max_examples=60)
@given(st.binary(min_size=1, max_size=3000), st.integers(0, 70))
def test_the_lanes_digest_is_its_definition(data, offset):
    flat = torch.frombuffer(bytearray(bytes(offset) + data), dtype=torch.uint8)[offset:]
    assert Copier("lanes").digest(flat) == lanes_by_definition(data)


def on_device_by_definition(data: bytes) -> int:
    """What the docstring of copies.py says: the sums of the words in each of 512 columns, weighted,
    and the bytes behind the last whole row.
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
    st.sampled_from(
        [("whole", "whole"), ("columns", "whole"), ("whole", "columns"), ("flat", "flat")]
    ),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(1, 40),
    st.integers(1, 900),
    st.integers(0, 70),
    st.integers(0, 99),
)
def test_a_copy_is_torchs_copy_with_the_digest_of_what_is_there(
    method, kinds, target_dtype, source_dtype, rows, width, first, seed
):
    if target_dtype == torch.int8 != source_dtype:
        source_dtype = torch.int8  # a cast to int8 of what does not fit is undefined
    torch.manual_seed(seed)
    target, source = (
        view_of(kind, dtype, rows, width, first)
        for kind, dtype in zip(kinds, (target_dtype, source_dtype))
    )
    source.copy_(torch.randn(source.shape) * 30)
    around = target._base if target._is_view() else target
    left = around.clone() if around is not target else None
    found = fold([Copier(method).copy(target, source)])
    assert torch.equal(target, source.to(target_dtype))
    assert found == digest(target.contiguous(), method)
    if left is not None:  # nothing beside it was touched
        target.zero_()
        assert torch.equal(around, left)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=60)
@given(
    st.sampled_from(
        [
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float32),
            (torch.int8, torch.int8),
            (torch.float16, torch.float32),
        ]
    ),
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 700), st.integers(0, 40)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 30),
)
def test_columns_of_the_same_rows_are_copied_as_each_alone_would_be(method, dtypes, pieces, rows):
    target_dtype, source_dtype = dtypes
    whole = (torch.randn(rows + 1, 1000) * 30).to(source_dtype)
    if rows == 0:
        whole = whole[0]
    sources = []
    targets = []
    arounds = []
    for start, width, first in pieces:
        source = whole[..., start : start + width]
        around = torch.zeros(first + source.numel() + 5, dtype=target_dtype)
        sources.append(source)
        targets.append(around[first : first + source.numel()].view(source.shape))
        arounds.append(around)
    digests = Copier(method).copy_columns(targets, sources)
    for target, source, found in zip(targets, sources, digests):
        assert torch.equal(target, source.to(target_dtype))
        assert fold([found]) == digest(target, method)
    for around, target in zip(arounds, targets):
        target.zero_()
        assert not around.any()


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
    found = Copier(method).copy_parts(source, Parts(parts))
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


@needs_kernel
def test_the_cast_rounds_as_torch_does():
    bits = torch.cat(
        [
            torch.arange(-(2**31), 2**31, 9973),
            torch.tensor([0x7F800000, 0x7F800001, 0x7FC00000, -0x800000, 1, -1]),
        ]
    )
    source = bits.to(torch.int32).view(torch.float32)
    target = torch.zeros(len(source), dtype=torch.bfloat16)
    Copier("lanes").copy(target, source)
    expected = source.to(torch.bfloat16)
    same = target.view(torch.int16) == expected.view(torch.int16)
    assert bool((same | (target.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("method", METHODS)
def test_megabytes(method):
    source = noise((4 << 20) + 12345)
    target = torch.zeros_like(source)
    assert fold([Copier(method).copy(target, source)]) == digest(source, method)
    assert torch.equal(target, source)


# --- kernels and compilers ---


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LLAMARL_NATIVE", raising=False)
    kernels.library.cache_clear()
    yield tmp_path
    kernels.library.cache_clear()


@needs_kernel
def test_a_kernel_is_compiled_once_and_kept(fresh):
    assert kernels.library("copy") is not None
    (made,) = (fresh / "llamarl").glob("copy-*.so")
    before = made.stat().st_mtime_ns
    kernels.library.cache_clear()
    assert kernels.library("copy") is not None
    assert [f.name for f in (fresh / "llamarl").iterdir()] == [
        made.name
    ] and made.stat().st_mtime_ns == before


@pytest.mark.parametrize("compiler", ["there-is-no-such-compiler", "false"])
def test_without_a_compiler_there_is_a_warning_and_no_kernel(fresh, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    with pytest.warns(UserWarning, match="slower"):
        assert kernels.library("copy") is None


def test_kernels_can_be_switched_off(fresh, monkeypatch):
    monkeypatch.setenv("LLAMARL_NATIVE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.library("copy") is None
