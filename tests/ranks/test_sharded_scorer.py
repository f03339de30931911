"""A model that scores gives the same scores however its ranks share it."""

from pathlib import Path

import pytest
import torch

from llamarl.comm.groups import World, executor_group
from llamarl.models.fsdp import local
from llamarl.scoring.sharded import ShardedScorer
from tests.build.kind_settings import model_settings
from tests.ranks.topologies import TOPOLOGIES, WORLD
from tests.scorers import SCORES, asked_for, transformers_scores, write_scorer

DEADLINE_S = 200


def scored(rank: int, path: str) -> dict[str, list]:
    """What one rank of the pool answers: scores, and how many elements it holds, by topology."""
    world = World(rank, WORLD, torch.device("cpu"))
    everyone = tuple(range(WORLD))
    settings = model_settings(path, microbatch_tokens=60)
    found = {}
    for name, (replicate, tp) in TOPOLOGIES.items():
        group = executor_group(
            "reward", everyone, world, DEADLINE_S, replicate=replicate, tensor_parallel=tp
        )
        scorer = ShardedScorer(settings, group)
        scores = [scorer.scores(asked_for(*size)).tolist() for size in ((5, 4), (1, 1))]
        held = sum(local(parameter).numel() for parameter in scorer.decoder.parameters())
        found[name] = [scores, held]
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("scorers")


@pytest.mark.slow
@pytest.mark.machine
@pytest.mark.usefixtures("float32_products")
def test_scores_do_not_depend_on_how_ranks_share_a_model(pool, root):
    theirs = write_scorer(root)
    answers = pool.call(__file__, "scored", ranks=WORLD, timeout_s=DEADLINE_S, path=str(root))
    wanted = [transformers_scores(theirs, asked_for(*size)) for size in ((5, 4), (1, 1))]
    whole = sum(parameter.numel() for parameter in theirs.parameters())
    for name, (replicate, _) in TOPOLOGIES.items():
        for answer in answers:
            scores, held = answer[name]
            for one, other in zip(scores, wanted):
                torch.testing.assert_close(torch.tensor(one), other, rtol=0, atol=SCORES)
            assert answer[name][0] == answers[0][name][0]
            assert held <= 1.2 * whole * replicate / WORLD + 200, name  # norms are on each
