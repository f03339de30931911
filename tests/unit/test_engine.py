"""The engine's completions against one forward over the whole sequence, however it batches, grows,
swaps weights, or is interrupted; and behind a context, where K/V are taken if they are kept.
"""

import dataclasses
import math
import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from llamarl.inference import generate
from llamarl.inference.engine import Engine
from llamarl.inference.requests import Partial
from llamarl.inference.sampler import SamplingParams
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, read_config
from llamarl.models.hf import load_weights, named_parameters_hf
from tests.decoding import (
    CONFIG,
    MAX_LEN,
    TOLERANCE,
    by_place,
    drain,
    full_forward_logits,
    full_forward_logprobs,
    needs_kernels,
    random_decoder,
)
from tests.engines import load
from tests.random_models import SIZES
from tests.tolerances import assert_same_greedy, margins_of, of_logprobs

pytestmark = pytest.mark.machine

PROMPTS = [[1, 5, 9], [1, 7], [3], [2, 4, 6, 8, 10, 12, 14], [1, 5, 9, 11]]
LONG = [(5 * i) % 29 + 1 for i in range(23)]


def engine(max_slots=8, max_len=MAX_LEN, **options):
    return Engine(random_decoder(), max_slots=max_slots, max_len=max_len, **options)


def assert_close(got, want):
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def assert_parity(e, completions, **processing):
    """Sampled tokens have the logprobs that one forward gives them."""
    assert completions
    for c in completions:
        wanted = full_forward_logprobs(e.decoder, c, **processing)
        assert_close(c.generator_logprobs[c.loss_mask], wanted[c.loss_mask])


def tokens_of(completions):
    return [c.token_ids.tolist() for c in completions]


def test_greedy_equals_transformers_generate(way, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, initializer_range=0.3, bos_token_id=1, eos_token_id=2)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    decoder = load_weights(build_decoder(read_config(tmp_path)), tmp_path)
    greedy = SamplingParams(40, temperature=0.0, stop_token_ids=(2,))
    ours = generate(Engine(decoder, max_slots=3, max_len=64), PROMPTS, greedy)
    for prompt, (completion,) in zip(PROMPTS, ours):
        generated = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        margins = margins_of(model(generated).logits[0, len(prompt) - 1 : -1])
        close = of_logprobs(config, size=float(margins.max()))
        assert_same_greedy(completion.token_ids, generated[0, len(prompt) :], margins, close)


def test_generator_logprobs_equal_a_fresh_full_forward(way):
    e = engine(max_slots=5)
    params = SamplingParams(24, temperature=0.7, stop_token_ids=(2, 3), n=3)
    completions = sum(generate(e, PROMPTS, params), [])
    assert len({c.token_ids.numel() for c in completions}) > 3  # ragged, so that rows were moved
    assert_parity(e, completions, temperature=0.7)


def test_score_is_the_logprobs_of_the_sampling_path():
    e = engine()
    ((completion,),) = generate(e, [PROMPTS[3]], SamplingParams(12, temperature=0.7))
    e.submit(9, [1, 2], SamplingParams(20))
    e.step(2)
    got = e.score(completion.prompt_ids, completion.token_ids, temperature=0.7)
    assert_close(got, completion.generator_logprobs)
    assert_parity(e, drain(e).values())
    assert e.score([1], []).shape == (0,)


def test_a_sample_depends_on_its_seed_and_ticket_alone_and_not_on_slots_batch_or_chunk():
    params = SamplingParams(16, stop_token_ids=(2,), n=4, seed=5)
    others = SamplingParams(7, top_k=3, temperature=0.5, n=2, seed=1)

    def samples(max_slots, chunk, order, *, extra=False, stream=0):
        e = engine(max_slots=max_slots)
        for ticket in order:
            if extra:
                e.submit(100 + ticket, [9, 9, 9], others)
            e.submit(ticket, PROMPTS[ticket], params, stream=stream)
        found = drain(e, chunk).items()
        return {(t, i): c.token_ids.tolist() for (_, t, i), c in found if t < 100}

    alone = samples(1, 3, [0, 1, 2, 3, 4])
    assert len({tuple(ids) for ids in alone.values()}) > 15  # samples differ among themselves
    assert samples(20, 16, [4, 2, 0, 1, 3]) == alone
    assert samples(6, 1, [3, 1, 4, 0, 2], extra=True) == alone
    other = samples(20, 4, range(5), stream=1)
    assert all(other[place] != ids for place, ids in alone.items())


