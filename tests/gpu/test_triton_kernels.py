"""Kernels in Triton beside the plain operations that they take the place of."""

import pytest
import torch
import torch.nn.functional as F

from llamarl.models import fused
from llamarl.models.quantize import quantize_rows

# Rounding to the other neighbour, once, where sums run in another order.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
DTYPES = pytest.mark.parametrize("dtype", ROUNDING)


@pytest.fixture(autouse=True)
def draws():
    torch.manual_seed(0)


def drawn(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype)


def by_kernels(operation, *arguments):
    with torch.inference_mode():
        assert fused.gpu_kernels(arguments[0]) is not None, "this GPU runs none"
        return operation(*arguments)


def by_plain_operations(operation, *arguments):
    """Outside of inference mode there are no kernels."""
    with torch.no_grad():
        assert fused.gpu_kernels(arguments[0]) is None
        return operation(*arguments)


def assert_rounded_alike(found, expected):
    tolerance = ROUNDING[expected.dtype]
    assert found.dtype == expected.dtype
    assert torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2048), (5, 100), (3, 7, 64)])
@pytest.mark.parametrize("has_change", [False, True])
def test_a_norm_of_a_sum(shape, has_change, dtype):
    x, scale = drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype)
    change = drawn(*shape, dtype=dtype) if has_change else None
    h, normed = by_kernels(fused.add_rms_norm, x, change, scale, 1e-5)
    plain_h, plain = by_plain_operations(fused.add_rms_norm, x, change, scale, 1e-5)
    assert torch.equal(h, plain_h)
    assert_rounded_alike(normed, plain)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 8192), (5, 100)])
def test_a_gate(shape, dtype):
    gate, up = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype)
    found = by_kernels(fused.swiglu, gate, up)
    assert_rounded_alike(found, by_plain_operations(fused.swiglu, gate, up))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 32, 64), (7, 3, 20), (5, 9, 128)])
def test_a_rotation(shape, dtype):
    x = drawn(*shape, dtype=dtype)
    half = torch.randn(shape[0], 1, shape[2] // 2, device="cuda")
    angles = torch.cat([half, half], dim=-1)
    found = by_kernels(fused.rotate, x, angles.cos(), angles.sin())
    assert_rounded_alike(found, by_plain_operations(fused.rotate, x, angles.cos(), angles.sin()))


@DTYPES
def test_keys_and_values_are_kept_in_their_places_alone(dtype):
    k = drawn(9, 3, 20, dtype=dtype)
    v = drawn(9, 3, 20, dtype=dtype)
    rows = torch.arange(9, device="cuda") % 6
    places = torch.arange(9, device="cuda") * 4
    held = drawn(2, 6, 3, 40, 20, dtype=dtype)
    expected = held.clone()
    expected[0][rows, :, places] = k
    expected[1][rows, :, places] = v
    kernels = by_kernels(fused.gpu_kernels, k)
    kernels.keep(held, rows, places, k, v)
    assert torch.equal(held, expected)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU with fp8",
)
@DTYPES
@pytest.mark.parametrize("shape", [(1, 2048), (5, 100)])
def test_fp8_numbers_and_their_scales_are_those_of_plain_operations(shape, dtype):
    x = drawn(*shape, dtype=dtype)
    x[0] *= 1e-42  # a scale that would be subnormal
    x = torch.cat([x, torch.zeros_like(x[:1]), x[:1] * 1e30])
    kernels = by_kernels(fused.gpu_kernels, x)
    q, scale = kernels.quantize_rows(x, 448.0)
    plain_q, plain_scale = quantize_rows(x, "fp8")
    assert torch.equal(scale, plain_scale)
    assert torch.equal(q.view(torch.uint8), plain_q.view(torch.uint8))
    x[0, 3] = torch.nan
    _, scale = kernels.quantize_rows(x, 448.0)
    assert scale.isnan().tolist() == [True] + [False] * (len(x) - 1)


@DTYPES
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype):
    x, change = drawn(33, 768, dtype=dtype), drawn(33, 768, dtype=dtype)
    scale = drawn(768, dtype=dtype)
    _, many = by_kernels(fused.add_rms_norm, x, change, scale, 1e-5)
    _, one = by_kernels(fused.add_rms_norm, x[7:8], change[7:8], scale, 1e-5)
    assert torch.equal(many[7:8], one)


def test_what_needs_gradients_takes_plain_operations():
    x = torch.ones(2, 4, device="cuda", requires_grad=True)
    gate = fused.swiglu(x, x)
    assert torch.equal(gate, F.silu(x) * x) and gate.requires_grad
