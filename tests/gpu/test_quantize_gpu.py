"""Quantised linears on a GPU: its own products, and a CUDA graph that reads new weights. Skipped,
saying so, without CUDA.
"""

import pytest
import torch

from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.hf import load_weights
from llamarl.models.quantize import QUANTIZED, QuantizedLinear, quantize_decoder, quantize_rows

# The largest relative error of rounding once.
FLOAT64 = 2.0**-53
FLOAT32 = 2.0**-24
BFLOAT16 = 2.0**-8
FP8_SUMS = (
    2.0**-11
)  # of the sum of sizes: tensor cores add fp8 products with about 14 bits before they go to float32
KL = 5e-3  # nats a token; the CPU's scaled_mm is 1.3e-3 from the float32 model
USUAL = {"fp8": "scaled_mm", "int8": "int_mm"}


@pytest.fixture(params=list(QUANTIZED))
def kind(request):
    if request.param == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 products need compute capability 8.9")
    return request.param


def random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to("cuda", dtype)


def linear_of(weight, kind):
    linear = QuantizedLinear(weight.shape[1], weight.shape[0], kind, device="cuda")
    quantize_rows(weight, kind, linear.weight, linear.weight_scale)
    return linear


def assert_computes_with_the_quantised_numbers(linear, x, got):
    """Against float64, on the CPU."""
    w = linear.weight.cpu().double() * linear.weight_scale.cpu().double()[:, None]
    seen, arithmetic = x.cpu().double(), linear.arithmetic
    if arithmetic != "weight_only":
        q, scale = quantize_rows(x, linear.kind)
        seen = q.cpu().double() * scale.cpu().double()[:, None]
    want, sizes = seen @ w.t(), seen.abs() @ w.abs().t()
    if arithmetic == "int_mm":  # integer sums are exact, the reference's are not
        bound = 4 * FLOAT32 * want.abs() + x.shape[1] * FLOAT64 * sizes
    elif arithmetic == "scaled_mm":
        bound = FP8_SUMS * sizes + BFLOAT16 * want.abs()
    else:  # in bfloat16 cuBLAS may keep partial sums in bfloat16
        bound = (4 * BFLOAT16 if x.dtype == torch.bfloat16 else x.shape[1] * FLOAT32) * sizes
    bound = bound + (x.dtype == torch.bfloat16) * BFLOAT16 * want.abs()
    assert (got.dtype, got.shape) == (x.dtype, want.shape)
    assert ((got.cpu().double() - want).abs() <= 1.01 * bound).all()


def test_rows_are_quantised_as_on_the_cpu_but_for_the_scales_last_bit(kind):
    weight = random(64, 96)
    (q, scale), (cpu_q, cpu_scale) = quantize_rows(weight, kind), quantize_rows(weight.cpu(), kind)
    assert torch.allclose(scale.cpu(), cpu_scale, rtol=4 * FLOAT32, atol=0)
    there, here = q.cpu().double(), cpu_q.double()
    step = there.abs().clamp_min(2.0**-6) * 2.0**-3 if kind == "fp8" else torch.ones_like(there)
    assert ((there - here).abs() <= step).all() and (there == here).double().mean() > 0.99


@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 33, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linears_use_the_gpus_products_and_compute_with_the_quantised_numbers(kind, dtype, tokens):
    linear, x = linear_of(random(48, 576), kind), random(tokens, 576, seed=1, dtype=dtype)
    got = linear(x)
    assert linear.arithmetic == USUAL[kind]
    assert_computes_with_the_quantised_numbers(linear, x, got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_that_the_products_refuse_are_weight_only_with_a_warning(kind, dtype):
    linear, x = linear_of(random(5, 37), kind), random(9, 37, seed=1, dtype=dtype)
    with pytest.warns(UserWarning, match="multiplied as weight_only"):
        got = linear(x)
    assert_computes_with_the_quantised_numbers(linear, x, got)


@torch.inference_mode()
def test_a_replayed_graph_reads_the_tokens_and_weights_put_in_place(kind):
    linear, other = linear_of(random(48, 64), kind), linear_of(random(48, 64, seed=1), kind)
    x, new = (
        random(8, 64, seed=2, dtype=torch.bfloat16),
        random(8, 64, seed=3, dtype=torch.bfloat16),
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # cuBLAS takes its workspace before the capture
        for _ in range(3):
            linear(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x)
    graph.replay()
    assert_computes_with_the_quantised_numbers(linear, x, y)
    x.copy_(new), linear.weight.copy_(other.weight), linear.weight_scale.copy_(other.weight_scale)
    graph.replay()
    assert_computes_with_the_quantised_numbers(other, new, other(new))
    assert_computes_with_the_quantised_numbers(linear, new, y)


@torch.inference_mode()
def test_the_tiny_model_is_close_to_its_quantised_self(kind):
    tokens = torch.tensor([1, 5, 6, 14, 7, 8, 18, 1, 9, 9, 14, 9, 9, 18], device="cuda")
    positions, cu_seqlens = (
        torch.arange(7, device="cuda").repeat(2),
        torch.tensor([0, 7, 14], device="cuda"),
    )
    decoder = load_weights(
        build_decoder(read_config(tiny_directory())), tiny_directory(), device="cuda"
    ).eval()
    exact = decoder(tokens, positions, PackedAttention(cu_seqlens)).double().log_softmax(-1)
    quantize_decoder(decoder, kind)
    quantised = decoder(tokens, positions, PackedAttention(cu_seqlens)).double().log_softmax(-1)
    assert 0 < (quantised.exp() * (quantised - exact)).sum(-1).mean() < KL
    assert {m.arithmetic for m in decoder.modules() if isinstance(m, QuantizedLinear)} == {
        USUAL[kind]
    }