class OverOldKeys:
    """Attention whose second decoder reads the first `kept` keys and values of the first one."""

    padding = 0

    def __init__(self, longest, kept):
        self.longest = longest
        self.kept = kept
        self.cached = {}

    def attend(self, layer, q, k, v):
        if layer in self.cached:
            pairs = zip(self.cached[layer], (k, v))
            k, v = (torch.cat([old[: self.kept], now[self.kept :]]) for old, now in pairs)
        self.cached[layer] = (k, v)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)


def test_new_weights_stamp_later_tokens_and_keep_the_cache():
    e = engine(max_slots=4)
    old = random_decoder(0)
    new = random_decoder(1)
    e.weights_changed(3)
    e.submit(0, PROMPTS[0], SamplingParams(12))
    assert e.step(5) == 5
    load(e, dict(named_parameters_hf(new)), 4)
    completion = drain(e)[0, 0, 0]
    assert completion.policy_versions.tolist() == [3] * 5 + [4] * 7
    assert_close(completion.generator_logprobs[:5], full_forward_logprobs(old, completion)[:5])
    # Token 4 was sampled, but not yet read.
    ids = torch.cat([completion.prompt_ids, completion.token_ids])
    context = OverOldKeys(ids.numel(), kept=3 + 4)
    with torch.no_grad():
        for decoder in (old, new):
            logits = decoder(ids, torch.arange(ids.numel()), context)
    expected = logits[2:-1].log_softmax(1).gather(1, completion.token_ids[:, None]).squeeze(1)
    assert_close(completion.generator_logprobs[5:], expected[5:])
    fresh = full_forward_logprobs(new, completion)
    assert (fresh[5:] - expected[5:]).abs().max() > 100 * TOLERANCE


def test_min_new_tokens_keeps_stop_tokens_out_of_the_distribution():
    e = engine(max_slots=64)
    params = SamplingParams(10, min_new_tokens=4, stop_token_ids=tuple(range(15)), n=50)
    (completions,) = generate(e, [PROMPTS[0]], params)
    assert min(c.token_ids.numel() for c in completions) == 5  # four without a stop token, then one
    for c in completions[:5]:
        logits = full_forward_logits(e.decoder, c)
        logits[:4, :15] = -math.inf
        expected = logits.log_softmax(1).gather(1, c.token_ids[:, None]).squeeze(1)
        assert_close(c.generator_logprobs, expected)


def test_min_p_leaves_out_what_is_less_likely_than_its_share_of_the_likeliest():
    e = engine()
    params = SamplingParams(9, n=6, temperature=1.3, min_p=0.5)
    (completions,) = generate(e, [PROMPTS[1]], params)
    for c in completions:
        scaled = full_forward_logits(e.decoder, c).double() / 1.3
        probabilities = scaled.softmax(1)
        least = probabilities.amax(1, keepdim=True) / 2
        kept = torch.where(probabilities >= least, probabilities, 0)
        of_token = (kept / kept.sum(1, keepdim=True)).gather(1, c.token_ids[:, None])
        assert_close(c.generator_logprobs, of_token.log().squeeze(1).float())


