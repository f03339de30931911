"""What an environment wrote is read by the model, and trained on by nothing."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llamarl.learning.packing import Packing, pack
from llamarl.learning.step_metrics import Row
from llamarl.learning.targets import Shaping, Targets, make_targets, shape
from llamarl.learning.values import CriticSettings
from llamarl.types import Ending, Group, Outcome
from tests.build.completion import build_completion
from tests.updating import STEP, VERSION, decoder_of, go_on, logprobs_alone, update_of
from tests.updating import group as sampled_group

NAN = float("nan")


def dialogue(ticket, token_ids, mask, *, index=0, prompt=(10, 11), versions=None):
    """A completion whose token at place i has logprob -i/8; NaN for context."""
    mask = torch.tensor(mask, dtype=torch.bool)
    places = torch.arange(len(token_ids))
    return build_completion(
        ticket,
        index,
        token_ids,
        prompt=prompt,
        generator_logprobs=torch.where(mask, -places / 8, NAN),
        policy_versions=torch.zeros_like(places) if versions is None else torch.tensor(versions),
        loss_mask=mask,
        ending=Ending(reason="completed", num_turns=2, reward=1.0, error=""),
    )


def group_of(*dialogues, rewards):
    scored = [(one, Outcome.score(reward)) for one, reward in zip(dialogues, rewards, strict=True)]
    return Group.of(scored)


# Two turns, 12 13 and 16, with 14 15 said between them; and one turn behind 14.
TWO = group_of(
    dialogue(0, [12, 13, 14, 15, 16], [1, 1, 0, 0, 1]),
    dialogue(0, [14, 17], [0, 1], index=1),
    rewards=[1.0, 0.0],
)


def packed(group: Group) -> Packing:
    """The packing of two completions with advantages 0.5 and -0.5, into one microbatch."""
    targets = Targets.of(group, torch.tensor([0.5, -0.5]))
    return pack([group], [targets], budget_tokens=100, skip_zero_advantage=False)


def test_context_is_among_the_inputs_and_no_label():
    packing = packed(TWO)
    (batch,) = packing.microbatches
    # 10 11 | 12 13 14 15 | 14, and at place i of them the labels:
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 14, 15, 14]
    assert batch.labels.tolist() == [12, 13, 16, 17]
    assert batch.rows.tolist() == [1, 2, 5, 6]
    assert batch.places.tolist() == [0, 1, 4, 6]
    assert batch.completions.tolist() == [0, 0, 0, 1]
    assert batch.generator_logprobs.tolist() == [0.0, -1 / 8, -4 / 8, -1 / 8]
    assert batch.advantages.tolist() == [0.5, 0.5, 0.5, -0.5]
    assert packing.num_loss_tokens == 4 and batch.group_tokens.tolist() == [4.0, 4.0]


def test_what_all_of_a_group_begin_with_is_computed_once_with_the_prompt():
    group = group_of(
        dialogue(0, [20, 21, 12, 14, 16], [0, 0, 1, 0, 1]),
        dialogue(0, [20, 21, 22, 17], [0, 0, 0, 1], index=1),
        rewards=[1.0, 0.0],
    )
    (batch,) = packed(group).microbatches
    # 10 11 20 21 | 12 14 | 22, and at place i of them the labels:
    assert batch.input_ids.tolist() == [10, 11, 20, 21, 12, 14, 22]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 4]
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 7] and batch.parents.tolist() == [-1, 0, 0]
    assert batch.labels.tolist() == [12, 16, 17]
    assert batch.rows.tolist() == [3, 5, 6]
    assert batch.places.tolist() == [2, 4, 8]


def test_what_only_looks_alike_further_on_is_each_completions_own():
    group = group_of(
        dialogue(0, [20, 23, 12], [0, 0, 1]),
        dialogue(0, [21, 23, 13], [0, 0, 1], index=1),
        rewards=[1.0, 0.0],
    )
    (batch,) = packed(group).microbatches
    assert batch.input_ids.tolist() == [10, 11, 20, 23, 21, 23]


def read_before(batch, row):
    """The tokens that the model has read at a row of a microbatch, that row's included."""
    bounds = batch.cu_seqlens.tolist()
    segment = next(i for i in range(len(bounds) - 1) if bounds[i] <= row < bounds[i + 1])
    tokens = batch.input_ids[bounds[segment] : row + 1].tolist()
    parent = int(batch.parents[segment])
    if parent >= 0:
        tokens = batch.input_ids[bounds[parent] : bounds[parent + 1]].tolist() + tokens
    assert batch.positions[row] == len(tokens) - 1
    return tokens


