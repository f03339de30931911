"""Executors that share ranks, and ranks that share cores: steps by hand, and no work is lost."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.models.config import read_config, tiny_directory
from llamarl.models.sharding import num_parameters
from llamarl.planner import ranks
from llamarl.planner.clock import VirtualClock
from llamarl.planner.costs import Costs
from llamarl.planner.curves import Cost, Curve
from llamarl.planner.fit import busy_of, fit_runs, seen_of
from llamarl.planner.plans import GeneratorPlan, Numerics, Plan, TrainerPlan, Work
from llamarl.planner.predict import Predictor
from llamarl.planner.ranks import bytes_of_ranks, share
from llamarl.planner.sheet import Measured, read_sheet
from llamarl.planner.turns import Cores, Rank, stretch
from tests.unit.made_runs import two_ranks

MODEL = read_config(tiny_directory())
H100 = read_sheet("h100")
APART = {"trainer": (0,), "generator": (1,), "reward": (1,)}
# A batch of 4 groups of 2 is trained on in 4 s on one rank, of 2 groups in 2 s. A decode step takes
# 0.5 s whatever it decodes. A completion costs 0.125 s where the reward is, and 0.0625 s of its
# worker.
MEASURED = Measured(
    model="tiny",
    parameters=num_parameters(MODEL),
    dtype="float32",
    microbatch=Cost(Curve((12, 24), (2.0, 4.0))),
    update_s=0.0,
    decode=Cost(Curve((1, 8), (0.5, 0.5))),
    prefill=Curve((1,), (1e-9,)),
    copy=Curve((1e9,), (1e-9,)),
    score=Curve((1, 8), (0.0625, 0.5)),
    hosted_s=0.125,
    turn_s=0.25,
)
WORK = Work(
    groups=4,
    group_size=2,
    prompt_tokens=2,
    completion_tokens=2,
    longest_prompt=2,
    max_new_tokens=2,
    max_lag=2,
)
CPU = replace(H100.device, kind="cpu", gpus_per_node=2)


def predictor(**besides):
    sheet = replace(H100, device=CPU, measured=replace(MEASURED, **besides))
    numerics = Numerics(dtype="float32", compute_dtype="float32", on_cpu=True)
    return Predictor.of(Costs(sheet, MODEL, numerics), WORK)


def plan(*, trainers=1, generators=1, max_lag=0):
    return Plan(
        TrainerPlan(shards=1, replicate=trainers, tensor=1, microbatch_tokens=100),
        GeneratorPlan(tensor=1, replicas=generators, slots=16),
        overcommit=2,
        max_lag=max_lag,
    )


def step(placed, *, cores=2, max_lag=0, **besides):
    made = plan(
        trainers=len(placed["trainer"]), generators=len(placed["generator"]), max_lag=max_lag
    )
    return share(predictor(**besides), made, placed, cores=cores)


def seconds(value):
    """Copies and messages take what rounds to nothing here."""
    return pytest.approx(value, abs=1e-3)


def test_a_synchronous_step_is_the_sum_of_its_parts():
    """4 s of training, 2 steps of 0.5 s, 8 completions, a turn."""
    assert step(APART).step_s == seconds(4 + 1 + 8 * (0.125 + 0.0625) + 0.25)


def test_two_ranks_that_train_together_halve_the_work_and_crowd_each_other():
    both = APART | {"trainer": (0, 1)}
    rest = 1 + 1.5 + 0.25
    assert step(both, together_s=0.5).step_s == seconds(2.5 + rest)
    assert step(both, together_s=0.5, crowding=0.5).step_s == seconds(1.5 * 2.5 + rest)
    # On one core they take turns, which no split can help.
    assert step(both, cores=1).step_s == seconds(2 * 2 + rest)


def test_an_asynchronous_step_is_that_of_the_busiest_rank():
    """The generator's rank has 1 s and 1 s; all of it runs beside 4 s of training."""
    assert step(APART, max_lag=2, cores=4).step_s == seconds(4)
    everything = {name: (0,) for name in APART}
    # One process on one core, of whose scorer's 0.5 s some are before the steps that count.
    assert 4 + 2 < step(everything, max_lag=2, cores=1).step_s <= 4 + 2 + 0.5 + 1e-2


