"""Pieces of growing sequences are read alike however ranks share the model."""

from pathlib import Path

import pytest
import torch

from llamarl.comm.groups import World, executor_group
from llamarl.scoring.ahead import PieceReader, ScoreHead
from llamarl.scoring.growing import GrowingSequences
from llamarl.scoring.sharded import ShardedScorer
from tests.build.kind_settings import model_settings
from tests.ranks.topologies import TOPOLOGIES, WORLD
from tests.scorers import SCORES, asked_for, transformers_scores, write_scorer

DEADLINE_S = 200
LONGEST = 48
ASKED = asked_for(3, 3)


def streamed(decoder, group, *, one_by_one: bool, ahead: bool) -> list[float]:
    """Scores of all completions; ahead: half of each was read before any was whole. Every rank
    plans for all, as the first does in a run.
    """
    reader = PieceReader(
        decoder, ScoreHead(0), slots=3, max_len=LONGEST, group=group, one_by_one=one_by_one
    )
    caches = []
    for _ in range(group.data_size):
        caches.append(GrowingSequences(piece_tokens=4, slots=3, max_len=LONGEST))
    scores = {}

    def read() -> None:
        passes = [growing.next_pass(30) for growing in caches]
        while any(one.pieces for one in passes):
            values = iter(reader.run(passes))
            for one in passes:
                for piece in one.pieces:
                    value = next(values)
                    if piece.is_last:
                        scores[piece.key] = float(value)
            passes = [growing.next_pass(30) for growing in caches]

    for is_whole in (False, True):
        for ticket, one in enumerate(ASKED):
            growing = caches[ticket % group.data_size]
            for index, ids in enumerate(one.completions):
                key = (ticket, index)
                if is_whole:
                    growing.finish(key, one.prompt_ids, ids)
                elif ahead:
                    growing.extend(key, one.prompt_ids, 0, ids[: ids.numel() // 2])
        read()
    return [scores[key] for key in sorted(scores)]


def read_in_pieces(rank: int, path: str) -> dict[str, list]:
    """What one rank of the pool answers: scores, by topology."""
    world = World(rank, WORLD, torch.device("cpu"))
    settings = model_settings(path)
    found = {}
    for name, (replicate, tp) in TOPOLOGIES.items():
        group = executor_group(
            "reward",
            tuple(range(WORLD)),
            world,
            DEADLINE_S,
            replicate=replicate,
            tensor_parallel=tp,
        )
        decoder = ShardedScorer(settings, group).decoder
        found[name] = [
            streamed(decoder, group, one_by_one=True, ahead=True),
            streamed(decoder, group, one_by_one=True, ahead=False),
            streamed(decoder, group, one_by_one=False, ahead=True),
        ]
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("scorers")


@pytest.fixture(scope="module")
def scorer(root):
    """Transformers' own."""
    return write_scorer(root)


@pytest.fixture(scope="module")
def answers(pool, root, scorer) -> list[dict]:
    """By rank."""
    return pool.call(__file__, "read_in_pieces", ranks=WORLD, timeout_s=DEADLINE_S, path=str(root))


@pytest.mark.slow
@pytest.mark.machine
@pytest.mark.usefixtures("float32_products")
def test_pieces_score_as_the_whole_however_ranks_share_the_model(scorer, answers):
    wanted = transformers_scores(scorer, ASKED)
    for answer in answers:
        for name in TOPOLOGIES:
            for scores in answer[name]:
                torch.testing.assert_close(torch.tensor(scores), wanted, rtol=0, atol=SCORES)


@pytest.mark.bitwise("a streamed score does not depend on what was read ahead")
@pytest.mark.slow
@pytest.mark.machine
def test_pieces_have_the_same_bits_on_every_rank_whatever_was_read_ahead(answers):
    for name in TOPOLOGIES:
        ahead, at_once, _ = answers[0][name]
        assert ahead == at_once, name
        for answer in answers:
            assert answer[name] == answers[0][name]
