"""The value head and PPO's step: GAE by a loop over tokens, gradients of one sequence at a time,
the head's own shards.
"""

import copy
import dataclasses
import math

import pytest
import torch

from llamarl.errors import NotFinite
from llamarl.learning.targets import Shaping
from llamarl.learning.update import StepAborted
from llamarl.learning.values import SharedCritic, value_head
from tests.unit.ppo_steps import (
    EPS,
    PPO,
    critic_of,
    estimate,
    forward,
    groups_of,
    ppo_update,
    sequences,
)
from tests.updating import SETTINGS, STEP, VERSION, decoder_of, go_on, group

CPU = torch.device("cpu")


def one_at_a_time(passes):
    """Weights of the decoder and of the head after `passes` steps of PPO by SGD, from whole logits
    of each sequence alone.
    """
    decoder, head = decoder_of(), copy.deepcopy(critic_of().head)
    decoder.train()
    data = sequences()
    with torch.no_grad():
        old = [forward(decoder, head, tokens, prompt)[1] for tokens, prompt, _, _ in data]
    made = [estimate(v, r) for v, (*_, r) in zip(old, data)]
    count = sum(len(r) for *_, r in data)
    for _ in range(passes):
        loss = 0.0
        for (tokens, prompt, mu, _), v_old, (advantages, returns) in zip(data, old, made):
            logprobs, v = forward(decoder, head, tokens, prompt)
            ratio = (logprobs - mu).exp()
            loss = (
                loss
                - torch.minimum(
                    ratio * advantages, ratio.clamp(1 - EPS, 1 + EPS) * advantages
                ).sum()
                / count
            )
            clipped = v_old + (v - v_old).clamp(-PPO.clip, PPO.clip)
            worse = torch.maximum((v - returns).square(), (clipped - returns).square())
            loss = loss + PPO.coef * 0.5 * worse.sum() / count
        every = [*decoder.parameters(), *head.parameters()]
        for p, g in zip(every, torch.autograd.grad(loss, every)):
            p.data -= (0.02 if p is not head.weight and p is not head.bias else PPO.lr) * g
    return decoder, head, count


@pytest.mark.filterwarnings("ignore:sequences longer")
@pytest.mark.parametrize("microbatch_tokens, passes", [(17, 3), (1000, 1)])
def test_a_step_of_ppo_is_that_of_one_sequence_at_a_time(microbatch_tokens, passes):
    decoder, head, count = one_at_a_time(passes)
    update = ppo_update(microbatch_tokens=microbatch_tokens, updates_per_batch=passes)
    metrics = update.run(groups_of(), VERSION, go_on).metrics
    start = decoder_of()
    moved = max(
        (a - b).abs().max().item() for a, b in zip(decoder.parameters(), start.parameters())
    )
    assert moved > 1e-3
    for got, want in zip(update.decoder.parameters(), decoder.parameters()):
        torch.testing.assert_close(got, want, atol=STEP * moved * passes + 1e-7 * passes, rtol=0)
    before = critic_of().head
    for got, want, old in zip(update.critic.parameters, head.parameters(), before.parameters()):
        torch.testing.assert_close(got, want, atol=2e-6 * passes, rtol=0)
        assert (want - old).abs().max() > 0.01
    assert metrics["tokens/trained"] == count
    assert metrics["value/grad_norm"] > 0 and metrics["value/loss"] > 0


def test_old_values_of_every_trained_token_do_not_depend_on_the_packing():
    update = ppo_update(microbatch_tokens=17)
    values = update._old_values(update.critic, groups_of(), VERSION, go_on)
    want, at = torch.zeros_like(values), 0
    alone = iter(sequences())
    for g in groups_of():
        for i, n in enumerate(g.lengths.tolist()):
            if g.trained[i]:
                tokens, prompt, *_ = next(alone)
                want[at : at + n] = forward(update.decoder, update.critic.head, tokens, prompt)[
                    1
                ].detach()
            at += n
    torch.testing.assert_close(values, want, atol=1e-6, rtol=0)
    assert values.abs().max() > 0.1 and not values.requires_grad


def test_explained_variance_by_hand():
    # Without discount a return is what is still to come: here the score, at every token of a
    # completion.
    critic = critic_of(dataclasses.replace(PPO, gamma=1.0, gae_lambda=1.0))
    critic.head.weight.data.zero_(), critic.head.bias.data.zero_()
    update = ppo_update(critic, shaping=Shaping())
    groups = [group(4, [2, 3], [1.0, 0.0])]
    assert (
        update.run(groups, VERSION, go_on).metrics["value/explained_variance"] == 0.0
    )  # values of 0 explain nothing
    assert (
        ppo_update(critic, shaping=Shaping())
        .run([group(4, [2, 3], [1.0, 1.0])], VERSION, go_on)
        .metrics["value/explained_variance"]
        is None
    )  # nothing to explain


def state_of(update):
    return [
        p.tolist() for p in (*update.decoder.parameters(), *update.critic.parameters)
    ], update.critic.state_dict()["value_step"]


def test_a_stop_in_the_pass_for_old_values_changes_nothing():
    update = ppo_update(microbatch_tokens=17)
    before, boundary = state_of(update), iter([False, True])
    with pytest.raises(StepAborted):
        update.run(groups_of(), VERSION, lambda: next(boundary))
    assert state_of(update) == before and next(boundary, None) is None


def test_a_value_head_that_is_not_finite_is_seen_and_changes_nothing():
    update = ppo_update()
    update.critic.head.bias.data.fill_(math.inf)
    before = state_of(update)
    with pytest.raises(NotFinite, match=f"step {VERSION}: the critic's values sum to (inf|nan)"):
        update.run(groups_of(), VERSION, go_on)
    assert state_of(update) == before


def test_a_fresh_head_says_0_for_everything():
    assert value_head(5, mesh=None, device=CPU)(torch.randn(3, 5)).tolist() == [0.0] * 3
    assert value_head(5, mesh=None, device=CPU)(torch.randn(0, 5)).shape == (0,)


def adam_critic():
    return SharedCritic(16, PPO, betas=(0.9, 0.99), eps=1e-8, mesh=None, device=CPU)


@pytest.mark.bitwise("a resumed value head goes on as the one that was not stopped")
def test_a_saved_head_goes_on_bit_for_bit():
    first, straight = ppo_update(adam_critic()), ppo_update(adam_critic())
    first.run(groups_of(), VERSION, go_on), straight.run(groups_of(), VERSION, go_on)
    saved = {
        k: v.clone() if isinstance(v, torch.Tensor) else v
        for k, v in first.critic.state_dict().items()
    }
    resumed = ppo_update(adam_critic())
    resumed.decoder.load_state_dict(first.decoder.state_dict())
    assert resumed.critic.load_state_dict([{}]) == 16 + 1  # nothing of it is there
    assert resumed.critic.load_state_dict([saved]) == 0
    resumed.run(groups_of(), VERSION + 1, go_on), straight.run(groups_of(), VERSION + 1, go_on)
    assert state_of(resumed) == state_of(straight) and state_of(resumed)[1] == 2.0


def test_the_heads_rate_follows_the_policys_schedule():
    update = ppo_update(schedule="linear")
    update.run(groups_of(), VERSION, go_on)
    assert [g["lr"] for g in update.critic.optimizer.param_groups] == [
        PPO.lr * (1 - VERSION / SETTINGS.max_steps)
    ]
