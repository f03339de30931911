"""Chunked logprobs against float64, their gradients, and the memory they promise."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import llamarl.learning.logprobs as module
from llamarl.learning.logprobs import chunked_logprobs, make_head

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("threads_of_machine")]

FP32_TOLERANCE = 3e-6  # nats; logits of order 10 carry float32 rounding of 1e-6
# KEEP_LOGITS, KEEP_BYTES
WAYS = {"kept": (1 << 22, 0), "narrow": (0, 1 << 26), "recomputed": (0, 0)}


@pytest.fixture(params=list(WAYS))
def path(request, monkeypatch):
    """The ways to backward: logits kept as they are or in the model's dtype, and multiplied again
    chunk by chunk.
    """
    go(monkeypatch, request.param)


def go(monkeypatch, way):
    for name, value in zip(("KEEP_LOGITS", "KEEP_BYTES"), WAYS[way]):
        monkeypatch.setattr(module, name, value)


def problem(tokens, dim, vocab, dtype=torch.float64, seed=0):
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, dim, generator=random, dtype=torch.float64)
    weight = torch.randn(vocab, dim, generator=random, dtype=torch.float64)
    labels = torch.randint(0, vocab, (tokens,), generator=random)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def oracle(hidden, weight, labels, temperature):
    logp = torch.log_softmax(hidden.double() @ weight.double().T / temperature, dim=-1)
    return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@settings(max_examples=25)
@given(
    tokens=st.integers(1, 33),
    vocab=st.integers(1, 70),
    chunk=st.integers(1, 40),
    temperature=st.sampled_from([0.3, 1, 2.5]),
)
def test_float32_values_are_those_of_float64_for_every_shape_and_chunk(
    tokens, vocab, chunk, temperature
):
    hidden, weight, labels = problem(tokens, 6, vocab, torch.float32)
    want = oracle(hidden, weight, labels, temperature)
    for way in WAYS:
        with pytest.MonkeyPatch.context() as monkeypatch:
            go(monkeypatch, way)
            given = {"temperature": temperature, "chunk_tokens": chunk}
            got = chunked_logprobs(hidden, weight, labels, **given)
        for ours, exact in zip(got, want):
            assert ours.dtype == torch.float32
            close = {"atol": FP32_TOLERANCE / temperature, "rtol": FP32_TOLERANCE}
            torch.testing.assert_close(ours.double(), exact, **close)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_backward_equals_autograd_through_the_full_logits(path, entropy_grad):
    hidden, weight, labels = problem(50, 8, 31)
    upstream = torch.randn(2, 50, dtype=torch.float64)
    given = {"temperature": 1.3, "chunk_tokens": 16, "entropy_grad": entropy_grad}
    got = chunked_logprobs(hidden, weight, labels, **given)
    want = oracle(hidden, weight, labels, 1.3)
    used = slice(2 if entropy_grad else 1)  # else the entropy has no gradient
    ours = torch.autograd.grad(got[used], (hidden, weight), tuple(upstream[used]))
    exact = torch.autograd.grad(want[used], (hidden, weight), tuple(upstream[used]))
    torch.testing.assert_close(ours, exact, atol=1e-13, rtol=1e-12)


def test_backward_twice_gives_the_same_gradient_twice(path):
    hidden, weight, labels = problem(9, 4, 5)
    logprobs, _ = chunked_logprobs(hidden, weight, labels, chunk_tokens=4)
    first = torch.autograd.grad(logprobs.sum(), (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_entropy_has_no_gradient_unless_asked_and_temperature_zero_is_one():
    given = problem(4, 3, 5)
    assert not chunked_logprobs(*given)[1].requires_grad
    assert chunked_logprobs(*given, entropy_grad=True)[1].requires_grad
    zero, one = (chunked_logprobs(*given, temperature=t)[0] for t in (0.0, 1.0))
    assert torch.equal(zero, one)


def test_only_wanted_gradients_are_made(path):
    hidden, weight, labels = problem(6, 3, 5)
    chunked_logprobs(hidden.detach(), weight, labels, chunk_tokens=4)[0].sum().backward()
    chunked_logprobs(hidden, weight.detach(), labels, chunk_tokens=4)[0].sum().backward()
    exact = torch.autograd.grad(oracle(hidden, weight, labels, 1.0)[0].sum(), (hidden, weight))
    torch.testing.assert_close((hidden.grad, weight.grad), exact)


def test_bfloat16_logits_get_a_float32_softmax(path):
    # Quarters, whose products bfloat16 holds: in no order of summation is anything rounded.
    hidden, weight, labels = problem(20, 16, 300, torch.bfloat16)
    with torch.no_grad():
        for factor in (hidden, weight):
            factor.mul_(2).round_().clamp_(-3, 3).div_(4)
    logits = hidden.double() @ weight.double().T
    assert torch.equal(logits, F.linear(hidden, weight).double())
    got = chunked_logprobs(hidden, weight, labels, chunk_tokens=20)
    for ours, exact in zip(got, oracle(hidden, weight, labels, 1.0)):
        close = {"atol": FP32_TOLERANCE, "rtol": FP32_TOLERANCE}
        torch.testing.assert_close(ours.double(), exact, **close)


def test_bfloat16_weight_gradients_of_many_chunks_add_up_in_float32(monkeypatch):
    # 1024 equal terms: added in bfloat16 they would stop growing at 256.
    go(monkeypatch, "recomputed")
    hidden = torch.ones(1024, 4, dtype=torch.bfloat16)
    weight = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(1024, dtype=torch.int64)
    chunked_logprobs(hidden, weight, labels, chunk_tokens=1)[0].sum().backward()
    assert weight.grad.tolist() == [[512.0] * 4, [-512.0] * 4]


def test_extreme_logits_stay_finite(path):
    hidden, weight, labels = problem(8, 4, 9, torch.float32)
    hidden = (hidden * 1e6).detach().requires_grad_()
    logprobs, entropy = chunked_logprobs(hidden, weight, labels, chunk_tokens=3)
    logprobs.sum().backward()
    assert logprobs.isfinite().all() and entropy.isfinite().all()
    assert (entropy > -1e-6).all()  # 0, but for the order of a sum
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation gives."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.largest = max(self.largest, elements)
        return out


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_no_tensor_grows_with_tokens_times_vocab(monkeypatch, entropy_grad):
    go(monkeypatch, "recomputed")
    hidden, weight, labels = problem(400, 4, 50, torch.float32)
    given = {"chunk_tokens": 10, "entropy_grad": entropy_grad}
    with LargestTensor() as seen:
        logprobs, entropy = chunked_logprobs(hidden, weight, labels, **given)
        (logprobs.sum() + entropy.sum()).backward()
    assert seen.largest <= max(10 * 50, 400 * 4, 50 * 4) < 400 * 50


def test_head_gives_the_labels_of_chosen_rows_and_their_gradients():
    hidden, weight, _ = problem(10, 4, 7)
    rows, labels = torch.tensor([[1, 4, 4, 9], [0, 3, 6, 3]])  # row 4 predicts two labels
    got = make_head(labels, rows, entropy_grad=True)(hidden, weight)
    want = oracle(hidden[rows], weight, labels, 1.0)
    torch.testing.assert_close(got, want)
    assert all(part._base is None for part in got), "FSDP2 warns of views"
    ours = torch.autograd.grad([x.sum() for x in got], (hidden, weight))
    exact = torch.autograd.grad([x.sum() for x in want], (hidden, weight))
    torch.testing.assert_close(ours, exact, atol=1e-14, rtol=1e-12)


def test_no_labels_give_zero_gradients_not_none(path):
    hidden, weight, _ = problem(3, 4, 7)
    nothing = torch.empty(0, dtype=torch.int64)
    logprobs, entropy = make_head(nothing, nothing)(hidden, weight)
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert hidden.grad.abs().max() == 0 and weight.grad.abs().max() == 0


@pytest.mark.parametrize(
    ("num_labels", "options", "message"),
    [
        (3, {}, "one label a token"),
        (4, {"temperature": -1.0}, "temperature >= 0"),
        (4, {"chunk_tokens": 0}, "chunk_tokens >= 1"),
    ],
)
def test_wrong_arguments_are_named(num_labels, options, message):
    labels = torch.zeros(num_labels, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        chunked_logprobs(torch.zeros(4, 2), torch.zeros(5, 2), labels, **options)


@pytest.mark.bitwise("kept logits are the recomputed ones")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_logits_give_the_bits_of_recomputed_ones(monkeypatch, dtype):
    found = []
    for way in ("narrow", "recomputed"):
        go(monkeypatch, way)
        hidden, weight, labels = problem(30, 6, 40, dtype)
        given = {"temperature": 0.7, "chunk_tokens": 8, "entropy_grad": True}
        values = chunked_logprobs(hidden, weight, labels, **given)
        (values[0].sum() + values[1].square().sum()).backward()
        found.append((*values, hidden.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found)) and found[0][3].abs().max() > 0.1
