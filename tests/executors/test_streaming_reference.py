"""Reference with a stream: completions that are read while they grow get the logprobs of the
whole.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executors.reference import Reference
from llamarl.errors import NotFinite
from llamarl.executor import ExecutorGroup
from llamarl.scoring.ahead import LogprobHead, StreamSettings
from llamarl.scoring.growing import Piece
from llamarl.types import Group, Prompt, Stretch
from tests.executors.fakes import FakeMetrics, FakeReceiver, FakeSender, FakeStream
from tests.executors.references import LOGPROBS, NAN, executor, group, one_by_one, scored

pytestmark = pytest.mark.machine
LONGEST = 24
LENGTHS = {1: (3, 1, 6, 2), 2: (14, 0, 9), 3: (5, 20)}  # of a ticket's completions


@pytest.fixture
def model(reference_model):
    return reference_model


def prompt_of(ticket):
    return Prompt(group(ticket).prompt_ids, f"question {ticket}", {})


def of_ticket(ticket):
    return group(ticket, lengths=LENGTHS[ticket])


def streaming(
    model,
    *,
    cache_tokens=8 * LONGEST,
    piece_tokens=4,
    temperature=1.0,
    native=True,
    reproducible=True,
):
    made = Reference(
        model_path=str(model),
        model_dtype="float32",
        temperature=temperature,
        microbatch_tokens=16,
        reproducible=reproducible,
        prompts=FakeStream(prompt_of),
        stream=StreamSettings(
            piece_tokens=piece_tokens, cache_tokens=cache_tokens, longest=LONGEST
        ),
    )
    inputs = [(record, FakeReceiver()) for record in made.consumes]
    outputs = [(Group, FakeSender("groups"))]
    ranks = ExecutorGroup("reference", (0,), 0, torch.device("cpu"))
    made.attach(ranks, inputs, outputs, control=None, metrics=FakeMetrics())
    made.setup()
    if not native:
        made._logprobs._ahead._reader.native = None
    return made


def stretch(ticket, sample, begin, end=None, *, has_ended=False):
    g = of_ticket(ticket)
    ids = g.token_ids.split(g.lengths.tolist())[sample]
    return Stretch(ticket, sample, begin, ids[begin:end], has_ended)


def hear(ours, *records):
    """Records as they come, each with a step."""
    for record in records:
        ours.inputs.of(type(record)).records.append(record)
        ours.step()


def sent(ours):
    """The logprobs of each group that was sent, once there is nothing to do."""
    while ours.step():
        pass
    sink = ours.outputs.of(Group)
    return {g.ticket: g.ref_logprobs for g in sink.records}


def num_held(ours):
    """How many completions the streams hold something about."""
    held = [s._parts.keys() | s._whole.keys() | s._read.keys() for s in ours._logprobs._streams]
    return sum(map(len, held))


def test_what_has_ended_is_read_to_its_end_before_its_group_comes(model):  # noqa: F811
    ours = streaming(model)
    hear(ours, stretch(2, 0, 0, 10), stretch(2, 2, 0, 9))
    assert set(ours.metrics.spans) == {"read ahead"}
    hear(ours, stretch(2, 0, 10, has_ended=True), stretch(2, 2, 9, has_ended=True))
    assert not sent(ours) and ours.metrics.spans[-1] == "read to the end"
    assert ours.waiting_for() is None
    num_passes = len(ours.metrics.spans)
    hear(ours, of_ticket(2))
    found = sent(ours)[2]
    assert (found.dtype, len(ours.metrics.spans)) == (torch.float32, num_passes)
    torch.testing.assert_close(found, one_by_one(model, of_ticket(2)), atol=LOGPROBS, rtol=0)
    assert ours.metrics.means["reference/prefilled_early"] == [1.0]
    assert len(ours.metrics.means["reference/tail_s"]) == 1 and num_held(ours) == 0


def test_the_rest_is_read_when_the_group_comes_and_nothing_twice(model):  # noqa: F811
    ours = streaming(model, piece_tokens=2)
    read = []
    calls = ours._ranks._calls
    run = calls["read"].run

    def watched(passes):
        for one in passes:
            for piece in one.pieces:
                end = piece.begin + len(piece.token_ids)
                read.extend((piece.key, place) for place in range(piece.begin, end))
        return run(passes)

    calls["read"] = replace(calls["read"], run=watched)
    hear(ours, stretch(3, 1, 0, 7), of_ticket(3))
    torch.testing.assert_close(
        sent(ours)[3], one_by_one(model, of_ticket(3)), atol=LOGPROBS, rtol=0
    )
    # Four pieces of 4 + 7 known tokens: the fifth may be the last. They predict 5 of 25.
    assert ours.metrics.means["reference/prefilled_early"] == [pytest.approx(5 / 25)]
    assert len(set(read)) == len(read)
    # A prompt of 4 tokens: its first piece is read once for both. No last token is read.
    assert len(read) == 4 + 20 - 1 + 2 + 5 - 1


@st.composite
def heard(draw):
    """Stretches and groups of three tickets in any order: twice, late, with gaps, or never; some of
    a completion that was begun otherwise.
    """
    records = []
    for ticket, lengths in LENGTHS.items():
        for sample, size in enumerate(lengths):
            cut = draw(st.integers(0, size))
            for begin, end in ((0, cut), (cut, None)):
                times = draw(st.sampled_from([0, 1, 1, 2]))
                records += [stretch(ticket, sample, begin, end, has_ended=end is None)] * times
            if draw(st.booleans()):
                other = torch.tensor(
                    draw(st.lists(st.integers(0, 28), max_size=20)), dtype=torch.int64
                )
                records.append(Stretch(ticket, sample, 0, other, draw(st.booleans())))
        records.append(of_ticket(ticket))
    return draw(st.permutations(records))


@pytest.mark.bitwise("streamed logprobs are those of the whole")
@pytest.mark.parametrize("native", [True, False])
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(heard(), st.sampled_from([LONGEST, 3 * LONGEST, 9 * LONGEST]))
def test_logprobs_have_the_same_bits_whatever_was_heard_before(
    model,
    native,
    records,
    cache_tokens,
):
    unheard = streaming(model, native=native)
    hear(unheard, *map(of_ticket, LENGTHS))
    wanted = sent(unheard)
    ours = streaming(model, cache_tokens=cache_tokens, native=native)
    hear(ours, *records)
    found = sent(ours)
    assert found.keys() == wanted.keys()
    for ticket, logprobs in wanted.items():
        assert torch.equal(found[ticket], logprobs)
        torch.testing.assert_close(
            logprobs, one_by_one(model, of_ticket(ticket)), atol=LOGPROBS, rtol=0
        )


def test_pieces_may_be_read_together_and_the_temperature_is_the_policys(model):  # noqa: F811
    ours = streaming(model, temperature=0.5, native=False, reproducible=False)
    hear(ours, *map(of_ticket, LENGTHS))
    for ticket, found in sent(ours).items():
        wanted = one_by_one(model, of_ticket(ticket), temperature=0.5)
        torch.testing.assert_close(found, wanted, atol=2 * LOGPROBS, rtol=0)
        plain = scored(executor(model, temperature=0.5), of_ticket(ticket))
        torch.testing.assert_close(found, plain, atol=2 * LOGPROBS, rtol=0)


def test_what_was_sampled_anew_is_read_anew(model):  # noqa: F811
    ours = streaming(model)
    others = torch.arange(9)
    hear(ours, Stretch(1, 2, 0, others, False), Stretch(1, 2, 9, others[:0], True))
    hear(ours, Stretch(3, 1, 0, others, True))  # all at once: it has begun nothing
    assert num_held(ours) == 1
    # Of ticket 3 it has not been read when the group is there.
    news = [Stretch(3, 1, 0, others, False), Stretch(3, 1, 9, others, True)]
    ours.inputs.of(Stretch).records.extend(news)
    hear(ours, of_ticket(3), of_ticket(1))
    for ticket, found in sent(ours).items():
        torch.testing.assert_close(
            found, one_by_one(model, of_ticket(ticket)), atol=LOGPROBS, rtol=0
        )


def test_completions_whose_groups_never_come_are_forgotten(model):  # noqa: F811
    ours = streaming(model, cache_tokens=LONGEST)  # a slot
    for ticket in range(100, 160):
        ids = torch.randint(0, 29, (6,), generator=torch.Generator().manual_seed(ticket))
        hear(ours, Stretch(ticket, 0, 0, ids, False), Stretch(ticket, 1, 0, ids, False))
        hear(ours, Stretch(ticket, 0, 6, ids[:0], True))
    assert 16 <= num_held(ours) <= 16 + 4 + 1
    hear(ours, of_ticket(2))
    torch.testing.assert_close(
        sent(ours)[2], one_by_one(model, of_ticket(2)), atol=LOGPROBS, rtol=0
    )


def test_a_full_channel_keeps_groups_and_lets_it_read(model):  # noqa: F811
    ours = streaming(model)
    sink = ours.outputs.of(Group)
    hear(ours, of_ticket(1))
    sink.room = 1
    sent(ours)
    hear(ours, of_ticket(2), stretch(3, 1, 0, 12))
    assert len(sent(ours)) == 1 and len(ours.inputs.of(Group).records) == 1
    assert ours.metrics.spans[-1] == "read ahead"
    assert ours.waiting_for() == "room: in channel groups, which the trainer empties"
    sink.room = 9
    hear(ours, group(4, lengths=(0, 0)), of_ticket(3))
    assert list(sent(ours)) == [1, 2, 4, 3]
    assert sent(ours)[4].shape == (0,)


def test_logprobs_that_are_not_finite_are_an_error_that_names_the_ticket(model):  # noqa: F811
    ours = streaming(model)
    ours.decoder.layers[0].attn.q_proj.weight.data.fill_(NAN)
    hear(ours, stretch(1, 2, 0, 5))
    with pytest.raises(NotFinite, match="reference on rank 0, ticket 1: its logprobs sum to nan"):
        hear(ours, of_ticket(1))
        sent(ours)


@pytest.mark.parametrize("begin, size, prompt, wanted", [
    (0, 4, 5, 0),  # all of it is prompt, and so is what it predicts
    (0, 4, 4, 1),  # the last one predicts the first of the completion
    (4, 4, 6, 3),
    (8, 2, 3, 2),
])  # fmt: skip
def test_a_piece_gives_the_logprobs_of_the_completions_tokens(begin, size, prompt, wanted):
    ids = torch.arange(size)
    piece = Piece(
        key=(0, 0),
        slot=0,
        begin=begin,
        token_ids=ids,
        next_id=size,
        is_last=True,
        prompt_size=prompt,
    )
    head = LogprobHead(temperature=1.0)
    assert head.num_values(piece) == wanted
    if wanted:  # the token behind each has almost all probability
        hidden = torch.eye(size + 1)[1:]
        logprobs = head(hidden, 50 * torch.eye(size + 1), piece)
        assert logprobs.shape == (wanted,) and logprobs.min() > -1e-6
