"""Kernels of a training step against the plain operations beside them, forward and backward."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import Tensor, nn

import llamarl.learning.logprobs as logprobs
import llamarl.models.attention as attention
import llamarl.models.fused as fused
from llamarl.models.attention import PackedAttention, Rotary
from llamarl.models.masters import Masters
from tests.updating import VERSION, decoder_of, groups_of, update_of

pytestmark = pytest.mark.machine

# A few roundings of the dtype, relative to the largest value. Plain bfloat16 rounds after every
# operation.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-6, torch.float64: 1e-12}
DTYPES = list(ROUNDING)
KERNELS = [torch.float32, torch.bfloat16]  # have kernels of their own


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)


def without_kernels(monkeypatch) -> None:
    for module in (fused, attention, logprobs):
        monkeypatch.setattr(module, "kernels", lambda x: None)


def with_gradients(function, inputs: list[Tensor]) -> list[Tensor]:
    """What a function gives, and the gradients of its inputs under upstream ones that
    all differ.
    """
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    outputs = list(out) if isinstance(out, tuple) else [out]
    upstream = [random(*y.shape, seed=100 + i, dtype=y.dtype) for i, y in enumerate(outputs)]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, upstream)]


def check(monkeypatch, function, inputs: list[Tensor], dtype: torch.dtype) -> None:
    """The kernel's and the plain results are those of float64, each to the dtype's rounding."""
    inputs = [x.to(dtype) for x in inputs]
    ours = with_gradients(function, inputs)
    with monkeypatch.context() as patch:
        without_kernels(patch)
        plain = with_gradients(function, inputs)
        exact = with_gradients(function, [x.double() for x in inputs])
    for got, same, want in zip(ours, plain, exact, strict=True):
        assert got.dtype == same.dtype and got.shape == want.shape
        allowed = ROUNDING[dtype] * float(want.abs().max())
        assert float((got.double() - want).abs().max()) <= allowed
        assert float((same.double() - want).abs().max()) <= 2 * allowed


def norm(x, scale):
    return fused.add_rms_norm(x, None, scale, 1e-5)[1]


def stream_and_norm(x, change, scale):
    return fused.add_rms_norm(x, change, scale, 1e-5)


def turned(x):
    cos, sin = Rotary(16, 1e4, None)(torch.tensor([0, 1, 2, 40, 3]), 41)
    return fused.rotate(x, cos, sin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "function, inputs",
    [
        (norm, [random(7, 5), random(5, seed=1)]),
        (norm, [random(7, 130), random(130, seed=1)]),
        (stream_and_norm, [random(7, 33), random(7, 33, seed=1), random(33, seed=2)]),
        (fused.swiglu, [4 * random(9, 37), random(9, 37, seed=1)]),
        (turned, [random(5, 3, 16)]),
    ],
    ids=["short norm", "long norm", "stream and norm", "swiglu", "rotation"],
)
def test_a_kernel_gives_what_float64_does(monkeypatch, function, inputs, dtype):
    check(monkeypatch, function, inputs, dtype)


def test_the_stream_passes_a_norm_without_a_change():
    x, scale = random(3, 8, dtype=torch.float32).requires_grad_(), torch.ones(8)
    h, _ = fused.add_rms_norm(x, None, scale, 1e-5)
    h.sum().backward()
    assert torch.equal(h, x) and torch.equal(x.grad, torch.ones(3, 8))


@pytest.mark.parametrize("dtype", KERNELS)
def test_a_frozen_scale_costs_no_gradient_and_changes_no_other(monkeypatch, dtype):
    sums = []

    def noting(kernel, like, *arguments):
        if kernel == "rms_norm_backward":
            sums.append(arguments[1])
        call_kernel(kernel, like, *arguments)

    call_kernel = fused.call_kernel
    monkeypatch.setattr(fused, "call_kernel", noting)
    found = []
    for is_trained in (True, False):
        x = random(7, 33, dtype=dtype).requires_grad_()
        scale = random(33, seed=1, dtype=dtype).requires_grad_(is_trained)
        h, y = fused.add_rms_norm(x, None, scale, 1e-5)
        (h + y * y).sum().backward()
        assert (scale.grad is not None) == is_trained
        found.append(x.grad)
    torch.testing.assert_close(*found)
    if fused.kernels(x) is not None:
        assert sums[0] is not None and sums[1] is None


def test_swiglu_of_large_and_broken_gates():
    gate = torch.tensor([-1e30, -100.0, -50.0, 0.0, 50.0, 1e30, float("nan")])
    got = fused.swiglu(gate, torch.ones(7))
    assert got[:4].abs().max() < 1e-19
    assert got[4:6].tolist() == pytest.approx([50.0, 1e30])
    assert got[6].isnan()


@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize("bias", [False, True])
def test_projections_of_one_input(dtype, bias):
    linears = [nn.Linear(12, n, bias=bias).to(dtype) for n in (8, 4, 4)]
    parameters = list(chain.from_iterable(linear.parameters() for linear in linears))
    x = random(6, 12, dtype=dtype)

    def plain(x):
        return tuple(linear(x) for linear in linears)

    def gradients(function):
        losses = [y.float().square().sum() for y in function(x)]
        return torch.autograd.grad(losses, parameters)

    def together(x):
        return fused.projections(x, *linears)

    got = [*with_gradients(together, [x]), *gradients(together)]
    want = [*with_gradients(plain, [x]), *gradients(plain)]
    for ours, theirs in zip(got, want, strict=True):
        allowed = ROUNDING[dtype] * theirs.double().abs().max()
        assert (ours.double() - theirs.double()).abs().max() <= allowed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, outputs", [(64, 96), (33, 70), (1, 40), (40, 1)])
def test_the_gradient_of_a_weight(monkeypatch, dtype, tokens, outputs):
    monkeypatch.setattr(fused, "_TURNED_ROWS", 32)
    grad_TN = random(tokens, outputs, dtype=dtype)
    x_TD = random(tokens, 24, seed=1, dtype=dtype)
    exact = grad_TN.double().T @ x_TD.double()
    lib = fused.kernels(grad_TN)
    for has_tiles in (False, True):  # else a kernel turns nothing on a machine without them
        if lib is not None:
            monkeypatch.setattr(lib, "has_tiles", lambda says=has_tiles: says)
        got = fused.weight_gradient(grad_TN, x_TD)
        assert got.dtype == dtype
        largest = float(exact.abs().max())
        assert float((got.double() - exact).abs().max()) <= ROUNDING[dtype] * largest


SEGMENTS = {  # lengths, parents
    "one": ([9], [-1]),
    "equal": ([6, 6], [-1, -1]),
    "unlike": ([11, 1, 4], [-1, -1, -1]),
    "children": ([5, 8, 3, 7, 2, 4], [-1, 0, 0, -1, 3, 3]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("segments", list(SEGMENTS))
def test_packed_attention(monkeypatch, dtype, segments):
    lengths, parents = SEGMENTS[segments]
    tokens = sum(lengths)
    context = PackedAttention(torch.tensor([0, *lengths]).cumsum(0), torch.tensor(parents))

    def attended(q, k, v):
        return context.attend(0, q, k, v)

    heads = [random(tokens, 6, 8), random(tokens, 2, 8, seed=1), random(tokens, 2, 8, seed=2)]
    check(monkeypatch, attended, heads, dtype)


def test_what_is_not_a_number_stays_so_in_attention():
    q, k, v = (torch.ones(4, 2, 8) for _ in range(3))
    k[1, 0, 3] = float("nan")
    out = PackedAttention(torch.tensor([0, 4])).attend(0, q, k, v)
    assert out[1:, 0].isnan().all() and out[0].isfinite().all() and out[:, 1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_head(monkeypatch, dtype, entropy_grad):
    """Of the same logits: products would add their own rounding. More of them than a block of the
    kernel's sums.
    """
    labels, temperature = torch.tensor([3, 0, 1499, 7, 7]), 0.8
    logits = 3 * random(5, 1500).to(dtype)
    a, b = random(5, seed=1), random(5, seed=2) if entropy_grad else None

    def head(logits):
        wide = torch.promote_types(logits.dtype, torch.float32)
        found = torch.empty(4, 5, dtype=wide)
        logprobs.log_softmax(logits, labels, temperature, out=found)
        of_entropy = None if b is None else b.to(wide)
        given = (labels, found, a.to(wide), of_entropy, temperature)
        return found, logprobs.log_softmax_backward(logits.clone(), *given)

    ours = head(logits)
    with monkeypatch.context() as patch:
        without_kernels(patch)
        plain, exact = head(logits), head(logits.double())
    for results in (ours, plain):
        assert (results[0] - exact[0]).abs().max() <= 5e-6  # nats of up to 20
        assert (results[1] - exact[1]).abs().max() <= ROUNDING[dtype] * exact[1].abs().max()


@pytest.mark.bitwise("the training kernels sum alike on any number of threads")
@pytest.mark.parametrize("dtype", KERNELS)
def test_results_do_not_depend_on_the_number_of_threads(dtype):
    before = torch.get_num_threads()

    def block(*inputs):
        return fused.swiglu(*stream_and_norm(*inputs))

    inputs = [random(40, 70), random(40, 70, seed=1), random(70, seed=2)]
    inputs = [x.to(dtype) for x in inputs]
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(with_gradients(block, inputs))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, three) for one, three in zip(*found, strict=True))


# --- what kernels are given ---


def test_a_label_that_is_no_row_of_the_head_is_refused_before_a_kernel_sees_it():
    hidden, weight = random(3, 8, dtype=torch.float32), random(5, 8, dtype=torch.float32)
    for label in (-1, 5):
        with pytest.raises(IndexError, match=r"labels .*: there are 0\.\.4"):
            logprobs.chunked_logprobs(hidden, weight, torch.tensor([0, label, 1]))


def test_segments_that_reach_outside_the_tokens_are_refused_before_a_kernel_sees_them():
    with pytest.raises(IndexError, match="segments reach over tokens"):
        PackedAttention(torch.tensor([0, 7, 4]))
    fits = PackedAttention(torch.tensor([0, 3, 7]))
    heads = random(6, 2, 4, dtype=torch.float32)
    with pytest.raises(ValueError, match="6 tokens for segments of 7 in all"):
        fits.attend(0, heads, heads, heads)


@pytest.mark.parametrize("compute_dtype", KERNELS)
def test_the_weights_gradients_of_several_microbatches_carry_no_graph(compute_dtype):
    """Else each would keep what its products read, of all microbatches, until they are zeroed."""
    graphs = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                graphs.extend(parameter.grad.requires_grad for parameter in group["params"])
            return super().step(closure)

    decoder = decoder_of()
    if compute_dtype != torch.float32:
        decoder.masters = Masters(decoder, decoder.layers, compute_dtype)
    boundaries = []  # of microbatches
    update = update_of(decoder, optimizer=Watched, microbatch_tokens=20)
    update.run(groups_of(), VERSION, lambda: bool(boundaries.append(0)))
    assert len(boundaries) > 2
    assert graphs == [False] * len(list(decoder.parameters()))
