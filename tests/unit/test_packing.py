"""Collation and packing: the worked example, a naive oracle, and that packing changes no gradient."""

import warnings
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.learning import packing
from llamarl.learning.logprobs import make_head
from llamarl.learning.losses.aipo import aipo
from llamarl.learning.packing import collate, filler, pack, to_device
from llamarl.models.attention import PackedAttention
from llamarl.models.build import ModelConfig, build_decoder
from llamarl.types import Group, PackedBatch

NAN = float("nan")
PACKED_GRADIENT = 2e-6  # float32 rounding, as a share of the largest gradient


def group(prompt, completions, rewards=None, *, ticket=0, reasons=None, reference=False):
    """A group whose completion token at flat place c has generator logprob -c/8, ref logprob -c/4 and version c."""
    lengths = torch.tensor([len(c) for c in completions])
    place = torch.arange(int(lengths.sum()))
    size = len(completions)
    return Group(
        ticket=ticket,
        prompt_ids=torch.tensor(prompt),
        lengths=lengths,
        token_ids=torch.tensor([t for c in completions for t in c], dtype=torch.int64),
        generator_logprobs=-place / 8,
        policy_versions=place,
        ref_logprobs=-place / 4 if reference else torch.empty(0),
        rewards=torch.tensor(rewards or [1.0] * size),
        finish_reasons=tuple(reasons or ["stop"] * size),
        outcomes=("score",) * size,
    )


def packed(groups, advantages=None, budget=100, drop=False):
    advantages = advantages or [torch.arange(1.0, g.lengths.numel() + 1) for g in groups]
    return pack(groups, advantages, budget_tokens=budget, drop_zero_advantage=drop)


def assert_batches_equal(got: PackedBatch, want: PackedBatch):
    for field in fields(PackedBatch):
        ours, theirs = getattr(got, field.name), getattr(want, field.name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), field.name


# -- collate ---------------------------------------------------------------------------------------------------------------


def test_collate_by_hand():
    # longest first: 7 opens a bin, 6 another, 4 fits beside the 6, 3 beside the 7, 1 opens a third
    assert collate([3, 7, 1, 6, 4], budget=10) == [[1, 0], [3, 4], [2]]


def test_collate_keeps_the_order_of_ties():
    assert collate([2, 2, 2, 2], budget=4) == [[0, 1], [2, 3]]


@given(lengths=st.lists(st.integers(1, 12), max_size=40), budget=st.integers(1, 15))
def test_collate_is_first_fit_decreasing_and_loses_nothing(lengths, budget):
    bins = collate(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in b) for b in bins]
    assert all(total <= budget or len(b) == 1 for total, b in zip(sums, bins))
    naive: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        home = next((b for b in naive if sum(lengths[j] for j in b) + lengths[i] <= budget), None)
        naive.append([i]) if home is None else home.append(i)
    assert bins == naive


def test_collate_refuses_a_budget_without_room():
    with pytest.raises(ValueError, match="budget=0"):
        collate([1], 0)


# -- pack ------------------------------------------------------------------------------------------------------------------


def test_the_worked_example_of_packed_batch():
    groups = [group([10, 11], [[12]]), group([20], [[21]], ticket=1)]
    (batch,) = packed(groups, [torch.tensor([0.5]), torch.tensor([-2.0])]).microbatches
    assert_batches_equal(
        batch,
        PackedBatch(
            input_ids=torch.tensor([10, 11, 20]),
            labels=torch.tensor([11, 12, 21]),
            positions=torch.tensor([0, 1, 0]),
            cu_seqlens=torch.tensor([0, 2, 3]),
            loss_mask=torch.tensor([False, True, True]),
            generator_logprobs=torch.tensor([0.0, 0.0, 0.0]),
            ref_logprobs=torch.zeros(3),
            advantages=torch.tensor([0.0, 0.5, -2.0]),
            policy_versions=torch.tensor([-1, 0, 0]),
        ),
    )


