"""PolicyUpdate on a tiny decoder: a step does what one sequence at a time would, or changes
nothing; N minibatches and T passes are so many ordinary steps in turn.
"""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from executors.trainer import FSDPTrainer
from llamarl.errors import NotFinite, ParityError
from llamarl.learning.logprobs import canary_of
from llamarl.learning.losses.common import per_completion, uses_all_completions, whole_groups
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.optim import value_at
from llamarl.learning.packing import pack
from llamarl.learning.targets import Shaping, Targets
from llamarl.learning.update import StepAborted
from llamarl.models.parity import ParityLimits, Sequence
from tests.tolerances import assert_same_ranking
from tests.updating import (
    NAN,
    SETTINGS,
    STEP,
    VERSION,
    VOCAB,
    all_logprobs,
    decoder_of,
    go_on,
    group,
    groups_of,
    logprobs_alone,
    update_of,
    weights_of,
)


def advantages_of(g):
    return torch.where(g.trained, g.rewards - g.rewards[g.trained].mean(), 0)


def state_of(update):
    """Weights, and the optimizer's state as plain values."""
    state = update.optimizer.state_dict()
    moments = {}
    for k, s in state["state"].items():
        moments[k] = {n: v.tolist() for n, v in s.items()}
    return [w.tolist() for w in weights_of(update)], moments, state["param_groups"]


def assert_unchanged(update, before):
    assert state_of(update) == before
    assert all(p.grad is None for p in update.decoder.parameters())


# --- the step ---


def one_at_a_time(groups, cap=4.0):
    """(gradients, loss, trained tokens) of AIPO from the whole logits of each sequence alone."""
    decoder = decoder_of()
    losses = []
    count = 0
    for g in groups:
        sizes = g.lengths.tolist()
        parts = zip(g.token_ids.split(sizes), g.generator_logprobs.split(sizes), advantages_of(g))
        for (completion, generator, advantage), is_trained in zip(parts, g.trained):
            if is_trained:
                chosen = logprobs_alone(decoder, g.prompt_ids, completion)
                weight = (chosen.detach() - generator).exp().clamp(max=cap)
                losses.append(-(weight * advantage * chosen).sum())
                count += len(completion)
    loss = sum(losses) / count
    loss.backward()
    return [p.grad for p in decoder.parameters()], loss.item(), count


@pytest.mark.filterwarnings("ignore:sequences longer")
@pytest.mark.parametrize("microbatch_tokens, skip", [(1, False), (17, True), (1000, False)])
def test_a_step_is_that_of_one_sequence_at_a_time(microbatch_tokens, skip):
    gradients, loss, count = one_at_a_time(groups_of())
    norm = torch.cat([g.flatten() for g in gradients]).norm().item()
    assert norm > 2 * SETTINGS.max_grad_norm
    rate = SETTINGS.lr * (1 - VERSION / SETTINGS.max_steps) * SETTINGS.max_grad_norm / norm
    update = update_of(microbatch_tokens=microbatch_tokens, skip_zero_advantage=skip)
    before = weights_of(update)
    metrics = update.run(groups_of(), VERSION, go_on)
    largest = max(rate * g.abs().max().item() for g in gradients)
    for old, new, gradient in zip(before, weights_of(update), gradients):
        # the weights themselves are rounded to 1e-7 of their size
        torch.testing.assert_close(new, old - rate * gradient, atol=STEP * largest + 1e-7, rtol=0)
    assert largest > 1e-3
    assert metrics["loss/value"] == pytest.approx(loss, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["tokens/trained"] == count
    assert {group["lr"] for group in update.optimizer.param_groups} == {SETTINGS.lr / 2}


@pytest.mark.bitwise("a step follows from weights and groups alone")
def test_gradients_of_the_step_before_do_not_add_up():
    update = update_of()
    for p in update.decoder.parameters():
        p.grad = torch.ones_like(p)
    want = update_of()
    assert update.run(groups_of(), VERSION, go_on) == want.run(groups_of(), VERSION, go_on)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(update), weights_of(want)))


@pytest.mark.bitwise("a reward that is not trained on is not read")
@pytest.mark.parametrize("garbage", [math.inf, 1e9])
def test_the_reward_of_a_completion_that_is_not_trained_on_changes_nothing(garbage):
    shaping = Shaping(missing_eos_penalty=-1.0, whiten="both")
    other = []
    for g in groups_of():
        rewards = torch.where(g.trained, g.rewards, garbage)
        other.append(dataclasses.replace(g, rewards=rewards))
    update, want = update_of(shaping=shaping), update_of(shaping=shaping)
    assert update.run(other, VERSION, go_on) == want.run(groups_of(), VERSION, go_on)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(update), weights_of(want)))