def test_greedy_and_sampling_rows_share_a_batch():
    e = engine()
    ((expected,),) = generate(engine(max_slots=1), PROMPTS[:1], SamplingParams(9, temperature=0.0))
    e.submit(0, PROMPTS[1], SamplingParams(9, n=4, top_p=0.5, temperature=1.3))
    e.submit(0, PROMPTS[0], SamplingParams(9, temperature=0.0), stream=1)
    greedy = drain(e)[1, 0, 0]
    margins = margins_of(full_forward_logits(e.decoder, expected))
    assert_same_greedy(greedy.token_ids, expected.token_ids, margins, TOLERANCE)
    assert_parity(e, [greedy])


@pytest.mark.parametrize(
    "options, submitted, chunk",
    [
        # A whole number of blocks: the place behind it is the next slot's first.
        ({"max_slots": 2, "max_len": 16}, [([1, 2, 3, 4], 12, 1), ([5], 15, 1)], 20),
        # The first ends at place 16 of 16, alone, four tokens before the others, and is not yet
        # taken out: it must not lengthen the cache.
        ({"max_slots": 41}, [([1] * 8, 8, 1), ([5], 12, 40)], 20),
        # Long prompts alone, in groups larger than the slots.
        (
            {"max_slots": 2, "prefill_chunk": 5},
            [(LONG, 6, 3), (PROMPTS[0], 9, 2), (LONG[::-1], 6, 1)],
            4,
        ),
    ],
    ids=["full slots", "ended rows", "long prompts"],
)
def test_whatever_shares_the_cache_is_sampled_as_one_forward_says(way, options, submitted, chunk):
    e = engine(**options)
    for ticket, (prompt, new, n) in enumerate(submitted):
        e.submit(ticket, prompt, SamplingParams(new, n=n))
    found = drain(e, chunk)
    assert len(found) == sum(n for _, _, n in submitted)
    assert_parity(e, found.values())


def test_the_cache_grows_under_running_rows_and_a_full_engine_still_scores(way):
    e = engine(max_slots=3, cache_tokens=3 * 48)  # whole blocks
    e.submit(0, PROMPTS[0], SamplingParams(13))
    e.step(4)
    e.submit(1, PROMPTS[3], SamplingParams(32, n=2))
    e.step(1)
    assert e.free_slots == 0 and e.score([1], [2]).shape == (1,)
    assert_parity(e, drain(e).values())


def test_the_rest_goes_on_where_samples_were_aborted():
    e = engine(max_slots=3)
    e.submit(0, PROMPTS[0], SamplingParams(10, n=2))
    # Longer than the first cache and with more stop tokens than the first table, so that both are
    # made anew while stepping.
    e.submit(1, PROMPTS[1], SamplingParams(30, stop_token_ids=(2, 3), min_new_tokens=30, n=3))
    e.submit(0, PROMPTS[2], SamplingParams(10), stream=1)
    e.step(4)
    assert e.abort(0, stream=0) == 2
    aborted = [(c.finish_reason, c.token_ids.numel()) for _, c in e.pop_finished()]
    assert aborted == [("aborted", 4)] * 2
    rest = drain(e)
    lengths = {key: c.token_ids.numel() for key, c in rest.items()}
    assert lengths == {(0, 1, 0): 30, (0, 1, 1): 30, (0, 1, 2): 30, (1, 0, 0): 10}
    assert_parity(e, [rest[1, 0, 0]])
    assert_parity(e, [rest[0, 1, i] for i in range(3)], banned=(2, 3))


def test_prompts_beyond_one_prefill_are_prefilled_in_parts(monkeypatch):
    params = SamplingParams(4, n=2)
    whole = generate(engine(max_slots=10), PROMPTS, params)
    monkeypatch.setattr("llamarl.inference.runner._PREFILL_TOKENS", 6)
    parts = generate(engine(max_slots=10), PROMPTS, params)
    assert list(map(tokens_of, parts)) == list(map(tokens_of, whole))