@pytest.mark.parametrize(
    "reward, max_lag, tokens", [((1,), 2, 1), ((0,), 2, 8), ((2,), 2, 8), ((1,), 0, 8)]
)
def test_a_generator_beside_a_reward_takes_short_turns(monkeypatch, reward, max_lag, tokens):
    """As executors.build has it."""
    simulated = []

    def simulate(settings, *rest):
        simulated.append(settings.chunk_tokens)
        return made(settings, *rest)

    made = ranks.simulate
    monkeypatch.setattr(ranks, "simulate", simulate)
    step(APART | {"reward": reward}, max_lag=max_lag)
    assert set(simulated) == {tokens}


def test_what_runs_beside_a_rank_makes_it_slower():
    """1 s of work beside it takes 1.5 s, in which it does 1 s of its 4 s; 3 s are left. A batch
    that is sampled in two pieces is 2 s of work.
    """
    nothing = Curve((1, 8), (1e-9, 8e-9))
    found = step(APART, max_lag=2, crowding=0.5, hosted_s=0.0, score=nothing)
    assert 1.5 + 3 <= found.step_s <= 3 + 2 + 1e-2


def test_a_third_rank_has_no_core_of_its_own():
    """Two generators beside a trainer leave it two thirds of a core while both sample."""
    three = {"trainer": (0,), "generator": (1, 2), "reward": (2,)}
    assert step(three, max_lag=2, hosted_s=0.0).step_s > 4 + 1e-2
    assert step(three, max_lag=2, hosted_s=0.0, cores=3).step_s == seconds(4)


@settings(deadline=None)
@given(
    st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6),
    st.integers(1, 8),
    st.floats(0.0, 1.0),
)
def test_no_core_rests_and_no_work_is_lost(pieces, cores, crowding):
    found = ended_s(pieces, cores, crowding)
    least = max(max(pieces), sum(pieces) / cores)
    assert max(found) >= least - 1e-9
    assert max(found) <= (sum(pieces) / cores + max(pieces)) * (1 + crowding) + 1e-9
    # Who has less to do ends first, and one more core makes nobody later.
    assert sorted(found) == found_by_size(pieces, found)
    for sooner, later in zip(ended_s(pieces, cores + 1, 0.0), ended_s(pieces, cores, 0.0)):
        assert sooner <= later + 1e-9


def ended_s(pieces, cores, crowding):
    """When each of these pieces ends that begin together."""
    clock = VirtualClock()
    shared = Cores(clock, count=cores, crowding=crowding)
    ends = {}
    for number, piece in enumerate(pieces):
        shared.work(piece, lambda number=number: ends.setdefault(number, clock.now))
    clock.run(lambda: len(ends) == len(pieces))
    return [ends[number] for number in range(len(pieces))]


def found_by_size(pieces, found):
    return [end for _, end in sorted(zip(pieces, found))]


def test_cores_are_shared_evenly():
    assert ended_s([2.0, 2.0, 2.0], 2, 0.0) == [3.0, 3.0, 3.0]
    # 2/3 of a core each for 1.5 s; then each of two has a core.
    assert ended_s([1.0, 2.0, 2.0], 2, 0.0) == pytest.approx([1.5, 2.5, 2.5])
    assert ended_s([1.0, 2.0], 2, 0.5) == pytest.approx([1.5, 2.5])
    assert ended_s([1.0, 2.0], 0, 0.5) == [1.0, 2.0]  # GPUs
    assert stretch(3, 2, 0.0) == 1.5
    assert stretch(3, 2, 0.2) == pytest.approx(1.5 * 1.2)
    assert stretch(2, 0, 0.2) == 1.0  # GPUs


def test_executors_of_a_rank_take_turns():
    """The order behind the one that leaves; who finds nothing to do is passed over."""
    clock = VirtualClock()
    rank = Rank(Cores(clock))
    begun = []
    to_do = {"a": 2, "b": 1, "c": 0}
    turns = {}

    def turn(name):
        if to_do[name]:
            to_do[name] -= 1
            begun.append((clock.now, name))
            rank.work(1.0, lambda: rank.leave(turns[name]))

    for name in to_do:
        turns[name] = lambda name=name: turn(name)
        rank.join(turns[name])
    turns["a"]()
    assert not clock.run(lambda: False)
    assert begun == [(0.0, "a"), (1.0, "b"), (2.0, "a")]
    assert rank.is_free


def test_no_core_is_refused():
    with pytest.raises(ValueError, match="cores=0"):
        step(APART, cores=0)


