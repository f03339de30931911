import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.inference import sampler
from llamarl.inference.sampler import SamplingParams, process, sample, sample_keys, uniforms

pytestmark = pytest.mark.machine

TOLERANCE = 1e-5  # float32 logprobs against float64
CHI2_STDEVS = 5  # chi-square of d degrees of freedom: mean d, variance 2d
LARGE = 1500  # a vocabulary beyond the one-pass CDF, and no multiple of a block
WHOLE = 1536  # six blocks


@pytest.fixture(params=["native", "torch"])
def way(request, monkeypatch):
    """Both ways to sample: the C kernel and PyTorch's operations."""
    if request.param == "torch":
        monkeypatch.setattr(sampler, "library", lambda *_: None)
    elif sampler.library("decode", "-fopenmp") is None:
        pytest.skip("no C compiler, or LLAMARL_NATIVE=0")


def draws(count, seed=0, ticket=0):
    keys = sample_keys(torch.tensor([(seed, 0, ticket, index) for index in range(count)]))
    return uniforms(keys, torch.zeros_like(keys))


def naive(logits, temperature, top_k, top_p, min_p):
    """Float64 logprobs of one row, one token at a time."""
    scaled = [x / (temperature or 1.0) for x in logits.double().tolist()]
    likeliest = sorted(scaled, reverse=True)
    scaled = [x if math.exp(x - likeliest[0]) >= min_p else -math.inf for x in scaled]
    if top_k:
        scaled = [x if x >= likeliest[min(top_k, len(scaled)) - 1] else -math.inf for x in scaled]
    weights = [math.exp(x - likeliest[0]) for x in scaled]
    total = sum(weights)
    if top_p < 1:
        mass, cut = 0.0, None
        for x, w in sorted(zip(scaled, weights), reverse=True):
            if mass / total >= top_p:
                break
            mass, cut = mass + w, x
        scaled = [x if x >= cut else -math.inf for x in scaled]
        total = sum(w for x, w in zip(scaled, weights) if x > -math.inf)
    return torch.tensor([x - likeliest[0] - math.log(total) for x in scaled], dtype=torch.float64)


def test_uniforms_are_splitmix64():
    # The first outputs of the reference splitmix64 from state 0, shifted to 53 bits.
    words = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    got = uniforms(torch.zeros(3, dtype=torch.int64), torch.arange(3))
    assert got.tolist() == [(word >> 11) * 2.0**-53 for word in words]


def test_uniforms_are_uniform_and_unlike_between_keys_and_counters():
    u = draws(20_000)
    assert 0 <= u.min() and u.max() < 1
    counts = torch.histc(u.float(), 50, 0, 1)
    assert ((counts - 400) ** 2 / 400).sum() < 49 + CHI2_STDEVS * math.sqrt(98)
    for other in (draws(20_000, seed=1), draws(20_000, ticket=1)):
        assert abs(torch.corrcoef(torch.stack([u, other]))[0, 1]) < CHI2_STDEVS / math.sqrt(20_000)
    every = torch.cartesian_prod(*[torch.arange(4)] * 4)
    assert len(sample_keys(every).unique()) == 256


