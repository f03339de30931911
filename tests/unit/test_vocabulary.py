"""Rows of the vocabulary without a token, and early end tokens: out of what is sampled and of every
softmax that scores it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import llamarl.learning.logprobs as logprobs_module
from llamarl.inference import Engine, SamplingParams
from llamarl.learning.logprobs import (
    LateEnds,
    Narrowing,
    chunked_logprobs,
    group_to_score,
    make_head,
)
from llamarl.learning.packing import pack
from llamarl.learning.sft import NextToken, SFTPair, completion_logprobs, pack_pairs
from llamarl.learning.targets import Targets
from llamarl.models.config import tiny_directory
from llamarl.models.hf import absent_rows
from llamarl.models.loading import frozen_decoder, training_decoder
from tests.decoding import drain
from tests.padded import ABSENT, ROWS, padded_directory

PROMPT = [1, 20, 21, 22]
CPU = torch.device("cpu")
EXACT = 1e-12  # float64


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    return padded_directory(tmp_path_factory.mktemp("padded") / "model")


def test_the_absent_rows_are_those_that_no_token_has(padded):
    rows = absent_rows(padded, ROWS, CPU)
    assert rows is not None and rows.tolist() == ABSENT
    assert absent_rows(tiny_directory(), 52, CPU) is None


@pytest.mark.parametrize("way", ["native", "module"])
def test_an_engine_samples_no_row_without_a_token(padded, way):
    engine = Engine.from_hf(padded, dtype="float32", max_slots=64, max_len=32, device="cpu")
    if way == "module":
        engine._runner.take("module")
    engine.submit(0, PROMPT, SamplingParams(8, temperature=3.0, n=64, seed=1))
    sampled = torch.cat([c.token_ids for c in drain(engine).values()])
    assert not torch.isin(sampled, torch.tensor(ABSENT)).any()
    scored = engine.score_all(PROMPT, [4, 5], temperature=3.0)
    assert scored[:, ABSENT].eq(-math.inf).all()
    torch.testing.assert_close(scored.exp().sum(1), torch.ones(2), atol=1e-5, rtol=0)


def narrowed_oracle(hidden, weight, labels, temperature, narrowing):
    logits = hidden.double() @ weight.double().T / temperature
    out = torch.zeros_like(logits, dtype=torch.bool)
    out[:, narrowing.absent_A] = True
    out[:, narrowing.end_ids_S] |= narrowing.is_early_T[:, None]
    kept = logits.masked_fill(out, -math.inf)
    logp = kept.log_softmax(1)
    finite = logp.masked_fill(out, 0.0)
    entropy = -(finite.exp().masked_fill(out, 0) * finite).sum(1)
    return logp.gather(1, labels[:, None])[:, 0], entropy


WAYS = {"kept": (1 << 22, 0), "narrow": (0, 1 << 26), "recomputed": (0, 0)}


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("way", list(WAYS))
def test_a_narrowed_softmax_and_its_gradients_are_those_of_the_rest(
    way, dtype, kernels, monkeypatch
):
    for name, value in zip(("KEEP_LOGITS", "KEEP_BYTES"), WAYS[way]):
        monkeypatch.setattr(logprobs_module, name, value)
    if not kernels:
        monkeypatch.setattr(logprobs_module, "kernels", lambda x: None)
    random = torch.Generator().manual_seed(4)
    hidden = torch.randn(21, 6, generator=random, dtype=torch.float64)
    weight = torch.randn(30, 6, generator=random, dtype=torch.float64)
    labels = torch.randint(5, 25, (21,), generator=random)  # neither absent nor an end
    narrowing = Narrowing(
        absent_A=torch.tensor([3, 25, 29]),
        end_ids_S=torch.tensor([0, 2]),
        is_early_T=torch.arange(21) % 3 == 0,
    )
    given = [t.to(dtype).requires_grad_() for t in (hidden, weight)]
    exact = [t.detach().double().requires_grad_() for t in given]
    got = chunked_logprobs(
        *given, labels, temperature=0.7, chunk_tokens=8, entropy_grad=True, narrowing=narrowing
    )
    want = narrowed_oracle(*exact, labels, 0.7, narrowing)
    tolerance = EXACT if dtype == torch.float64 else 2e-5
    for ours, theirs in zip(got, want):
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)
    upstream = torch.randn(2, 21, generator=random, dtype=torch.float64)
    ours = torch.autograd.grad(got, given, tuple(u.to(g.dtype) for u, g in zip(upstream, got)))
    theirs = torch.autograd.grad(want, exact, tuple(upstream))
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one.double(), other, atol=10 * tolerance, rtol=tolerance)
    assert not ours[1][[3, 25, 29]].any(), "a row without a token has a gradient"


def test_nothing_is_narrowed_where_nothing_is_out():
    assert Narrowing.of(None, None, torch.arange(3)) is None


def asked(prompt, *completions):
    return group_to_score(torch.tensor(prompt), [torch.tensor(c) for c in completions])


def test_labels_know_how_many_tokens_of_their_completion_come_before():
    """Two completions of a group, of 3 and 2 tokens, then one of 4 with two of context."""
    mask = torch.tensor([True, False, False, True])
    groups = [
        asked([20, 21], [30, 31, 32], [33, 34]),
        replace(asked([22], [35, 36, 37, 38]), loss_mask=mask),
    ]
    packing = pack(
        groups,
        [Targets.of(g, g.rewards) for g in groups],
        budget_tokens=100,
        skip_zero_advantage=False,
    )
    (batch,) = packing.microbatches
    found = dict(zip(batch.places.tolist(), batch.offsets.tolist()))
    assert found == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 0, 8: 3}
    narrowing = Narrowing.of(None, LateEnds((2,), min_new_tokens=2), batch.offsets)
    early = dict(zip(batch.places.tolist(), narrowing.is_early_T.tolist()))
    assert [place for place, is_early in early.items() if is_early] == [0, 1, 3, 4, 5]


def test_supervised_training_and_frozen_models_count_no_row_without_a_token(padded):
    learned = torch.tensor([False, False, True, True, True])
    pair = SFTPair(torch.tensor([1, 20, 30, 31, 2]), learned)
    trained = training_decoder(padded, mesh=None, device=CPU, compute_dtype=torch.float32)
    frozen = frozen_decoder(padded, mesh=None, device=CPU, dtype=torch.float32)
    engine = Engine.from_hf(padded, dtype="float32", max_slots=2, max_len=16, device="cpu")
    want = engine.score([1, 20], [30, 31, 2]).sum()
    loss, _, _ = NextToken().loss(trained, pack_pairs([pair], CPU))
    torch.testing.assert_close(-loss, want, atol=1e-4, rtol=0)
    by_frozen = completion_logprobs(frozen, pack_pairs([pair], CPU))
    torch.testing.assert_close(by_frozen.float(), want[None], atol=1e-4, rtol=0)
    loss.backward()
    embedding = trained.tok_embeddings.weight.grad
    assert embedding[:52].any() and not embedding[ABSENT].any()


def test_a_padded_head_keeps_its_narrowing_in_step_with_the_labels():
    """On a CPU labels are padded to few sizes; what is padded is dropped."""
    hidden = torch.randn(17, 4)
    weight = torch.randn(9, 4)
    labels = torch.full((17,), 5)
    offsets = torch.arange(17)
    narrowing = Narrowing.of(torch.tensor([8]), LateEnds((2, 3), 4), offsets)
    got, _ = make_head(labels, offsets, narrowing=narrowing)(hidden, weight)
    want, _ = narrowed_oracle(hidden, weight, labels, 1.0, narrowing)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
