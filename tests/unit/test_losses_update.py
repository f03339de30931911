"""Losses that look at completions, through PolicyUpdate: microbatches make no difference."""

import pytest
import torch

from llamarl.learning.losses.regularisers import regularised
from tests.loss_problems import PUBLISHED
from tests.updating import STEP, VERSION, go_on, groups_of, update_of


@pytest.mark.parametrize("name", ["rloo", "proximal_rloo", "kimi_k2", "tb", "online_dpo"])
def test_the_step_does_not_depend_on_the_microbatches(name):
    def step(microbatch_tokens):
        groups = [g for g in groups_of()]
        for g in groups:
            object.__setattr__(g, "ref_logprobs", torch.full(g.token_ids.shape, -2.5))
        fn = regularised(PUBLISHED[name], kl_coef=0.1, entropy_coef=0.1)
        update = update_of(loss_fn=fn, microbatch_tokens=microbatch_tokens, max_grad_norm=1e9)
        metrics = update.run(groups, VERSION, go_on).metrics
        return metrics, torch.cat([p.detach().flatten() for p in update.decoder.parameters()])

    (one, weights), (many, other) = step(1000), step(40)
    unused = "packing/unused_budget_fraction"
    assert one[unused] != many[unused] and one["grad_norm"] > 0
    own = [
        k
        for k in one
        if k.startswith(("loss/", "grad", "kl/", "ratio/", "clip/", "tb/", "dpo/", "kimi/"))
    ]
    assert {k: one[k] for k in own} == pytest.approx({k: many[k] for k in own}, rel=STEP, abs=STEP)
    torch.testing.assert_close(weights, other, rtol=STEP, atol=STEP)