def naive_sequences(groups, advantages):
    """One PackedBatch a trained completion, token by token, by (ticket, sample)."""
    out = {}
    for g, a in zip(groups, advantages):
        start = 0
        for i, length in enumerate(g.lengths.tolist()):
            own = slice(start, start + length)
            start += length
            if length == 0 or g.rewards[i].isnan() or g.finish_reasons[i] == "aborted":
                continue
            tokens = g.prompt_ids.tolist() + g.token_ids[own].tolist()
            before, n = len(g.prompt_ids) - 1, len(tokens) - 1
            out[g.ticket, i] = PackedBatch(
                input_ids=torch.tensor(tokens[:-1]),
                labels=torch.tensor(tokens[1:]),
                positions=torch.arange(n),
                cu_seqlens=torch.tensor([0, n]),
                loss_mask=torch.arange(n) >= before,
                generator_logprobs=torch.tensor([0.0] * before + g.generator_logprobs[own].tolist()),
                ref_logprobs=torch.tensor([0.0] * before + (g.ref_logprobs[own].tolist() or [0.0] * length)),
                advantages=torch.tensor([0.0] * before + [a[i].item()] * length),
                policy_versions=torch.tensor([-1] * before + g.policy_versions[own].tolist()),
            )
    return out


def joined(sequences):
    """Whole sequences end to end."""
    parts = {f.name: torch.cat([getattr(s, f.name) for s in sequences]) for f in fields(PackedBatch) if f.name != "cu_seqlens"}
    ends = torch.tensor([s.input_ids.numel() for s in sequences]).cumsum(0)
    return PackedBatch(cu_seqlens=torch.cat([torch.tensor([0]), ends]), **parts)


@st.composite
def random_groups(draw):
    reference, groups = draw(st.booleans()), []
    for ticket in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 4))
        token = st.integers(0, 50)
        groups.append(
            group(
                draw(st.lists(token, min_size=1, max_size=5)),
                [draw(st.lists(token, max_size=6)) for _ in range(size)],
                draw(st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=size, max_size=size)),
                ticket=ticket,
                reasons=draw(st.lists(st.sampled_from(["stop", "length", "aborted"]), min_size=size, max_size=size)),
                reference=reference,
            )
        )
    return groups


