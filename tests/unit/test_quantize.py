"""Weights in one byte: what rounding may cost, that shards agree with the whole, and linears
against float64.
"""

import math
import warnings
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from llamarl.models import quantize
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.hf import load_weights, named_parameters_hf
from llamarl.models.quantize import (
    QUANTIZED,
    QuantizedLinear,
    arithmetic_of,
    is_quantized,
    kl_from_top,
    quantize_decoder,
    quantize_rows,
)
from tests.build.job import run_python
from tests.build.model_config import model_config
from tests.tolerances import rounding

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("float32_products")]

# The largest relative error of rounding once.
FLOAT64 = 2.0**-53
FLOAT32 = 2.0**-24
BFLOAT16 = 2.0**-8
# Of rounding once to 3 bits of mantissa; the smallest normal number.
E4M3_RELATIVE, E4M3_SMALLEST = 2.0**-4, 2.0**-6
EXACT = 1e-12  # nats, float64
# Nats, twice what was measured: mean KL(quantised || float32) of the tiny model on PROMPTS.
KL = {
    ("fp8", "scaled_mm"): 2.6e-3,
    ("fp8", "weight_only"): 6e-4,
    ("int8", "int_mm"): 9e-4,
    ("int8", "weight_only"): 8e-5,
}
each_kind = pytest.mark.parametrize("kind", QUANTIZED)
each_arithmetic = pytest.mark.parametrize("kind, arithmetic", KL)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
PROMPTS = ([1, 5, 6, 14, 7, 8, 18], [1, 9, 9, 14, 9, 9, 18, 5, 13, 12], [1, 7, 14, 4, 18, 7, 2])


@pytest.fixture(autouse=True)
def exact_integers(request):
    """Products of int8 that saturate are noticed and never chosen (see below): there is nothing to
    hold them to.
    """
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if parameters.get("arithmetic") == "int_mm" and not quantize._int_mm_is_exact():
        pytest.skip("this CPU's int8 products saturate")


def random(*shape, seed=0, dtype=torch.float32):
    """Normal numbers whose rows differ in size by up to e^6."""
    generator = torch.Generator().manual_seed(seed)
    size = (3 * torch.randn(shape[0], 1, generator=generator).clamp(-1, 1)).exp()
    return (torch.randn(shape, generator=generator) * size).to(dtype)


def linear_of(weight, kind, arithmetic=None, bias=None):
    linear = QuantizedLinear(weight.shape[1], weight.shape[0], kind, bias=bias)
    quantize_rows(weight, kind, linear.weight, linear.weight_scale)
    linear.arithmetic = arithmetic
    return linear


def meta_decoder():
    return build_decoder(read_config(tiny_directory()))


@torch.inference_mode()
def logprobs_of(decoder):
    cu_seqlens = torch.tensor([0, *(len(p) for p in PROMPTS)]).cumsum(0)
    positions = torch.cat([torch.arange(len(p)) for p in PROMPTS])
    tokens = torch.tensor(list(chain.from_iterable(PROMPTS)))
    return decoder(tokens, positions, PackedAttention(cu_seqlens)).double().log_softmax(-1)


# --- Rows ---