def test_a_completion_can_be_trained_on():
    e = engine()
    ((completion,),) = generate(e, [PROMPTS[0]], SamplingParams(4))
    ids = torch.cat([completion.prompt_ids, completion.token_ids])
    ends = torch.tensor([0, ids.numel()])
    logits = e.decoder(ids, torch.arange(ids.numel()), PackedAttention(ends))
    (logits[2:-1].sum(1) * completion.generator_logprobs).sum().backward()
    assert all(p.grad is not None for p in e.decoder.parameters())


def test_what_does_not_fit_is_refused_at_submit():
    e = engine(max_len=16)
    e.submit(0, [1] * 6, SamplingParams(10))
    for prompt, params, problem in (
        ([1] * 7, SamplingParams(10), "7 prompt tokens.*max_new_tokens=10 exceed max_len=16"),
        ([1, -1], SamplingParams(1), "vocabulary of 31"),
        ([1], SamplingParams(1, stop_token_ids=(31,)), "vocabulary of 31"),
    ):
        with pytest.raises(ValueError, match=problem):
            e.submit(1, prompt, params)
    assert e.num_waiting == 1
    for key, value in {"cache_tokens": 39, "prefill_chunk": 0}.items():
        with pytest.raises(ValueError, match=f"{key}={value}"):
            engine(**{key: value})


def test_weights_that_are_not_finite_are_an_error_and_not_a_completion():
    e = engine()
    with torch.no_grad():
        e.decoder.norm.scale[0] = math.nan
    e.submit(0, [1, 2], SamplingParams(3))
    with pytest.raises(RuntimeError, match="not finite under policy version 0"):
        e.step(8)


# --- The native decode path ---


@pytest.mark.parametrize(
    "head_dim, heads, groups, vocab",
    [(8, 6, 2, 31), (48, 4, 4, 97), (80, 6, 2, 31), (128, 4, 4, 97)],
)
def test_the_native_path_takes_any_heads_biases_and_both_dtypes(head_dim, heads, groups, vocab):
    needs_kernels()
    config = dataclasses.replace(
        CONFIG,
        attention_bias=True,
        tie_word_embeddings=groups == 2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        vocab_size=vocab,
        intermediate_size=106,
    )
    params = SamplingParams(80, n=11)  # longer than what attention reads at once
    for dtype, tolerance in ((torch.float32, TOLERANCE), (torch.bfloat16, 0.4)):
        decoder = random_decoder(config=config, scale=0.15)
        e = Engine(decoder, max_slots=11, max_len=100, dtype=dtype)
        assert e._runner.native is not None
        for c in generate(e, [PROMPTS[3]], params)[0]:
            difference = c.generator_logprobs - full_forward_logprobs(e.decoder, c).float()
            assert difference.abs().max() < tolerance


@pytest.mark.bitwise("an engine's completions follow from what it is asked, on any threads")
def test_completions_have_the_same_bits_again_on_other_threads():
    needs_kernels()
    e = engine(max_slots=70)
    prompts = [[1 + i % 30, 5, i % 7] for i in range(70)]
    params = SamplingParams(20, stop_token_ids=(2,))
    together = generate(e, prompts, params)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        again = generate(e, prompts, params)
    finally:
        torch.set_num_threads(threads)
    for (a,), (b,) in zip(together, again):
        assert torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(a.generator_logprobs, b.generator_logprobs)


def test_the_native_path_in_bfloat16_is_as_near_float32_as_the_module_is():
    needs_kernels()
    exact = random_decoder(scale=0.2)
    e = Engine(random_decoder(scale=0.2), max_slots=64, max_len=MAX_LEN, dtype=torch.bfloat16)
    exact.load_state_dict({name: p.float() for name, p in e.decoder.state_dict().items()})
    native, module = [], []
    for c in generate(e, [PROMPTS[3]], SamplingParams(24, n=64))[0]:
        truth = full_forward_logprobs(exact, c)
        native.append((c.generator_logprobs - truth).abs())
        module.append((full_forward_logprobs(e.decoder, c).float() - truth).abs())
    assert torch.cat(native).mean() < torch.cat(module).mean()