@st.composite
def dialogue_groups(draw):
    """A group of dialogues out of few tokens, so that many begin alike, some of them aborted."""
    ticket = draw(st.integers(0, 1))
    prompt = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    dialogues = []
    for index in range(draw(st.integers(1, 4))):
        tokens = draw(st.lists(st.tuples(st.integers(1, 2), st.booleans()), min_size=1, max_size=6))
        ids = [token for token, _ in tokens]
        mask = [is_sampled for _, is_sampled in tokens]
        one = dialogue(ticket, ids, mask, index=index, prompt=prompt)
        reason = draw(st.sampled_from(["stop", "stop", "stop", "aborted"]))
        dialogues.append(dataclasses.replace(one, finish_reason=reason))
    return group_of(*dialogues, rewards=[1.0] * len(dialogues))


@pytest.mark.filterwarnings("ignore:sequences longer than")
@given(st.lists(dialogue_groups(), min_size=1, max_size=3), st.integers(1, 30))
def test_every_sampled_token_is_predicted_once_behind_all_that_came_before_it(groups, budget):
    packing = pack(
        groups,
        [Targets.of(g, torch.ones(g.lengths.numel())) for g in groups],
        budget_tokens=budget,
        skip_zero_advantage=False,
    )
    sizes = [batch.input_ids.numel() for batch in packing.microbatches]
    taken = sum(max(size, budget) for size in sizes)
    assert packing.unused_budget_fraction == (1 - sum(sizes) / taken if taken else 0.0)
    found = {}
    for batch in packing.microbatches:
        for row, label, place in zip(batch.rows, batch.labels, batch.places):
            assert int(place) not in found
            found[int(place)] = [*read_before(batch, int(row)), int(label)]
    wanted = {}
    first = 0
    for group in groups:
        lengths = group.lengths.tolist()
        rows = zip(group.token_ids.split(lengths), group.trained_tokens.split(lengths))
        for token_ids, is_trained in rows:
            for place in is_trained.nonzero().flatten().tolist():
                read = [*group.prompt_ids.tolist(), *token_ids[: place + 1].tolist()]
                wanted[first + place] = read
            first += token_ids.numel()
    assert found == wanted


def test_a_completion_of_context_alone_is_not_trained_on():
    group = group_of(
        dialogue(0, [14, 15], [0, 0]), dialogue(0, [12], [1], index=1), rewards=[1.0, 0.0]
    )
    assert group.trained.tolist() == [False, True]
    assert group.trained_tokens.tolist() == [False, False, True]


def reinforce(inputs):
    """-sum_t A_t log pi_t / num_loss_tokens, of what it is given."""
    objective = inputs.advantages * inputs.trainer_logprobs
    return -objective.sum() / inputs.num_loss_tokens, {}


def gradients_of(groups: list[Group], **changes) -> tuple[list[torch.Tensor], Row]:
    """What a step changes of each weight, and its result."""
    decoder = decoder_of()
    before = [p.detach().clone() for p in decoder.parameters()]
    result = update_of(decoder, **changes).run(groups, VERSION, go_on)
    return [new.detach() - old for new, old in zip(decoder.parameters(), before)], result


def masked_group(ticket, lengths, rewards):
    """Random dialogues: every third token, and the first, is context."""
    group = sampled_group(ticket, lengths, rewards)
    places = torch.cat([torch.arange(length) for length in lengths])
    ends = torch.cat([torch.arange(length) == length - 1 for length in lengths])
    return dataclasses.replace(group, loss_mask=(places % 3 != 0) | ends)


GROUPS = [masked_group(1, [7, 4], [1.0, 0.0]), masked_group(2, [5, 8, 6], [0.0, 1.0, 0.5])]


def opened(group: Group) -> Group:
    """The group with two tokens of context that all of its completions begin with."""
    token_ids = group.token_ids.clone()
    mask = group.loss_mask.clone()
    starts = group.lengths.cumsum(0) - group.lengths
    for place in range(2):
        token_ids[starts + place] = 3 + place
        mask[starts + place] = False
    return dataclasses.replace(group, token_ids=token_ids, loss_mask=mask)


OPENED = [opened(group) for group in GROUPS]