def test_rows_by_hand():
    # e4m3 has 3 bits of mantissa: near 0.3 it has 9/32 and 10/32; 17 is midway between 16 and 18,
    # and 16's mantissa is even.
    q, scale = quantize_rows(torch.tensor([[448, -1, 0.3, 17], [-896, 0, 0, 2]]), "fp8")
    assert (q.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert scale.tolist() == [1.0, 2.0]
    assert q.float().tolist() == [[448, -1, 0.3125, 16], [-448, 0, 0, 1]]
    # int8 rounds to nearest, ties to even.
    q, scale = quantize_rows(torch.tensor([[127, -63.5, 0.5, 1.5], [-254, 0, 1.1, 2]]), "int8")
    assert (q.dtype, scale.dtype, scale.tolist()) == (torch.int8, torch.float32, [1.0, 2.0])
    assert q.tolist() == [[127, -64, 0, 2], [-127, 0, 1, 1]]
    for kind in QUANTIZED:  # rows of zeros have scale 1
        q, scale = quantize_rows(torch.tensor([[0.0, -0.0], [0.0, 3.0]]), kind)
        assert scale[0] == 1 and (q[0].float() == 0).all() and scale[1] > 0
    for attempt in (lambda: quantize_rows(torch.ones(2, 2), "fp4"), lambda: linear_of(q, "fp4")):
        with pytest.raises(ValueError, match="quantize='fp4': need one of fp8, int8"):
            attempt()


@each_dtype
@each_kind
def test_rounding_costs_no_more_than_the_format_says(kind, dtype):
    weight = random(64, 96, dtype=dtype)
    q, scale = quantize_rows(weight, kind)
    exact, step = weight.double(), scale.double()[:, None]
    error = (q.double() * step - exact).abs()
    bound = (step / 2).expand_as(error)
    if kind == "fp8":
        bound = E4M3_RELATIVE * torch.maximum(exact.abs(), E4M3_SMALLEST * step)
    # Of the scale and of the division, before the rounding to one byte.
    assert (error <= bound + 4 * FLOAT32 * exact.abs()).all()
    assert (error > 0.9 * bound).any()  # the bound is no idle one


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 70),
    cuts=st.lists(st.integers(0, 9), max_size=3),
    block=st.integers(1, 300),
    seed=st.integers(0, 99),
    kind=st.sampled_from(list(QUANTIZED)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    exponent=st.sampled_from([-45, -39, -3, 0, 30]),
)
@settings(max_examples=60)
def test_shards_of_rows_are_quantised_as_the_whole_is(
    rows, columns, cuts, block, seed, kind, dtype, exponent
):
    weight = (random(rows, columns, seed=seed) * 10.0**exponent).to(dtype)
    whole_q, whole_scale = quantize_rows(weight, kind)
    bounds = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "_BLOCK", block)
        shards = [quantize_rows(weight[a:b], kind) for a, b in zip(bounds, bounds[1:])]
    codes = torch.cat([q.view(torch.uint8) for q, _ in shards])
    assert torch.equal(codes, whole_q.view(torch.uint8))
    assert torch.equal(torch.cat([scale for _, scale in shards]), whole_scale)
    assert whole_q.float().isfinite().all() and whole_scale.isfinite().all()


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result._base is None:
            if all(result is not a for a in args):
                self.numel = max(self.numel, result.numel())
        return result


@each_kind
def test_rows_are_written_in_place_a_block_at_a_time_and_the_weight_stays(kind, monkeypatch):
    weight = random(10, 8)
    before, whole = weight.clone(), quantize_rows(weight, kind)
    q, scale = torch.empty(10, 8, dtype=QUANTIZED[kind]), torch.empty(10)
    monkeypatch.setattr(quantize, "_BLOCK", 3 * 8)
    with Largest() as largest:
        quantize_rows(weight, kind, q, scale)
    assert 0 < largest.numel <= 3 * 8
    assert torch.equal(q.float(), whole[0].float()) and torch.equal(scale, whole[1])
    assert torch.equal(weight, before)
    with pytest.raises(AssertionError, match="q_out is torch.uint8"):
        quantize_rows(weight, kind, q.view(torch.uint8), scale)
    with pytest.raises(AssertionError, match="scale_out is"):
        quantize_rows(weight, kind, q, scale[:1])


@each_arithmetic
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_weight_that_is_no_number_shows_in_its_channel_alone(kind, arithmetic, poison):
    weight = random(16, 16)
    weight[3, 5] = poison
    out = linear_of(weight, kind, arithmetic)(random(4, 16, seed=1))
    assert out.isfinite().all(0).tolist() == [channel != 3 for channel in range(16)]


# --- Linears ---


@pytest.mark.parametrize("tokens, inputs, outputs", [(32, 576, 192), (7, 37, 5)])
@each_dtype
@each_arithmetic
def test_linears_compute_with_the_quantised_numbers(
    kind, arithmetic, dtype, tokens, inputs, outputs
):
    x, weight = random(tokens, inputs, seed=1, dtype=dtype), random(outputs, inputs)
    linear = linear_of(weight, kind, arithmetic)
    got = linear(x)
    w = linear.weight.double() * linear.weight_scale.double()[:, None]
    seen = x.double()
    if arithmetic != "weight_only":
        q, scale = quantize_rows(x, kind)
        seen = q.double() * scale.double()[:, None]
    want, sizes = seen @ w.t(), seen.abs() @ w.abs().t()
    # Sums may err by one rounding a term: in float32, but integer sums are exact, and then only the
    # reference's err. Rounded to bfloat16 are a bfloat16 result, the sums that a bfloat16 F.linear
    # returns, and all that scaled_mm returns.
    term = FLOAT64 if arithmetic == "int_mm" else FLOAT32
    summing = (inputs + 3) * term * sizes + 3 * FLOAT32 * want.abs()
    is_narrow = dtype == torch.bfloat16
    roundings = {"scaled_mm": 1, "int_mm": is_narrow, "weight_only": 2 * is_narrow}[arithmetic]
    rounded = roundings * BFLOAT16 * want.abs()
    assert (got.dtype, got.shape) == (dtype, (tokens, outputs))
    assert ((got.double() - want).abs() <= (summing + rounded) * (1 + BFLOAT16)).all()