@pytest.mark.parametrize("how", ["data", "copy", "told"])
def test_weights_are_native_anew_when_they_are_exchanged_or_written(how):
    e, new = engine(), random_decoder(1)
    generate(e, [PROMPTS[0]], SamplingParams(4))
    with torch.no_grad():
        for parameter, value in zip(e.decoder.parameters(), new.parameters()):
            if how == "data":
                parameter.data = value.data
            elif how == "copy":
                parameter.copy_(value)
            else:
                parameter.data.numpy()[...] = value.data.numpy()  # torch does not see this write
    if how == "told":
        e.weights_changed(1)
    assert_parity(e, generate(e, [PROMPTS[0]], SamplingParams(9))[0])


def test_a_projection_that_is_no_plain_linear_is_left_to_the_module():
    class Halved(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) / 2

    e = engine()
    e.decoder.layers[1].mlp.w2.__class__ = Halved
    e = Engine(e.decoder, max_slots=2, max_len=MAX_LEN)
    assert e._runner.native is None
    assert_parity(e, generate(e, [PROMPTS[0]], SamplingParams(9))[0])


# --- Long prompts, the cache's budget ---


def test_a_long_prompt_is_prefilled_in_pieces_between_which_rows_decode(way):
    params = SamplingParams(8, n=3)
    expected = generate(engine(max_slots=6), [LONG], params)[0]
    e = engine(max_slots=6, prefill_chunk=7)
    e.submit(9, PROMPTS[1], SamplingParams(30, n=2))
    assert e.step(3) == 6
    e.submit(0, LONG, params)
    for _ in range(3):  # 7, 14, 21 of 23 tokens
        assert e.step(2) == 4 and (e.num_live, e.num_waiting) == (2, 3)
        assert e.score(PROMPTS[0], [4, 5]).isfinite().all()
    assert e.step(2) == 4 + 6 and e.num_live == 5
    found = drain(e)
    assert tokens_of(found[0, 0, i] for i in range(3)) == tokens_of(expected)
    assert_parity(e, found.values())


def test_aborting_a_half_prefilled_prompt_frees_its_place():
    e = engine(max_slots=3, prefill_chunk=5)
    e.submit(0, PROMPTS[0], SamplingParams(20))
    e.step(1)
    e.submit(1, LONG, SamplingParams(6, n=2))
    e.submit(2, LONG[::-1], SamplingParams(6))
    e.step(1)
    assert e.abort(1) == 2
    found = drain(e)
    assert_parity(e, [found[0, 0, 0], found[0, 2, 0]])


@pytest.mark.parametrize("cache_tokens", [48, 100])
def test_the_cache_stays_within_its_budget_and_everybody_is_served(cache_tokens):
    e = engine(max_slots=12, cache_tokens=cache_tokens)
    for ticket, prompt in enumerate(PROMPTS * 2):
        e.submit(ticket, prompt, SamplingParams(5 if ticket % 3 else 30, n=2))
    finished, most = [], 0
    while e.num_live or e.num_waiting:
        e.step(3)
        finished += [c for _, c in e.pop_finished()]
        _, rows, _, places, _ = e._cache.layers[0].shape
        assert rows * places <= cache_tokens
        most = max(most, e.num_live)
    assert len(finished) == 20 and most > (cache_tokens > 48)
    assert_parity(e, finished)


# --- New weights, partial completions ---


