"""Sequences that are read while they grow: what is planned, and what a model makes of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.executor import ExecutorGroup
from llamarl.scoring.ahead import PieceReader, ScoreHead, from_message, to_message
from llamarl.scoring.growing import GrowingSequences, Pass, Piece
from llamarl.scoring.sharded import ShardedScorer
from tests.build.kind_settings import model_settings
from tests.scorers import SCORES, asked_for, transformers_scores, write_scorer

ALONE = ExecutorGroup("reward", (0,), 0, torch.device("cpu"))
LONGEST = 48


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


def sequences_of(piece_tokens, *, slots, max_len=LONGEST, **options) -> GrowingSequences:
    return GrowingSequences(piece_tokens=piece_tokens, slots=slots, max_len=max_len, **options)


class Slots:
    """A cache that holds token ids: what a model would see."""

    def __init__(self, growing: GrowingSequences):
        self.growing = growing
        self.held = {}  # slot -> tokens
        self.ended = {}  # sequence -> its tokens, once

    def run(self, most: int) -> int:
        """A pass; how many tokens were read."""
        reading = self.growing.next_pass(most)
        assert reading.pieces or not reading.copies, "nobody runs a pass without pieces"
        for source, target, size in reading.copies:
            self.held[target] = self.held[source][:size]
        for piece in reading.pieces:
            before = self.held.get(piece.slot, [])[: piece.begin]
            assert len(before) == piece.begin
            self.held[piece.slot] = before + piece.token_ids.tolist()
            if piece.is_last:
                assert piece.key not in self.ended, "read to its end twice"
                self.ended[piece.key] = (self.held[piece.slot], piece.next_id)
            else:
                assert piece.next_id >= 0, "its next token must be known"
        assert len(reading.pieces) < 2 or reading.num_tokens <= most
        return reading.num_tokens


@st.composite
def stories(draw):
    """Sequences, and what is heard of them in which order; (what happens, how much is read)."""
    num_tickets = draw(st.integers(1, 3))
    prompts = [draw(st.lists(st.integers(0, 9), min_size=1, max_size=12)) for _ in range(3)]
    events = []
    sequences = {}
    for ticket in range(num_tickets):
        for index in range(draw(st.integers(1, 3))):
            tokens = draw(st.lists(st.integers(0, 9), max_size=20))
            sequences[ticket, index] = (prompts[ticket], tokens)
            cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=5)))
            for begin, end in zip([0, *cuts], [*cuts, len(tokens)]):
                stretch = (begin, tokens[begin:end], end == len(tokens))
                times = draw(st.integers(0, 2))
                events += [((ticket, index), stretch)] * times
            if draw(st.booleans()):  # of a completion that was begun and given up
                other = draw(st.lists(st.integers(0, 9), max_size=20))
                events.append(((ticket, index), (0, other, False)))
            kind = draw(st.sampled_from(["finish", "finish", "finish", "forget"]))
            events.append(((ticket, index), kind))
    order = draw(st.permutations(events))
    # Mostly as it is: the whole completion behind what was said of it.
    if draw(st.booleans()):
        order = sorted(order, key=lambda event: isinstance(event[1], str))
    reads = draw(st.lists(st.integers(0, 40), min_size=len(order), max_size=len(order)))
    return sequences, list(zip(order, reads))


@pytest.mark.parametrize("last_is_label", [False, True])
@settings(max_examples=40)
@given(stories(), st.integers(1, 9), st.integers(1, 4))
def test_whatever_is_heard_each_whole_sequence_is_read_once_in_its_pieces(
    last_is_label, story, chunk, slots
):
    sequences, events = story
    growing = sequences_of(chunk, slots=slots, last_is_label=last_is_label)
    cache = Slots(growing)
    wanted = set()
    for (key, what), most in events:
        prompt, tokens = sequences[key]
        if what == "finish" and len(prompt) + len(tokens) > last_is_label:
            wanted.add(key)
            early = growing.finish(key, ids(*prompt), ids(*tokens))
            assert 0 <= early < max(1, len(tokens))
        elif what == "forget":
            growing.forget(key)
        elif what != "finish":
            begin, stretch, has_ended = what
            growing.extend(key, ids(*prompt), begin, ids(*stretch), has_ended=has_ended)
        if most:
            cache.run(most)
    for _ in range(1000):
        if not growing.pending:
            break
        assert cache.run(chunk), "nothing is read though a sequence waits"
    assert cache.ended.keys() == wanted
    for key, (read, next_id) in cache.ended.items():
        prompt, tokens = sequences[key]
        whole = prompt + tokens
        assert read == whole[: len(whole) - last_is_label]
        assert next_id == (whole[-1] if last_is_label else -1)
    while cache.run(100):
        pass  # what is read ahead of the others comes to an end


def test_pieces_are_of_the_chunk_and_the_last_waits_for_the_end():
    growing = sequences_of(4, slots=2)
    growing.extend((3, 0), ids(1, 2, 3), 0, ids(4, 5, 6, 7, 8))
    (piece,) = growing.next_pass(100).pieces
    assert (piece.begin, piece.token_ids.tolist(), piece.next_id) == (0, [1, 2, 3, 4], 5)
    assert not growing.next_pass(100).pieces  # the second piece is full, and may be the last
    early = growing.finish((3, 0), ids(1, 2, 3), ids(4, 5, 6, 7, 8))
    assert early == 1
    (piece,) = growing.next_pass(100).pieces
    assert (piece.begin, piece.token_ids.tolist(), piece.is_last) == (4, [5, 6, 7, 8], True)
    assert growing.num_known == 0


def test_a_prompt_is_read_once_for_all_samples_of_its_ticket():
    growing = sequences_of(2, slots=3)
    prompt = ids(1, 2, 3, 4, 5)
    for index in range(3):
        growing.extend((3, index), prompt, 0, ids(6, 7, 8))
    first = growing.next_pass(100)
    assert {piece.key for piece in first.pieces} == {(3, 0)} and not first.copies
    second = growing.next_pass(100)
    assert [size for _, _, size in second.copies] == [4, 4]
    assert {(piece.key, piece.begin) for piece in second.pieces} == {((3, 1), 4), ((3, 2), 4)}


def test_a_prompt_is_copied_once_something_is_read_behind_it():
    growing = sequences_of(2, slots=2)
    prompt = ids(1, 2, 3, 4)
    growing.extend((3, 0), prompt, 0, ids(6))
    growing.next_pass(100)
    growing.extend((3, 1), prompt, 0, ids())
    assert growing.next_pass(100) == Pass()
    growing.extend((3, 1), prompt, 0, ids(6, 7, 8))
    ((_, _, size),) = growing.next_pass(100).copies
    assert size == 4


def test_what_a_pass_reads_is_copied_by_no_other_piece_of_it():
    growing = sequences_of(2, slots=2)
    growing.finish((3, 0), ids(1, 2), ids())
    growing.finish((3, 1), ids(1, 2), ids(4))
    reading = growing.next_pass(100)
    assert not reading.copies
    places = [(piece.key, piece.begin) for piece in reading.pieces]
    assert places == [((3, 0), 0), ((3, 1), 0), ((3, 1), 2)]


def test_whole_sequences_go_first_and_take_the_slot_of_what_was_read_least():
    growing = sequences_of(2, slots=2)
    growing.extend((0, 0), ids(1), 0, ids(2, 3, 4, 5))
    growing.extend((1, 0), ids(1), 0, ids(2, 3, 4, 5, 6, 7))
    growing.next_pass(100)
    growing.extend((2, 0), ids(1), 0, ids(2, 3, 4, 5))
    assert not growing.next_pass(100).pieces  # it waits: none is dropped for a hint
    assert growing.num_evictions == 0
    growing.finish((3, 0), ids(1), ids(2, 3))
    assert {piece.key for piece in growing.next_pass(100).pieces} == {(3, 0)}
    assert growing.num_evictions == 1
    # The other was read further and stays; the one that was dropped is read anew from its start.
    assert growing.finish((1, 0), ids(1), ids(2, 3, 4, 5, 6, 7)) == 5
    growing.next_pass(100)
    assert growing.finish((0, 0), ids(1), ids(2, 3, 4, 5)) == 0
    pieces = growing.next_pass(100).pieces
    assert [piece.begin for piece in pieces] == [0, 2, 4]


def test_late_hints_begin_nothing_and_unfinished_sequences_are_bounded():
    growing = sequences_of(2, slots=1)
    growing.finish((0, 0), ids(1), ids(2))
    growing.next_pass(100)
    growing.extend((0, 0), ids(1), 0, ids(2))
    growing.extend((1, 0), ids(1), 3, ids(2))  # its beginning is not known
    assert growing.num_known == 0
    for ticket in range(2, 1000):
        growing.extend((ticket, 0), ids(1), 0, ids(2))
    assert growing.num_known == 4


def test_what_cannot_be_read_is_refused():
    growing = sequences_of(2, slots=1, max_len=4)
    with pytest.raises(ValueError, match="need 1 to 4"):
        growing.finish((0, 0), ids(1, 2, 3), ids(4, 5))
    growing.finish((0, 0), ids(1), ids(2))
    with pytest.raises(ValueError, match="ticket 0, sample 0 came twice"):
        growing.finish((0, 0), ids(1), ids(2))
    with pytest.raises(ValueError, match="slots=0"):
        sequences_of(2, slots=0)


def test_passes_travel_as_numbers():
    open_piece = {"token_ids": ids(5, 6), "next_id": 9, "is_last": False, "prompt_size": 5}
    first = Piece(key=(7, 1), slot=3, begin=4, **open_piece)
    last_piece = {"token_ids": ids(1), "next_id": -1, "is_last": True, "prompt_size": 1}
    second = Piece(key=(8, 0), slot=2, begin=0, **last_piece)
    passes = [Pass(((0, 1, 4), (0, 2, 4)), (first, second)), Pass(), Pass((), (second,))]
    arrived = from_message(to_message(passes))
    assert [one.copies for one in arrived] == [one.copies for one in passes]
    for here, there in zip(passes, arrived):
        assert repr(here.pieces) == repr(there.pieces)


# --- with a model ---


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    path = tmp_path_factory.mktemp("scorer")
    theirs = write_scorer(path)
    return theirs, ShardedScorer(model_settings(path, microbatch_tokens=60), ALONE)


def streamed(decoder, asked, *, native, chunk, slots=4, seed=None, one_by_one=True) -> torch.Tensor:
    """[N]: scores of completions that come in pieces of random sizes, in a random order."""
    sizes = {"slots": slots, "max_len": LONGEST}
    reader = PieceReader(decoder, ScoreHead(0), group=ALONE, one_by_one=one_by_one, **sizes)
    if not native:
        reader.native = None
    elif reader.native is None:
        pytest.skip("no compiler makes the kernels")
    growing = sequences_of(chunk, slots=slots)
    left = {}
    for ticket, one in enumerate(asked):
        left |= {(ticket, i): (one.prompt_ids, tokens) for i, tokens in enumerate(one.completions)}
    scores = dict.fromkeys(left, 0.0)
    told = dict.fromkeys(left, 0)
    draw = torch.Generator().manual_seed(seed or 0)

    def run() -> int:
        reading = growing.next_pass(40)
        for piece, values in zip(reading.pieces, reader.run([reading])):
            if piece.is_last:
                scores[piece.key] = float(values)
        return len(reading.pieces)

    while left:
        key = list(left)[int(torch.randint(len(left), (), generator=draw))]
        prompt, tokens = left[key]
        size = int(torch.randint(1, 9, (), generator=draw))
        if seed is None or told[key] + size >= tokens.numel():
            growing.finish(key, prompt, tokens)
            del left[key]
        else:
            growing.extend(key, prompt, told[key], tokens[told[key] : told[key] + size])
            told[key] += size
        if int(torch.randint(2, (), generator=draw)):
            run()
    while run():
        pass
    return torch.tensor(list(scores.values()))


def streamed_in_ways(decoder, asked, **how) -> list[torch.Tensor]:
    """Scores that were read at the end, read ahead and dropped, and read ahead and kept."""
    ways = ((4, None), (2, 2), (12, 3))
    return [streamed(decoder, asked, slots=slots, seed=seed, **how) for slots, seed in ways]


@pytest.mark.machine
@pytest.mark.usefixtures("float32_products")
@pytest.mark.parametrize("native, chunk", [(True, 3), (False, 16)])
def test_a_streamed_score_is_the_score_of_the_whole(scorer, native, chunk):
    theirs, ours = scorer
    asked = asked_for(4, 3)
    wanted = transformers_scores(theirs, asked)
    packed = ours.scores(asked)
    for scores in streamed_in_ways(ours.decoder, asked, native=native, chunk=chunk):
        torch.testing.assert_close(scores, wanted, rtol=0, atol=SCORES)
        torch.testing.assert_close(scores, packed, rtol=0, atol=SCORES)


@pytest.mark.bitwise("a streamed score does not depend on what was read ahead")
@pytest.mark.machine
@pytest.mark.usefixtures("float32_products")
@pytest.mark.parametrize("native", [True, False])
def test_a_streamed_score_has_the_same_bits_whatever_was_read_ahead(scorer, native):
    _, ours = scorer
    seen = {}
    for chunk in (3, 16):
        how = {"native": native, "chunk": chunk}
        seen[chunk], *others = streamed_in_ways(ours.decoder, asked_for(3, 2), **how)
        for other in others:
            assert torch.equal(other, seen[chunk])
    if native:  # each row is summed in one order
        assert torch.equal(seen[3], seen[16])


@pytest.mark.machine
@pytest.mark.usefixtures("float32_products")
def test_pieces_of_several_sequences_may_be_read_in_one_forward(scorer):
    theirs, ours = scorer
    asked = asked_for(3, 4, seed=5)
    scores = streamed(ours.decoder, asked, native=False, chunk=4, seed=7, one_by_one=False)
    torch.testing.assert_close(scores, transformers_scores(theirs, asked), rtol=0, atol=SCORES)