def test_masked_truncated_completions_have_no_loss_and_count_in_their_groups_mean():
    """As TRL masks them: its rewards and advantages are made of all completions."""
    seen = []

    def loss_fn(inputs, **options):
        seen.append(inputs)
        return regularised(policy_gradient)(inputs, **options)

    cut = group(4, [2, 3, 1], [0.0, 3.0, 1.5], finish_reasons=("stop", "length", "stop"))
    update = update_of(loss_fn=loss_fn, masks_truncated=True)
    row = update.run([cut], VERSION, go_on)
    (inputs,) = seen
    assert inputs.advantages.tolist() == [-1.5, -1.5, 0.0]  # less the mean of all three
    assert (inputs.num_loss_tokens, inputs.completions.num_completions) == (3, 2)
    assert row["tokens/trained"] == 3 and row["reward/mean"] == 1.5


def test_a_batch_with_nothing_to_train_is_a_step_of_no_change():
    update = update_of()
    before = weights_of(update)
    metrics = update.run([group(2, [3, 2], [NAN, NAN])], VERSION, go_on)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(update), before))
    assert [metrics[name] for name in ("grad_norm", "tokens/trained", "loss/value")] == [0.0] * 3
    assert metrics["parity/logprob_diff_max"] is None and metrics["reward/error_rate"] == 1.0
    assert all(v is None or math.isfinite(v) for v in metrics.values())


def test_the_loss_gets_a_reference_only_where_one_ran():
    seen = []

    def loss_fn(inputs):
        seen.append(inputs.ref_logprobs)
        return regularised(policy_gradient)(inputs)

    without = group(4, [2, 3], [0.0, 1.0])
    with_one = dataclasses.replace(without, ref_logprobs=-torch.arange(5.0))
    update = update_of(loss_fn=loss_fn)
    assert update.run([without], VERSION, go_on)["kl/ref"] is None and seen == [None]
    assert update.run([with_one], VERSION, go_on)["kl/ref"] > 0
    assert seen[1].tolist() == [0.0, -1.0, -2.0, -3.0, -4.0]


# --- what changes nothing ---


def seasoned(**changes):
    """An update after one step of AdamW, so that the optimizer has a state to lose."""
    update = update_of(optimizer=torch.optim.AdamW, **changes)
    update.run(groups_of(), VERSION - 1, go_on)
    update.optimizer.zero_grad()
    return update


@pytest.mark.bitwise("a step that was stopped and made again is the step")
def test_a_stop_at_any_microbatch_changes_nothing_and_the_step_can_be_made_again():
    update = seasoned(microbatch_tokens=17)
    before = state_of(update)
    microbatches = 0
    while True:
        boundary = iter(range(1000))
        try:
            update.run(groups_of(), VERSION, lambda: next(boundary) == microbatches)
        except StepAborted:
            assert next(boundary) == microbatches + 1  # it went on until then, and not further
            assert_unchanged(update, before)
            microbatches += 1
        else:
            break
    groups = groups_of()
    targets = [Targets.of(g, advantages_of(g)) for g in groups]
    packing = pack(groups, targets, budget_tokens=17, skip_zero_advantage=False)
    # A boundary before each microbatch, and one before the step.
    assert microbatches == len(packing.microbatches) + 1 > 3
    once = seasoned(microbatch_tokens=17)
    once.run(groups_of(), VERSION, go_on)
    assert state_of(update) == state_of(once) != before


def bad_loss(value=0.0, gradient=1.0):
    """A loss that adds `value` to the sum of logprobs, and multiplies their gradients."""

    def loss_fn(inputs):
        inputs.trainer_logprobs.register_hook(lambda g: g * gradient)
        return inputs.trainer_logprobs.sum() + value, {}

    return loss_fn


def with_nan(groups):
    groups[2].generator_logprobs[3] = NAN  # a trained token
    return groups