@pytest.mark.parametrize("recompute_kv", [True, False])
def test_keys_and_values_of_new_weights(recompute_kv):
    """They are recomputed where that is asked for. Without that a prompt of which some pieces were
    prefilled, and which has sampled nothing, has read the new weights all the same.
    """
    e, new = engine(max_slots=4, prefill_chunk=9 if recompute_kv else 5), random_decoder(1)
    e.submit(0, PROMPTS[0], SamplingParams(20, n=2))
    e.submit(1, LONG, SamplingParams(9))
    e.step(1), e.step(1)
    assert e.num_waiting == 1 and e._waiting[0].num_cached >= 5
    load(e, dict(named_parameters_hf(new)), 2, recompute_kv=recompute_kv)
    found = drain(e)
    for c in found.values() if recompute_kv else [found[0, 1, 0]]:
        before = int((c.policy_versions == 0).sum())
        assert c.policy_versions.tolist() == [0] * before + [2] * (c.token_ids.numel() - before)
        expected = full_forward_logprobs(new, c)
        assert_close(c.generator_logprobs[before:], expected[before:])
    assert found[0, 1, 0].policy_versions.tolist() == [2] * 9


@settings(max_examples=8)
@given(st.integers(0, 16), st.integers(1, 5), st.sampled_from([3, 512]))
def test_a_completion_interrupted_anywhere_goes_on_in_another_engine(steps, slots, prefill_chunk):
    params = SamplingParams(14, n=2, stop_token_ids=(2, 3), temperature=0.8, min_new_tokens=2)

    def submitted(slots):
        e = engine(max_slots=slots, prefill_chunk=prefill_chunk)
        for ticket, prompt in enumerate(PROMPTS[:3]):
            e.submit(ticket, prompt, params)
        return e

    expected = drain(submitted(6))
    first = submitted(slots)
    for _ in range(steps):
        first.step(1)
    found = by_place(first.pop_finished())
    second = engine(max_slots=4, prefill_chunk=prefill_chunk)
    second.weights_changed(5)
    partials = first.export_partials()
    for partial in partials:
        second.submit_partial(partial)
    assert tokens_of(second.export_partials()) == tokens_of(partials)
    sampled = 0
    while second.num_live or second.num_waiting:
        sampled += second.step(4)
        found |= by_place(second.pop_finished())
    assert found.keys() == expected.keys()
    for key, c in expected.items():
        assert torch.equal(found[key].token_ids, c.token_ids)
        assert found[key].finish_reason == c.finish_reason
        assert_close(found[key].generator_logprobs, c.generator_logprobs)
    new = 0
    for p in partials:
        versions = found[p.stream, p.ticket, p.sample_index].policy_versions
        had = p.token_ids.numel()
        assert versions.tolist() == [0] * had + [5] * (versions.numel() - had)
        new += versions.numel() - had
    assert sampled == new


def partial_of(tokens, params, **fields):
    """A sample of ticket 7 of the first prompt, with these tokens of version 0."""
    token_ids = torch.as_tensor(tokens)
    values = {
        "stream": 0,
        "ticket": 7,
        "sample_index": 0,
        "prompt_ids": torch.tensor(PROMPTS[0]),
        "token_ids": token_ids,
        "generator_logprobs": torch.zeros(len(token_ids)),
        "policy_versions": torch.zeros_like(token_ids),
    }
    return Partial(params=params, **{**values, **fields})


def test_a_completion_that_has_ended_cannot_go_on_and_an_aborted_partial_keeps_its_tokens():
    e = engine()
    e.submit(0, PROMPTS[0], SamplingParams(6))
    e.step(2)
    (partial,) = e.export_partials()
    for more, params in ((6, SamplingParams(6)), (1, SamplingParams(6, stop_token_ids=(4,)))):
        with pytest.raises(ValueError, match="cannot go on"):
            e.submit_partial(partial_of([4] * more, params))
    other = engine()
    other.submit_partial(partial)
    assert other.abort() == 1
    ((_, c),) = other.pop_finished()
    assert torch.equal(c.token_ids, partial.token_ids) and c.finish_reason == "aborted"


# --- K/V of a completion that stopped and goes on ---

CONTEXT = [3, 11, 4]


def behind(completion, context, params):
    """What goes on with a completion behind a context."""
    size = len(context)
    versions = completion.policy_versions
    return partial_of(
        torch.cat([completion.token_ids, torch.tensor(context)]),
        params,
        sample_index=completion.sample_index,
        generator_logprobs=torch.cat([completion.generator_logprobs, torch.zeros(size)]),
        policy_versions=torch.cat([versions, versions[-1].expand(size)]),
        loss_mask=torch.cat([completion.loss_mask, torch.zeros(size, dtype=torch.bool)]),
    )


