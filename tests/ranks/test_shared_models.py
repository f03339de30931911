"""A frozen model says the same however its ranks share it: a reference's logprobs and a scorer's
scores, of whole sequences and of pieces that are read ahead. Where no layer is split a reference
says it to the bit.
"""

from pathlib import Path

import pytest
import torch

from llamarl.executor import ExecutorGroup
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.fsdp import local
from llamarl.scoring.ahead import LogprobHead, PieceReader, ScoreHead
from llamarl.scoring.growing import GrowingSequences
from llamarl.scoring.reference import StreamedLogprobs
from llamarl.scoring.sharded import ShardedReference, ShardedScorer
from llamarl.types import Stretch
from tests.build.kind_settings import model_settings
from tests.ranks.topologies import TOPOLOGIES, WORLD, alone, groups_on
from tests.scorers import SCORES, asked_for, transformers_scores, write_scorer
from tests.tolerances import of_logprobs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.machine,
    pytest.mark.usefixtures("float32_products"),
]

DEADLINE_S = 200
LONGEST = 48  # tokens of a sequence
SLOTS = 6
LOGIT = 8.0  # at most so large, at this temperature
SIZES = ((6, 4), (1, 2))  # more prompts than ranks, and fewer
ASKED = asked_for(*SIZES[0])


def num_held(decoder) -> int:
    return sum(local(parameter).numel() for parameter in decoder.parameters())


def lists(values) -> list[list[float]]:
    return [one.tolist() for one in values]


class Streams:
    """Plans of what is read in pieces. Every rank plans for all, as the first does in a run."""

    def __init__(self, decoder, head, group, make, *, one_by_one=True):
        self.reader = PieceReader(
            decoder, head, slots=SLOTS, max_len=LONGEST, group=group, one_by_one=one_by_one
        )
        self.streams = [make() for _ in range(group.data_size)]

    def of(self, ticket):
        return self.streams[ticket % len(self.streams)]

    def read(self, note) -> bool:
        """Read the next pieces; note(stream, piece, value) of each. Returns whether any were."""
        passes = [stream.next_pass(30) for stream in self.streams]
        values = iter(self.reader.run(passes))
        for stream, one in zip(self.streams, passes):
            for piece in one.pieces:
                note(stream, piece, next(values))
        return any(one.pieces for one in passes)


def streamed_logprobs(reference: ShardedReference, group: ExecutorGroup) -> list[list[float]]:
    """Of ASKED, read in pieces, of which some are read ahead."""

    def make():
        growing = GrowingSequences(piece_tokens=4, slots=SLOTS, max_len=LONGEST, last_is_label=True)
        return StreamedLogprobs(growing, most_kept=100)

    streams = Streams(reference.decoder, LogprobHead(0.7), group, make)
    for ticket, one in enumerate(ASKED):
        for index, ids in enumerate(one.completions):
            news = Stretch(ticket, index, 0, ids[: 7 * index], False)
            streams.of(ticket).hear(news, one.prompt_ids)
        streams.read(StreamedLogprobs.note)
    found = []
    for ticket, one in enumerate(ASKED):
        keys = [(ticket, index) for index in range(len(one.completions))]
        for key, ids in zip(keys, one.completions):
            streams.of(ticket).want(key, one.prompt_ids, ids)
        while streams.read(StreamedLogprobs.note):
            pass
        found.append(torch.cat([streams.of(ticket).take(key) for key in keys]).tolist())
    return found


