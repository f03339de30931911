"""Attacks are scored by the mean over the answers to them, whatever scores these."""

import math
import random
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llamarl.errors import RewardError
from llamarl.scoring.replies import ReplyMean, ReplySettings, mean_outcome
from llamarl.scoring.routing import InTurn
from llamarl.scoring.scorer import Item, Scorer
from llamarl.types import Group, Outcome, Prompt, Replied
from tests.build.completion import build_completion

WORDS = ["error", "abstain", "right", "wrong", ""]  # of a token
SCORES = {"right": 1.0, "wrong": 0.0}


class Later(Scorer):
    """A scorer that scores what it was given in an order of its own, some at each poll."""

    name = "later"

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._known = []
        self.released = []
        self.seen = []

    @property
    def pending(self):
        return len(self._known)

    def submit(self, key, item):
        completion = item.text
        self.seen.append((item.prompt.text, completion, item.meta))
        outcome = Outcome("score", SCORES.get(completion, 0.0), "")
        if completion == "error":
            outcome = Outcome.error("cannot score it")
        if completion == "abstain":
            outcome = Outcome.abstain("does not care")
        self._known.append((key, outcome))

    def release(self, keys):
        self.released.append(list(keys))

    def poll(self):
        self._random.shuffle(self._known)
        count = self._random.randint(0, len(self._known))
        known = self._known[:count]
        del self._known[:count]
        return known

    def wait(self, timeout_s):
        return True


def answered(*words, ticket=0, sample=0, outcome="score", reason=""):
    return Replied(
        attack=build_completion(ticket, sample, [2]),
        prompt_ids=torch.tensor([9]),
        lengths=torch.ones(len(words), dtype=torch.int64),
        token_ids=torch.tensor([WORDS.index(word) for word in words], dtype=torch.int64),
        has_ended=(True,) * len(words),
        outcome=outcome,
        reason=reason,
    )


def attack(*words, is_held_out=False, **options):
    item = Item(
        prompt=Prompt(torch.tensor([1]), "the attacker's prompt", {"words": ["right"]}),
        token_ids=torch.tensor([2]),
        text="the attack",
        has_ended=True,
        is_held_out=is_held_out,
    )
    return ReplySettings(decode, 0.5).with_replies(item, answered(*words, **options))


def decode(ids):
    return WORDS[ids[0]]


class WithNovelty(Later):
    """The same, with a reward of 1 for novelty besides."""

    def poll(self):
        known = []
        for key, outcome in super().poll():
            known.append((key, Outcome("score", outcome.value + 1, "", outcome.value)))
        return known


def scored(attacks, *, seed=0, threshold=0.5, make=Later):
    """(outcomes by key, the source)."""
    source = make(seed)
    scoring = ReplyMean(InTurn(source), ReplySettings(decode, threshold))
    for key, one in enumerate(attacks):
        scoring.submit(key, one)
    scoring.release(range(len(attacks)))
    outcomes = scoring.poll()
    while scoring.pending:
        outcomes += scoring.poll()
    assert len(dict(outcomes)) == len(outcomes) == len(attacks)  # each once
    return dict(outcomes), source


@given(
    st.lists(st.lists(st.sampled_from(WORDS[2:4]), min_size=1, max_size=5), max_size=6),
    st.integers(0, 5),
)
def test_an_attacks_score_is_the_mean_over_its_answers(rows, seed):
    outcomes, source = scored([attack(*words) for words in rows], seed=seed)
    for key, words in enumerate(rows):
        share = words.count("right") / len(words)
        columns = {"reward/success": float(share > 0.5)}
        assert outcomes[key] == Outcome("score", share, "", columns=columns)
    # What compares completions of a prompt gets the answers to one attack at a time, also where two
    # attacks are alike.
    assert [len(keys) for keys in source.released] == [len(words) for words in rows]


def test_what_scores_sees_the_attack_as_prompt_and_the_answer_as_completion():
    _, source = scored([attack("right", "wrong")])
    assert [(prompt, text, meta["words"]) for prompt, text, meta in source.seen] == [
        ("the attack", "right", ["right"]),
        ("the attack", "wrong", ["right"]),
    ]
    # What was sampled is the answer, in the victim's tokens.
    told = [meta["sampled"] for _, _, meta in source.seen]
    assert [one["token_ids"] for one in told] == [[2], [3]] and WORDS[2:4] == ["right", "wrong"]
    assert [one["raw_text"] for one in told] == ["right", "wrong"]


