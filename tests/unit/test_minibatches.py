"""N minibatches and T passes: a step is so many ordinary ones in turn, and what ends it early
leaves a clean state.
"""

import dataclasses
import math

import pytest
import torch

from llamarl.errors import NotFinite
from llamarl.learning.losses.common import per_completion, uses_all_completions, whole_groups
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.targets import Shaping
from llamarl.learning.update import StepAborted
from llamarl.models.attention import PackedAttention
from llamarl.models.parity import ParityLimits
from tests.updating import (
    NAN,
    SETTINGS,
    STEP,
    VERSION,
    decoder_of,
    go_on,
    group,
    groups_of,
    update_of,
)

BUDGET = 17


def adam(**changes):
    return update_of(
        optimizer=torch.optim.AdamW, microbatch_tokens=BUDGET, schedule="constant", **changes
    )


def weights_of(update):
    return [p.detach().clone() for p in update.decoder.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.bitwise("a step's updates are ordinary steps, one after the other")
@pytest.mark.parametrize("minibatches, passes", [(2, 1), (1, 2), (2, 3), (4, 1)])
def test_a_step_is_so_many_ordinary_steps_on_its_parts(minibatches, passes):
    once, groups = adam(minibatches_per_step=minibatches, updates_per_batch=passes), groups_of()
    got = once.run(groups, VERSION, go_on).metrics
    plain, each = adam(), len(groups) // minibatches
    rows = []
    for _ in range(passes):
        rows += [
            plain.run(groups[i : i + each], VERSION, go_on).metrics
            for i in range(0, len(groups), each)
        ]
    assert same(weights_of(once), weights_of(plain))
    assert {float(s["step"]) for s in once.optimizer.state.values()} == {
        float(minibatches * passes)
    }
    tokens = [row["tokens/trained"] for row in rows]
    mean = {}
    for key in ("loss/value", "grad_norm"):
        mean[key] = sum(row[key] for row in rows) / len(rows)
    by_token = {}
    for key in ("entropy", "ratio/mean", "kl/generator"):
        by_token[key] = sum(row[key] * t for row, t in zip(rows, tokens)) / sum(tokens)
    assert {name: got[name] for name in mean | by_token} == pytest.approx(mean | by_token, rel=1e-5)
    assert got["ratio/max"] == max(row["ratio/max"] for row in rows)
    assert got["tokens/trained"] == sum(tokens) / passes  # of the batch, each once
    whole = adam().run(groups, VERSION, go_on).metrics
    assert got["reward/mean"] == whole["reward/mean"] and got["lag/mean"] == whole["lag/mean"]


def test_every_update_has_its_own_denominator():
    """Halves of unlike size: one update each, so a token of the small half weighs more than in one
    update of both.
    """
    groups = [group(4, [9, 9, 9], [1.0, 0.5, 0.0]), group(3, [1, 2], [0.0, 1.0])]
    seen = []

    def loss_fn(inputs):
        seen.append(inputs.num_loss_tokens)
        return inputs.trainer_logprobs.sum() / inputs.num_loss_tokens, {}

    update_of(loss_fn=loss_fn, minibatches_per_step=2, updates_per_batch=2).run(
        groups, VERSION, go_on
    )
    assert seen == [27.0, 3.0, 27.0, 3.0]


def test_the_rate_falls_with_every_update():
    update = update_of(
        minibatches_per_step=2, updates_per_batch=2, schedule="linear", warmup_steps=1, max_steps=3
    )
    seen = []
    update.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"])
    )
    for version in range(3):
        update.run(groups_of(), version, go_on)
    # a warm-up of 1 step of 4 updates, then 8 down to 0
    assert seen == pytest.approx(
        [SETTINGS.lr * (i + 1) / 5 for i in range(4)]
        + [SETTINGS.lr * (1 - i / 8) for i in range(8)]
    )


# --- what ends a step ---


