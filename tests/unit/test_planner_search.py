"""The search finds what trying everything finds, and says what would fit where nothing does."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.memory import GIB
from llamarl.planner.costs import Costs, GeneratorPlan, Numerics, Split, StepWork, TrainerPlan
from llamarl.planner.predict import Predictor, best_split
from llamarl.planner.profile import Assumption, read_profile
from llamarl.planner.search import (
    ALIKE,
    NothingFits,
    SearchLimits,
    divisors,
    powers_up_to,
    search,
    shortest,
)
from tests.build.model_config import model_config

MODEL = model_config(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position_embeddings=4096,
)
WORK = StepWork(
    groups=6,
    group_size=4,
    prompt_tokens=100,
    completion_tokens=300,
    longest_prompt=128,
    max_new_tokens=1024,
    sigma=0.5,
    max_lag=2,
)
PROFILE = read_profile("h100")


def predictor(work=WORK, **numerics):
    return Predictor(Costs(PROFILE, MODEL, Numerics(**numerics)), work)


def trainers(gpus):
    """Every trainer of exactly so many GPUs."""
    for tensor, ranks in itertools.product((1, 2, 4, 8), divisors(WORK.groups)):
        if tensor * ranks != gpus:
            continue
        for shards, size in itertools.product(divisors(ranks), powers_up_to(1 << 17, 1024)):
            yield TrainerPlan(shards, ranks // shards, tensor, size)


def generators(gpus):
    """Every generator of so many GPUs a layer, and as many replicas as there are GPUs for."""
    for tensor in (1, 2, 4, 8):
        for slots in range(WORK.group_size, 97):
            if gpus // tensor:
                yield GeneratorPlan(tensor, gpus // tensor, slots)


@pytest.mark.parametrize("gpus, gib", [(2, 40), (8, 12)])
def test_search_finds_what_trying_everything_finds(gpus, gib):
    found = predictor()
    memory = gib * GIB
    ours = search(found, SearchLimits(gpus, memory)).asynchronous
    least = float("inf")
    for own in range(1, gpus):
        # Ranks that train on groups of their own -> the least seconds of such a trainer.
        training: dict[int, float] = {}
        for plan in trainers(own):
            if found.trainer_bytes(plan).total <= memory:
                took = found.update_s(plan) + found.costs.publish_s(plan)
                training[plan.data_ranks] = min(took, training.get(plan.data_ranks, took))
        for generator in generators(gpus - own):
            if found.generator_bytes(generator).total > memory:
                continue
            for overcommit in range(WORK.max_lag * WORK.groups + 1):
                sampling_s = found.streaming_s(generator, overcommit)
                sampling_s += found.costs.swap_s(generator.tensor)
                shared = [took for ranks, took in training.items() if overcommit % ranks == 0]
                least = min([least, *(max(took, sampling_s) for took in shared)])
    assert least < float("inf")
    assert least * (1 - 1e-9) <= ours.step_s <= least * ALIKE
    assert ours.bytes_of_gpu <= memory
    assert ours.plan.gpus <= gpus


def test_the_step_is_that_of_its_slowest_part():
    found = predictor()
    plan = Split(TrainerPlan(1, 1, 1, 4096), GeneratorPlan(1, 1, 8), overcommit=6)
    one = found.predict(plan)
    assert one.step_s == max(one.trainer_s, one.generator_s, one.score_s, one.transfer_s)
    by_turns = found.predict(replace(plan, max_lag=0))
    parts = by_turns.trainer_s + by_turns.generator_s + by_turns.score_s + by_turns.transfer_s
    assert by_turns.step_s == pytest.approx(parts)
    assert by_turns.sample_s > one.sample_s  # it waits for the longest


def test_rows_are_bounded_by_what_may_be_started():
    """6 groups of 4 a batch, half of it waiting: (overcommit + 3) 4 completions on all replicas. Of
    5 slots 1.5 are free on average, until there is room for a group of 4.
    """
    alike = predictor(replace(WORK, sigma=0.0))
    assert alike.rows(GeneratorPlan(1, 2, 100), overcommit=1) == (1 + 3) * 4 / 2
    assert alike.rows(GeneratorPlan(1, 2, 5), overcommit=1) == 3.5
    # The longest of 4 is taken at 4/5 of the distribution, z = 0.8416, and the mean is
    # exp(sigma^2 / 2) medians: a completion decodes for exp(0.125 - 0.4208) = 0.7439 of the time.
    uneven = predictor().rows(GeneratorPlan(1, 2, 100), overcommit=1)
    assert uneven == pytest.approx(0.7439 * 8, rel=1e-3)


def test_lag_is_one_and_overcommit_over_the_batch_within_the_bound():
    plan = Split(TrainerPlan(1, 1, 1, 1024), GeneratorPlan(1, 1, 1), overcommit=3, max_lag=4)
    lags = [replace(plan, **one).mean_lag(6) for one in ({}, {"overcommit": 60})]
    assert [*lags, replace(plan, max_lag=0, overcommit=0).mean_lag(6)] == [1.5, 4.0, 0.0]


def test_among_steps_that_are_alike_the_least_lag_is_taken():
    found = predictor()
    plan = Split(TrainerPlan(1, 1, 1, 4096), GeneratorPlan(1, 1, 8), overcommit=6, max_lag=2)
    one = found.predict(plan)
    younger = replace(one, step_s=one.step_s * 1.005, mean_lag=1.0)
    slower = replace(one, step_s=one.step_s * 1.02, mean_lag=0.5)
    assert shortest([one, younger, slower]) is younger
    assert shortest([]) is None


def test_without_need_no_group_is_started_beyond_a_batch():
    """Scores take so long that no overcommit makes the step shorter."""
    slow = replace(PROFILE.assumptions, score_s=Assumption(10.0, "of a test"))
    costs = Costs(replace(PROFILE, assumptions=slow), MODEL, Numerics())
    found = search(Predictor(costs, WORK), SearchLimits(4, 40 * GIB)).asynchronous
    assert (found.plan.overcommit, found.mean_lag) == (0, 1.0)


def test_what_is_given_is_kept_to_and_more_gpus_a_layer_than_there_are_are_refused():
    limits = SearchLimits(8, 40 * GIB, overcommit=2, trainer_tensor=2, generator_tensor=4)
    plan = search(predictor(), limits).asynchronous.plan
    assert (plan.trainer.tensor, plan.generator.tensor, plan.overcommit) == (2, 4, 2)
    with pytest.raises(ValueError, match=r"^trainer\.tensor_parallel=4: .* there are 2$"):
        SearchLimits(2, 40 * GIB, trainer_tensor=4)
    assert SearchLimits(4, 40 * GIB, trainer_tensor=4).trainer_tensor == 4


def test_a_synchronous_job_has_no_asynchronous_plan_and_one_gpu_neither():
    at_once = search(predictor(replace(WORK, max_lag=0)), SearchLimits(4, 40 * GIB))
    assert at_once.asynchronous is None and not at_once.pays
    alone = search(predictor(), SearchLimits(1, 60 * GIB))
    assert alone.asynchronous is None
    assert alone.synchronous.plan.sharing in ("shared", "offload")
    assert search(predictor(), SearchLimits(2, 30 * GIB)).synchronous.bytes_of_gpu <= 30 * GIB


def test_what_does_not_fit_says_what_would():
    with pytest.raises(NothingFits) as error:
        search(predictor(), SearchLimits(2, 6 * GIB))
    text = str(error.value)
    assert "nothing fits 6 GiB a GPU on 2 GPU(s)" in text
    assert "trainer takes at least" in text and "generator takes at least" in text
    assert "trainer.activation_checkpointing=true" in text


def test_rows_run_out_as_their_lengths_do():
    """The stretches make up the mean length of a row, and last until the longest."""
    even = replace(WORK, sigma=0.0).drain(8.0, 24)
    assert even == [(8.0, 300.0)]
    uneven = WORK.drain(8.0, 24)
    tokens = sum(rows * steps for rows, steps in uneven)
    # 64 quantiles of a log-normal and its last order statistic: within a tenth of the integral,
    # whose last rows count as one.
    assert tokens / 8 == pytest.approx(300, rel=0.1)
    assert sum(steps for _, steps in uneven) == pytest.approx(WORK.length_at(24 / 25))
    assert WORK.length_at(1 - 1e-9) == WORK.max_new_tokens


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"prompt_tokens": 200}, "cannot be above task.max_prompt_tokens"),
        ({"groups": 0}, "at least 1"),
        ({"prompt_tokens": 0}, "above 0"),
    ],
)
def test_work_that_contradicts_itself_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        replace(WORK, **changes)


POSITIVE = st.floats(0.1, 10.0)
SHARES = st.floats(0.01, 0.99)


def t_async(batch, total, theta, trainer, generator):
    """Seconds of an asynchronous step at any split, as section 7 of LlamaRL has it."""
    (m_t, eta_t), (m_g, eta_g) = trainer, generator
    training = batch * m_t * eta_t / (theta * total)
    return max(training, batch * m_g * eta_g / ((1 - theta) * total))


def t_sync(batch, total, gpus, eta_t, eta_g):
    """Seconds of a synchronous step, whose sides take turns on replicas of `gpus` GPUs."""
    return batch * gpus / total * (eta_t + eta_g)


def t_best(batch, total, trainer, generator):
    """Seconds of an asynchronous step at the best split."""
    return t_async(batch, total, best_split(trainer, generator), trainer, generator)


def test_the_closed_form_by_hand():
    """2,048 completions on 256 GPUs, 8 a replica, 0.5 and 1.5 s a completion."""
    assert t_sync(2048, 256, 8, 0.5, 1.5) == 2048 * 8 / 256 * 2.0 == 128.0
    # Its own m: 4 GPUs of the generator hold a replica that is as fast.
    assert best_split((8, 0.5), (4, 1.5)) == 4 / 10
    assert t_best(2048, 256, (8, 0.5), (4, 1.5)) == pytest.approx(80.0)
    # With equal m and b overlap alone gains nothing.
    assert t_best(2048, 256, (8, 0.5), (8, 1.5)) == t_sync(2048, 256, 8, 0.5, 1.5)


@settings(deadline=None, max_examples=30)
@given(POSITIVE, POSITIVE, POSITIVE, POSITIVE, SHARES)
def test_the_closed_form_is_the_least_of_all_splits(m_t, eta_t, m_g, eta_g, other):
    trainer = (m_t, eta_t)
    generator = (m_g, eta_g)
    best = 100.0 / 64.0 * (m_t * eta_t + m_g * eta_g)
    # Ratios of up to 1e4: 1 - theta loses four digits of sixteen.
    assert t_best(100.0, 64.0, trainer, generator) == pytest.approx(best, rel=1e-9)
    assert t_async(100.0, 64.0, other, trainer, generator) >= best * (1 - 1e-9)


@st.composite
def etas(draw):
    """A time a completion that falls with b, or stays: the theorem's assumption."""
    fixed = draw(st.floats(0.0, 10.0))
    floor = draw(st.floats(0.01, 10.0))
    power = draw(st.floats(0.0, 3.0))
    return lambda b: fixed / b + floor * (1 + b**-power)


# A side's time a completion by b, the bytes of its weights, and those of one completion.
SIDES = st.tuples(etas(), st.floats(0.1, 100.0), POSITIVE)


@settings(deadline=None, max_examples=50)
@given(SIDES, SIDES, st.floats(1.0, 64.0), SHARES, st.floats(0.1, 1000.0))
def test_theorem_7_5(trainer, generator, m, share, left):
    """Whatever a synchronous job does with the memory that both sides' weights leave, an
    asynchronous one on as many GPUs a replica is no slower. Each of its sides also has the memory
    of the other's weights.
    """
    (eta_t, weights_t, sample_t), (eta_g, weights_g, sample_g) = trainer, generator
    together = (share * left / sample_t, (1 - share) * left / sample_g)
    alone = ((left + weights_g) / sample_t, (left + weights_t) / sample_g)
    synchronous = t_sync(100.0, 64.0, m, eta_t(together[0]), eta_g(together[1]))
    asynchronous = t_best(100.0, 64.0, (m, eta_t(alone[0])), (m, eta_g(alone[1])))
    assert asynchronous <= synchronous * (1 + 1e-9)