@settings(deadline=None)
@given(groups=random_groups(), budget=st.integers(1, 30), drop=st.booleans())
def test_pack_equals_a_token_by_token_oracle(groups, budget, drop):
    advantages = [torch.where(g.rewards.isnan(), 0, g.rewards) for g in groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = pack(groups, advantages, budget_tokens=budget, drop_zero_advantage=drop)
    trained = naive_sequences(groups, advantages)
    kept = [s for s in trained.values() if not drop or s.advantages[-1] != 0]
    bins = collate([s.input_ids.numel() for s in kept], budget)
    assert len(got.microbatches) == len(bins)
    for batch, members in zip(got.microbatches, bins):
        assert_batches_equal(batch, joined([kept[i] for i in members]))
    assert got.num_loss_tokens == sum(int(s.loss_mask.sum()) for s in trained.values())
    assert (got.num_completions, got.num_dropped) == (len(trained), len(trained) - len(kept))
    assert got.num_masked == sum(g.lengths.numel() for g in groups) - len(trained)


def test_padding_is_the_unused_share_of_the_budget():
    # 3 + 4 - 1 = 6 tokens each: two microbatches of 10 hold 12
    got = packed([group([1, 2, 3], [[4] * 4, [5] * 4])], budget=10)
    assert [b.input_ids.numel() for b in got.microbatches] == [6, 6] and got.padding_fraction == pytest.approx(1 - 12 / 20)


def test_dropping_zero_advantages_keeps_the_denominators():
    g = group([1], [[2, 3], [4], [5, 6, 7]])
    advantages = [torch.tensor([0.0, 1.0, 0.0])]
    dropped, whole = packed([g], advantages, drop=True), packed([g], advantages)
    assert (dropped.num_loss_tokens, dropped.num_completions) == (whole.num_loss_tokens, whole.num_completions) == (6, 3)
    assert dropped.num_dropped == 2 and dropped.microbatches[0].input_ids.tolist() == [1]


def test_nothing_to_train_is_no_microbatch():
    got = packed([group([1], [[2], []], [NAN, 1.0])])
    assert (got.microbatches, got.num_loss_tokens, got.num_masked, got.padding_fraction) == ([], 0, 2, 0.0)
    assert packed([]).microbatches == []


def test_a_sequence_over_the_budget_goes_alone_and_is_warned_of_once():
    packing._warn_too_long.cache_clear()
    groups = [group([1], [[2] * 9, [3], [4]])]
    with pytest.warns(UserWarning, match="microbatch_tokens=4"):
        got = packed(groups, budget=4)
    assert [b.input_ids.numel() for b in got.microbatches] == [9, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed(groups, budget=4)


@pytest.mark.parametrize(
    ("groups", "advantages", "message"),
    [
        ([group([], [[1]])], None, "empty prompt"),
        ([group([1], [[1]])], [torch.zeros(2)], "do not fit"),
        ([group([1], [[1]])], [torch.tensor([NAN])], "not finite"),
        ([group([1], [[1]]), group([1], [[1]], reference=True)], None, "some groups and not in others"),
    ],
)
def test_what_cannot_be_packed_is_refused(groups, advantages, message):
    with pytest.raises(ValueError, match=message):
        packed(groups, advantages)


def test_reference_is_told_apart_from_zeros():
    assert packed([group([1], [[2]], reference=True)]).has_reference
    assert not packed([group([1], [[2]])]).has_reference


# -- gradients -------------------------------------------------------------------------------------------------------------


def tiny_decoder():
    config = ModelConfig("LlamaForCausalLM", 23, 16, 24, 2, 4, 2, 4, 1e-6, 1e4, None, 64, True, False)
    decoder = build_decoder(config, device="cpu")
    random = torch.Generator().manual_seed(0)
    for parameter in decoder.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random) * 0.3
    return decoder


def gradients(decoder, batches, num_loss_tokens):
    decoder.zero_grad()
    for b in batches:
        rows = b.loss_mask.nonzero().squeeze(1)
        logprobs, _ = decoder(b.input_ids, b.positions, PackedAttention(b.cu_seqlens), make_head(b.labels, rows))
        loss, _ = aipo(
            logprobs, b.generator_logprobs[rows], None, b.advantages[rows], b.loss_mask[rows], num_loss_tokens=num_loss_tokens
        )
        loss.backward()
    return [p.grad.clone() for p in decoder.parameters()]


def test_gradients_do_not_depend_on_packing_dropping_or_fillers():
    random = torch.Generator().manual_seed(1)
    groups = [
        group(
            torch.randint(0, 23, (int(torch.randint(1, 6, (), generator=random)),), generator=random).tolist(),
            [torch.randint(0, 23, (n,), generator=random).tolist() for n in (1, 4, 9)],
            ticket=ticket,
        )
        for ticket in range(4)
    ]
    advantages = [torch.tensor([0.7, 0.0, -1.3])] * 4
    decoder = tiny_decoder()
    alone = packed(groups, advantages, budget=1000)
    want = gradients(decoder, naive_sequences(groups, advantages).values(), alone.num_loss_tokens)
    largest = max(g.abs().max().item() for g in want)
    assert largest > 0.01
    for budget, drop in ((1000, False), (14, False), (30, True)):
        got = packed(groups, advantages, budget=budget, drop=drop)
        assert got.num_loss_tokens == alone.num_loss_tokens
        torch.testing.assert_close(
            gradients(decoder, [*got.microbatches, filler()], got.num_loss_tokens), want, atol=PACKED_GRADIENT * largest, rtol=0
        )


def test_a_filler_alone_gives_zero_gradients_to_every_parameter():
    assert all((g == 0).all() for g in gradients(tiny_decoder(), [filler()], 5))


def test_to_device_moves_every_field():
    moved = to_device(filler(), "meta")
    assert all(getattr(moved, f.name).is_meta for f in fields(PackedBatch))