@pytest.mark.parametrize(
    "loss_fn, groups",
    [
        (policy_gradient, with_nan(groups_of())),
        (bad_loss(), with_nan(groups_of())),  # which does not look at them
        (bad_loss(value=math.inf), groups_of()),
        (bad_loss(gradient=math.inf), groups_of()),
    ],
    ids=["generator_nan", "generator_nan_unseen", "loss_inf", "gradient_inf"],
)
def test_what_is_not_finite_changes_nothing_and_is_named(loss_fn, groups):
    update = seasoned(microbatch_tokens=17)
    update.loss_fn = loss_fn
    before = state_of(update)
    said = rf"step {VERSION}: .*(nan|inf).*Tickets on this rank: \[4, 1, 3, 7\]"
    with pytest.raises(NotFinite, match=said):
        update.run(groups, VERSION, go_on)
    assert_unchanged(update, before)


def test_a_finite_custom_loss_is_a_step():
    """Otherwise the cases above would show nothing."""
    update = seasoned()
    update.loss_fn, before = bad_loss(), state_of(update)
    update.run(groups_of(), VERSION, go_on)
    assert state_of(update) != before


# --- parity ---

# Versions of the tokens of two completions, of 3 and 4.
FRESH = [VERSION] * 7
STALE = [VERSION - 1] * 7
LAST_IS_FRESH = [*STALE[:6], VERSION]
SECOND_IS_FRESH = [*STALE[:3], *FRESH[3:]]


@pytest.mark.parametrize(
    "offset, versions, tolerance, recomputes_kv, want",
    [
        (0.02, FRESH, 0.03, False, 0.02),  # within
        (0.0, FRESH, 0.01, False, 0.0),
        (5.0, STALE, 0.01, False, None),  # no fresh token
        (5.0, FRESH, None, False, 5.0),  # not compared, and still reported
        (-0.02, FRESH, 0.001, False, "differ by 0.001768 .* 0.001"),
        (0.5, SECOND_IS_FRESH, 0.001, False, "differ by"),
        # It went on under the trainer's weights; what it reads is theirs only with recompute_kv.
        (0.5, LAST_IS_FRESH, 0.001, False, None),
        (0.5, LAST_IS_FRESH, 0.001, True, "differ by"),
    ],
)
def test_fresh_tokens_alone_are_compared_and_others_end_the_step(
    offset, versions, tolerance, recomputes_kv, want
):
    """Of the uniform decoder's own logprobs, off by `offset` on the last token."""
    g = group(4, [3, 4], [0.0, 1.0], policy_versions=torch.tensor(versions))
    g.generator_logprobs.fill_(-math.log(VOCAB))
    g.generator_logprobs[-1] += offset
    parity = None if tolerance is None else ParityLimits.of(fixed=tolerance)
    update = update_of(decoder_of(uniform=True), parity=parity, recomputes_kv=recomputes_kv)
    before = state_of(update)
    if isinstance(want, str):
        with pytest.raises(ParityError, match=f"step {VERSION}: .* {want}"):
            update.run([g], VERSION, go_on)
        assert state_of(update) == before
    else:
        got = update.run([g], VERSION, go_on)["parity/logprob_diff_max"]
        assert got is want is None or got == pytest.approx(want, abs=1e-5)


# --- metrics ---