def streamed_scores(decoder, group, *, one_by_one: bool, ahead: bool) -> list[float]:
    """Of ASKED. ahead: half of each was read before any was whole."""
    scores = {}

    def note(_, piece, value):
        if piece.is_last:
            scores[piece.key] = float(value)

    def make():
        return GrowingSequences(piece_tokens=4, slots=SLOTS, max_len=LONGEST)

    streams = Streams(decoder, ScoreHead(0), group, make, one_by_one=one_by_one)
    for is_whole in (False, True):
        for ticket, one in enumerate(ASKED):
            for index, ids in enumerate(one.completions):
                if is_whole:
                    streams.of(ticket).finish((ticket, index), one.prompt_ids, ids)
                elif ahead:
                    half = ids[: ids.numel() // 2]
                    streams.of(ticket).extend((ticket, index), one.prompt_ids, 0, half)
        while streams.read(note):
            pass
    return [scores[key] for key in sorted(scores)]


def of_reference(group: ExecutorGroup) -> dict:
    reference = ShardedReference(
        str(tiny_directory()),
        dtype=torch.float32,
        temperature=0.7,
        microbatch_tokens=60,
        group=group,
    )
    said = []
    for size in SIZES:
        said += lists(reference.logprobs(asked_for(*size), together=False))
    return {
        "whole": said,
        "held": num_held(reference.decoder),
        "pieces": streamed_logprobs(reference, group),
    }


def of_scorer(group: ExecutorGroup, path: str) -> dict:
    scorer = ShardedScorer(model_settings(path, microbatch_tokens=60), group)
    return {
        "whole": lists(scorer.scores(asked_for(*size)) for size in SIZES),
        "held": num_held(scorer.decoder),
        "ahead": streamed_scores(scorer.decoder, group, one_by_one=True, ahead=True),
        "at once": streamed_scores(scorer.decoder, group, one_by_one=True, ahead=False),
        "together": streamed_scores(scorer.decoder, group, one_by_one=False, ahead=True),
    }


def say(rank: int, path: str) -> dict[str, list]:
    """What one rank of the pool answers, by topology: of the reference and of the scorer."""
    groups = {"whole": alone(rank), **groups_on(rank)}
    return {name: [of_reference(group), of_scorer(group, path)] for name, group in groups.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("scorers")


@pytest.fixture(scope="module")
def theirs(root):
    """transformers' own scorer."""
    return write_scorer(root)


@pytest.fixture(scope="module")
def answers(pool, root, theirs) -> list[dict]:
    """By rank."""
    return pool.call(__file__, "say", ranks=WORLD, timeout_s=DEADLINE_S, path=str(root))


def test_a_reference_says_what_the_whole_one_says(answers):
    tolerance = of_logprobs(read_config(tiny_directory()), size=LOGIT)
    wanted = answers[0]["whole"][0]["whole"]
    for answer in answers:
        for name, (said, _) in answer.items():
            for one, other in zip(said["whole"], wanted, strict=True):
                assert one == pytest.approx(other, rel=0, abs=tolerance), name
            for one, other in zip(said["pieces"], wanted[: len(ASKED)], strict=True):
                assert one == pytest.approx(other, rel=0, abs=tolerance), name


@pytest.mark.bitwise("a reference sharded by rows alone says what the whole one says")
def test_a_reference_has_the_same_bits_on_every_rank_and_those_of_the_whole_where_no_layer_is_split(
    answers,
):
    for answer in answers:
        for name, (_, tp) in TOPOLOGIES.items():
            said, first = answer[name][0], answers[0][name][0]
            assert (said["whole"], said["pieces"]) == (first["whole"], first["pieces"]), name
            if tp == 1:
                assert said["whole"] == answer["whole"][0]["whole"], name


def test_a_scorer_says_what_transformers_says(theirs, answers):
    wanted = [transformers_scores(theirs, asked_for(*size)) for size in SIZES]
    for answer in answers:
        for name in TOPOLOGIES:
            said = answer[name][1]
            for one, other in zip(said["whole"], wanted, strict=True):
                torch.testing.assert_close(torch.tensor(one), other, rtol=0, atol=SCORES)
            for kind in ("ahead", "at once", "together"):
                scores = torch.tensor(said[kind])
                torch.testing.assert_close(scores, wanted[0], rtol=0, atol=SCORES)


@pytest.mark.bitwise("a streamed score does not depend on what was read ahead")
def test_scores_have_the_same_bits_on_every_rank_whatever_was_read_ahead(answers):
    for name in TOPOLOGIES:
        said = answers[0][name][1]
        assert said["ahead"] == said["at once"], name
        for answer in answers:
            assert answer[name][1] | {"held": said["held"]} == said


def test_each_rank_holds_its_share(theirs, answers):
    config = read_config(tiny_directory())
    vocabulary = 2 * config.vocab_size * config.hidden_size  # elements of embedding and head
    of_scorer = sum(parameter.numel() for parameter in theirs.parameters())
    for answer in answers:
        size = answer["whole"][0]["held"]
        for name, (replicate, tp) in TOPOLOGIES.items():
            reference, scorer = answer[name]
            share = size * replicate / WORLD
            if tp > 1:  # each of them holds these whole, and four both key/value heads
                share += vocabulary * replicate / WORLD
            assert reference["held"] <= (1.05 if tp == 1 else 1.2) * share, name
            # Norms are on each.
            assert scorer["held"] <= 1.2 * of_scorer * replicate / WORLD + 200, name