def needs_sums_in_float32():
    """Skip where PyTorch has no fp8 product with one scale and float32 sums: on some CPUs, held to
    older instructions, oneDNN makes none. Only a GPU's is used outside of tests.
    """
    q = torch.zeros(16, 16, dtype=torch.float8_e4m3fn)
    one = torch.ones(())
    try:
        torch._scaled_mm(q, q.T, scale_a=one, scale_b=one, out_dtype=torch.float32)
    except RuntimeError as error:
        pytest.skip(f"this CPU has no such product: {error}")


@each_dtype
def test_fp8_products_are_the_same_where_torch_takes_one_scale_for_the_whole(monkeypatch, dtype):
    linear = linear_of(random(48, 96), "fp8", "scaled_mm")
    x = random(7, 96, seed=1, dtype=dtype)
    usual = linear(x)
    needs_sums_in_float32()
    monkeypatch.setattr(quantize, "_takes_row_scales", lambda device: False)
    got = linear(x)
    # Each rounds a float32 sum to bfloat16, and the sums may differ in their last bits.
    assert got.dtype == usual.dtype == dtype
    size = usual.abs().max().item()
    torch.testing.assert_close(got, usual, rtol=2 * BFLOAT16, atol=96 * FLOAT32 * size)


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_whether_scales_of_rows_are_taken_is_found_by_a_trial(monkeypatch, error):
    def refuses(*args, **kwargs):
        raise error("For tensor-wise scaling scales must be scalars")

    monkeypatch.setattr(torch, "_scaled_mm", refuses)
    assert not quantize._takes_row_scales.__wrapped__(torch.device("cpu"))
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kwargs: None)
    assert quantize._takes_row_scales.__wrapped__(torch.device("cpu"))


@each_arithmetic
def test_no_tokens_a_bias_and_float16(kind, arithmetic):
    weight, bias = random(8, 16), nn.Parameter(torch.arange(8.0), requires_grad=False)
    plain, biased = (linear_of(weight, kind, arithmetic, bias=b) for b in (None, bias))
    x = random(3, 16, seed=1)
    want = plain(x) + bias
    assert (biased(x) - want).abs().max() <= rounding(terms=16, size=float(want.abs().max()))
    assert plain(x[:0]).shape == (0, 8)
    # 16 products of 100 and 0.01 fit float16; those of 100 and the whole numbers in the weight, 127
    # or 448, do not.
    small = linear_of(torch.full((8, 16), 0.01), kind, arithmetic)
    assert small(torch.full((2, 16), 100.0).half()).tolist() == [[16.0] * 8] * 2


def test_every_e4m3_number_is_widened_exactly():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for dtype in (torch.bfloat16, torch.float32):
        numbers = codes.to(dtype)
        same = quantize._widen(codes, dtype) == numbers
        assert same.sum() == 254 and (same | numbers.isnan()).all()


@each_arithmetic
def test_the_next_forward_sees_weights_put_in_place(kind, arithmetic):
    x = random(4, 32, seed=2)
    linear, fresh = (linear_of(random(16, 32, seed=seed), kind, arithmetic) for seed in (0, 1))
    before, want = linear(x), fresh(x)
    tolerance = rounding(terms=32, size=float(want.abs().max()))
    kept = linear.weight.data, linear.weight_scale.data
    others = fresh.weight.data.clone(), fresh.weight_scale.data.clone()
    assert (before - want).abs().max() > 100 * tolerance
    for (weight, scale), result in ((others, want), (kept, before)):
        linear.weight.data, linear.weight_scale.data = weight, scale
        assert (linear(x) - result).abs().max() <= tolerance
    linear.weight.copy_(fresh.weight)
    linear.weight_scale.copy_(fresh.weight_scale)
    assert (linear(x) - want).abs().max() <= tolerance


@each_kind
def test_casts_and_moves_leave_one_byte_and_float32(kind):
    linear = linear_of(random(8, 16), kind, bias=nn.Parameter(torch.ones(8), requires_grad=False))
    q, scale = linear.weight.clone(), linear.weight_scale.clone()
    nn.Sequential(linear).to(torch.bfloat16)
    assert linear.weight.dtype == QUANTIZED[kind] and torch.equal(linear.weight.float(), q.float())
    assert linear.weight_scale.dtype == torch.float32 and torch.equal(linear.weight_scale, scale)
    assert linear.bias.dtype == torch.bfloat16
    linear(random(2, 16))
    assert linear.arithmetic and linear.to("meta").arithmetic is None and linear.weight.is_meta
    linear.to_empty(device="cpu")
    assert linear.weight.dtype == QUANTIZED[kind] and not linear.weight_scale.is_meta