@pytest.mark.filterwarnings("ignore:sequences longer")
@pytest.mark.parametrize("microbatch_tokens", [3, 20])
def test_metrics_by_hand(microbatch_tokens):
    # Every logprob is -log 23, so the generator's are set by the ratio: 1, but 6 (capped at 4) and
    # 0.5 for two tokens.
    log = math.log(VOCAB)
    ratios = [torch.ones(5), torch.ones(6)]
    ratios[0][2], ratios[1][1] = 6.0, 0.5
    of_first = {"policy_versions": torch.tensor([3, 4, 5, 5, 5]), "prompt": [7, 7]}
    of_second = {"policy_versions": torch.tensor([4, 2, 5, 5, 5, 5]), "prompt": [7]}
    reasons = ("stop", "length", "stop")
    groups = [
        group(0, [2, 3], [1.0, 0.0], **of_first),
        group(1, [1, 4, 1], [2.0, 1.0, NAN], finish_reasons=reasons, **of_second),
    ]
    for i, (g, ratio) in enumerate(zip(groups, ratios)):
        # k3(0) = 0 in the first group, k3(1) = e - 2 in the second
        logprobs = {"ref_logprobs": torch.full_like(ratio, -log + i)}
        groups[i] = dataclasses.replace(g, generator_logprobs=-log - ratio.log(), **logprobs)
    update = update_of(
        decoder_of(uniform=True), microbatch_tokens=microbatch_tokens, temperature=1.0
    )
    got = update.run(groups, VERSION, go_on)
    # Trained: 5 tokens of group 0, 1 + 4 of group 1 (its last has no reward). Advantages: 0.5, -0.5
    # in both. Weights after the cap: [1 1], [4 1 1] in group 0, [1], [0.5 1 1 1] in group 1.
    weighted = 0.5 * 2 - 0.5 * 6 + 0.5 * 1 - 0.5 * 3.5
    want = {
        "loss/value": log * weighted / 10,
        "reward/mean": 4 / 4,  # 1, 0, 2, 1
        "reward/std": math.sqrt(0.5),  # over n
        "reward/error_rate": 1 / 5,
        "entropy": log,
        "kl/ref": 5 * (math.e - 2) / 10,
        "ratio/mean": (8 + 6 + 0.5) / 10,
        "ratio/max": 6.0,
        "ratio/capped_fraction": 1 / 10,
        "lag/mean": (2 + 0 + 1 + 3 + 0) / 5,  # of each completion's oldest token
        "lag/max": 3.0,
        "tokens/trained": 10.0,
        "tokens/generated": 11.0,
        "tokens/deadline_truncated": 0.0,
        "completion/length_mean": 11 / 5,
        "completion/truncated_fraction": 1 / 5,
        "completion/deadline_truncated_fraction": 0.0,
        # The second completion of group 0 is fresh.
        "parity/logprob_diff_max": math.log(6.0),
        "parity/logprob_diff_rms": math.log(6.0) / math.sqrt(3),
    }
    # Prompts of 2 and 1: 2 + 1 + 2 and 1 + 0 + 3 tokens, 9 of 20. A budget of 3 has 2 + 1 and 1 +
    # 0; 2 + 2 and 1 + 3 pass it.
    unused = {20: 1 - 9 / 20, 3: 1 - (3 + 4 + 1 + 4) / (3 + 4 + 3 + 4)}[microbatch_tokens]
    # Attention pads prompts of 2 and 1 to 2, completions of 1, 2 and 3 to 3. Alone in their
    # microbatches none is padded.
    padding = {20: 1 - 9 / (2 * 2 + 3 * 3), 3: 0.0}[microbatch_tokens]
    assert {k: got[k] for k in want} == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert got["packing/padding_fraction"] == pytest.approx(padding)
    assert got["packing/unused_budget_fraction"] == pytest.approx(unused)
    k3 = 6 - 1 - math.log(6), 0.5 - 1 - math.log(0.5)
    assert got["kl/generator"] == pytest.approx(sum(k3) / 10, rel=1e-5)
    assert got["grad_norm"] > 0
    by_lag = {name for name in got if name.startswith("lag/tokens/")}
    assert sum(got[name] for name in by_lag) == pytest.approx(1)
    packing = {"packing/padding_fraction", "packing/unused_budget_fraction"}
    assert got.keys() - by_lag == want.keys() | packing | {"kl/generator", "grad_norm"}


def test_completions_cut_at_a_deadline_are_counted_and_not_trained_on():
    aborted = ("aborted",) * 2
    versions = [torch.tensor([4, 4, 2, 2, 2]), torch.empty(0, dtype=torch.int64)]
    groups = [
        group(0, [2, 3, 0], [1.0, NAN, NAN], finish_reasons=("stop", *aborted)),
        group(1, [0, 0], [NAN, NAN], finish_reasons=aborted),
    ]
    groups = [dataclasses.replace(g, policy_versions=v) for g, v in zip(groups, versions)]
    got = update_of(skip_zero_advantage=False).run(groups, VERSION, go_on)
    assert got["completion/deadline_truncated_fraction"] == 4 / 5
    tokens = [got[f"tokens/{name}"] for name in ("deadline_truncated", "generated", "trained")]
    assert tokens == [3.0, 5.0, 2.0]
    # Of the two completions that have tokens; the others have no version.
    assert (got["lag/mean"], got["lag/max"]) == ((VERSION - 4 + VERSION - 2) / 2, VERSION - 2)


# --- canaries ---


SEQUENCES = [Sequence([3, 1, 4, 1, 5], 1), Sequence([9, 2], 1), Sequence([6, 5, 3, 5, 8, 9], 4)]


def canary(update, top=0):
    made = update.decoder, SEQUENCES, torch.device("cpu")
    return canary_of(*made, temperature=SETTINGS.temperature, top=top)


