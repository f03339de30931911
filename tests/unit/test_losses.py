"""What every loss owes: names, options, masks, microbatches, extremes and declarations."""

import math
import sys
from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.config.command_line import check_command_line
from llamarl.config.sections.loss import LOSS_OPTIONS, declarations, declares
from llamarl.learning.losses import LOSSES, check_options, options_of, resolve_loss
from llamarl.learning.losses.common import has_mark, ratio
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.learning.losses.regularisers import regularised
from tests.build.user_module import write_modules
from tests.loss_problems import PUBLISHED, SECTIONS, inputs_of, problem
from tests.unit.refusals import complaint


def test_bfloat16_logprobs_are_subtracted_in_float32():
    # The difference takes 12 bits.
    pi, mu = torch.tensor([[-8.0], [-7.0 / 512]], dtype=torch.bfloat16)
    inputs = inputs_of(pi, mu, None, torch.ones(1), torch.tensor([True]), num_loss_tokens=1)
    _, metrics = policy_gradient(inputs)
    assert metrics["ratio/sum"].item() == pytest.approx(math.exp(-8 + 7 / 512), rel=1e-6)
    assert ratio(torch.tensor([math.inf])).isfinite().all()


# --- names ---

MY_LOSSES = """
from llamarl.learning.losses.common import holds_to_generator, needs_reference

def my_loss(inputs, *, width, depth=1):
    return inputs.trainer_logprobs.sum() / inputs.num_loss_tokens, {}

def too_many(trainer_logprobs, generator_logprobs, *, width=1): ...

def plain(inputs): ...

@holds_to_generator
def held(inputs): ...

@needs_reference
def compared(inputs): ...
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    broken = "import no_such_dependency"
    write_modules(tmp_path, monkeypatch, users_losses=MY_LOSSES, users_broken=broken)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("users_losses", "users_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_losses_resolve_by_name_or_from_the_users_directory(user_module):
    assert all(resolve_loss(name) is fn for name, fn in LOSSES.items())
    assert all(fn.__name__ == name for name, fn in LOSSES.items())
    fn = resolve_loss("users_losses:my_loss")
    check_options(fn, {"width": 1})
    assert fn.__name__ == "my_loss"
    for name, error, message in (
        ("cliped", ValueError, "no loss 'cliped'; did you mean clipped"),
        ("users_losses:my_los", ValueError, "did you mean my_loss"),
        ("users_losses:too_many", ValueError, "must take .inputs, .*generator_logprobs"),
        ("users_broken:loss", ModuleNotFoundError, "no_such_dependency"),  # not the module itself
    ):
        with pytest.raises(error, match=message):
            resolve_loss(name)


def test_options_are_checked_all_at_once(user_module):
    check_options(policy_gradient, {"ratio_cap": 2.0, "ratio_level": "sequence"})
    said = r"(?s)ratio_kap: unknown option; did you mean ratio_cap\?.*num_loss_tokens: unknown"
    with pytest.raises(ValueError, match=said):
        check_options(policy_gradient, {"ratio_kap": 2.0, "num_loss_tokens": 3})
    with pytest.raises(ValueError, match="width: my_loss needs it"):
        check_options(resolve_loss("users_losses:my_loss"), {"depth": 2})


# --- What every loss owes ---


EXACT = dict(atol=1e-12, rtol=1e-11)  # float64 sums in another order
every_loss = pytest.mark.parametrize("fn", PUBLISHED.values(), ids=PUBLISHED)
every_name = pytest.mark.parametrize("name", PUBLISHED)
REGULARISERS = dict(kl_coef=0.1, entropy_coef=0.05)


def test_every_loss_is_published():
    assert {section["fn"] for section in SECTIONS.values()} == LOSSES.keys()


@every_name
def test_a_published_loss_gives_every_option_of_its_function(name):
    fn = LOSSES[SECTIONS[name]["fn"]]
    assert SECTIONS[name].keys() - {"fn", "name"} == set(options_of(fn))


def test_what_a_config_reads_of_a_loss_is_what_the_loss_declares():
    assert declarations().keys() == LOSSES.keys()
    marks = set(chain.from_iterable(declared.marks for declared in declarations().values()))
    assert marks == {
        "whole_groups",
        "group_means",
        "uses_all_completions",
        "needs_reference",
        "token_advantages",
        "holds_to_generator",
        "sums_completions",
    }
    for name, fn in LOSSES.items():
        assert list(declarations()[name].options) == options_of(fn)
        assert declarations()[name].marks == {mark for mark in marks if hasattr(fn, mark)}
    options = set(chain.from_iterable(one.options for one in declarations().values()))
    assert options == LOSS_OPTIONS.keys()
    assert not declares("my_module:my_loss", "token_advantages")


@pytest.mark.parametrize("around", [{"kl_coef": 0.1}, {"entropy_coef": 0.1}])
def test_a_term_around_a_loss_uses_all_completions(around):
    assert has_mark(regularised(PUBLISHED["aipo"], **around), "uses_all_completions")
    assert not has_mark(regularised(PUBLISHED["aipo"]), "uses_all_completions")


@every_loss
def test_without_advantage_there_is_a_gradient_exactly_where_the_loss_says_so(fn):
    p = problem()
    p = replace(p, advantages=torch.zeros_like(p.advantages))
    assert bool((p.gradient(fn) != 0).any()) is has_mark(fn, "uses_all_completions")


@every_loss
@pytest.mark.parametrize("garbage", [-math.inf, math.nan])
def test_masked_labels_add_nothing_and_get_zero_gradient_whatever_they_hold(fn, garbage):
    clean, fn = problem(), regularised(fn, **REGULARISERS)
    entropy = torch.rand(clean.pi.shape, dtype=torch.float64, requires_grad=True)
    dirty = [torch.where(clean.mask, t.detach(), garbage) for t in (*clean.tensors[:4], entropy)]
    dirty[0].requires_grad_(), dirty[4].requires_grad_()
    soiled = replace(clean, pi=dirty[0], mu=dirty[1], ref=dirty[2], advantages=dirty[3])
    loss, metrics = soiled.call(fn, entropy=dirty[4])
    want, want_metrics = clean.call(fn, entropy=entropy)
    assert loss.item() == want.item() and math.isfinite(want.item())
    assert metrics == want_metrics
    loss.backward(), want.backward()
    for got, right in ((dirty[0].grad, clean.pi.grad), (dirty[4].grad, entropy.grad)):
        assert (got[~clean.mask] == 0).all() and torch.equal(got, right) and (got != 0).any()


@every_loss
@settings(max_examples=4)
@given(places=st.lists(st.integers(0, 2), min_size=9, max_size=9), seed=st.integers(0, 5))
def test_microbatches_add_up_to_the_batch(fn, places, seed):
    whole = problem(seed=seed)
    if has_mark(fn, "whole_groups"):
        places = [places[g] for g in whole.completions.groups.tolist()]
    fn = regularised(fn, kl_coef=0.1)
    parts = []
    for k in range(3):
        parts.append(whole.part([j for j, place in enumerate(places) if place == k]))
    want, want_metrics = whole.call(fn)
    shares = [part.call(fn) for part in parts]
    torch.testing.assert_close(sum(loss for loss, _ in shares), want, **EXACT)
    gradient = torch.autograd.grad(sum(loss for loss, _ in shares), whole.pi)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(want, whole.pi)[0], **EXACT)
    for name, value in want_metrics.items():
        joined = torch.stack([metrics[name] for _, metrics in shares])
        whole_value = joined.amax() if name.endswith("/max") else joined.sum()
        torch.testing.assert_close(whole_value, value, **EXACT)
        assert value.dim() == 0 and not value.requires_grad and value.is_floating_point()


@every_loss
@pytest.mark.parametrize("gap", [1e20, -1e20])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_huge_log_ratios_stay_finite(fn, gap, sign):
    p = problem()
    single = [t.detach().float() for t in p.tensors[:4]]
    pi = (single[0] - abs(gap) if gap > 0 else single[0]).requires_grad_()
    far = pi.detach() + gap
    completions = replace(p.completions, rewards=sign * p.completions.rewards.float())
    signed = {"advantages": sign * single[3].abs(), "completions": completions}
    loss, metrics = replace(p, pi=pi, mu=far, ref=far, **signed).call(regularised(fn, kl_coef=1e-3))
    (gradient,) = torch.autograd.grad(loss, pi)
    assert loss.isfinite() and gradient.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


@every_loss
def test_no_labels_give_loss_zero_that_can_go_backward(fn):
    p = problem().part([])
    loss, metrics = p.call(regularised(fn, kl_coef=0.1))
    loss.backward()
    assert loss.item() == 0 and all(value == 0 for value in metrics.values())


@every_loss
def test_what_is_not_a_number_in_a_trained_label_reaches_the_loss(fn):
    p = problem()
    pi = p.pi.detach().clone()
    pi[p.mask] = math.nan
    assert replace(p, pi=pi.requires_grad_()).call(fn)[0].isnan()


@every_name
def test_the_loss_depends_on_the_generators_logprobs_as_it_says(name):
    p, fn = problem(), PUBLISHED[name]
    loss, moved = p.call(fn)[0], replace(p, mu=p.mu - 0.3).call(fn)[0]
    is_free = name in {"reinforce", "rloo", "online_dpo", "best_of_n", "tb"}
    assert (loss.item() == moved.item()) is is_free


# --- the knobs of ratios ---

WITH_RATIO = [name for name in PUBLISHED if "ratio_cap" in SECTIONS[name]]
with_ratio = pytest.mark.parametrize("fn", [PUBLISHED[name] for name in WITH_RATIO], ids=WITH_RATIO)
LEVELS = ("token", "sequence", "sequence_mean")
FREE = {"ratio_cap": None, "ratio_mask_low": None, "ratio_mask_high": None}


@with_ratio
def test_every_ratio_loss_has_the_same_knobs(fn):
    assert set(options_of(fn)) >= {"ratio_cap", "ratio_mask_low", "ratio_mask_high", "ratio_level"}


@with_ratio
@pytest.mark.parametrize("level", LEVELS)
def test_a_cap_or_a_mask_without_bound_is_none(fn, level):
    p, none = problem(spread=3), FREE | {"ratio_level": level}
    loss = p.call(fn, **none)[0]
    for wide in ({"ratio_cap": math.inf}, {"ratio_mask_low": 0.0, "ratio_mask_high": math.inf}):
        assert p.call(fn, **none | wide)[0].item() == loss.item()
    for tight in ({"ratio_cap": 1.3}, {"ratio_mask_high": 1.3}):
        assert p.call(fn, **none | tight)[0].item() != loss.item()


@with_ratio
@pytest.mark.parametrize("level", LEVELS)
def test_labels_outside_the_mask_get_no_gradient_and_the_others_theirs(fn, level):
    p, bounds = problem(spread=2), dict(ratio_mask_low=0.8, ratio_mask_high=1.25)
    free = FREE | {"ratio_level": level}
    ratios = torch.zeros_like(p.pi)
    for j in range(p.completions.groups.numel()):
        labels = p.labels(j)
        gaps = (p.pi.detach() - p.mu)[labels]
        of_level = {"token": gaps, "sequence": gaps.sum(), "sequence_mean": gaps.mean()}
        ratios[labels] = of_level[level].exp()
    kept = p.mask & (ratios >= 0.8) & (ratios <= 1.25)
    got, metrics = p.gradient(fn, **free | bounds), p.call(fn, **free | bounds)[1]
    assert 0 < kept.sum() < p.mask.sum() and metrics["ratio/masked"] == (p.mask & ~kept).sum()
    assert (got[~kept] == 0).all()
    torch.testing.assert_close(got[kept], p.gradient(fn, **free)[kept], **EXACT)
    torch.testing.assert_close(metrics["ratio/sum"], ratios.sum(), **EXACT)
    torch.testing.assert_close(metrics["ratio/max"], ratios.max(), **EXACT)


KNOBS = [
    ({"ratio_cap": 0.0}, "ratio_cap=0.0: need more than 0"),
    ({"ratio_cap": math.nan}, "need more than 0"),
    ({"ratio_mask_low": 2.0, "ratio_mask_high": 1.0}, "0 <= low < high"),
    ({"ratio_mask_low": -1.0}, "0 <= low < high"),
    ({"ratio_level": "word"}, "ratio_level=word: need token or sequence or sequence_mean"),
]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *(("aipo", *knob) for knob in KNOBS),
        *(("ppo", *knob) for knob in KNOBS),
        ("grpo", {"clip_low": 1.5}, "0 <= clip_low <= 1"),
        ("ppo", {"clip_high": -0.1}, "clip_high >= 0"),
        ("ppo", {"ratio_cap": 1.2}, "leaves nothing to clip"),
        ("aipo", {"normalize": "words"}, "need tokens or completions"),
        ("dr_grpo", {"max_tokens": 0}, "need at least 1"),
        ("dr_grpo", {"max_tokens": 5, "normalize": "groups"}, "takes the place of normalize"),
        ("tb", {"beta": 0.0}, "more than 0"),
        ("tb", {"log_reward_temperature": 0.0}, "log_reward_temperature=0.0: need more than 0"),
        ("tb", {"reference_temperature": -1.0}, "reference_temperature=-1.0: need more than 0"),
        ("online_dpo", {"beta": -1.0}, "more than 0"),
        ("tba", {"beta": -1.0}, "at least 0"),
        ("kimi_k2", {"tau": -1.0}, "at least 0"),
        ("distill", {"reward_weight": -1.0}, "at least 0"),
    ],
)
def test_impossible_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        problem().call(PUBLISHED[name], **options)


@pytest.mark.parametrize("name", ["online_dpo", "tb", "tba", "distill"])
def test_a_loss_that_compares_with_a_reference_needs_one(name):
    with pytest.raises(ValueError, match="reference=frozen"):
        replace(problem(), ref=None).call(PUBLISHED[name])


# --- a loss of one's own, as the config's check finds it ---

OTHER_TEMPERATURES = ("buffer=replay", "generator.temperature=[0.5,2]")


def test_the_marks_of_a_loss_of_ones_own_are_asked_about(user_module):
    for accepted in (
        ["loss.fn=users_losses:held"],
        ["loss.fn=users_losses:plain"],
        ["loss.fn=users_losses:plain", *OTHER_TEMPERATURES],
        ["loss.fn=users_losses:compared", "reference=frozen"],
    ):
        check_command_line(accepted, world_size=1)
    said = complaint("loss.fn=users_losses:held", *OTHER_TEMPERATURES)
    assert "this loss keeps the policy close to the distribution that sampled" in said
    assert "this loss compares with a reference" in complaint("loss.fn=users_losses:compared")
