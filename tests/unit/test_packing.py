"""Collation and packing: the worked example, a naive oracle, and that packing changes no
gradient.
"""

import warnings
from dataclasses import fields, replace
from itertools import accumulate, chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llamarl.learning import packing
from llamarl.learning.collation import collate
from llamarl.learning.logprobs import make_head
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.learning.packing import filler, pack
from llamarl.learning.targets import Targets
from llamarl.models.attention import PackedAttention
from llamarl.types import PackedBatch
from tests.build.group import build_group
from tests.loss_problems import inputs_of
from tests.tolerances import rounding
from tests.updating import decoder_of

pytestmark = pytest.mark.machine

NAN = float("nan")
# Of the largest: width, and the layers there and back.
PACKED_GRADIENT = rounding(terms=16, depth=2 * 2 * 2)


def group(prompt, completions, rewards=None, *, ticket=0, reasons=None, reference=False):
    """A group whose completion token at flat place c has generator logprob -c/8, ref logprob -c/4
    and version c.
    """
    lengths = [len(c) for c in completions]
    place = torch.arange(sum(lengths))
    return build_group(
        ticket,
        lengths,
        rewards,
        prompt=prompt,
        token_ids=torch.tensor(list(chain.from_iterable(completions)), dtype=torch.int64),
        generator_logprobs=-place / 8,
        policy_versions=place,
        ref_logprobs=-place / 4 if reference else torch.empty(0),
        finish_reasons=tuple(reasons or ["stop"] * len(lengths)),
    )


def packed(groups, advantages=None, budget=100, drop=False, whole_groups=False, **options):
    advantages = advantages or [torch.arange(1.0, g.lengths.numel() + 1) for g in groups]
    targets = [Targets.of(g, a) for g, a in zip(groups, advantages)]
    options |= {"skip_zero_advantage": drop, "whole_groups": whole_groups}
    return pack(groups, targets, budget_tokens=budget, **options)


def sizes_of(packing):
    """The tokens of each microbatch."""
    return [batch.input_ids.numel() for batch in packing.microbatches]


def completions_of(packing, groups):
    """The completions in each microbatch, in order, numbered over all groups."""
    lengths = torch.cat([g.lengths for g in groups])
    owners = torch.arange(len(lengths)).repeat_interleave(lengths)
    return [owners[b.places].unique_consecutive().tolist() for b in packing.microbatches]


def assert_batches_equal(got: PackedBatch, want: PackedBatch):
    for field in fields(PackedBatch):
        ours, theirs = getattr(got, field.name), getattr(want, field.name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), field.name


@given(lengths=st.lists(st.integers(1, 12), max_size=40), budget=st.integers(1, 15))
def test_collate_is_first_fit_decreasing_and_loses_nothing(lengths, budget):
    def total(members: list[int]) -> int:
        return sum(lengths[i] for i in members)

    naive: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        home = next((b for b in naive if total(b) + lengths[i] <= budget), None)
        naive.append([i]) if home is None else home.append(i)
    assert collate(lengths, budget) == naive
    with pytest.raises(ValueError, match="budget=0"):
        collate([1], 0)


def test_the_worked_example_of_packed_batch():
    groups = [group([10, 11], [[12, 13], [14]]), group([20], [[21, 22]], ticket=1)]
    (batch,) = packed(groups, [torch.tensor([0.5, 0.25]), torch.tensor([-2.0])]).microbatches
    assert_batches_equal(
        batch,
        PackedBatch(
            input_ids=torch.tensor([10, 11, 12, 20, 21]),
            positions=torch.tensor([0, 1, 2, 0, 1]),
            cu_seqlens=torch.tensor([0, 2, 3, 4, 5]),
            parents=torch.tensor([-1, 0, -1, 2]),
            rows=torch.tensor([1, 2, 1, 3, 4]),
            labels=torch.tensor([12, 13, 14, 21, 22]),
            places=torch.arange(5),
            offsets=torch.tensor([0, 1, 0, 0, 1]),
            generator_logprobs=torch.tensor([0.0, -0.125, -0.25, 0.0, -0.125]),
            ref_logprobs=torch.zeros(5),
            advantages=torch.tensor([0.5, 0.5, 0.25, -2.0, -2.0]),
            returns=torch.zeros(5),
            old_values=torch.zeros(5),
            policy_versions=torch.tensor([0, 1, 2, 0, 1]),
            completions=torch.tensor([0, 0, 1, 2, 2]),
            groups=torch.tensor([0, 0, 1]),
            rewards=torch.tensor([1.0, 1.0, 1.0]),
            group_tokens=torch.tensor([3.0, 3.0, 2.0]),
        ),
    )


