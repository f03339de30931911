"""Records survive the wire exactly, in whatever numbers and sizes. They check their lengths."""

import dataclasses

import pytest
import torch

from llamarl.comm import wire
from llamarl.types import Completion, EvalCompletion, Group, Outcome, Replied
from tests.build.completion import build_completion


def completion(ticket: int, sample: int, length: int) -> Completion:
    g = torch.Generator().manual_seed(ticket * 31 + sample)
    return build_completion(
        ticket,
        sample,
        torch.randint(0, 99, (length,), generator=g).tolist(),
        version=ticket,
        finish_reason="stop" if length % 2 else "length",
        generator_logprobs=torch.randn(length, generator=g),
    )


def answer(number: int, length: int) -> EvalCompletion:
    return EvalCompletion(
        prompt_index=number,
        greedy=number % 2 == 0,
        sample_index=3 * number,
        token_ids=torch.arange(length),
        policy_versions=torch.full((length,), 7),
        finish_reason="stop",
    )


def group(ticket: int, lengths: list[int]) -> Group:
    scored = []
    for i, length in enumerate(lengths):
        outcome = Outcome.score(float(i)) if i else Outcome.error("broken")
        scored.append((completion(ticket, i, length), outcome))
    return Group.of(scored)


def replied(attack: Completion | EvalCompletion, lengths: list[int]) -> Replied:
    return Replied(
        attack=attack,
        prompt_ids=torch.arange(len(lengths)),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        token_ids=torch.arange(sum(lengths)),
        has_ended=tuple(length % 2 == 0 for length in lengths),
        outcome="score" if lengths else "abstain",
        reason="" if lengths else "nothing was asked",
    )


def assert_same(a, b) -> None:
    for f in dataclasses.fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(y, x, rtol=0, atol=0, equal_nan=True)
        elif dataclasses.is_dataclass(x):
            assert_same(x, y)
        else:
            assert x == y, f.name


RECORDS = {
    "one completion": [completion(0, 0, 3)],
    "an empty completion among others": [completion(i, 2 * i, n) for i, n in enumerate([4, 0, 1])],
    "answers to held-out prompts": [answer(i, n) for i, n in enumerate([0, 5, 2])],
    "groups of other sizes": [group(0, [2, 0]), group(1, [1, 3, 1])],
    "replies with their attacks": [
        replied(completion(t, 1, 3), lengths) for t, lengths in enumerate([[2, 0], [], [1]])
    ],
}


@pytest.mark.parametrize("records", RECORDS.values(), ids=RECORDS)
def test_records_round_trip(records):
    for sent, come in zip(records, wire.decode(wire.encode(records)), strict=True):
        assert_same(sent, come)


def test_a_group_joins_its_completions_in_sample_order():
    scored = [(completion(5, i, i + 1), Outcome.score(float(i))) for i in (2, 0, 1)]
    joined = Group.of(scored)
    assert joined.lengths.tolist() == [1, 2, 3] and joined.rewards.tolist() == [0, 1, 2]
    expected = torch.cat([completion(5, i, i + 1).token_ids for i in range(3)])
    assert torch.equal(joined.token_ids, expected)


def test_unregistered_and_mixed_records_and_bytes_that_are_no_message_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Stranger:
        x: int

    with pytest.raises(TypeError, match="Stranger"):
        wire.encode([Stranger(1)])
    with pytest.raises(TypeError, match="one registered record type"):
        wire.encode([completion(0, 0, 1), Stranger(1)])
    with pytest.raises(TypeError, match="one registered record type"):
        wire.encode([replied(completion(0, 0, 1), []), replied(answer(0, 1), [])])
    with pytest.raises(ValueError, match="not a message"):
        wire.decode(b"\x10\0\0\0\0\0\0\0" + b"{}" * 8)


def test_lengths_are_checked_at_birth():
    with pytest.raises(ValueError, match="2 tokens but 3 logprobs"):
        build_completion(generator_logprobs=torch.zeros(3))
    with pytest.raises(ValueError, match="held-out prompt 4: 3 tokens but 2 versions"):
        dataclasses.replace(answer(4, 3), policy_versions=torch.zeros(2))
