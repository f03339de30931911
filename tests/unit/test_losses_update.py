"""Losses that look at completions, through PolicyUpdate: what they are given, and no difference by microbatch."""

import math

import pytest
import torch

from llamarl.learning.losses import LOSSES
from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.update import completions_of
from tests.unit.test_update import VERSION, go_on, group, groups_of, update_of

SAME = 1e-5  # float32 sums in another order


def test_completions_of_a_microbatch_by_hand():
    groups = [group(4, [2, 3], [0.0, 1.0]), group(1, [1, 4, 2], [2.0, 3.0, 5.0])]
    c = completions_of(groups, [3, 4, 0], num_completions=9.0, num_groups=4.0)
    assert (c.index.tolist(), c.groups.tolist(), c.rewards.tolist()) == ([0] * 4 + [1] * 2 + [2] * 2, [1, 1, 0], [3.0, 5.0, 0.0])
    none = completions_of([], [], num_completions=0.0, num_groups=0.0)
    assert none.index.numel() == none.groups.numel() == none.rewards.numel() == 0


@pytest.mark.parametrize("name", ["rloo", "proximal_rloo", "kimi_k2", "tb", "online_dpo"])
def test_the_step_does_not_depend_on_the_microbatches(name):
    def step(microbatch_tokens):
        groups = [g for g in groups_of()]
        for g in groups:
            object.__setattr__(g, "ref_logprobs", torch.full(g.token_ids.shape, -2.5))
        fn = regularised(LOSSES[name], kl_coef=0.1, entropy_coef=0.1)
        update = update_of(loss_fn=fn, microbatch_tokens=microbatch_tokens, max_grad_norm=1e9)
        metrics = update.run(groups, VERSION, go_on)
        return metrics, torch.cat([p.detach().flatten() for p in update.decoder.parameters()])

    (one, weights), (many, other) = step(1000), step(40)
    assert one["packing/padding_fraction"] != many["packing/padding_fraction"] and one["grad_norm"] > 0
    own = [k for k in one if k.startswith(("loss/", "grad", "kl/", "ratio/", "clip/", "tb/", "dpo/", "kimi/"))]
    assert {k: one[k] for k in own} == pytest.approx({k: many[k] for k in own}, rel=SAME, abs=SAME)
    torch.testing.assert_close(weights, other, rtol=SAME, atol=SAME)


def test_a_cut_group_is_refused_by_a_loss_that_couples_it():
    one = group(4, [6, 7, 5], [0.0, 1.0, 2.0])
    update = update_of(loss_fn=LOSSES["best_of_n"], microbatch_tokens=15)
    with pytest.raises(ValueError, match="raise trainer.microbatch_tokens"):
        update.run([one], VERSION, go_on)
    assert math.isfinite(update_of(loss_fn=LOSSES["best_of_n"]).run([one], VERSION, go_on)["loss/value"])