def test_the_logprobs_of_context_change_no_bit_of_a_step():
    changes, result = gradients_of(GROUPS)
    spoilt = []
    for group in GROUPS:
        logprobs = torch.where(group.loss_mask, group.generator_logprobs, NAN)
        spoilt.append(dataclasses.replace(group, generator_logprobs=logprobs))
    others, other = gradients_of(spoilt)
    assert all(map(torch.equal, changes, others))
    assert result == other


@pytest.mark.parametrize("groups", [GROUPS, OPENED], ids=["apart", "opened"])
def test_the_gradient_is_that_of_the_sampled_tokens_alone(groups):
    """By autograd over each whole sequence: the objective is a sum over the places in the mask, so
    a token of context adds a gradient of 0.
    """
    decoder = decoder_of()
    total = sum(int(group.loss_mask.sum()) for group in groups)
    loss = torch.zeros(())
    for group in groups:
        advantages = group.rewards - group.rewards.mean()
        lengths = group.lengths.tolist()
        parts = zip(group.token_ids.split(lengths), group.loss_mask.split(lengths), advantages)
        for token_ids, mask, advantage in parts:
            of_tokens = logprobs_alone(decoder, group.prompt_ids, token_ids)
            loss = loss - (advantage * of_tokens * mask).sum() / total
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in decoder.parameters()]).sum().sqrt()
    _, result = gradients_of(groups, loss_fn=reinforce)
    assert result["grad_norm"] == pytest.approx(float(norm), rel=STEP)
    assert result["tokens/trained"] == total
    everything = [dataclasses.replace(g, loss_mask=torch.ones_like(g.loss_mask)) for g in groups]
    _, of_all = gradients_of(everything, loss_fn=reinforce)
    assert of_all["grad_norm"] != pytest.approx(float(norm), rel=1000 * STEP)


def test_a_token_of_context_has_no_kl_and_the_score_stands_at_the_last_turn():
    group = dataclasses.replace(TWO, ref_logprobs=torch.full((7,), -1.0))
    logprobs = torch.where(group.loss_mask, group.generator_logprobs, 0.0)
    group = dataclasses.replace(group, generator_logprobs=logprobs)
    shaped = shape([group], Shaping(reward_kl_coef=1.0))[0]
    # -(log mu - log ref): of 12, 13 and 16 of the first, of 17 of the second
    assert shaped.tokens.tolist() == [-1.0, -0.875, 0.0, 0.0, -0.5 + 1.0, 0.0, -0.875 + 0.0]


class Alone:
    """One rank's sums."""

    @staticmethod
    def sum(**values):
        return values


def targets_of(group: Group, advantages: str, critic=None, old_values=None) -> Targets:
    (targets,), _ = make_targets(
        [group],
        Shaping(),
        advantages=advantages,
        critic=critic,
        old_values=old_values,
        minibatches=[slice(0, 1)],
        ranks=Alone(),
    )
    return targets


def by_turns(*dialogues, rewards, turn_rewards):
    scored = [
        (one, Outcome("score", reward, "", turn_rewards=turns))
        for one, reward, turns in zip(dialogues, rewards, turn_rewards, strict=True)
    ]
    return Group.of(scored)


def test_a_turn_is_worth_what_comes_from_it_on_compared_with_the_groups_at_that_turn():
    group = by_turns(
        dialogue(0, [12, 13, 14, 16, 17], [1, 1, 0, 1, 1]),
        dialogue(0, [12, 14, 18], [1, 0, 1], index=1),
        dialogue(0, [19], [1], index=2),
        rewards=[3.0, 1.0, 0.5],
        turn_rewards=[(1.0, 2.0), (0.5, 0.25), ()],
    )
    assert group.turn_rewards.tolist() == [0, 1, 0, 0, 2, 0.5, 0, 0.25, 0]
    targets = targets_of(group, "turns")
    # From turn 1 on: 3, 1 and 0.5, of mean 1.5. From turn 2 on: 2 and 0.25 + 0.25 of the rest,
    # which stands at the end, of mean 1.25.
    want = [1.5, 1.5, 0.0, 0.75, 0.75, -0.5, 0.0, -0.75, -1.0]
    assert targets.advantages.tolist() == want
    assert targets.rewards.tolist() == [3.0, 1.0, 0.5]


def test_without_rewards_of_turns_every_turn_has_what_comes_at_the_end():
    targets = targets_of(TWO, "turns")
    # Turn 1: 1 and 0. Turn 2: the second has none, so there is nothing to compare with.
    assert targets.advantages.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0, 0.0, -0.5]


