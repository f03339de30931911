"""Which ranks executors have: by the configuration, by the planner, and where NCCL joins them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.comm.groups import RankInfo, have_a_gpu_each
from llamarl.config.command_line import RED_TEAM, compose_config, default_config
from llamarl.config.placement import idle_ranks, placement_of
from llamarl.config.sections.placement import PlacementSettings
from llamarl.launch.placement import planned_placement

RANKS = 16
AUTO = PlacementSettings(
    trainer=None,
    generator=None,
    reward=None,
    reference=None,
    victim=None,
    colocate=None,
    sheet=None,
)


def placed_by(placement, world_size, groups_per_step=64, tensor_parallel=1, split_into=None):
    """The ranks of a run with a reference that gives these alone. split_into: completions of each
    prompt that all trainer ranks share.
    """
    config = SimpleNamespace(
        placement=placement,
        groups_per_step=groups_per_step,
        trained_per_prompt=split_into,
        splits_prompts=split_into is not None,
        generator=SimpleNamespace(tensor_parallel=tensor_parallel),
        reference=SimpleNamespace(kind="frozen", placed=True),
        victim=SimpleNamespace(placed=False),
    )
    return placement_of(config, world_size)


@pytest.mark.parametrize(
    "world_size, groups, size, trainer, generator, reward",
    [
        (1, 64, 1, (0,), (0,), (0,)),
        (2, 64, 1, (0,), (1,), (1,)),
        (3, 64, 1, (0,), (1, 2), (2,)),
        (4, 64, 1, (0, 1), (2, 3), (3,)),
        (6, 64, 1, (0, 1), (2, 3, 4, 5), (5,)),  # three trainers cannot share 64 groups
        # Whole replicas of several ranks.
        (3, 64, 2, (0,), (1, 2), (2,)),
        (4, 64, 2, (0, 1), (2, 3), (3,)),
        (8, 64, 3, (0, 1), (2, 3, 4, 5, 6, 7), (7,)),  # four trainers would leave no whole replicas
        (4, 1, 2, (0,), (1, 2), (3,)),  # one is left over, for the reward
        (9, 64, 8, (0,), tuple(range(1, 9)), (8,)),
    ],
)
def test_ranks_are_halved_between_trainers_and_whole_replicas(
    world_size, groups, size, trainer, generator, reward
):
    placed = placed_by(AUTO, world_size, groups_per_step=groups, tensor_parallel=size)
    found = placed["trainer"], placed["generator"], placed["reward"]
    assert found == (trainer, generator, reward)


def test_what_is_given_stays_and_the_rest_is_filled_in_around_it():
    placed = placed_by(dataclasses.replace(AUTO, generator=[0]), 4)
    assert placed == {"trainer": (1, 2), "generator": (0,), "reward": (3,), "reference": (3,)}
    placed = placed_by(dataclasses.replace(AUTO, generator=[0, 1, 2, 3, 4]), 8)
    assert placed["trainer"] == (5, 6)  # three are free, but cannot share 64 groups


def test_trainers_that_split_prompts_are_as_many_as_share_the_completions():
    assert placed_by(AUTO, 6, groups_per_step=1, split_into=9)["trainer"] == (0, 1, 2)
    assert placed_by(AUTO, 6, groups_per_step=3, split_into=4)["trainer"] == (0, 1)


def test_colocated_executors_share_what_is_given_for_one_of_them_or_everything():
    both = dataclasses.replace(AUTO, colocate=["trainer", "generator"])
    placed = placed_by(both, 4)
    assert placed["trainer"] == placed["generator"] == (0, 1, 2, 3)
    placed = placed_by(dataclasses.replace(both, generator=[1, 2]), 4)
    assert (placed["trainer"], placed["generator"], placed["reward"]) == ((1, 2), (1, 2), (3,))


@given(st.integers(1, 40), st.integers(1, 40), st.just(1) | st.integers(1, 8))
def test_automatic_placement_splits_the_batch_and_makes_whole_replicas_wherever_it_can(
    world_size, groups_per_step, size
):
    placed = placed_by(AUTO, world_size, groups_per_step=groups_per_step, tensor_parallel=size)
    trainer, generator = set(placed["trainer"]), set(placed["generator"])
    assert groups_per_step % len(trainer) == 0
    assert world_size == 1 or not trainer & generator
    assert len(generator) % size == 0 or world_size <= size
    if size == 1:
        assert trainer | generator == set(range(world_size)), "none is idle"


def test_a_rank_that_hosts_nothing_is_known():
    given = ["placement.trainer=[0]", "placement.generator=[1]", "placement.reward=[1]"]
    config = default_config(overrides=given)
    assert idle_ranks(config, 4) == [2, 3]


def test_a_victim_stands_beside_the_reward_or_where_it_is_put():
    config = compose_config([], RED_TEAM)
    assert config.victim.placed and config.victim.longest == 16 + 6
    assert placement_of(config, 3)["victim"] == (2,)
    assert placement_of(compose_config(["placement.generator=[0]"], RED_TEAM), 1)["victim"] == (0,)
    assert "victim" not in placement_of(compose_config([]), 3)


def test_a_sheet_splits_all_kinds_of_ranks_without_overlap():
    config = compose_config(["placement.sheet=h100"])
    planned, words = planned_placement(config, RANKS)
    assert "s a step by h100" in words
    placed = placement_of(planned, RANKS)
    trainer, generator = placed["trainer"], placed["generator"]
    assert trainer and generator and not set(trainer) & set(generator)
    assert set(trainer) | set(generator) <= set(range(RANKS))
    assert config.groups_per_step % len(trainer) == 0


def test_longer_completions_get_the_generator_more_ranks():
    found = {}
    for tokens in (8, 2048):
        words = ["placement.sheet=h100", f"max_new_tokens={tokens}"]
        planned, _ = planned_placement(compose_config(words), RANKS)
        found[tokens] = len(planned.placement.trainer or ())
    assert found[2048] < found[8]


@pytest.mark.parametrize("words, ranks", [([], RANKS), (["placement.sheet=h100"], 1)])
def test_without_a_sheet_or_on_one_rank_nothing_is_planned(words, ranks):
    config = compose_config(words)
    assert planned_placement(config, ranks) == (config, "")


def test_a_sheet_that_is_not_there_is_named():
    with pytest.raises((ValueError, OSError), match="h101"):
        planned_placement(compose_config(["placement.sheet=h101"]), RANKS)


@pytest.mark.parametrize(
    "gpus, ranks, is_so",
    [
        ((), (), False),
        (("a", "b"), (0, 1), True),
        (("a",), (0,), True),
        (("a", "a"), (0, 1), False),
        (("a", "b", "a", "b"), (0, 1, 2), False),
        (("a", "b", "a", "b"), (2, 3), True),
        (("a", None), (0, 1), False),
    ],
)
def test_nccl_joins_ranks_with_a_gpu_each(gpus, ranks, is_so):
    assert have_a_gpu_each(RankInfo(rank, "host", gpus[rank]) for rank in ranks) is is_so
