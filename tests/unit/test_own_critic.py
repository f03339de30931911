"""A value model of its own: PPO's step against one sequence at a time on whole tensors, what it
leaves alone, and going on from what was saved.
"""

import dataclasses

import pytest
import torch

from llamarl.errors import NotFinite
from llamarl.learning.update import StepAborted
from llamarl.learning.values import CriticSettings, OwnCritic
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder
from tests.tolerances import rounding
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
from tests.updating import VERSION, decoder_of, go_on

LR = 0.05  # of the policy and of the value model, by SGD
SETTINGS = dataclasses.replace(PPO, lr=LR)
STEP = rounding(
    terms=24, depth=2 * 2 * 2
)  # of the largest change: width, and the layers there and back


def trunk_of():
    """A scorer with one label, of other weights than the policy's."""
    trunk = build_decoder(decoder_of().config.as_scorer(), device="cpu")
    random = torch.Generator().manual_seed(8)
    for parameter in trunk.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random) * 0.3
    return trunk


def own_critic(settings: CriticSettings = SETTINGS, optimizer=torch.optim.SGD):
    trunk = trunk_of()
    return OwnCritic(trunk, settings, optimizer(trunk.parameters(), lr=123.0))


def own_update(critic=None, **changes):
    return ppo_update(critic or own_critic(), **{"lr": LR, **changes})


def values_of(trunk, tokens, prompt):
    """[L] of one sequence alone."""
    hidden = []

    def keep(hidden_TD, weight_CD):
        hidden.append(hidden_TD)
        return hidden_TD @ weight_CD.T

    ends = PackedAttention(torch.tensor([0, len(tokens)]))
    return trunk(tokens, torch.arange(len(tokens)), ends, keep)[prompt - 1 : -1, 0]


def one_at_a_time(passes):
    """Policy and value model after `passes` steps of SGD, each by its own loss alone."""
    policy, trunk = decoder_of().train(), trunk_of().train()
    head = critic_of().head  # of a shared critic: not looked at
    data = sequences()
    with torch.no_grad():
        old = [values_of(trunk, tokens, prompt) for tokens, prompt, *_ in data]
    made = [estimate(v, r) for v, (*_, r) in zip(old, data)]
    count = sum(len(r) for *_, r in data)
    for _ in range(passes):
        of_policy = of_values = 0.0
        for (tokens, prompt, mu, _), v_old, (advantages, returns) in zip(data, old, made):
            logprobs, _ = forward(policy, head, tokens, prompt)
            ratio = (logprobs - mu).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - EPS, 1 + EPS) * advantages)
            of_policy = of_policy - gain.sum() / count
            v = values_of(trunk, tokens, prompt)
            near = v_old + (v - v_old).clamp(-PPO.clip, PPO.clip)
            worse = torch.maximum((v - returns).square(), (near - returns).square())
            of_values = of_values + PPO.coef * 0.5 * worse.sum() / count
        for model, loss in ((policy, of_policy), (trunk, of_values)):
            parameters = list(model.parameters())
            for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
                p.data -= LR * gradient
    return policy, trunk


def assert_moved_alike(got, want, start, passes):
    pairs = list(zip(got.parameters(), want.parameters(), start.parameters(), strict=True))
    moved = max((w - s).abs().max().item() for _, w, s in pairs)
    assert moved > 1e-3
    for mine, theirs, _ in pairs:
        atol = STEP * moved * passes + 1e-7 * passes
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=0)


@pytest.mark.filterwarnings("ignore:sequences longer")
@pytest.mark.parametrize("microbatch_tokens, passes", [(17, 3), (1000, 1)])
def test_a_step_is_that_of_one_sequence_at_a_time(microbatch_tokens, passes):
    policy, trunk = one_at_a_time(passes)
    update = own_update(microbatch_tokens=microbatch_tokens, updates_per_batch=passes)
    metrics = update.run(groups_of(), VERSION, go_on).metrics
    assert_moved_alike(update.decoder, policy, decoder_of(), passes)
    assert_moved_alike(update.critic.trunk, trunk, trunk_of(), passes)
    assert metrics["value/grad_norm"] > 0 and metrics["value/loss"] > 0