@pytest.mark.parametrize(
    "kind, shape, device, capability, hip, usual, obstacle",
    [
        ("fp8", (5, 37), "cpu", (9, 0), None, "weight_only", ""),
        ("fp8", (48, 16), "cuda", (8, 9), None, "scaled_mm", ""),
        ("int8", (8, 24), "cuda", (8, 0), None, "int_mm", ""),
        ("fp8", (48, 24), "cuda", (9, 0), None, "weight_only", "multiples of 16"),
        ("int8", (12, 8), "cuda", (9, 0), None, "weight_only", "multiples of 8"),
        ("fp8", (48, 16), "cuda", (8, 0), None, "weight_only", "compute capability 8.9"),
        ("int8", (8, 8), "mps", (9, 0), None, "weight_only", "known on NVIDIA GPUs alone"),
        ("fp8", (48, 16), "cuda", (9, 0), "6.4", "weight_only", "known on NVIDIA GPUs alone"),
    ],
)
def test_the_arithmetic_is_the_devices_best_and_what_rules_it_out_is_said(
    monkeypatch, kind, shape, device, capability, hip, usual, obstacle
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    found, said = arithmetic_of(kind, shape, torch.device(device))
    assert found == usual and said.endswith(obstacle) and bool(said) == bool(obstacle)


def test_a_linear_warns_once_if_it_is_not_multiplied_as_usual(monkeypatch):
    monkeypatch.setattr(quantize, "_int_mm_is_exact", lambda: False)
    linear, x = linear_of(random(8, 16), "int8"), random(2, 16)
    with pytest.warns(UserWarning, match=r"int8 weights \[8, 16\] .* weight_only.* this CPU's"):
        first = linear(x)
    monkeypatch.setattr(quantize, "_int_mm_is_exact", lambda: True)
    usual = linear_of(random(8, 16), "int8"), linear_of(random(8, 16), "fp8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (linear(x) - first).abs().max() <= rounding(terms=16, size=float(first.abs().max()))
        assert [each(x).shape for each in usual] == [(2, 8)] * 2
    assert [each.arithmetic for each in usual] == ["int_mm", "weight_only"]


def test_int8_is_right_on_a_cpu_whose_products_saturate():
    code = """
import torch, warnings
from llamarl.models.quantize import QuantizedLinear
warnings.simplefilter("ignore")
linear = QuantizedLinear(64, 16, "int8")
linear.weight.fill_(127), linear.weight_scale.fill_(1)
print(linear(torch.full((16, 64), 127.0)).unique().tolist(), flush=True)
"""
    # oneDNN then acts as if the CPU had no VNNI.
    said = run_python("-c", code, ONEDNN_MAX_CPU_ISA="AVX2")
    assert said.strip() == f"[{64 * 127.0 * 127}]"


# --- Decoders ---


@each_arithmetic
def test_the_tiny_model_is_close_to_its_quantised_self(kind, arithmetic):
    decoder = load_weights(meta_decoder(), tiny_directory()).eval()
    exact = logprobs_of(decoder)
    quantize_decoder(decoder, kind)
    for module in decoder.modules():
        if isinstance(module, QuantizedLinear):
            module.arithmetic = arithmetic
    quantised = logprobs_of(decoder)
    kl = (quantised.exp() * (quantised - exact)).sum(-1).mean().item()
    assert 0 < kl < KL[kind, arithmetic]


@each_kind
def test_names_shapes_and_dtypes_are_what_is_quantized_says(kind):
    skip = ("down_proj", "layers.0.")
    want = {}
    for name, p in named_parameters_hf(meta_decoder()):
        chosen = is_quantized(name, p.shape, skip)
        want[name] = p.shape, QUANTIZED[kind] if chosen else torch.float32
        if chosen:
            want[name + "_scale"] = p.shape[:1], torch.float32
    decoder = meta_decoder()
    quantize_decoder(decoder, kind, skip)
    got = {name: (p.shape, p.dtype) for name, p in named_parameters_hf(decoder)}
    assert got == want and all(p.is_meta for p in decoder.parameters())
    # 3 of 4 layers, q, k, v, o, gate and up
    one_byte = [name for name, (_, dtype) in got.items() if dtype == QUANTIZED[kind]]
    assert len(one_byte) == 18 and "model.layers.1.self_attn.q_proj.weight" in one_byte
    with pytest.raises(ValueError, match="dwon_proj"):
        quantize_decoder(meta_decoder(), kind, ("dwon_proj",))


UNTIED = model_config(vocab_size=96, hidden_size=32, intermediate_size=64, head_dim=8)


@pytest.mark.bitwise(
    "activations are rounded to int8 or fp8 at thresholds, where a last bit is a whole step"
)
@each_kind
def test_an_untied_head_is_quantised_where_it_is_asked_for(kind):
    torch.manual_seed(0)
    decoder = build_decoder(UNTIED, device="cpu").requires_grad_(False)
    for p in decoder.parameters():
        torch.nn.init.normal_(p, std=0.3)
    tokens, attention = torch.arange(12), PackedAttention(torch.tensor([0, 12]))
    quantize_decoder(decoder, kind)
    kept = decoder(tokens, tokens, attention)
    hidden = decoder(tokens, tokens, attention, lambda h_TD, w_VD: h_TD)
    quantize_decoder(decoder, kind, ())
    head = decoder.output
    assert isinstance(head, QuantizedLinear) and head.weight.dtype == QUANTIZED[kind]
    logits = decoder(tokens, tokens, attention)
    assert torch.equal(logits, head(hidden)) and not torch.equal(logits, kept)
    torch.testing.assert_close(logits, kept, rtol=0, atol=0.05 * kept.abs().max().item())


# --- KL ---


def test_kl_from_top_by_hand():
    other = torch.tensor([[1 / 4, 1 / 4, 1 / 2]], dtype=torch.float64).log()
    reference = torch.tensor([[1 / 2, 1 / 4, 1 / 4]], dtype=torch.float64).log()
    for ids, of, want in (
        # The first id against the rest: 1/4 ln(1/4 / 1/2) + 3/4 ln(3/4 / 1/2) = 0.1308
        ([0], other, 0.25 * math.log(0.5) + 0.75 * math.log(1.5)),
        # All three: 1/4 ln 1/2 + 0 + 1/2 ln 2 = ln 2 / 4
        ([2, 0, 1], other, math.log(2) / 4),
        ([1], reference, 0),
    ):
        got = kl_from_top(torch.tensor([ids]), reference[:, ids], of)
        assert got.dtype == torch.float64 and got.item() == pytest.approx(want, abs=EXACT)


@given(
    seed=st.integers(0, 999),
    vocabulary=st.integers(2, 40),
    sharpness=st.sampled_from([0.1, 1.0, 5.0]),
    data=st.data(),
)
@settings(max_examples=60)
def test_kl_from_top_is_the_kl_of_all_ids_and_never_more(seed, vocabulary, sharpness, data):
    known = data.draw(st.integers(1, vocabulary))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, vocabulary, generator=generator, dtype=torch.float64)
    reference, other = (sharpness * logits).log_softmax(-1).unbind()
    full = (other.exp() * (other - reference)).sum(-1)
    order = reference.argsort(-1, descending=True)

    def bound_of(number: int) -> torch.Tensor:
        top = order[:, :number]
        return kl_from_top(top, reference.gather(1, top), other)

    assert torch.allclose(bound_of(vocabulary), full, rtol=0, atol=EXACT)
    bound = bound_of(known)
    assert (bound >= 0).all() and (bound <= full + EXACT).all()
    if known > 1 and sharpness <= 1:  # else what is left for the rest may be rounding
        assert (bound_of(known - 1) <= bound + EXACT).all()


def test_kl_from_top_where_the_rest_is_nothing():
    half = math.log(0.5)

    def kl(reference, other):
        return kl_from_top(torch.tensor([[0, 1]]), torch.tensor([reference]), other).item()

    # Logprobs whose probabilities exceed 1 by float32's rounding leave less than nothing for a rest
    # of e^-20.
    other = torch.tensor([[half, half, -20.0]], dtype=torch.float64)
    assert 0 <= kl([half + 1e-6, half + 1e-6], other) < 10 * math.exp(-20)
    # The generator gives no mass where the reference gives some, and the other way round; NaN stays
    # visible.
    nothing = torch.tensor([[0.0, -math.inf, -math.inf]])
    assert kl([half, half], nothing) == pytest.approx(math.log(2), abs=1e-6)
    assert kl([0.0, -math.inf], other) == math.inf
    assert math.isnan(kl([half, half], torch.full((1, 3), math.nan)))
