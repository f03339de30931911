"""A reference over ranks of its own holds its share of the model, and says to the bit what a whole
one says.
"""

import pytest
import torch

from llamarl.comm.groups import World, executor_group
from llamarl.executor import ExecutorGroup
from llamarl.learning.sharded_reference import ShardedReference
from llamarl.models.config import tiny_directory
from llamarl.models.fsdp import local
from tests.scorers import asked_for

WORLD = 4
REPLICATE = {"fsdp4": 1, "hsdp2x2": 2, "copies4": 4}
DEADLINE_S = 200
CPU = torch.device("cpu")


def reference_on(group: ExecutorGroup) -> ShardedReference:
    return ShardedReference(
        str(tiny_directory()),
        dtype=torch.float32,
        temperature=0.7,
        microbatch_tokens=60,
        group=group,
    )


def said_by(reference: ShardedReference) -> list[list[float]]:
    """Of more prompts than ranks, and of fewer."""
    found = []
    for size in ((6, 4), (1, 2)):
        logprobs = reference.logprobs(asked_for(*size), together=False)
        found += [values.tolist() for values in logprobs]
    return found


def shares(rank: int) -> dict[str, list]:
    """What one rank of the pool answers: logprobs, and how many elements it holds, by topology."""
    world = World(rank, WORLD, CPU)
    everyone = tuple(range(WORLD))
    groups = {"whole": ExecutorGroup("reference", (rank,), rank, CPU)}
    for name, replicate in REPLICATE.items():
        groups[name] = executor_group("reference", everyone, world, DEADLINE_S, replicate=replicate)
    found = {}
    for name, group in groups.items():
        reference = reference_on(group)
        said = said_by(reference)
        held = sum(local(parameter).numel() for parameter in reference.decoder.parameters())
        found[name] = [said, held]
    return found


@pytest.mark.slow
@pytest.mark.machine
def test_shards_say_what_the_whole_says(pool):
    answers = pool.call(__file__, "shares", ranks=WORLD, timeout_s=DEADLINE_S)
    for answer in answers:
        wanted, size = answer["whole"]
        for name, replicate in REPLICATE.items():
            said, held = answer[name]
            assert said == wanted, name
            assert held <= 1.05 * size * replicate / WORLD, name