def sequences_of(groups, advantages):
    """Each trained completion as a PackedBatch of its own, nothing shared, by its number over all
    groups.
    """
    out, number = {}, -1
    tokens_before = 0
    for g, a in zip(groups, advantages):
        start, before = 0, len(g.prompt_ids) - 1
        for i, length in enumerate(g.lengths.tolist()):
            number, own = number + 1, slice(start, start + length)
            start += length
            if not g.trained[i]:
                continue
            tokens = torch.cat([g.prompt_ids, g.token_ids[own]])
            out[number] = PackedBatch(
                input_ids=tokens[:-1],
                positions=torch.arange(len(tokens) - 1),
                cu_seqlens=torch.tensor([0, len(tokens) - 1]),
                parents=torch.tensor([-1]),
                rows=torch.arange(before, before + length),
                labels=g.token_ids[own],
                places=torch.arange(tokens_before + own.start, tokens_before + own.stop),
                offsets=torch.arange(length),
                generator_logprobs=g.generator_logprobs[own],
                ref_logprobs=g.ref_logprobs[own] if g.ref_logprobs.numel() else torch.zeros(length),
                advantages=a[i].expand(length),
                returns=torch.zeros(length),
                old_values=torch.zeros(length),
                policy_versions=g.policy_versions[own],
                completions=torch.zeros(length, dtype=torch.int64),
                groups=torch.tensor([0]),
                rewards=g.rewards[i : i + 1],
                group_tokens=g.lengths[g.trained].sum().float()[None],
            )
        tokens_before += g.token_ids.numel()
    return out


def context(batch, row):
    """The tokens that a row sees, by following segments alone: its parent's, then its own up to
    itself.
    """
    starts = batch.cu_seqlens.tolist()
    segment = max(s for s in range(len(starts) - 1) if starts[s] <= row)
    parent = int(batch.parents[segment])
    seen = batch.input_ids[starts[parent] : starts[parent + 1]].tolist() if parent >= 0 else []
    assert parent < 0 or batch.parents[parent] == -1
    return seen + batch.input_ids[starts[segment] : row + 1].tolist()


def group_of_completion(groups, number):
    ends = list(accumulate(g.lengths.numel() for g in groups))
    return next(i for i, end in enumerate(ends) if number < end)


@st.composite
def random_groups(draw):
    reference, groups = draw(st.booleans()), []
    token = st.integers(0, 50)
    reason = st.sampled_from(["stop", "length", "aborted"])
    for ticket in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 4))
        rewards = st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=size, max_size=size)
        made = group(
            draw(st.lists(token, min_size=1, max_size=5)),
            [draw(st.lists(token, max_size=6)) for _ in range(size)],
            draw(rewards),
            ticket=ticket,
            reasons=draw(st.lists(reason, min_size=size, max_size=size)),
            reference=reference,
        )
        groups.append(made)
    return groups


LABELLED = "labels places generator_logprobs ref_logprobs advantages policy_versions".split()