def first_turns(made, count=3):
    """Turns of one token."""
    made.submit(7, PROMPTS[0], SamplingParams(30, stop_token_ids=tuple(range(31)), n=count))
    return drain(made)


def go_on(made, finished, context=CONTEXT):
    """Have eight tokens sampled behind the context."""
    for completion in finished.values():
        most = completion.token_ids.numel() + len(context) + 8
        made.submit_partial(behind(completion, context, SamplingParams(most)))
    return drain(made)


def computed_tokens(made, monkeypatch):
    """A list to which each pass of a prompt adds how many tokens it computes."""
    counted = []
    prefill = made._runner.prefill

    def call(first_slot, prompts, *given, **named):
        counted.append(sum(ids.numel() for ids in prompts))
        return prefill(first_slot, prompts, *given, **named)

    monkeypatch.setattr(made._runner, "prefill", call)
    return counted


@pytest.mark.parametrize(
    "kept_tokens, kept, num_computed",
    # Two turns of the three are equal: where nothing is kept, these are read once.
    [(100, [0, 1, 2], 3 * 5), (4, [1, 2], 7 + 2 * 5), (0, [], 2 * 7)],
)
def test_a_turn_goes_on_as_one_forward_says_and_computes_only_what_is_not_kept(
    way, monkeypatch, kept_tokens, kept, num_computed
):
    made = engine(kept_tokens=kept_tokens)
    finished = first_turns(made)
    assert [key[2] for key in made._kept._rows] == kept, "the oldest is dropped"
    assert made._kept.places == 2 * len(kept), "the turn's token was not read"
    counted = computed_tokens(made, monkeypatch)
    found = go_on(made, finished)
    assert sum(counted) == num_computed
    assert made._kept.places == 0
    for key, completion in found.items():
        assert completion.loss_mask.tolist() == [True, False, False, False] + [True] * 8
        assert completion.token_ids[0] == finished[key].token_ids[0]
    assert_parity(made, found.values())


def test_a_row_that_ended_before_its_chunk_did_keeps_what_it_had_read(way):
    """Ended rows go on computing until they are taken out, and must not spoil what is kept."""
    stops = SamplingParams(20, stop_token_ids=tuple(range(0, 31, 4)), n=6, seed=3)

    def played(chunk):
        made = engine(kept_tokens=1000)
        made.submit(7, PROMPTS[0], stops)
        finished = drain(made, chunk)
        found = go_on(made, {k: c for k, c in finished.items() if c.finish_reason == "stop"})
        return made, found

    made, found = played(chunk=12)
    _, others = played(chunk=1)
    assert len({c.loss_mask.long().argmin().item() for c in found.values()}) > 2
    for key, completion in found.items():
        assert torch.equal(completion.token_ids, others[key].token_ids)
    assert_parity(made, found.values())


def test_a_turn_behind_a_restart_reads_what_follows_it_alone(way):
    made = engine(kept_tokens=100)
    (completion,) = first_turns(made, count=1).values()
    partial = behind(completion, CONTEXT, SamplingParams(20))
    restarts = torch.tensor([False, True, False, False])
    made.release(0, 7, 0)
    made.submit_partial(dataclasses.replace(partial, restarts=restarts))
    made.step(4)
    # Also in another engine, in the middle of the turn.
    (moved,) = made.export_partials()
    other = engine(kept_tokens=100)
    other.submit_partial(moved)
    found = [*drain(made).values(), *drain(other).values()]
    assert torch.equal(found[0].token_ids, found[1].token_ids)
    for one in found:
        assert one.token_ids.numel() == 20 and one.restarts.nonzero().tolist() == [[1]]
        fields = ("token_ids", "generator_logprobs", "policy_versions", "loss_mask", "restarts")
        behind_it = {name: getattr(one, name)[4:] for name in fields}
        alone = dataclasses.replace(one, prompt_ids=one.token_ids[1:4], **behind_it)
        assert_parity(made, [alone])