def test_a_canary_holds_the_logprobs_of_what_is_not_given():
    update = update_of()
    got = canary(update)
    want = []
    for s in SEQUENCES:
        given, scored = torch.tensor(s.token_ids).split([s.given, s.num_scored])
        want += logprobs_alone(update.decoder, given, scored).tolist()
    assert len(want) == 4 + 1 + 2 and got.sequences == SEQUENCES
    assert (got.top_ids, got.top_logprobs) == ([], [])
    assert got.logprobs == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("top", [3, 10 * VOCAB])
def test_a_canary_for_a_quantised_generator_holds_the_likeliest_tokens_too(top):
    update = update_of()
    got = canary(update, top)
    parts = [torch.tensor(s.token_ids).split([s.given, s.num_scored]) for s in SEQUENCES]
    rows = torch.cat([all_logprobs(update.decoder, *part).detach() for part in parts])
    for ids, row in zip(got.top_ids, rows, strict=True):
        assert len(ids) == min(top, VOCAB)
        assert_same_ranking(ids, row, 1e-5)
    likeliest = rows.gather(1, torch.tensor(got.top_ids))
    torch.testing.assert_close(torch.tensor(got.top_logprobs), likeliest, atol=1e-5, rtol=0)
    assert got.logprobs == pytest.approx(canary(update).logprobs, abs=1e-5)


@pytest.mark.parametrize(
    "version, grad_norm, must_differ",
    [
        (1, 2e-8, True),
        (1, 4e-15, False),  # rounding
        (1000, 1.0, False),  # the last of a cosine's rates
    ],
)
def test_only_a_step_with_a_gradient_and_a_rate_must_show(version, grad_norm, must_differ):
    settings = dataclasses.replace(SETTINGS, schedule="cosine", max_steps=1000)
    model = SimpleNamespace(adam=SimpleNamespace(eps=1e-8))
    trainer = SimpleNamespace(settings=settings, model_settings=model, version=version)
    assert FSDPTrainer._must_differ(trainer, grad_norm) == must_differ


# --- N minibatches and T passes ---


BUDGET = 17


def adam(**changes):
    fixed = {"optimizer": torch.optim.AdamW, "microbatch_tokens": BUDGET, "schedule": "constant"}
    return update_of(**fixed, **changes)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.bitwise("a step's updates are ordinary steps, one after the other")
def test_a_step_is_so_many_ordinary_steps_on_its_parts():
    minibatches, passes = 2, 3
    once, groups = adam(minibatches_per_step=minibatches, updates_per_batch=passes), groups_of()
    got = once.run(groups, VERSION, go_on)
    plain, each = adam(), len(groups) // minibatches
    rows = []
    for i in [*range(0, len(groups), each)] * passes:
        rows.append(plain.run(groups[i : i + each], VERSION, go_on))
    assert same(weights_of(once), weights_of(plain))
    made = {float(state["step"]) for state in once.optimizer.state.values()}
    assert made == {float(minibatches * passes)}
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
    whole = adam().run(groups, VERSION, go_on)
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

    update = update_of(loss_fn=loss_fn, minibatches_per_step=2, updates_per_batch=2)
    update.run(groups, VERSION, go_on)
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
    up = [SETTINGS.lr * (i + 1) / 5 for i in range(4)]
    assert seen == pytest.approx([*up, *(SETTINGS.lr * (1 - i / 8) for i in range(8))])


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
    fresh = []
    for g in groups_of():
        versions = torch.full_like(g.policy_versions, VERSION)
        fresh.append(dataclasses.replace(g, policy_versions=versions))
        fresh[-1].generator_logprobs[:] = -math.log(VOCAB)
    decoder = decoder_of(uniform=True)
    settings = dict(minibatches_per_step=2, updates_per_batch=2, max_grad_norm=100.0)
    settings["parity"] = ParityLimits.of(fixed=1e-4)
    row = update_of(decoder, **settings).run(fresh, VERSION, go_on)
    assert row["parity/logprob_diff_max"] < 1e-4
    assert row["ratio/max"] > 1.01, "the later updates did differ"
    fresh[0].generator_logprobs[0] += 0.1
    with pytest.raises(Exception, match="logprobs differ by"):
        update_of(decoder_of(uniform=True), **settings).run(fresh, VERSION, go_on)


# --- losses that look at completions ---


