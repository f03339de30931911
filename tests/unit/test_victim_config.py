"""The section `victim` and the recipe that has one: what is refused, and where it is placed."""

import pytest

from llamarl.config.command_line import RED_TEAM, RL, ConfigError, compose_config
from llamarl.config.placement import placement_of


def complaints(*overrides, kind=RED_TEAM) -> dict[str, str]:
    try:
        compose_config(list(overrides), kind)
    except ConfigError as error:
        return {problem.where: problem.what for problem in error.problems}
    return {}


def test_the_recipe_has_a_victim_out_of_the_box_and_the_main_job_none():
    config = compose_config([], RED_TEAM)
    assert config.victim.placed and config.victim.longest == 16 + 6
    assert (config.buffer.kind, config.loss.fn, config.reference.kind) == ("replay", "tb", "frozen")
    assert not compose_config([], RL).victim.placed
    assert config.task.words == ["5"]


@pytest.mark.parametrize(
    "other",
    [
        ("buffer=fifo", "loss=reinforce", "reference=none"),
        ("loss=ppo", "trainer.advantages=gae", "buffer=fifo"),
        ("task=addition",),
        ("reference=reset", "buffer=fifo"),
    ],
)
def test_its_other_values_do_not_stand_in_the_way_of_another_choice(other):
    assert not complaints(*other)


@pytest.mark.parametrize(
    "kind, overrides, where, says",
    [
        (RL, ["victim=hf"], "victim.kind=hf", "recipes/red_team.py"),
        (RED_TEAM, ["victim.template=attack"], "victim.template=attack", "put {attack} where"),
        (RED_TEAM, ["victim.path=/nowhere"], "victim.path=/nowhere", "no such file"),
        (RED_TEAM, ["victim.pat=x"], "victim.pat", "did you mean victim.path?"),
        (RED_TEAM, ["victim.replies=0"], "victim.replies=0", "at least 1"),
        (
            RED_TEAM,
            ["reward=judge", "reward.url=http://localhost:1/v1", "reward.model=m"]
            + ["reward.ask=group", "victim.replies=3"],
            "reward.ask=group victim.kind=hf",
            "reward.ask=score",
        ),
        (RED_TEAM, ["reward=encoder", "reward.path=/nowhere"], "reward.path=/nowhere", "no such"),
    ],
)
def test_what_cannot_be_is_told_with_the_remedy(kind, overrides, where, says):
    assert says in complaints(*overrides, kind=kind).get(where, "")


def test_it_stands_beside_the_reward_or_where_it_is_put():
    assert placement_of(compose_config([], RED_TEAM), 3)["victim"] == (2,)
    placed = compose_config(["placement.generator=[0]"], RED_TEAM)
    assert placement_of(placed, 1)["victim"] == (0,)
    assert "victim" not in placement_of(compose_config([], RL), 3)
