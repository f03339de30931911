"""PPO's critics, a value head on the policy's trunk and a value model of its own: a step against
one sequence at a time, what a critic leaves alone, and going on from what was saved.
"""

import dataclasses

import pytest
import torch

from llamarl.errors import NotFinite
from llamarl.learning.losses.clipped import clipped
from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.targets import Shaping
from llamarl.learning.update import StepAborted
from llamarl.learning.values import CriticSettings, OwnCritic, SharedCritic, value_head
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder
from llamarl.models.config import as_scorer
from tests.updating import (
    NAN,
    SETTINGS,
    STEP,
    VERSION,
    decoder_of,
    go_on,
    group,
    update_of,
    weights_of,
)

PPO = CriticSettings(lr=0.3, coef=0.5, clip=0.1, gamma=0.9, gae_lambda=0.8)
OWN = dataclasses.replace(PPO, lr=0.05)
BETA = 0.05
EPS = 0.2  # of the clip
LRS = {SharedCritic: 0.02, OwnCritic: 0.05}  # of the policy
CPU = torch.device("cpu")


def shared_critic(settings=PPO, optimizer=torch.optim.SGD):
    """A head that has learnt something already, stepped by SGD so that a step is its gradient."""
    critic = SharedCritic(16, settings, betas=(0.9, 0.99), eps=1e-8, mesh=None, device=CPU)
    random = torch.Generator().manual_seed(3)
    critic.head.weight.data.copy_(torch.randn(16, generator=random) * 0.3)
    critic.head.bias.data.fill_(0.2)
    critic.optimizer = optimizer(critic.parameters, lr=123.0)
    return critic


def own_critic(settings=OWN, optimizer=torch.optim.SGD):
    """A scorer with one label, of other weights than the policy's."""
    trunk = build_decoder(as_scorer(decoder_of().config), device="cpu")
    random = torch.Generator().manual_seed(8)
    for parameter in trunk.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random) * 0.3
    return OwnCritic(trunk, settings, optimizer(trunk.parameters(), lr=123.0))


each_critic = pytest.mark.parametrize("make", [shared_critic, own_critic])


def ppo_update(critic, **changes):
    made = {
        "shaping": Shaping(missing_eos_penalty=-1.0, reward_kl_coef=BETA),
        "max_grad_norm": 1e6,
        "schedule": "constant",
        "lr": LRS[type(critic)],
    }
    return update_of(loss_fn=regularised(clipped), critic=critic, **{**made, **changes})


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
        places = torch.arange(g.token_ids.numel()).split(g.lengths.tolist())
        for i, own in enumerate(places):
            if not g.trained[i]:
                continue
            r = -BETA * (g.generator_logprobs[own] - g.ref_logprobs[own])
            r[-1] += g.rewards[i] if g.finish_reasons[i] == "stop" else -1.0
            tokens = torch.cat([g.prompt_ids, g.token_ids[own]])
            out.append((tokens, len(g.prompt_ids), g.generator_logprobs[own], r))
    return out


def alone(policy, critic, tokens, prompt):
    """(logprobs [L], values [L]) of one sequence, from whole tensors."""
    kept = []

    def keep(hidden, weight):
        kept.append(hidden)
        return hidden @ weight.T

    given = tokens, torch.arange(len(tokens)), PackedAttention(torch.tensor([0, len(tokens)])), keep
    logprobs = (policy(*given) / SETTINGS.temperature).log_softmax(-1)[prompt - 1 : -1]
    values = critic.head(kept[0]) if critic.trunk is None else critic.trunk(*given)[:, 0]
    return logprobs.gather(1, tokens[prompt:, None])[:, 0], values[prompt - 1 : -1]


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


def one_at_a_time(make, passes):
    """Policy, critic and trained tokens after `passes` steps of SGD by PPO's loss."""
    policy, critic = decoder_of().train(), make()
    if critic.trunk is not None:
        critic.trunk.train()
    data = sequences()
    with torch.no_grad():
        old = [alone(policy, critic, tokens, prompt)[1] for tokens, prompt, *_ in data]
    made = [estimate(v, r) for v, (*_, r) in zip(old, data)]
    count = sum(len(r) for *_, r in data)
    rates = [(p, LRS[type(critic)]) for p in policy.parameters()]
    rates += [(p, critic.settings.lr) for p in critic.parameters]
    for _ in range(passes):
        loss = 0.0
        for (tokens, prompt, mu, _), v_old, (advantages, returns) in zip(data, old, made):
            logprobs, v = alone(policy, critic, tokens, prompt)
            ratio = (logprobs - mu).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - EPS, 1 + EPS) * advantages)
            near = v_old + (v - v_old).clamp(-PPO.clip, PPO.clip)
            worse = torch.maximum((v - returns).square(), (near - returns).square())
            loss = loss + (PPO.coef * 0.5 * worse.sum() - gain.sum()) / count
        gradients = torch.autograd.grad(loss, [p for p, _ in rates])
        for (p, lr), gradient in zip(rates, gradients):
            p.data -= lr * gradient
    return policy, critic, count


def assert_moved_alike(got, want, start, passes):
    triples = list(zip(got, want, start, strict=True))
    moved = max((w - s).abs().max().item() for _, w, s in triples)
    assert moved > 1e-3
    for mine, theirs, _ in triples:
        atol = (STEP * moved + (2e-6 if mine.dim() == 1 else 1e-7)) * passes
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=0)