@given(groups=random_groups(), budget=st.integers(1, 30), drop=st.booleans(), whole=st.booleans())
def test_every_label_sees_its_prompt_and_completion_and_keeps_its_fields(
    groups, budget, drop, whole
):
    advantages = [torch.where(g.trained, g.rewards, 0) for g in groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = packed(groups, advantages, budget, drop, whole)
    trained = sequences_of(groups, advantages)
    kept = {n: s for n, s in trained.items() if not drop or s.advantages[0] != 0}
    completions = completions_of(got, groups)
    assert sorted(chain.from_iterable(completions)) == sorted(kept)
    for batch, members in zip(got.microbatches, completions, strict=True):
        alone = [kept[n] for n in members]
        for name in LABELLED:
            expected = torch.cat([getattr(s, name) for s in alone])
            assert torch.equal(getattr(batch, name), expected), name
        want = []
        for one in alone:
            want += [one.input_ids[: row + 1].tolist() for row in one.rows.tolist()]
        assert [context(batch, row) for row in batch.rows.tolist()] == want
        assert batch.positions[batch.rows].tolist() == [len(tokens) - 1 for tokens in want]
        assert batch.input_ids.numel() == batch.positions.numel() == batch.cu_seqlens[-1]
        owners = [group_of_completion(groups, n) for n in members]
        is_one = len(members) == 1 or (whole and len(set(owners)) == 1)
        assert batch.input_ids.numel() <= budget or is_one
        numbers = []
        for number, one in enumerate(alone):
            numbers += [number] * len(one.labels)
        assert batch.completions.tolist() == numbers
        assert batch.rewards.tolist() == [s.rewards.item() for s in alone]
        assert batch.group_tokens.tolist() == [s.group_tokens.item() for s in alone]
        assert sorted(set(batch.groups.tolist())) == list(range(len(set(owners))))
        assert (batch.parents < 0).sum() == len(set(owners)), "a prompt twice in a microbatch"
        together = []
        for a in owners:
            together.append([a == b for b in owners])
        assert (batch.groups[:, None] == batch.groups[None]).tolist() == together
    assert got.num_loss_tokens == sum(s.labels.numel() for s in trained.values())
    assert got.num_completions == len(trained)
    sizes = [0] * len(groups)
    for n in trained:
        sizes[group_of_completion(groups, n)] += 1
    assert got.num_groups == sum(size > 1 for size in sizes)
    homes = set()
    for number, those in enumerate(completions):
        homes |= {(group_of_completion(groups, n), number) for n in those}
    assert not whole or len(homes) == len({owner for owner, _ in homes})


def test_a_group_is_cut_where_its_completions_fill_holes_and_save_a_microbatch():
    # 1 + 2 * 2, 1 + 4 and 1 + 5 tokens of 9: three microbatches whole. The first's completions fit
    # in the others' holes.
    groups = []
    for n, size, count in ((1, 2, 2), (2, 4, 1), (3, 5, 1)):
        groups.append(group([n], [[n] * (size + 1)] * count, ticket=n))
    assert sizes_of(packed(groups, budget=9, whole_groups=True)) == [6, 5, 5]
    got = packed(groups, budget=9)
    first, second = got.microbatches
    assert first.input_ids.tolist() == [3] * 6 + [1] * 3
    assert second.input_ids.tolist() == [2] * 5 + [1] * 3
    assert completions_of(got, groups) == [[3, 0], [2, 1]]
    assert first.groups.tolist() == second.groups.tolist() == [1, 0]
    # Two tokens less, and one completion finds no hole: nothing is moved
    assert sizes_of(packed(groups, budget=7)) == [6, 5, 5]


def test_a_group_that_must_stay_whole_is_never_cut_and_is_warned_of():
    # 3 + (4 - 1) * 3 = 12 tokens, and 1 + 1
    groups = [group([1, 2, 3], [[4] * 4, [5] * 4, [6] * 4]), group([7], [[8, 9]], ticket=1)]
    packing._warn_too_long.cache_clear()
    with pytest.warns(UserWarning, match="groups .*microbatch_tokens=8"):
        assert sizes_of(packed(groups, budget=8, whole_groups=True)) == [12, 2]
    assert sizes_of(packed(groups, budget=14, whole_groups=True)) == [14]


def test_ranks_that_share_groups_have_the_same_ones_in_each_microbatch():
    """By itself one rank puts the first two groups together, and the other the last two."""
    sizes = [[6, 2, 4], [4, 2, 6]]  # of a token of the prompt and all of the completion but one
    ranks = []
    for of_rank in sizes:
        ranks.append([group([9], [[1] * size]) for size in of_rank])

    def largest(own):
        assert own in sizes
        return [max(pair) for pair in zip(*sizes)]

    def plans(**options):
        found = []
        for groups in ranks:
            made = packed(groups, budget=8, whole_groups=True, **options)
            found.append({tuple(sorted(own)) for own in completions_of(made, groups)})
        return found

    assert plans() == [{(0, 1), (2,)}, {(1, 2), (0,)}]
    assert plans(largest_over_ranks=largest) == [{(0, 1), (2,)}] * 2


@pytest.mark.parametrize(
    "rewards, options",
    [
        ([1.0, 0.0], {}),  # cut
        ([1.0, NAN], {"whole_groups": True}),
        ([1.0, 0.0], {"whole_groups": True, "drop": True, "advantages": [torch.tensor([1.0, 0])]}),
    ],
)
def test_a_share_of_which_something_is_left_out_is_refused(rewards, options):
    with pytest.raises(ValueError, match="ranks share these groups"):
        packed([group([9], [[1, 2], [3]], rewards)], largest_over_ranks=list, **options)


def test_targets_by_token_reach_their_labels():
    g = group([1], [[2, 3], [4, 5, 6]], [1.0, 2.0])
    values = torch.arange(5.0)
    targets = Targets(
        rewards=g.rewards + 10, advantages=values - 1, returns=values * 2, old_values=values * 3
    )
    (batch,) = pack([g], [targets], budget_tokens=100, skip_zero_advantage=False).microbatches
    assert batch.advantages.tolist() == [-1.0, 0.0, 1.0, 2.0, 3.0]
    assert batch.returns.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert batch.old_values.tolist() == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert batch.rewards.tolist() == [11.0, 12.0]


def test_only_completions_without_any_advantage_are_dropped():
    g = group([1], [[2, 3], [4, 5], [6]])
    advantages, none = torch.tensor([0.0, -0.5, 0.0, 0.0, 0.0]), torch.zeros(0)
    targets = Targets(g.rewards, advantages, none, none)
    got = pack([g], [targets], budget_tokens=100, skip_zero_advantage=True)
    assert completions_of(got, [g]) == [[0]] and got.num_completions == 3


def test_the_unused_share_of_the_budget():
    # 3 + 4 - 1 = 6 tokens each: two microbatches of 8 hold 12
    got = packed([group([1, 2, 3], [[4] * 4, [5] * 4])], budget=8)
    assert got.unused_budget_fraction == pytest.approx(1 - 12 / 16)


def test_nothing_to_train_is_no_microbatch_and_a_reference_is_told_apart_from_zeros():
    got = packed([group([1], [[2], []], [NAN, 1.0])])
    assert (got.microbatches, got.num_loss_tokens, got.num_completions) == ([], 0, 0)
    assert got.unused_budget_fraction == 0.0
    assert packed([]).microbatches == []
    assert packed([group([1], [[2]], reference=True)]).has_reference
    assert not packed([group([1], [[2]])]).has_reference


def test_a_sequence_over_the_budget_goes_alone_and_is_warned_of_once():
    packing._warn_too_long.cache_clear()
    groups = [group([1], [[2] * 9, [3], [4]])]
    with pytest.warns(UserWarning, match="microbatch_tokens=4"):
        assert sizes_of(packed(groups, budget=4)) == [9, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed(groups, budget=4)


@pytest.mark.parametrize(
    "groups, targets, message",
    [
        ([group([], [[1]])], {}, "empty prompt"),
        ([group([1], [[1]])], {"advantages": torch.tensor([NAN])}, "ticket 0: .*not finite"),
        ([group([1], [[1]]), group([1], [[1]], reference=True)], {}, "some .* and not in others"),
        ([group([1], [[2], [3]])], {"advantages": torch.zeros(3)}, "do not fit"),
        ([group([1], [[2], [3]])], {"rewards": torch.zeros(1)}, "do not fit"),
        ([group([1], [[2], [3]])], {"rewards": torch.tensor([1.0, NAN])}, "not finite"),
    ],
)
def test_what_cannot_be_packed_is_refused(groups, targets, message):
    given = [replace(Targets.of(g, torch.zeros(g.lengths.numel())), **targets) for g in groups]
    with pytest.raises(ValueError, match=message):
        pack(groups, given, budget_tokens=9, skip_zero_advantage=False)


def gradients(decoder, batches, num_loss_tokens):
    decoder.zero_grad()
    for b in batches:
        attention = PackedAttention(b.cu_seqlens, b.parents)
        head = make_head(b.labels, b.rows)
        logprobs, _ = decoder(b.input_ids, b.positions, attention, head)
        every = torch.ones_like(b.labels, dtype=torch.bool)
        given = logprobs, b.generator_logprobs, None, b.advantages, every
        policy_gradient(inputs_of(*given, num_loss_tokens=num_loss_tokens))[0].backward()
    return [p.grad.clone() for p in decoder.parameters()]


def test_gradients_do_not_depend_on_packing_dropping_or_fillers():
    random = torch.Generator().manual_seed(1)

    def drawn(length: int) -> list[int]:
        return torch.randint(0, 23, (length,), generator=random).tolist()

    groups = []
    for ticket in range(4):
        prompt = drawn(int(torch.randint(1, 6, (), generator=random)))
        groups.append(group(prompt, [drawn(n) for n in (1, 4, 9)], ticket=ticket))
    advantages = [torch.tensor([0.7, 0.0, -1.3])] * 4
    decoder = decoder_of()
    alone = packed(groups, advantages, budget=1000)
    want = gradients(decoder, sequences_of(groups, advantages).values(), alone.num_loss_tokens)
    largest = max(g.abs().max().item() for g in want)
    assert largest > 0.005
    for budget, drop in ((14, False), (30, True), (1, True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a sequence over the budget
            got = packed(groups, advantages, budget=budget, drop=drop)
        assert got.num_loss_tokens == alone.num_loss_tokens
        found = gradients(decoder, [*got.microbatches, filler()], got.num_loss_tokens)
        torch.testing.assert_close(found, want, atol=PACKED_GRADIENT * largest, rtol=0)
    assert all((g == 0).all() for g in gradients(decoder, [filler()], 5))
