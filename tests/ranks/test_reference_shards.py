"""A reference over ranks of its own holds its share of the model, and says what a whole one says,
to the bit where no layer is split.
"""

import pytest
import torch

from llamarl.comm.groups import World, executor_group
from llamarl.executor import ExecutorGroup
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.fsdp import local
from llamarl.scoring.ahead import LogprobHead, PieceReader
from llamarl.scoring.growing import GrowingSequences
from llamarl.scoring.reference import StreamedLogprobs
from llamarl.scoring.sharded import ShardedReference
from llamarl.types import Stretch
from tests.ranks.topologies import TOPOLOGIES, WORLD
from tests.scorers import asked_for
from tests.tolerances import of_logprobs

DEADLINE_S = 200
CPU = torch.device("cpu")
LONGEST = 48  # tokens of a sequence
SLOTS = 6
LOGIT = 8.0  # at most so large, at this temperature


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
    for name, (replicate, tp) in TOPOLOGIES.items():
        groups[name] = executor_group(
            "reference", everyone, world, DEADLINE_S, replicate=replicate, tensor_parallel=tp
        )
    found = {}
    for name, group in groups.items():
        reference = reference_on(group)
        said = said_by(reference)
        held = sum(local(parameter).numel() for parameter in reference.decoder.parameters())
        found[name] = [said, held]
    return found


@pytest.fixture(scope="module")
def answers(pool) -> list[dict]:
    """By rank."""
    return pool.call(__file__, "shares", ranks=WORLD, timeout_s=DEADLINE_S)


@pytest.mark.slow
@pytest.mark.machine
def test_shards_say_what_the_whole_says(answers):
    tolerance = of_logprobs(read_config(tiny_directory()), size=LOGIT)
    wanted, _ = answers[0]["whole"]
    for answer in answers:
        for name in ("whole", *TOPOLOGIES):
            said, _ = answer[name]
            for one, other in zip(said, wanted, strict=True):
                assert one == pytest.approx(other, rel=0, abs=tolerance), name


@pytest.mark.bitwise("a reference sharded by rows alone says what the whole one says")
@pytest.mark.slow
@pytest.mark.machine
def test_shards_have_the_same_bits_on_every_rank_and_those_of_the_whole_where_no_layer_is_split(
    answers,
):
    for answer in answers:
        wanted, _ = answer["whole"]
        for name, (_, tp) in TOPOLOGIES.items():
            said, _ = answer[name]
            assert said == answers[0][name][0], name
            if tp == 1:
                assert said == wanted, name


@pytest.mark.slow
@pytest.mark.machine
def test_each_rank_holds_its_share(answers):
    config = read_config(tiny_directory())
    vocabulary = 2 * config.vocab_size * config.hidden_size  # elements of embedding and head
    for answer in answers:
        _, size = answer["whole"]
        for name, (replicate, tp) in TOPOLOGIES.items():
            _, held = answer[name]
            share = size * replicate / WORLD
            if tp > 1:  # each of them holds these whole, and four both key/value heads
                share += vocabulary * replicate / WORLD
            slack = 1.05 if tp == 1 else 1.2
            assert held <= slack * share, name


def streamed_by(reference: ShardedReference, group: ExecutorGroup) -> list[list[float]]:
    """The same of the first prompts, read in pieces, of which some are read ahead; every rank plans
    for all.
    """
    asked = asked_for(6, 4)
    streams = []
    for _ in range(group.data_size):
        growing = GrowingSequences(piece_tokens=4, slots=SLOTS, max_len=LONGEST, last_is_label=True)
        streams.append(StreamedLogprobs(growing, most_kept=100))
    reader = PieceReader(
        reference.decoder,
        LogprobHead(0.7),
        slots=SLOTS,
        max_len=LONGEST,
        group=group,
        one_by_one=True,
    )

    def read() -> bool:
        passes = [stream.next_pass(30) for stream in streams]
        values = iter(reader.run(passes))
        for stream, one in zip(streams, passes):
            for piece in one.pieces:
                stream.note(piece, next(values))
        return any(one.pieces for one in passes)

    for ticket, one in enumerate(asked):
        stream = streams[ticket % len(streams)]
        for index, token_ids in enumerate(one.completions):
            stream.hear(
                Stretch(
                    ticket=ticket,
                    sample_index=index,
                    begin=0,
                    token_ids=token_ids[: 7 * index],
                    has_ended=False,
                ),
                one.prompt_ids,
            )
        read()
    found = []
    for ticket, one in enumerate(asked):
        stream = streams[ticket % len(streams)]
        for index, token_ids in enumerate(one.completions):
            stream.want((ticket, index), one.prompt_ids, token_ids)
        while read():
            pass
        keys = [(ticket, index) for index in range(len(one.completions))]
        found.append(torch.cat([stream.take(key) for key in keys]).tolist())
    return found


def streamed_shares(rank: int) -> dict[str, list]:
    """What one rank of the pool answers: logprobs of the whole sequences, and of pieces."""
    world = World(rank, WORLD, CPU)
    everyone = tuple(range(WORLD))
    found = {}
    for name, (replicate, tp) in TOPOLOGIES.items():
        group = executor_group(
            "reference", everyone, world, DEADLINE_S, replicate=replicate, tensor_parallel=tp
        )
        reference = reference_on(group)
        whole = reference.logprobs(asked_for(6, 4), together=False)
        found[name] = [[values.tolist() for values in whole], streamed_by(reference, group)]
    return found


@pytest.mark.slow
@pytest.mark.machine
def test_pieces_say_what_whole_sequences_say_however_ranks_share_the_model(pool):
    answers = pool.call(__file__, "streamed_shares", ranks=WORLD, timeout_s=DEADLINE_S)
    tolerance = of_logprobs(read_config(tiny_directory()), size=LOGIT)
    for answer in answers:
        for name in TOPOLOGIES:
            whole, pieces = answer[name]
            assert pieces == answers[0][name][1], name
            for one, other in zip(pieces, whole, strict=True):
                assert one == pytest.approx(other, rel=0, abs=tolerance), name