@whole_groups
@uses_all_completions
def coupled(inputs, *, seen=None):
    """sum_j (log pi(y_j) - its group's mean - r_j)^2 / N: no completion's gradient without the
    others.
    """
    completions = inputs.completions
    total = completions.sums(inputs.trainer_logprobs)
    mean = completions.group_mean(total, torch.ones_like(total, dtype=torch.bool))
    centred = total - mean - completions.rewards
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
        totals = []
        for completion, is_trained in zip(g.token_ids.split(g.lengths.tolist()), g.trained):
            if is_trained:
                totals.append(logprobs_alone(decoder, g.prompt_ids, completion).sum())
        totals = torch.stack(totals)
        losses.append((totals - totals.mean() - g.rewards[g.trained]).square().sum())
        count += len(totals)
    loss = sum(losses) / count
    loss.backward()
    return [p.grad for p in decoder.parameters()], loss.item(), count


@pytest.mark.filterwarnings("ignore:groups .which this loss")
def test_a_loss_over_whole_groups_is_that_of_one_sequence_at_a_time():
    gradients, loss, count = coupled_by_hand(groups_of())
    seen = []
    update = update_of(
        loss_fn=lambda inputs: coupled(inputs, seen=seen),
        microbatch_tokens=30,
        whole_groups=True,
        max_grad_norm=1e9,
        lr=1.0,
        schedule="constant",
    )
    before = weights_of(update)
    metrics = update.run(groups_of(), VERSION, go_on)
    assert metrics["loss/value"] == pytest.approx(loss, rel=1e-5)
    assert metrics["coupled/square"] == pytest.approx(loss, rel=1e-5)
    assert set(seen) == {(float(count), 4.0)} and count == 3 + 2 + 3 + 2
    largest = max(g.abs().max().item() for g in gradients)
    for old, new, gradient in zip(before, weights_of(update), gradients):
        torch.testing.assert_close(old - new, gradient, atol=STEP * largest, rtol=0)


def test_an_entropy_bonus_is_that_of_the_whole_softmax():
    """The gradient through the chunked entropy, against -sum p log p of whole logits."""
    g, coef = group(4, [6, 2, 9], [1.0, 0.5, 0.0]), 0.3
    decoder, total = decoder_of(), 0.0
    for completion in g.token_ids.split(g.lengths.tolist()):
        logp = all_logprobs(decoder, g.prompt_ids, completion)
        total = total - (logp.exp() * logp).sum()
    (-coef * total / 17).backward()
    changes = {"max_grad_norm": 1e9, "lr": 1.0, "schedule": "constant"}
    plain, bonus = (
        update_of(loss_fn=regularised(policy_gradient, entropy_coef=c), **changes)
        for c in (0.0, coef)
    )
    rows = [update.run([g], VERSION, go_on) for update in (plain, bonus)]
    assert rows[1]["entropy"] == rows[0]["entropy"] == pytest.approx(total.item() / 17, rel=1e-5)
    largest = max(p.grad.abs().max().item() for p in decoder.parameters())
    assert largest > 1e-3
    for a, b, p in zip(weights_of(plain), weights_of(bonus), decoder.parameters()):
        # The weights are rounded to 1e-7.
        torch.testing.assert_close(a - b, p.grad, atol=STEP * largest + 1e-6, rtol=0)


# --- beta by step, against TBA's own words (tables 2 and 3) ---


@pytest.mark.parametrize(
    "first, by, values",
    [
        (
            0.012,
            {"kind": "linear", "final": 0.004, "end_step": 500},
            {0: 0.012, 125: 0.01, 250: 0.008, 500: 0.004, 999: 0.004},
        ),
        (
            1.0,
            {"kind": "cut", "final": 0.05, "end_step": 128, "cut_step": 32},
            {0: 1.0, 16: 1 - 0.95 / 8, 31: 1 - 0.95 * 31 / 128, 32: 0.05, 200: 0.05},
        ),
        # A cut after the end is a line.
        (
            1.0,
            {"kind": "cut", "final": 0.0, "end_step": 4, "cut_step": 9},
            {0: 1.0, 1: 0.75, 2: 0.5, 3: 0.25, 4: 0.0, 9: 0.0, 11: 0.0},
        ),
    ],
)
def test_a_value_falls_along_a_line_and_may_be_cut(first, by, values):
    for step, value in values.items():
        assert value_at(step, first, **by) == pytest.approx(value, rel=1e-12)