def test_an_answer_without_a_score_leaves_the_attack_without_one_and_is_named():
    outcomes, _ = scored(
        [attack("right", "error", "abstain"), attack("abstain", "right"), attack("right")]
    )
    assert outcomes[0].kind == "error" and math.isnan(outcomes[0].value)
    assert outcomes[0].reason == "reply 2 of 3: cannot score it"
    assert (outcomes[1].kind, outcomes[1].reason) == ("abstain", "reply 1 of 2: does not care")
    assert [outcomes[key].columns for key in range(3)] == [{}, {}, {"reward/success": 1.0}]


def test_what_was_not_asked_has_the_outcome_that_it_came_with():
    outcomes, source = scored(
        [
            attack(outcome="error", reason="too long"),
            attack(outcome="abstain", reason="empty"),
            attack("", ""),
        ]
    )
    assert (outcomes[0].kind, outcomes[0].reason) == ("error", "too long")
    assert (outcomes[1].kind, outcomes[1].reason) == ("abstain", "empty")
    assert (outcomes[2].kind, outcomes[2].reason) == ("error", "the victim's 2 replies are empty")
    assert source.seen == []


def test_a_success_is_above_the_threshold():
    half = attack("right", "wrong")
    outcomes, _ = scored([half, attack("right")])
    assert [outcomes[key].columns["reward/success"] for key in range(2)] == [0.0, 1.0]
    outcomes, _ = scored([half], threshold=0.4)
    assert outcomes[0].columns == {"reward/success": 1.0}


def test_nothing_is_kept_of_attacks_that_were_scored_before_their_group_was_whole():
    source = InTurn(Later(0))
    scoring = ReplyMean(source, ReplySettings(decode, 0.5))
    for key in range(2):
        scoring.submit(key, attack("right", "wrong"))
    while scoring.pending:
        scoring.poll()
    scoring.release(range(2))
    assert not source._attacks and not scoring._said


def test_novelty_is_rewarded_and_is_no_success():
    attacks = [attack("right", "wrong"), attack("right", "right")]
    outcomes, _ = scored(attacks, make=WithNovelty)
    assert [outcomes[key].value for key in range(2)] == [1.5, 2.0]
    assert [outcomes[key].columns["reward/success"] for key in range(2)] == [0.0, 1.0]


def test_a_mean_does_not_depend_on_who_was_first():
    values = [0.1, 0.2, 0.3]
    outcomes = [Outcome("score", value, "") for value in values]
    assert mean_outcome(outcomes).value == sum(values) / 3


def test_the_columns_of_a_mean_are_the_means_of_the_columns():
    outcomes = []
    for value in (0.25, 0.5, 0.75):
        columns = {"reward/a/mean": value, "reward/b/mean": 1.0}
        outcomes.append(Outcome("score", value, "", columns=columns))
    assert mean_outcome(outcomes).columns == {"reward/a/mean": 0.5, "reward/b/mean": 1.0}


# --- In the reward ---


@pytest.fixture
def build_with_victim(build_reward):
    """A Reward whose completions come with answers."""
    return partial(build_reward, replies=ReplySettings(decode, 0.5))


def step_until(reward, condition):
    while not condition():
        reward.step()
        reward._scorer.wait(0.1)


def test_a_group_is_whole_with_the_mean_rewards_of_its_attacks(build_with_victim):
    reward = build_with_victim()
    reward.inputs.of(Replied).records += [
        answered("right", "wrong", ticket=3, sample=1),
        answered("right", "right", ticket=3, sample=0),
    ]
    sink = reward.outputs.of(Group)
    step_until(reward, lambda: sink.records)
    (group,) = sink.records
    assert group.ticket == 3 and group.rewards.tolist() == [1.0, 0.5]


def test_a_victim_that_answers_nothing_ends_the_run(build_with_victim):
    reward = build_with_victim(max_error_rate=0.1)
    for ticket in range(40):
        reward.inputs.of(Replied).records += [
            answered("", "", ticket=ticket, sample=sample) for sample in range(2)
        ]
    with pytest.raises(RewardError, match="the victim's 2 replies are empty"):
        step_until(reward, partial(bool, False))
