"""References of the trainer's own, its weights without their adapters and a sharded copy: they say
what a frozen reference says.
"""

import dataclasses

import pytest
import torch

from llamarl.config.command_line import (
    compose_config,
)
from llamarl.config.placement import placement_of
from llamarl.errors import NotFinite
from llamarl.executor import ExecutorGroup
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.update import StepAborted
from llamarl.models.config import tiny_directory
from llamarl.models.loading import training_decoder
from llamarl.models.lora import LoraLinear, adapters_off
from llamarl.models.shape import Lora
from llamarl.scoring.sharded import ShardedReference, asked_of
from tests.build.job import finished_job
from tests.launching import SMALL
from tests.tolerances import rounding
from tests.updating import NAN, VERSION, go_on, group, update_of, weights_of

CPU = torch.device("cpu")
# Nats: the tiny model's width and layers.
LOGPROBS = rounding(terms=512, depth=2 * 4, size=4.0)
LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"), seed=5)


def adapted():
    """The tiny model with adapters that have learnt something."""
    decoder = training_decoder(
        tiny_directory(), mesh=None, device=CPU, compute_dtype=torch.float32, lora=LORA
    )
    draw = torch.Generator().manual_seed(1)
    for module in decoder.modules():
        if isinstance(module, LoraLinear):
            module.lora_b.data.normal_(0, 0.1, generator=draw)
    return decoder


def update(**changes):
    loss = regularised(policy_gradient, kl_coef=0.5)
    decoder = adapted()
    made = update_of(decoder, loss, microbatch_tokens=17, **changes)
    made.reference = decoder
    trained = [p for p in decoder.parameters() if p.requires_grad]
    made.optimizer = torch.optim.SGD(trained, lr=123.0)
    return made


def groups_of():
    """With a masked completion and one that was cut off, which a reference scores too."""
    return [
        group(4, [6, 2, 9], [1.0, 0.5, 0.0]),
        group(3, [1, 5, 2], [0.0, 1.0, NAN], finish_reasons=("stop", "aborted", "stop")),
    ]


def frozen_scores(groups):
    reference = ShardedReference(
        str(tiny_directory()),
        dtype=torch.float32,
        temperature=0.7,
        microbatch_tokens=1000,
        group=ExecutorGroup("reference", (0,), 0, CPU),
    )
    return reference.logprobs([asked_of(group) for group in groups], together=True)


def test_it_says_what_a_frozen_reference_says():
    groups = groups_of()
    ours = update()
    scored = ours._with_reference(ours.reference, groups, VERSION, go_on)
    for got, sent, want in zip(scored, groups, frozen_scores(groups), strict=True):
        torch.testing.assert_close(got.ref_logprobs, want, atol=LOGPROBS, rtol=0)
        assert not got.ref_logprobs.requires_grad
        assert got.rewards is sent.rewards and got.finish_reasons == sent.finish_reasons


def test_a_step_is_that_with_a_frozen_reference():
    ours, theirs = update(), update()
    theirs.reference = None
    groups = groups_of()
    given = []
    for g, scores in zip(groups, frozen_scores(groups), strict=True):
        given.append(dataclasses.replace(g, ref_logprobs=scores))
    got = ours.run(groups, VERSION, go_on)
    want = theirs.run(given, VERSION, go_on)
    assert want["kl/ref"] > 0.01
    assert got["kl/ref"] == pytest.approx(want["kl/ref"], abs=LOGPROBS)
    moved = 0.0
    before = list(adapted().parameters())
    for a, b, start in zip(weights_of(ours), weights_of(theirs), before, strict=True):
        change = (b - start).abs().max().item()
        torch.testing.assert_close(a, b, atol=LOGPROBS * (change + 1e-4), rtol=0)
        moved = max(moved, change)
    assert moved > 1e-3


def test_the_adapters_are_on_again_whatever_happens():
    ours = update()
    with pytest.raises(StepAborted):
        ours.run(groups_of(), VERSION, lambda: True)
    adapters = [m for m in ours.decoder.modules() if isinstance(m, LoraLinear)]
    assert adapters and all(m.adapts for m in adapters)
    with adapters_off(ours.decoder):
        assert not any(m.adapts for m in adapters)


def test_a_reference_that_is_not_finite_is_an_error():
    ours = update()
    ours.decoder.layers[0].attn.q_proj.weight.data.fill_(torch.nan)
    with pytest.raises(NotFinite, match=f"step {VERSION}: the reference's logprobs sum to nan"):
        ours.run(groups_of(), VERSION, go_on)


def test_it_takes_no_ranks():
    config = compose_config(["reference=adapters_off", "trainer.lora.rank=4", "loss.kl_coef=0.1"])
    assert not config.reference.placed and "reference" not in placement_of(config, 4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_run_with_a_reference_that_is_sharded_as_the_trainer_is(tmp_path, ranks):
    """Its values are those of a frozen one: the same run, seen by its metrics."""
    words = [*SMALL, "loss.kl_coef=0.1", "max_lag=0", "lr=1e-3", "max_steps=2"]
    words += ["placement.trainer=[0,1]"] if ranks else []
    kinds = {}
    for kind in ("frozen", "sharded"):
        job = finished_job(f"reference={kind}", *words, run_dir=tmp_path / kind, ranks=ranks)
        kinds[kind] = [row["kl/ref"] for row in job.rows[1:]]
    assert kinds["sharded"] == pytest.approx(kinds["frozen"], rel=1e-3, abs=1e-6)
    assert kinds["sharded"][1] > 1e-5