def test_weights_race_with_the_news_of_room():
    """1 + 2/4, and up to a step more where the trainer never waits and its weights are late."""
    late = step(APART, max_lag=3, transfer_s=3.0).mean_lag
    soon = step(APART, max_lag=3, transfer_s=1e-9).mean_lag
    assert 1.5 <= soon < 1.75 < late <= 2.5
    assert step(APART, max_lag=2, transfer_s=3.0).mean_lag <= 2.0
    # A trainer that waits has sent them long before.
    slow = replace(MEASURED.decode, curve=Curve((1, 8), (5.0, 5.0)))
    assert step(APART, max_lag=3, decode=slow).mean_lag <= 1.5
    assert step(APART).mean_lag == 0.0


BESIDE = {"trainer": (0, 1), "generator": (0, 1), "reward": (1,)}


def test_a_generator_beside_its_trainer_has_its_weights_before_its_next_turn():
    """Half of a batch waits for the step behind the next, so that the lag is 1/2 where weights come
    before tickets. However long they are on their way: the turn waits for a part that another rank
    has.
    """
    assert step(BESIDE, max_lag=2).mean_lag == pytest.approx(0.5)
    assert step(BESIDE, max_lag=2, transfer_s=3.0).mean_lag == pytest.approx(0.5)
    one = {**BESIDE, "generator": (1,)}
    soon = step(one, max_lag=2, transfer_s=1e-9)
    late = step(one, max_lag=2, transfer_s=3.0)
    assert soon.mean_lag == late.mean_lag == pytest.approx(0.5)
    assert late.step_s > soon.step_s + 1
    # Of three generators the third has no trainer on its rank.
    three = {**BESIDE, "generator": (0, 1, 2)}
    assert step(three, max_lag=2, transfer_s=3.0).mean_lag > 0.5


def test_a_ranks_process_holds_what_all_its_executors_do():
    made = predictor()
    apart = bytes_of_ranks(made, plan(), APART | {"reward": (2,)})
    trainer = apart[0]
    generator = apart[1]
    process = apart[2]
    held = made.memory.trainer(plan().trainer).held
    assert process < generator and process + held < trainer
    (together,) = bytes_of_ranks(made, plan(), {name: (0,) for name in APART}).values()
    assert together == trainer + generator - process
    # FSDP2, and the sets of weights of a sum of gradients.
    two = bytes_of_ranks(made, plan(trainers=2), APART | {"trainer": (0, 1)})
    assert two[0] > trainer
    # A batch twice as large has as many activations more.
    larger = Predictor.of(made.costs, replace(WORK, groups=64))
    assert bytes_of_ranks(larger, plan(), APART)[0] > trainer


# --- A fit that tells synchronous runs from others ---


def test_busy_seconds_come_from_the_traces_without_the_last_checkpoint(tmp_path):
    run = two_ranks(tmp_path / "a", groups=4, trainer_s=0.5, step_s=1.0, max_lag=0)
    seen = seen_of(run, 6.0)
    assert (seen.point.generator_s, seen.hosted_s) == (0.25, 0.125)
    assert busy_of(run)["trainer"] == 0.5
    assert seen.is_synchronous and seen.is_apart


def test_synchronous_runs_say_what_nobodys_work_explains_and_others_how_crowded_it_is(tmp_path):
    """16 and 32 completions: gaps of 0.125 and 0.1875 s are 0.0625 s and 1/256 s each. Alone an
    update takes 0.5 s; beside 0.4375 s of other work in a step of 0.875 s it takes 0.625 s.
    """
    runs = [
        two_ranks(tmp_path / "a", groups=4, trainer_s=0.5, step_s=1.0, max_lag=0),
        two_ranks(tmp_path / "b", groups=8, trainer_s=1.0, step_s=1.5625, max_lag=0),
        two_ranks(tmp_path / "c", groups=4, trainer_s=0.625, step_s=0.875, max_lag=1),
    ]
    sheet = fit_runs(runs, replace(H100, device=CPU), prompt_tokens=6.0)
    measured = sheet.measured
    assert measured.turn_s == pytest.approx(0.0625)
    assert measured.score.at(16) == pytest.approx(16 / 256)
    assert measured.hosted_s == pytest.approx((0.125 / 16 + 0.125 / 32) / 2)
    assert measured.crowding == pytest.approx(0.25 / 0.5)
    assert measured.microbatch.curve.at(184) == pytest.approx(0.5)
    # An update that is shorter beside others is not crowded.
    short = two_ranks(tmp_path / "d", groups=4, trainer_s=0.375, step_s=0.625, max_lag=1)
    sheet = fit_runs([*runs[:2], short], replace(H100, device=CPU), prompt_tokens=6.0)
    assert sheet.measured.crowding == 0.0
    # On GPUs nothing is crowded.
    assert fit_runs(runs, H100, prompt_tokens=6.0).measured.crowding == 0.0