def test_rewards_of_turns_stand_where_the_turns_end():
    group = by_turns(
        dialogue(0, [12, 13, 14, 16], [1, 1, 0, 1]), rewards=[3.0], turn_rewards=[(1.0,)]
    )
    shaped = shape([group], Shaping())[0]
    assert shaped.tokens.tolist() == [0.0, 1.0, 0.0, 2.0] and shaped.completions.tolist() == [3.0]
    cut = dataclasses.replace(group, finish_reasons=("length",))
    shaped = shape([cut], Shaping(missing_eos_penalty=-1.0))[0]
    assert shaped.tokens.tolist() == [0.0, 0.0, 0.0, -1.0], "the set reward is of the whole"


def test_gae_steps_from_a_turn_to_the_next_over_the_context():
    critic = SimpleNamespace(
        settings=CriticSettings(lr=1.0, coef=1.0, clip=None, gamma=0.5, gae_lambda=0.5)
    )
    old_values = torch.tensor([1.0, 2.0, 9.0, 9.0, 4.0, 9.0, 0.0])
    targets = targets_of(TWO, "gae", critic, old_values)
    # deltas: 12: 0.5*2 - 1 = 0; 13: 0.5*4 - 2 = 0; 16: 1 - 4 = -3. A_t = delta + 0.25 A_t+1
    assert targets.advantages.tolist() == [-3 / 16, -3 / 4, 0.0, 0.0, -3.0, 0.0, 0.0]
    assert targets.returns.tolist() == [1 - 3 / 16, 2 - 3 / 4, 0.0, 0.0, 1.0, 0.0, 0.0]


def rewritten(group: Group, place: int) -> Group:
    """The group with a restart at this place of its tokens."""
    restarts = torch.arange(group.token_ids.numel()) == place
    return dataclasses.replace(group, restarts=restarts)


def test_what_is_read_anew_is_a_sequence_of_its_own():
    # 12 13, and then behind 14 15 alone 16; beside it 17 behind 10 11 14.
    group = rewritten(TWO, 2)
    (batch,) = packed(group).microbatches
    assert batch.input_ids.tolist() == [10, 11, 12, 14, 15, 14]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 5, 6]
    assert batch.parents.tolist() == [-1, 0, -1, 0]
    assert batch.labels.tolist() == [12, 13, 16, 17]
    assert batch.rows.tolist() == [1, 2, 4, 5]
    assert batch.completions.tolist() == [0, 0, 0, 1]


def test_a_reading_cannot_begin_with_a_sampled_token():
    with pytest.raises(ValueError, match="begins anew with a sampled token"):
        rewritten(TWO, 1)


def test_the_gradient_of_a_rewritten_dialogue_is_that_of_its_readings_one_by_one():
    """The turn behind a restart as a completion of its own, whose prompt is what was read anew."""
    token_ids = [1, 2, 3, 4, 5, 6, 7]
    mask = [True, True, False, False, True, True, True]
    one = dialogue(0, token_ids, mask, prompt=(8, 9))
    other = dialogue(0, [4, 5], [True, True], index=1, prompt=(8, 9))
    whole = rewritten(group_of(one, other, rewards=[1.0, 0.0]), 2)
    first = group_of(dialogue(0, [1, 2], [True] * 2, prompt=(8, 9)), other, rewards=[1.0, 0.0])
    second = group_of(
        dialogue(1, [5, 6, 7], [True] * 3, prompt=(3, 4)),
        dialogue(1, [5], [True], index=1, prompt=(3, 4)),
        rewards=[1.0, 0.0],
    )

    def total(inputs):
        """Of the completion with the reward alone."""
        return -(inputs.advantages.clamp(min=0) * inputs.trainer_logprobs).sum(), {}

    together, _ = gradients_of([whole], loss_fn=total, max_grad_norm=1e9)
    apart, _ = gradients_of([first, second], loss_fn=total, max_grad_norm=1e9)
    for ours, theirs in zip(together, apart):
        torch.testing.assert_close(ours, theirs, atol=STEP * float(theirs.abs().max()), rtol=0)
    unread = dataclasses.replace(whole, restarts=torch.zeros_like(whole.restarts))
    plain, _ = gradients_of([unread], loss_fn=total, max_grad_norm=1e9)
    assert not torch.allclose(plain[0], together[0])


def test_the_oldest_token_of_any_turn_decides_the_lag():
    group = group_of(
        dialogue(0, [12, 13, 14, 15, 16], [1, 1, 0, 0, 1], versions=[3, 3, 3, 3, 7]), rewards=[1.0]
    )
    assert group.oldest_version == 3
