"""The value head and PPO's step: GAE by a loop over tokens, gradients of one sequence at a time,
the head's own shards.
"""

import copy
import dataclasses
import math

import pytest
import torch

from llamarl.errors import NotFinite
from llamarl.learning.losses.clipped import clipped
from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.shaping import Shaping
from llamarl.learning.update import StepAborted
from llamarl.learning.values import CriticSettings, SharedCritic
from llamarl.models.attention import PackedAttention
from llamarl.models.heads import value_head
from tests.updating import NAN, SETTINGS, STEP, VERSION, decoder_of, go_on, group, update_of

PPO = CriticSettings(lr=0.3, coef=0.5, clip=0.1, gamma=0.9, gae_lambda=0.8)
BETA, EPS = 0.05, 0.2
CPU = torch.device("cpu")


def critic_of(settings=PPO, **start):
    """A head that has learnt something already, stepped by SGD so that a step is its gradient."""
    critic = SharedCritic(16, settings, betas=(0.9, 0.99), eps=1e-8, mesh=None, device=CPU)
    random = torch.Generator().manual_seed(3)
    critic.head.weight.data.copy_(torch.randn(16, generator=random) * 0.3)
    critic.head.bias.data.fill_(0.2)
    critic.optimizer = torch.optim.SGD(critic.parameters, lr=123.0)
    return critic


def ppo_update(critic=None, **changes):
    made = dict(
        shaping=Shaping(missing_eos_penalty=-1.0, reward_kl_coef=BETA),
        max_grad_norm=1e6,
        schedule="constant",
        lr=0.02,
    )
    return update_of(
        loss_fn=regularised(clipped), critic=critic or critic_of(), **{**made, **changes}
    )


def groups_of():
    """A masked completion, one that was cut off, and an ordinary group; the reference differs from
    the policy.
    """
    made = [
        group(4, [6, 2, 9], [1.0, 0.5, 0.0]),
        group(3, [1, 5, 2], [0.0, 1.0, NAN]),
        group(7, [2, 2, 8], [0.0, 3.0, 1.0], finish_reasons=("stop", "aborted", "length")),
        group(1, [3], [1.0]),  # a group of one is enough
    ]
    return [
        dataclasses.replace(g, ref_logprobs=torch.linspace(-4.0, -2.0, g.token_ids.numel()))
        for g in made
    ]


def sequences():
    """(tokens, prompt length, generator logprobs, shaped reward of each token) of every trained
    completion.
    """
    out = []
    for g in groups_of():
        at = 0
        for i, n in enumerate(g.lengths.tolist()):
            own, at = slice(at, at + n), at + n
            if g.rewards[i].isnan() or g.finish_reasons[i] == "aborted":
                continue
            r = -BETA * (g.generator_logprobs[own] - g.ref_logprobs[own])
            r[-1] += g.rewards[i] if g.finish_reasons[i] == "stop" else -1.0
            out.append(
                (
                    torch.cat([g.prompt_ids, g.token_ids[own]]),
                    len(g.prompt_ids),
                    g.generator_logprobs[own],
                    r,
                )
            )
    return out


def forward(decoder, head, tokens, prompt):
    """(logprobs [L], values [L]) of one sequence alone."""
    kept = []

    def both(hidden, weight):
        kept.append(head(hidden)[prompt - 1 : -1])
        return hidden @ weight.T

    logits = decoder(
        tokens, torch.arange(len(tokens)), PackedAttention(torch.tensor([0, len(tokens)])), both
    )
    logprobs = (logits / SETTINGS.temperature).log_softmax(-1)[prompt - 1 : -1]
    return logprobs.gather(1, tokens[prompt:, None])[:, 0], kept[0]


def estimate(values, rewards, s=PPO):
    """GAE and returns by the definition: a double loop, in Python's floats."""
    v = [*values.tolist(), 0.0]
    r = rewards.tolist()
    n = len(rewards)
    delta = [r[t] + s.gamma * v[t + 1] - v[t] for t in range(n)]
    advantages = []
    for begin in range(n):
        ahead = range(n - begin)
        advantages.append(sum((s.gamma * s.gae_lambda) ** k * delta[begin + k] for k in ahead))
    return torch.tensor(advantages), torch.tensor([a + b for a, b in zip(advantages, v)])


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
@pytest.mark.parametrize("microbatch_tokens", [1, 17, 1000])
@pytest.mark.parametrize("passes", [1, 3])
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
            if not g.rewards[i].isnan() and g.finish_reasons[i] != "aborted":
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
