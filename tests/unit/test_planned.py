"""The ranks that the planner chooses for a job, where placement.sheet asks for them."""

from __future__ import annotations

import pytest

from llamarl.config.command_line import compose_config
from llamarl.config.placement import placement_of
from llamarl.launch.placement import planned_placement

RANKS = 16


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
