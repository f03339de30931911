"""Losses and gradients against TRL 1.16's, made once by tests/golden/make_trl_losses.py; PPO and
GAE against torchtune's.
"""

import json
from pathlib import Path

import pytest
import torch

from llamarl.learning.losses.inputs import Completions
from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.targets import gae, group_mean_std, leave_one_out
from llamarl.learning.values import value_loss
from tests.loss_problems import PUBLISHED, inputs_of

EXACT = dict(atol=1e-14, rtol=1e-12)
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "trl_losses.json").read_text())
OURS = {
    "grpo": ("grpo", {}, {}),
    "grpo_clip_higher": ("grpo", {"clip_high": 0.28}, {}),
    "grpo_delta": ("grpo", {"ratio_cap": 1.5}, {}),
    "gspo": ("grpo", {"ratio_level": "sequence_mean", "clip_low": 0.05, "clip_high": 0.05}, {}),
    "dapo": ("grpo", {"normalize": "tokens"}, {}),
    "dapo_kl": ("grpo", {"normalize": "tokens"}, {"kl_coef": 0.1}),
    "dapo_entropy": ("grpo", {"normalize": "tokens"}, {"entropy_coef": 0.05}),
    "dr_grpo": ("ppo", {"normalize": "tokens"}, {}),  # and another denominator
    "cispo": ("cispo", {"ratio_cap": 1.2}, {}),
    "cispo_kl": ("cispo", {"ratio_cap": 1.2}, {"kl_coef": 0.1}),
    "rloo": ("proximal_rloo", {}, {}),
}


def packed():
    """(TRL's padded tensors, which labels are no padding, ours end to end)."""
    padded = {
        name: torch.tensor(value, dtype=torch.float64) for name, value in GOLDEN["tensors"].items()
    }
    lengths = torch.tensor(GOLDEN["lengths"])
    real = torch.arange(5) < lengths[:, None]
    index = torch.arange(6).repeat_interleave(lengths)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    completions = Completions(
        index=index,
        groups=groups,
        rewards=padded["rewards"],
        group_tokens=torch.zeros(2).index_add(0, groups, lengths.float())[groups],
        num_completions=6.0,
        num_groups=2.0,
        num_trained_groups=2.0,
    )
    ours = {
        name: value[real] if value.dim() == 2 else value[index] for name, value in padded.items()
    }
    return padded, real, ours, completions


@pytest.mark.parametrize("case", OURS)
def test_loss_and_gradient_equal_trls(case):
    (name, options, around), golden = OURS[case], GOLDEN["losses"][case]
    _, real, t, completions = packed()
    pi, entropy = t["trainer_logprobs"].requires_grad_(), t["entropy"].requires_grad_()
    advantages = t["leave_one_out"] if case == "rloo" else t["advantages"]
    fn, size = regularised(PUBLISHED[name], **around), pi.numel()
    # TRL's dr_grpo is the clipped surrogate over completions times their room
    tokens = 6.0 * 5 if case == "dr_grpo" else float(size)
    inputs = inputs_of(
        pi,
        t["generator_logprobs"],
        t["ref_logprobs"],
        advantages,
        torch.ones(size, dtype=torch.bool),
        num_loss_tokens=tokens,
        entropy=entropy,
        completions=completions,
    )
    loss, _ = fn(inputs, **options)
    loss.backward()
    assert loss.item() == pytest.approx(golden["loss"], rel=1e-12)
    want = torch.tensor(golden["gradient"], dtype=torch.float64)
    torch.testing.assert_close(pi.grad, want[real], **EXACT)
    assert (want != 0).any() and (want[~real] == 0).all()
    if "entropy_gradient" in golden:
        torch.testing.assert_close(
            entropy.grad,
            torch.tensor(golden["entropy_gradient"], dtype=torch.float64)[real],
            **EXACT,
        )


def test_every_golden_is_compared():
    assert OURS.keys() == GOLDEN["losses"].keys() and GOLDEN["made"]["trl"].startswith("1.16")


def test_advantages_equal_trls():
    padded, *_ = packed()
    rewards = padded["rewards"].view(2, 3)
    every = torch.ones(2, 3, dtype=torch.bool)
    scaled = group_mean_std(rewards, every).flatten()
    left_out = leave_one_out(rewards, every).flatten()
    torch.testing.assert_close(scaled, padded["advantages"], **EXACT)
    torch.testing.assert_close(left_out, padded["leave_one_out"], **EXACT)


def test_ppo_value_loss_and_gae_equal_torchtunes():
    from torchtune import rlhf
    from torchtune.rlhf.loss import PPOLoss

    random = torch.Generator().manual_seed(3)
    pi, old, values, old_values, rewards = (
        torch.randn(5, 4, 7, generator=random, dtype=torch.float64) * 0.4
    )
    length = torch.full((4,), 7)
    # torchtune whitens its advantages; ours are whitened before they are compared.
    got, returns = gae(rewards.flatten(), old_values.flatten(), length, gamma=0.9, lam=0.8)
    want, want_returns = rlhf.estimate_advantages(old_values, rewards, 0.9, 0.8)
    whitened = rlhf.whiten(got.view(4, 7))
    torch.testing.assert_close(whitened, want, **EXACT)
    torch.testing.assert_close(returns.view(4, 7), want_returns, **EXACT)
    _, policy, value, *_ = PPOLoss(epsilon=0.2, value_coeff=1.0, value_clip_range=0.3)(
        old, pi, want, old_values, values, want_returns
    )
    every = torch.ones(28, dtype=torch.bool)
    inputs = inputs_of(pi.flatten(), old.flatten(), None, want.flatten(), every, num_loss_tokens=28)
    ours = PUBLISHED["ppo"](inputs)[0]
    ours_value, _ = value_loss(
        *(x.flatten() for x in (values, old_values, want_returns)),
        value_clip=0.3,
        num_loss_tokens=28,
    )
    torch.testing.assert_close((ours, ours_value), (policy, value), **EXACT)