@pytest.mark.parametrize("vocab", [256, WHOLE])
def test_the_greedy_token_is_the_first_of_the_likeliest(way, vocab):
    logits = torch.randn(50, vocab, generator=torch.Generator().manual_seed(0)).round()  # many ties
    tokens, logprobs = sample(logits, draws(50), torch.ones(50, dtype=torch.bool))
    assert torch.equal(tokens, (logits == logits.amax(1, keepdim=True)).int().argmax(1))
    torch.testing.assert_close(logprobs, logits.log_softmax(1).amax(1), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("vocab", [52, LARGE])
def test_frequencies_follow_the_softmax(way, vocab):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 1.5
    count = 40_000
    tokens, logprobs = sample(logits.expand(count, -1), draws(count))
    expected = logits.double().softmax(0) * count
    seen = torch.bincount(tokens, minlength=vocab).double()
    rare = expected < 10  # merged into one cell, as chi-square wants
    expected, seen = (torch.cat([x[~rare], x[rare].sum(0, keepdim=True)]) for x in (expected, seen))
    chi2 = ((seen - expected) ** 2 / expected)[expected > 0].sum()
    freedom = expected.numel() - 1
    assert abs(chi2 - freedom) < CHI2_STDEVS * math.sqrt(2 * freedom)
    torch.testing.assert_close(logprobs, logits.log_softmax(0)[tokens], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("vocab", [52, LARGE])
@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_a_token_of_probability_zero_is_never_sampled(way, vocab, u):
    logits = torch.full((vocab - 2, vocab), -math.inf)
    possible = torch.arange(1, vocab - 1)  # row i may only sample token i+1
    logits[possible - 1, possible] = 0.0
    tokens, logprobs = sample(logits, torch.full((vocab - 2,), u, dtype=torch.float64))
    assert torch.equal(tokens, possible) and not logprobs.any()


def test_rounding_of_block_sums_never_carries_a_sample_past_the_last_possible_token(way):
    logits = torch.randn(200, LARGE, generator=torch.Generator().manual_seed(0))
    logits[:, 1000:] = -math.inf  # in the middle of a block
    tokens, _ = sample(logits, torch.full((200,), 1 - 2.0**-53, dtype=torch.float64))
    assert tokens.max() < 1000


@settings(max_examples=80)
@given(
    st.integers(0, 2**31),
    st.sampled_from([3, 52, LARGE, WHOLE]),
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 3, 40, 400, 9999]),
    st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 1e-4, 0.1, 0.7, 1.0]),
)
def test_processed_logprobs_equal_a_naive_float64_reference(
    seed, vocab, temperature, top_k, top_p, min_p
):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3
    # Beside a row that asks for nothing, which must stay untouched.
    both = torch.stack([logits, logits])
    processed = process(
        both,
        temperature_N=torch.tensor([temperature, 1.0]),
        top_k_N=torch.tensor([top_k, 0]),
        top_p_N=torch.tensor([top_p, 1.0], dtype=torch.float64),
        min_p_N=torch.tensor([min_p, 0.0], dtype=torch.float64),
    )
    expected = naive(logits, temperature, top_k, top_p, min_p)
    logprobs = processed[0].log_softmax(0).double()
    torch.testing.assert_close(logprobs, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(processed[1], logits)
    u = torch.tensor([0.6, 0.6], dtype=torch.float64)
    tokens, logprobs = sample(processed, u, torch.tensor([temperature == 0, False]))
    assert expected[tokens[0]] > -math.inf
    assert logprobs[0].item() == pytest.approx(expected[tokens[0]].item(), abs=TOLERANCE)
    if temperature == 0:
        assert tokens[0] == logits.argmax()


def test_both_ways_to_sample_agree(monkeypatch):
    if sampler.library("decode", "-fopenmp") is None:
        pytest.skip("no C compiler, or LLAMARL_NATIVE=0")
    logits = torch.randn(3000, LARGE, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 700:800], greedy = -math.inf, torch.arange(3000) % 7 == 0
    got = sample(logits, draws(3000), greedy)
    monkeypatch.setattr(sampler, "library", lambda *_: None)
    expected = sample(logits, draws(3000), greedy)
    same = got[0] == expected[0]
    assert (~same).sum() <= 1  # where a uniform lies within rounding of a token's edge
    torch.testing.assert_close(got[1][same], expected[1][same], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("vocab", [5, LARGE])
def test_nan_logits_give_a_token_of_the_vocabulary_and_a_nan_logprob(way, vocab):
    logits = torch.zeros(2, vocab)
    logits[0, 3] = math.nan
    tokens, logprobs = sample(logits, torch.tensor([0.9, 0.9], dtype=torch.float64))
    assert tokens.max() < vocab and logprobs.isnan().tolist() == [True, False]


def test_min_p_is_transformers():
    from transformers import MinPLogitsWarper

    logits = torch.randn(4, LARGE, generator=torch.Generator().manual_seed(3)) * 3
    want = MinPLogitsWarper(0.05)(None, logits / 0.7)
    rows = {"temperature_N": torch.full((4,), 0.7), "min_p_N": torch.full((4,), 0.05).double()}
    assert torch.equal(process(logits, **rows), want)
    assert 0 < want.isinf().sum() < want.numel()


def test_ties_with_the_last_kept_token_are_kept():
    logits = torch.tensor([[1.0, 2.0, 2.0, 3.0, 0.0]])
    # Masses .58 .21 .21 .08 .03 (rounded): .6 needs the first two, and the second ties with the
    # third.
    for narrowed in ({"top_k_N": torch.tensor([2])}, {"top_p_N": torch.tensor([0.6]).double()}):
        kept = process(logits, **narrowed).isfinite()
        assert kept.tolist() == [[False, True, True, True, False]]


def test_a_banned_token_has_probability_zero_and_padding_bans_nothing():
    logits = torch.zeros(2, 4)
    processed = process(logits, banned_NS=torch.tensor([[0, -1, 2], [-1, -1, -1]]))
    assert processed.softmax(1).tolist() == [[0.0, 0.5, 0.0, 0.5], [0.25] * 4]
    assert not logits.any()


def test_all_bad_sampling_parameters_are_named_at_once():
    bad = {"max_new_tokens": 0, "temperature": -1.0, "top_k": -1, "top_p": 0.0, "n": 0}
    bad["min_p"] = -0.1
    said = "max_new_tokens.*temperature.*top_k.*top_p.*min_p.*min_new_tokens.*stop_token_ids.*n=0"
    with pytest.raises(ValueError, match=said):
        SamplingParams(min_new_tokens=2, stop_token_ids=(-1,), **bad)
    with pytest.raises(ValueError, match="temperature=nan"):
        SamplingParams(max_new_tokens=1, temperature=float("nan"))
    assert SamplingParams(max_new_tokens=1, stop_token_ids=[2]).stop_token_ids == (2,)
