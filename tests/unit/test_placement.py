"""Which backend an executor's own collectives take."""

import pytest
import torch

from llamarl.comm.groups import World, backend_of

NCCL = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    "gpus, ranks, backend",
    [
        ((), (0, 1), "gloo"),
        (("a", "b"), (0, 1), NCCL),
        (("a",), (0,), NCCL),
        (("a", "a"), (0, 1), "gloo"),
        (("a", "b", "a", "b"), (0, 1, 2), "gloo"),
        (("a", "b", "a", "b"), (2, 3), NCCL),
        (("a", ""), (0, 1), "gloo"),
    ],
)
def test_nccl_joins_ranks_with_a_gpu_each_and_gloo_all_others(gpus, ranks, backend):
    assert backend_of(World(0, len(gpus), torch.device("cpu"), gpus), ranks) == backend
