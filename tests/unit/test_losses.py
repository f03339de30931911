"""The policy gradient by hand and against float64 autograd; names and options of losses."""

import math
import sys

import pytest
import torch

from llamarl.learning.losses import LOSSES, check_options, resolve_loss
from llamarl.learning.losses.common import ratio
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.learning.losses.regularisers import regularised
from tests.loss_problems import inputs_of

HALF = math.log(0.5)


def f64(*values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def problem(tokens=12, seed=0):
    """Random float64 tensors in a loss's order, about half of them masked."""
    random = torch.Generator().manual_seed(seed)
    pi, mu, ref = -2 * torch.rand(3, tokens, generator=random, dtype=torch.float64)
    advantages = torch.randn(tokens, generator=random, dtype=torch.float64)
    return pi.requires_grad_(), mu, ref, advantages, torch.rand(tokens, generator=random) < 0.5


def test_the_policy_gradient_by_hand():
    # pi 1/2, mu 1/4: ratio 2, capped at 1.5; -1.5 * 1 * ln(1/2) = 1.0397. Its gradient is -1.5:
    # none through the weight.
    pi = f64(HALF, grad=True)
    inputs = inputs_of(pi, f64(2 * HALF), None, f64(1.0), torch.tensor([True]), num_loss_tokens=1)
    loss, metrics = policy_gradient(inputs, ratio_cap=1.5)
    loss.backward()
    assert loss.item() == pytest.approx(1.5 * math.log(2), abs=1e-15)
    assert pi.grad.item() == pytest.approx(-1.5, abs=1e-15)
    got = {name: value.item() for name, value in metrics.items()}
    # k3 at pi/mu = 2: 2 - 1 - ln 2
    want = {
        "ratio/sum": 2.0,
        "ratio/max": 2.0,
        "ratio/capped": 1.0,
        "kl/generator": 1 - math.log(2),
    }
    assert got == pytest.approx(want, abs=1e-14)


def test_the_weight_is_cut_from_above_only():
    pi = f64(math.log(0.01), grad=True)
    inputs = inputs_of(pi, f64(0.0), None, f64(1.0), torch.tensor([True]), num_loss_tokens=1)
    policy_gradient(inputs, ratio_cap=2.0)[0].backward()
    assert pi.grad.item() == pytest.approx(-0.01, abs=1e-15)


def test_on_policy_gradient_is_the_policy_gradient():
    pi, _, _, advantages, mask = problem()
    inputs = inputs_of(pi, pi.detach(), None, advantages, mask, num_loss_tokens=7)
    policy_gradient(inputs)[0].backward()
    torch.testing.assert_close(
        pi.grad, torch.where(mask, -advantages / 7, 0), atol=1e-16, rtol=1e-12
    )


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_it_equals_a_naive_float64_sum_and_its_autograd(kl_coef):
    pi, mu, ref, advantages, mask = problem(40)
    loss = regularised(policy_gradient, kl_coef=kl_coef)
    inputs = inputs_of(pi, mu, ref, advantages, mask, num_loss_tokens=9)
    got, metrics = loss(inputs, ratio_cap=1.2)
    want = f64(0.0).squeeze()
    for t in mask.nonzero().flatten():
        weight = min(math.exp(pi[t].item() - mu[t].item()), 1.2)
        kl = torch.exp(ref[t] - pi[t]) - 1 - (ref[t] - pi[t])
        want = want - (weight * advantages[t] * pi[t] - kl_coef * kl) / 9
    torch.testing.assert_close(got, want, atol=1e-14, rtol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(got, pi), torch.autograd.grad(want, pi), atol=1e-14, rtol=1e-12
    )
    ratios = (pi.detach() - mu)[mask].exp()
    assert metrics["ratio/capped"] == (ratios > 1.2).sum() > 0
    torch.testing.assert_close(
        (metrics["ratio/sum"], metrics["ratio/max"]), (ratios.sum(), ratios.max())
    )


def test_bfloat16_logprobs_are_subtracted_in_float32():
    pi, mu = torch.tensor(
        [[-8.0], [-7.0 / 512]], dtype=torch.bfloat16
    )  # the difference takes 12 bits
    inputs = inputs_of(pi, mu, None, torch.ones(1), torch.tensor([True]), num_loss_tokens=1)
    _, metrics = policy_gradient(inputs)
    assert metrics["ratio/sum"].item() == pytest.approx(math.exp(-8 + 7 / 512), rel=1e-6)
    assert ratio(torch.tensor([math.inf])).isfinite().all()


# --- names ---

MY_LOSS = """
def my_loss(inputs, *, width, depth=1):
    return inputs.trainer_logprobs.sum() / inputs.num_loss_tokens, {}

def too_many(trainer_logprobs, generator_logprobs, *, width=1): ...

limit = 3
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "users_losses.py").write_text(MY_LOSS)
    (tmp_path / "users_broken.py").write_text("import no_such_dependency")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("users_losses", "users_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_losses_resolve_by_name():
    assert all(resolve_loss(name) is fn for name, fn in LOSSES.items())
    assert all(fn.__name__ == name for name, fn in LOSSES.items())


def test_a_loss_in_the_users_directory_resolves(user_module):
    fn = resolve_loss("users_losses:my_loss")
    check_options(fn, {"width": 1})
    assert fn.__name__ == "my_loss"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cliped", "no loss 'cliped'; did you mean clipped"),
        ("users_losses:my_los", "did you mean my_loss"),
        ("users_losses:limit", "users_losses has int, not a function, under the name limit"),
        ("users_losses:too_many", "must take .inputs, .*generator_logprobs"),
        ("users_lossez:my_loss", "no module users_lossez"),
    ],
)
def test_a_wrong_name_says_what_is_there(user_module, name, message):
    with pytest.raises(ValueError, match=message):
        resolve_loss(name)


def test_what_a_users_module_lacks_is_not_mistaken_for_the_module(user_module):
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        resolve_loss("users_broken:loss")


def test_options_are_checked_all_at_once(user_module):
    check_options(policy_gradient, {"ratio_cap": 2.0, "ratio_level": "sequence"})
    with pytest.raises(
        ValueError,
        match=r"(?s)ratio_kap: unknown option; did you mean ratio_cap\?.*num_loss_tokens: unknown",
    ):
        check_options(policy_gradient, {"ratio_kap": 2.0, "num_loss_tokens": 3})
    with pytest.raises(ValueError, match="width: my_loss needs it"):
        check_options(resolve_loss("users_losses:my_loss"), {"depth": 2})
