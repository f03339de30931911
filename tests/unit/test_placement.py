"""Where NCCL joins ranks."""

import pytest

from llamarl.comm.groups import RankInfo, have_a_gpu_each


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