@pytest.mark.bitwise("a step that was stopped and made again is the step")
def test_a_stop_before_the_first_update_changes_nothing_and_after_it_the_step_is_finished():
    whole = adam(minibatches_per_step=2, updates_per_batch=2)
    asked = []
    whole.run(groups_of(), VERSION, lambda: bool(asked.append(1)))
    for stop_at in range(len(asked)):
        update, boundary = adam(minibatches_per_step=2, updates_per_batch=2), iter(range(1000))
        before = weights_of(update)
        with pytest.raises(StepAborted):
            update.run(groups_of(), VERSION, lambda: next(boundary) == stop_at)
        assert same(weights_of(update), before) and not update.optimizer.state
    # A stop that comes with the first update is served after the last.
    update = adam(minibatches_per_step=2, updates_per_batch=2)
    began = []
    update.optimizer.register_step_pre_hook(lambda *_: began.append(1))
    update.run(groups_of(), VERSION, lambda: bool(began))
    assert same(weights_of(update), weights_of(whole)) and len(began) == 4


def test_what_is_not_finite_in_a_later_update_is_named_with_its_place():
    calls = []

    def loss_fn(inputs):
        calls.append(1)
        return inputs.trainer_logprobs.sum() * (math.inf if len(calls) > 2 else 1e-3), {}

    update = update_of(loss_fn=loss_fn, minibatches_per_step=2, updates_per_batch=2)
    expected = (
        r"step 5, minibatch 1 of 2, pass 2 of 2: .*; 2 updates of this step are in the weights "
        r"already; .*resume=auto"
    )
    with pytest.raises(NotFinite, match=expected):
        update.run(groups_of(), VERSION, go_on)


def test_parity_is_asked_of_the_first_update_alone():
    """After it the policy is another one than sampled the tokens, so they must differ."""
    fresh = [
        dataclasses.replace(g, policy_versions=torch.full_like(g.policy_versions, VERSION))
        for g in groups_of()
    ]
    decoder = decoder_of(uniform=True)
    for g in fresh:
        g.generator_logprobs[:] = -math.log(23)
    settings = dict(
        minibatches_per_step=2,
        updates_per_batch=2,
        parity=ParityLimits.of(fixed=1e-4),
        max_grad_norm=100.0,
    )
    row = update_of(decoder, **settings).run(fresh, VERSION, go_on).metrics
    assert (
        row["parity/logprob_diff_max"] < 1e-4 and row["ratio/max"] > 1.01
    )  # the later updates did differ
    fresh[0].generator_logprobs[0] += 0.1
    with pytest.raises(Exception, match="logprobs differ by"):
        update_of(decoder_of(uniform=True), **settings).run(fresh, VERSION, go_on)


# -- losses that look at completions
# -------------------------------------------------------------------------------------------


@whole_groups
@uses_all_completions
def coupled(inputs, *, seen=None):
    """sum_j (log pi(y_j) - its group's mean - r_j)^2 / N: no completion's gradient without the
    others.
    """
    completions = inputs.completions
    total = completions.sums(inputs.trainer_logprobs)
    centred = (
        total
        - completions.group_mean(total, torch.ones_like(total, dtype=torch.bool))
        - completions.rewards
    )
    loss = per_completion(centred.square().sum(), completions)
    if seen is not None:
        seen.append((completions.num_completions, completions.num_groups))
    return loss, {"coupled/square/completions": centred.detach().square().sum()}


def coupled_by_hand(groups):
    """(gradients, loss) from whole logits of each sequence alone."""
    decoder = decoder_of()
    losses = []
    count = 0
    for g in groups:
        totals, rewards = [], []
        for i, completion in enumerate(g.token_ids.split(g.lengths.tolist())):
            if not g.trained[i]:
                continue
            tokens = torch.cat([g.prompt_ids, completion])
            logits = decoder(
                tokens, torch.arange(len(tokens)), PackedAttention(torch.tensor([0, len(tokens)]))
            )
            logprobs = (logits / SETTINGS.temperature).log_softmax(-1)[len(g.prompt_ids) - 1 : -1]
            (
                totals.append(logprobs.gather(1, completion[:, None]).sum()),
                rewards.append(g.rewards[i]),
            )
        totals = torch.stack(totals)
        losses.append((totals - totals.mean() - torch.stack(rewards)).square().sum())
        count += len(rewards)
    loss = sum(losses) / count
    loss.backward()
    return [p.grad for p in decoder.parameters()], loss.item(), count