@pytest.mark.filterwarnings("ignore:sequences longer")
@each_critic
@pytest.mark.parametrize("microbatch_tokens, passes", [(17, 3), (1000, 1)])
def test_a_step_of_ppo_is_that_of_one_sequence_at_a_time(make, microbatch_tokens, passes):
    policy, critic, count = one_at_a_time(make, passes)
    update = ppo_update(make(), microbatch_tokens=microbatch_tokens, updates_per_batch=passes)
    metrics = update.run(groups_of(), VERSION, go_on)
    policies = [model.parameters() for model in (update.decoder, policy, decoder_of())]
    assert_moved_alike(*policies, passes)
    assert_moved_alike(update.critic.parameters, critic.parameters, make().parameters, passes)
    assert metrics["tokens/trained"] == count
    assert metrics["value/grad_norm"] > 0 and metrics["value/loss"] > 0


@pytest.mark.parametrize("rewards, explained", [([1.0, 0.0], 0.0), ([1.0, 1.0], None)])
def test_values_of_0_explain_nothing_and_equal_returns_leave_nothing_to_explain(rewards, explained):
    # Without discount a return is the score, at every token of a completion.
    critic = shared_critic(dataclasses.replace(PPO, gamma=1.0, gae_lambda=1.0))
    critic.head.weight.data.zero_(), critic.head.bias.data.zero_()
    update = ppo_update(critic, shaping=Shaping())
    row = update.run([group(4, [2, 3], rewards)], VERSION, go_on)
    assert row["value/explained_variance"] == explained


def test_it_is_clipped_by_its_own_norm():
    free, clipped_one = ppo_update(own_critic()), ppo_update(own_critic(), max_grad_norm=1e-3)
    norms = []
    for update in (free, clipped_one):
        norms.append(update.run(groups_of(), VERSION, go_on)["value/grad_norm"])
    assert norms[0] > 1e-2 and norms[1] == pytest.approx(norms[0], rel=STEP)
    moved = 0.0
    for p, start in zip(clipped_one.critic.parameters, own_critic().parameters):
        moved += (p - start).square().sum().item()
    assert moved**0.5 == pytest.approx(OWN.lr * 1e-3, rel=1e-2)


@pytest.mark.bitwise("the critic's settings change nothing of the policy's step")
def test_the_policys_step_has_the_same_bits_with_another_coefficient():
    updates = [ppo_update(own_critic(dataclasses.replace(OWN, coef=coef))) for coef in (0.5, 2.0)]
    for update in updates:
        update.run(groups_of(), VERSION, go_on)
    assert all(map(torch.equal, *(weights_of(update) for update in updates)))
    assert not all(map(torch.equal, *(update.critic.parameters for update in updates)))


def state_of(update):
    return [p.tolist() for p in (*update.decoder.parameters(), *update.critic.parameters)]


@each_critic
@pytest.mark.parametrize("boundary", [1, 7], ids=["in the pass for old values", "in the update"])
def test_a_stop_before_the_first_update_changes_nothing(make, boundary):
    update = ppo_update(make(), microbatch_tokens=17)
    before, asked = state_of(update), iter(range(boundary + 1))
    with pytest.raises(StepAborted):
        update.run(groups_of(), VERSION, lambda: next(asked) == boundary)
    assert state_of(update) == before
    assert all(p.grad is None for p in update.critic.parameters)


@each_critic
def test_values_that_are_not_finite_are_seen_and_change_nothing(make):
    update = ppo_update(make())
    update.critic.parameters[-1].data.fill_(torch.inf)
    before = state_of(update)
    with pytest.raises(NotFinite, match=f"step {VERSION}: the critic's values sum to (inf|nan)"):
        update.run(groups_of(), VERSION, go_on)
    assert state_of(update) == before


@pytest.mark.bitwise("a resumed critic goes on as the one that was not stopped")
@each_critic
def test_it_goes_on_bit_for_bit_from_what_was_saved(make):
    first, straight, resumed = (ppo_update(make(optimizer=torch.optim.AdamW)) for _ in range(3))
    for update in (first, straight):
        update.run(groups_of(), VERSION, go_on)
    saved = {}
    for key, value in first.critic.state_dict().items():
        saved[key] = value.clone() if isinstance(value, torch.Tensor) else value
    resumed.decoder.load_state_dict(first.decoder.state_dict())
    held = sum(p.numel() for p in resumed.critic.parameters)
    assert resumed.critic.load_state_dict([{}]) == held  # nothing of it is there
    assert resumed.critic.load_state_dict([saved]) == 0
    for update in (resumed, straight):
        update.run(groups_of(), VERSION + 1, go_on)
    assert state_of(resumed) == state_of(straight)
    assert resumed.critic.state_dict()["value_step"] == 2.0


def test_what_another_critic_saved_is_refused():
    with pytest.raises(ValueError, match="weight does not fit this run"):
        own_critic().load_state_dict([shared_critic().state_dict()])
    with pytest.raises(ValueError, match="resume with the trainer.critic.trunk"):
        shared_critic().load_state_dict([own_critic().state_dict()])


def test_a_fresh_head_says_0_for_everything():
    assert value_head(5, mesh=None, device=CPU)(torch.randn(3, 5)).tolist() == [0.0] * 3
    assert value_head(5, mesh=None, device=CPU)(torch.randn(0, 5)).shape == (0,)


def test_the_critics_rate_follows_the_policys_schedule():
    update = ppo_update(shared_critic(), schedule="linear")
    update.run(groups_of(), VERSION, go_on)
    rate = PPO.lr * (1 - VERSION / SETTINGS.max_steps)
    assert [g["lr"] for g in update.critic.optimizer.param_groups] == [rate]
