"""Records survive the wire exactly, in whatever numbers and sizes."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llamarl.comm import wire
from llamarl.types import (
    Completion,
    EvalCompletion,
    Group,
    Outcome,
    Replied,
)


def completion(ticket: int, sample: int, length: int) -> Completion:
    g = torch.Generator().manual_seed(ticket * 31 + sample)
    return Completion(
        ticket=ticket,
        sample_index=sample,
        prompt_ids=torch.arange(3),
        token_ids=torch.randint(0, 99, (length,), generator=g),
        generator_logprobs=torch.randn(length, generator=g),
        policy_versions=torch.full((length,), ticket),
        finish_reason="stop" if length % 2 else "length",
    )


def same(a, b) -> bool:
    for f in dataclasses.fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, torch.Tensor):
            if x.dtype != y.dtype or not torch.equal(
                torch.nan_to_num(x.double(), nan=7.5), torch.nan_to_num(y.double(), nan=7.5)
            ):
                return False
        elif x != y:
            return False
    return True


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_completions_round_trip(lengths):
    records = [completion(i, 2 * i, n) for i, n in enumerate(lengths)]
    assert all(same(a, b) for a, b in zip(records, wire.decode(wire.encode(records)), strict=True))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_answers_to_held_out_prompts_round_trip(lengths):
    records = [
        EvalCompletion(
            prompt_index=i,
            greedy=i % 2 == 0,
            sample_index=3 * i,
            token_ids=torch.arange(n),
            policy_versions=torch.full((n,), 7),
            finish_reason="stop",
        )
        for i, n in enumerate(lengths)
    ]
    assert all(same(a, b) for a, b in zip(records, wire.decode(wire.encode(records)), strict=True))


def test_an_answer_has_a_version_for_each_token():
    with pytest.raises(ValueError, match="held-out prompt 4: 3 tokens but 2 versions"):
        EvalCompletion(
            prompt_index=4,
            greedy=True,
            sample_index=0,
            token_ids=torch.arange(3),
            policy_versions=torch.zeros(2),
            finish_reason="stop",
        )


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4))
def test_groups_round_trip_with_completions_that_are_not_trained_on(shapes):
    groups = []
    for t, lengths in enumerate(shapes):
        scored = [
            (completion(t, i, n), Outcome.score(float(i)) if i else Outcome.error("broken"))
            for i, n in enumerate(lengths)
        ]
        groups.append(Group.of(scored))
    assert all(same(a, b) for a, b in zip(groups, wire.decode(wire.encode(groups)), strict=True))


def test_a_group_joins_its_completions_in_sample_order():
    scored = [(completion(5, i, i + 1), Outcome.score(float(i))) for i in (2, 0, 1)]
    group = Group.of(scored)
    assert group.lengths.tolist() == [1, 2, 3] and group.rewards.tolist() == [0, 1, 2]
    assert torch.equal(
        group.token_ids, torch.cat([completion(5, i, i + 1).token_ids for i in range(3)])
    )


def test_unregistered_and_mixed_records_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Stranger:
        x: int

    with pytest.raises(TypeError, match="Stranger"):
        wire.encode([Stranger(1)])
    with pytest.raises(TypeError, match="one registered record type"):
        wire.encode([completion(0, 0, 1), Stranger(1)])


def test_what_is_no_message_is_refused():
    with pytest.raises(ValueError, match="not a message"):
        wire.decode(b"\x10\0\0\0\0\0\0\0" + b"{}" * 8)


def test_lengths_are_checked_at_birth():
    with pytest.raises(ValueError, match="2 tokens but 3 logprobs"):
        Completion(
            ticket=0,
            sample_index=0,
            prompt_ids=torch.arange(1),
            token_ids=torch.arange(2),
            generator_logprobs=torch.zeros(3),
            policy_versions=torch.zeros(2),
            finish_reason="stop",
        )


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=5))
def test_answers_travel_with_their_attacks(rows):
    records = []
    for ticket, lengths in enumerate(rows):
        record = Replied(
            attack=completion(ticket, 1, 3),
            prompt_ids=torch.arange(len(lengths)),
            lengths=torch.tensor(lengths, dtype=torch.int64),
            token_ids=torch.arange(sum(lengths)),
            has_ended=tuple(length % 2 == 0 for length in lengths),
            outcome="score" if lengths else "abstain",
            reason="" if lengths else "nothing was asked",
        )
        records.append(record)
    for sent, come in zip(records, wire.decode(wire.encode(records)), strict=True):
        assert same(sent.attack, come.attack) and sent.ticket == come.ticket
        assert [a.tolist() for a in come.replies] == [a.tolist() for a in sent.replies]
        assert torch.equal(sent.prompt_ids, come.prompt_ids)
        ours = (sent.has_ended, sent.outcome, sent.reason)
        assert (come.has_ended, come.outcome, come.reason) == ours


def test_answers_are_of_one_kind_of_attack_a_message():
    empty = torch.empty(0, dtype=torch.int64)
    given = dict(
        prompt_ids=empty,
        lengths=empty,
        token_ids=empty,
        has_ended=(),
        outcome="abstain",
        reason="",
    )
    held_out = EvalCompletion(
        prompt_index=0,
        greedy=True,
        sample_index=0,
        token_ids=empty,
        policy_versions=empty,
        finish_reason="stop",
    )
    records = [Replied(attack=attack, **given) for attack in (completion(0, 0, 1), held_out)]
    with pytest.raises(TypeError, match="one registered record type"):
        wire.encode(records)
