"""Where NCCL joins ranks, and where a generator's turns are short."""

import pytest

from llamarl.comm.groups import RankInfo, have_a_gpu_each
from llamarl.config.placement import wants_short_turns


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


@pytest.mark.parametrize(
    "besides, synchronous, is_so",
    [
        ({"reward": (1,)}, False, True),
        ({"reward": (1,)}, True, False),
        ({"reward": (2,)}, False, False),
        ({"reward": (2,), "reference": (1,)}, False, True),
        ({"reward": (1,), "trainer": (0, 1)}, False, False),
    ],
)
def test_turns_are_short_beside_a_scorer_and_no_trainer(besides, synchronous, is_so):
    placement = {"trainer": (0,), "generator": (1,)} | besides
    assert wants_short_turns(placement, synchronous=synchronous) is is_so