@pytest.mark.filterwarnings("ignore:groups .which this loss")
@pytest.mark.parametrize("microbatch_tokens", [1, 30, 1000])
def test_a_loss_over_whole_groups_is_that_of_one_sequence_at_a_time(microbatch_tokens):
    gradients, loss, count = coupled_by_hand(groups_of())
    seen = []
    update = update_of(
        loss_fn=lambda inputs: coupled(inputs, seen=seen),
        microbatch_tokens=microbatch_tokens,
        whole_groups=True,
        max_grad_norm=1e9,
        lr=1.0,
        schedule="constant",
    )
    before = weights_of(update)
    metrics = update.run(groups_of(), VERSION, go_on).metrics
    assert metrics["loss/value"] == pytest.approx(loss, rel=1e-5)
    assert metrics["coupled/square"] == pytest.approx(loss, rel=1e-5)
    assert set(seen) == {(float(count), 4.0)} and count == 3 + 2 + 3 + 2
    largest = max(g.abs().max().item() for g in gradients)
    for old, new, gradient in zip(before, weights_of(update), gradients):
        torch.testing.assert_close(old - new, gradient, atol=STEP * largest, rtol=0)


def test_an_entropy_bonus_is_that_of_the_whole_softmax():
    """The gradient through the chunked entropy, against -sum p log p of whole logits."""
    groups, coef = [group(4, [6, 2, 9], [1.0, 0.5, 0.0])], 0.3
    decoder, total = decoder_of(), 0.0
    for completion in groups[0].token_ids.split(groups[0].lengths.tolist()):
        tokens = torch.cat([groups[0].prompt_ids, completion])
        logits = decoder(
            tokens, torch.arange(len(tokens)), PackedAttention(torch.tensor([0, len(tokens)]))
        )
        logp = (logits / SETTINGS.temperature).log_softmax(-1)[len(groups[0].prompt_ids) - 1 : -1]
        total = total - (logp.exp() * logp).sum()
    (-coef * total / 17).backward()
    bonus = update_of(
        loss_fn=regularised(policy_gradient, entropy_coef=coef),
        max_grad_norm=1e9,
        lr=1.0,
        schedule="constant",
    )
    plain = update_of(
        loss_fn=regularised(policy_gradient), max_grad_norm=1e9, lr=1.0, schedule="constant"
    )
    got = bonus.run(groups, VERSION, go_on).metrics["entropy"]
    plain.run(groups, VERSION, go_on)
    assert got == pytest.approx(total.item() / 17, rel=1e-5)
    largest = max(p.grad.abs().max().item() for p in decoder.parameters())
    assert largest > 1e-3
    for a, b, p in zip(weights_of(plain), weights_of(bonus), decoder.parameters()):
        torch.testing.assert_close(
            a - b, p.grad, atol=STEP * largest + 1e-6, rtol=0
        )  # the weights are rounded to 1e-7


def test_the_penalty_for_a_missing_end_reaches_the_advantages():
    seen = []

    def loss_fn(inputs):
        seen.append((inputs.advantages.tolist(), inputs.completions.rewards.tolist()))
        return inputs.trainer_logprobs.sum(), {}

    g = group(4, [1, 2, 1], [1.0, 1.0, NAN], finish_reasons=("stop", "length", "stop"))
    row = (
        update_of(loss_fn=loss_fn, shaping=Shaping(missing_eos_penalty=-1.0))
        .run([g], VERSION, go_on)
        .metrics
    )
    assert seen == [([1.0, -1.0, -1.0], [1.0, -1.0])]
    assert (
        row["reward/mean"] == 1.0 and row["reward/shaped_mean"] == 0.0
    )  # the task's own stays visible