def test_it_is_clipped_by_its_own_norm():
    free, clipped = own_update(), own_update(max_grad_norm=1e-3)
    norms = []
    for update in (free, clipped):
        norms.append(update.run(groups_of(), VERSION, go_on).metrics["value/grad_norm"])
    assert norms[0] > 1e-2
    assert norms[1] == pytest.approx(norms[0], rel=STEP)
    moved = 0.0
    for p, start in zip(clipped.critic.parameters, trunk_of().parameters()):
        moved += (p - start).square().sum().item()
    assert moved**0.5 == pytest.approx(LR * 1e-3, rel=1e-2)


@pytest.fixture
def by_coefficient():
    """Updates after a step: with the coefficient of the others, and with one of 2."""
    updates = [own_update(), own_update(own_critic(dataclasses.replace(SETTINGS, coef=2.0)))]
    for update in updates:
        update.run(groups_of(), VERSION, go_on)
    return updates


def test_its_coefficient_scales_its_own_step_and_leaves_the_policys_as_it_was(by_coefficient):
    free, other = by_coefficient
    assert_moved_alike(other.decoder, free.decoder, decoder_of(), passes=1)
    scaled = trunk_of()
    for p, moved in zip(scaled.parameters(), free.critic.parameters, strict=True):
        p.data += (moved - p).detach() * (2.0 / SETTINGS.coef)
    assert_moved_alike(other.critic.trunk, scaled, trunk_of(), passes=1)


@pytest.mark.bitwise("the critic's settings change nothing of the policy's step")
def test_the_policys_step_has_the_same_bits_with_another_coefficient(by_coefficient):
    free, other = by_coefficient
    assert all(map(torch.equal, other.decoder.parameters(), free.decoder.parameters()))


def weights_of(update):
    return [p.tolist() for p in (*update.decoder.parameters(), *update.critic.parameters)]


def test_a_stop_before_the_first_update_changes_nothing():
    update = own_update(microbatch_tokens=17)
    before = weights_of(update)
    asked = iter(range(100))
    with pytest.raises(StepAborted):
        # In the pass that trains: that for old values has fewer boundaries than this.
        update.run(groups_of(), VERSION, lambda: next(asked) > 6)
    assert weights_of(update) == before
    assert all(p.grad is None for p in update.critic.parameters)


def test_values_that_are_not_finite_change_nothing():
    update = own_update()
    update.critic.trunk.score.weight.data.fill_(torch.inf)
    before = [p.tolist() for p in update.decoder.parameters()]
    with pytest.raises(NotFinite, match=f"step {VERSION}: the critic's values sum to (inf|nan)"):
        update.run(groups_of(), VERSION, go_on)
    assert [p.tolist() for p in update.decoder.parameters()] == before


@pytest.mark.bitwise("a resumed critic goes on as the one that was not stopped")
def test_it_goes_on_bit_for_bit_from_what_was_saved():
    first, straight = (own_update(own_critic(optimizer=torch.optim.AdamW)) for _ in range(2))
    for update in (first, straight):
        update.run(groups_of(), VERSION, go_on)
    saved = {}
    for key, value in first.critic.state_dict().items():
        saved[key] = value.clone() if isinstance(value, torch.Tensor) else value
    resumed = own_update(own_critic(optimizer=torch.optim.AdamW))
    resumed.decoder.load_state_dict(first.decoder.state_dict())
    assert resumed.critic.load_state_dict([saved]) == 0
    for update in (resumed, straight):
        update.run(groups_of(), VERSION + 1, go_on)
    assert weights_of(resumed) == weights_of(straight)


def test_what_another_critic_saved_is_refused():
    with pytest.raises(ValueError, match="critic has weight, which this run's has not"):
        own_critic().load_state_dict([critic_of().state_dict()])
    with pytest.raises(ValueError, match="resume with the trainer.critic.trunk"):
        critic_of().load_state_dict([own_critic().state_dict()])
    held = sum(p.numel() for p in trunk_of().parameters())
    assert own_critic().load_state_dict([{}]) == held
