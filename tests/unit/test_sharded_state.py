"""What ranks saved of a model is loaded by any number of ranks, whole or not at all."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from llamarl.models.config import read_config, tiny_directory
from llamarl.models.sharded_state import Shard, load_model, load_shards
from llamarl.models.sharding import Box

ROWS = 7
WHOLE = torch.arange(ROWS * 2.0).view(ROWS, 2)
SHAPES = {"weight": (ROWS, 2)}


def cut(places):
    """The boxes of ranks that cut the rows at these places."""
    ends = [0, *sorted(places), ROWS]
    return [Box((begin, 0), (end - begin, 2)) for begin, end in zip(ends, ends[1:])]


def saved(box):
    """What the rank of a box has saved."""
    values = WHOLE[box.within(Box.whole((ROWS, 2)))].clone()
    return {"boxes": {"weight": [list(box.offsets), list(box.lengths)]}, "weight": values}


def shard_of(box):
    return Shard("weight", nn.Parameter(torch.full(box.lengths, -1.0)), box)


def take(shard, part, theirs):
    shard.copy_overlap(shard.parameter, part, "weight", theirs)


places = st.lists(st.integers(0, ROWS), max_size=4)


@given(places, places)
def test_each_rank_takes_its_own_rows_however_many_had_saved_them(theirs, ours):
    parts = [saved(box) for box in cut(theirs)]
    parts.append({"boxes": {}})  # of a rank whose peer has saved what it holds
    shards = [shard_of(box) for box in cut(ours)]
    for shard in shards:
        assert load_shards([shard], parts, shapes=SHAPES, take=take) == {}
    assert torch.equal(torch.cat([shard.parameter for shard in shards]), WHOLE)


def test_elements_that_nobody_saved_are_missed():
    first, _ = cut([4])
    shard = shard_of(Box.whole((ROWS, 2)))
    assert load_shards([shard], [saved(first)], shapes=SHAPES, take=take) == {"weight": 3 * 2}
    decoder = SimpleNamespace(config=read_config(tiny_directory()))
    with pytest.raises(ValueError, match="the checkpoint lacks weight"):
        load_model(decoder, [shard], [{}], take)


@pytest.mark.parametrize("shapes", [{}, {"weight": (ROWS - 1, 2)}, {"weight": (ROWS,)}])
def test_another_models_are_refused_before_anything_is_taken(shapes):
    whole = Box.whole((ROWS, 2))
    taken = []
    with pytest.raises(ValueError, match="weight does not fit this run's model"):
        load_shards(
            [shard_of(whole)], [saved(whole)], shapes=shapes, take=lambda *what: taken.append(what)
        )
    assert not taken