def test_new_weights_that_recompute_drop_what_is_kept(way):
    made = engine(kept_tokens=100)
    finished = first_turns(made)
    made.weights_changed(1)
    assert made._kept.places
    made.weights_changed(2, recompute_kv=True)
    assert not made._kept.places
    for completion in go_on(made, finished).values():
        assert completion.policy_versions.tolist() == [0, 0, 0, 0] + [2] * 8


def test_a_context_longer_than_a_piece_is_prefilled_in_pieces_from_the_first_token(way):
    made = engine(kept_tokens=100, prefill_chunk=4)
    found = go_on(made, first_turns(made, count=1), context=[3, 11, 4, 8, 9, 10])
    assert_parity(made, found.values())


def test_what_is_aborted_or_released_keeps_nothing():
    made = engine(kept_tokens=100)
    first_turns(made)
    made.release(0, 7, 1)
    assert [key[2] for key in made._kept._rows] == [0, 2]
    made.abort(7)
    assert not made._kept.places


def test_a_stop_string_of_the_context_or_of_an_earlier_turn_ends_no_later_turn():
    def decode(ids):
        return "".join(chr(97 + i) for i in ids)

    made = engine(kept_tokens=100, decode=decode)
    # Whatever is sampled first is a stop string, and so is the context.
    stops = tuple(decode([i]) for i in range(31))
    made.submit(7, PROMPTS[0], SamplingParams(30, stop_strings=stops))
    (completion,) = drain(made).values()
    assert completion.finish_reason == "stop" and completion.token_ids.numel() == 1
    said = decode(completion.token_ids.tolist())
    params = SamplingParams(12, stop_strings=(said + decode(CONTEXT), decode(CONTEXT)))
    made.submit_partial(behind(completion, CONTEXT, params))
    (found,) = drain(made).values()
    assert found.token_ids.numel() == 12 and found.finish_reason == "length"


@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_stop_token_ends_a_turn_only_where_it_was_sampled(is_sampled):
    made = engine(kept_tokens=0)
    mask = torch.tensor([True, is_sampled])
    partial = partial_of([4, 2], SamplingParams(5, stop_token_ids=(2,)), loss_mask=mask)
    if is_sampled:
        with pytest.raises(ValueError, match="cannot go on"):
            made.submit_partial(partial)
    else:
        made.submit_partial(partial)
        (found,) = drain(made).values()
        assert found.token_ids.numel() > 2


# --- A real model ---


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_greedy_equals_transformers_on_a_real_model():
    path = os.environ.get("LLAMARL_SMOLLM2")
    if not path:
        pytest.skip("needs LLAMARL_SMOLLM2: SmolLM2-135M-Instruct (recipes/fetch_smollm2.py)")
    prompts = torch.randint(100, 40_000, (100, 16), generator=torch.Generator().manual_seed(0))
    e = Engine.from_hf(path, dtype="float32", max_slots=100, max_len=16 + 128)
    ours = generate(e, prompts.tolist(), SamplingParams(128, temperature=0.0))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    lengths = {"min_new_tokens": 128, "max_new_tokens": 128, "eos_token_id": None}
    plain = {"do_sample": False, "pad_token_id": 0, "repetition_penalty": 1.0}
    mask = torch.ones_like(prompts)
    generated = model.generate(prompts, attention_mask=mask, **lengths, **plain)
    near_tie = 1e-3  # nats between the two likeliest
    for (completion,), whole in zip(ours, generated):
        with torch.no_grad():
            margins = margins_of(model(whole[None]).logits[0, 15:-1])
        assert_same_greedy(completion.token_ids, whole[16:], margins, near_tie / 2)
