"""Reference alone: its scores are those of each prompt with each completion in a forward of its
own, also of completions that are read while they grow; which version scores a group where it is
reset, and what a checkpoint holds.
"""

import json
import time
from collections import deque
from dataclasses import fields, replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executors.reference import Reference
from llamarl.ddma.channel import RESET, send_reset
from llamarl.errors import NotFinite, TimedOut
from llamarl.executor import ExecutorGroup
from llamarl.models.hf import named_parameters_hf
from llamarl.scoring import sharded
from llamarl.scoring.ahead import LogprobHead, StreamSettings
from llamarl.scoring.growing import Piece
from llamarl.tasks.forms import PART_KEY, REWARD_KEY
from llamarl.types import Group, Prompt, ReferencePolicy, Stretch
from tests.build.group import build_group
from tests.build.model_directory import write_model
from tests.decoding import our_decoder, whole_logits
from tests.executors.fakes import FakeControl, FakeStream, give, seat
from tests.tolerances import rounding

pytestmark = pytest.mark.machine
NAN = float("nan")
VOCAB = 29
CONFIG = json.loads("""{"architectures": ["LlamaForCausalLM"], "vocab_size": 29, "hidden_size": 16,
"intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
"num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": true}""")
# Nats: CONFIG's widest sum, the feed-forward's; two sums a layer and the head's; its logits' size.
LOGPROBS = rounding(terms=24, depth=2 * 2 + 1, size=2.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a random model whose next-token distributions are far from uniform."""
    return write_model(tmp_path_factory.mktemp("model"), CONFIG)


def reference(path, *, group=None, inputs=None, control=None, **settings):
    settings = {"temperature": 1.0, "microbatch_tokens": 1000, **settings}
    made = Reference(model_path=str(path), model_dtype="float32", **settings)
    return seat(made, group=group, inputs=inputs, control=control)


def group(ticket=0, lengths=(3, 1, 6, 2), prompt=4, **changes):
    changes = {"policy_versions": torch.arange(sum(lengths)), **changes}
    return build_group(ticket, lengths, prompt=prompt, vocab_size=VOCAB, **changes)


def sent(ours):
    """ticket -> the groups that were sent since it was last asked, once there is nothing to do."""
    while ours.step():
        pass
    sink = ours.outputs.of(Group)
    sink.records, found = [], sink.records
    return {g.ticket: g for g in found}


def scored_all(ours, groups):
    """The logprobs of groups that come together."""
    give(ours, *groups)
    return [g.ref_logprobs for g in sent(ours).values()]


def scored(ours, g):
    (logprobs,) = scored_all(ours, [g])
    return logprobs


@torch.no_grad()
def one_by_one(path, g, temperature=1.0):
    """Every token's logprob from whole logits of its own sequence."""
    decoder, out = our_decoder(path), []
    for completion in g.token_ids.split(g.lengths.tolist()):
        tokens = torch.cat([g.prompt_ids, completion])
        logprobs = (whole_logits(decoder, tokens) / temperature).log_softmax(-1)
        of_completion = logprobs[len(g.prompt_ids) - 1 : -1]
        out.append(of_completion.gather(1, completion[:, None])[:, 0])
    return torch.cat(out)


def assert_close(found, wanted, atol=LOGPROBS):
    torch.testing.assert_close(found, wanted, atol=atol, rtol=0)


@pytest.fixture
def packings(monkeypatch):
    """What is packed during the test."""
    made, pack = [], sharded.pack

    def watched(*args, **options):
        made.append(pack(*args, **options))
        return made[-1]

    monkeypatch.setattr(sharded, "pack", watched)
    return made


@pytest.mark.filterwarnings("ignore:sequences longer")
@pytest.mark.parametrize(
    "budget, lengths, microbatches",
    [
        (12, (3, 1, 6, 2), 1),
        (11, (3, 1, 6, 2), 2),
        (7, (6, 3, 2, 1), 2),
        (1, (3, 1, 6, 2), 4),
        (100, (0, 3, 0, 2), 1),
    ],
)
def test_scores_are_those_of_each_sequence_alone(model, packings, budget, lengths, microbatches):
    g = group(lengths=lengths)
    got, want = scored(reference(model, microbatch_tokens=budget), g), one_by_one(model, g)
    assert (got.dtype, got.device.type, got.shape) == (torch.float32, "cpu", g.token_ids.shape)
    assert want.std() > 1
    assert_close(got, want)
    assert [len(p.microbatches) for p in packings] == [microbatches]


def test_the_order_is_the_groups_though_microbatches_hold_another(model, packings):
    g = group(lengths=(1, 2, 7), prompt=2)
    got = scored(reference(model, microbatch_tokens=8), g)
    places = []
    for packed in packings:
        places += [microbatch.places.tolist() for microbatch in packed.microbatches]
    assert places == [[0, 3, 4, 5, 6, 7, 8, 9], [1, 2]]
    assert_close(got, one_by_one(model, g))


def test_the_temperature_is_the_policys(model):
    g = group()
    cool = scored(reference(model, temperature=0.5), g)
    assert_close(cool, one_by_one(model, g, temperature=0.5), 2 * LOGPROBS)
    assert (cool - scored(reference(model), g)).abs().max() > 0.1


def test_masked_and_aborted_completions_are_scored_too(model):
    """Lengths must fit the group's, and a reward that failed says nothing of the tokens."""
    masked = group(
        rewards=torch.tensor([NAN, 0.0, 1.0, NAN]),
        finish_reasons=("aborted", "stop", "length", "stop"),
        outcomes=("error", "score", "score", "abstain"),
    )
    assert_close(scored(reference(model), masked), one_by_one(model, group()))
    assert scored(reference(model), group(lengths=(0, 0))).shape == (0,)


def test_a_step_passes_groups_on_in_order_with_scores_and_nothing_else_changed(model):
    ours, groups = reference(model, groups_per_batch=2), [group(ticket) for ticket in (4, 2, 9)]
    give(ours, *groups)
    records = ours.outputs.of(Group).records
    assert ours.step() and [g.ticket for g in records] == [4, 2]
    assert ours.step() and [g.ticket for g in records] == [4, 2, 9]
    assert not ours.step() and ours.waiting_for() is None
    for got, given_ in zip(records, groups):
        assert_close(got.ref_logprobs, one_by_one(model, given_))
        assert not got.ref_logprobs.requires_grad
        for field in fields(Group):
            mine, theirs = getattr(got, field.name), getattr(given_, field.name)
            is_made = field.name in ("ref_logprobs", "trained")  # by the reference, and by a Group
            assert is_made or mine is theirs
        assert torch.equal(got.trained, given_.trained)


def test_a_full_channel_stops_it_before_it_takes_anything(model):
    ours = reference(model)
    give(ours, group())
    ours.outputs.of(Group).room = 0
    assert not ours.step() and len(ours.inputs.of(Group).records) == 1
    assert ours.waiting_for() == "room: in channel groups, which the trainer empties"


@pytest.mark.bitwise("a reproducible reference scores a group alike whatever is beside it")
@pytest.mark.filterwarnings("ignore:sequences longer")
@pytest.mark.parametrize("budget", [1000, 16])
def test_together_groups_share_microbatches_and_alone_they_keep_their_bits(model, packings, budget):
    groups = [group(ticket, lengths=(ticket + 1, 2)) for ticket in range(4)]
    ours = reference(model, microbatch_tokens=budget, reproducible=True)
    alone = [scored(ours, g) for g in groups]
    beside = scored_all(ours, groups)
    assert len(packings) == 2 * len(groups)
    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))
    together = scored_all(reference(model, microbatch_tokens=budget), groups)
    assert len(packings) == 2 * len(groups) + 1
    for found, wanted in zip(together, alone, strict=True):
        assert_close(found, wanted)


def test_scoring_leaves_weights_and_gradients_alone(model):
    ours = reference(model)
    before = [p.clone() for p in ours.decoder.parameters()]
    scored(ours, group())
    for p, was in zip(ours.decoder.parameters(), before):
        assert torch.equal(p, was) and p.grad is None and not p.requires_grad


def test_a_group_of_a_mixture_is_scored_by_the_teacher_of_its_part(model, tmp_path):
    """Its teacher has other widths and a padded vocabulary; a part without one has the default."""
    teacher = write_model(tmp_path / "teacher", CONFIG | {"hidden_size": 24, "vocab_size": 32})
    parts = {4: "b", 2: "a", 9: "b", 5: "c"}

    def prompt_of(ticket):
        return Prompt(torch.zeros(1), "", {PART_KEY: parts[ticket], REWARD_KEY: "m:f"})

    teachers = {"b": str(teacher), "c": str(model)}
    ours = reference(model, teachers=teachers, prompts=FakeStream(prompt_of))
    groups = [group(ticket, lengths=(ticket, 2)) for ticket in parts]
    give(ours, *groups)
    found = sent(ours)
    assert list(found) == list(parts), "in the order in which they came"
    for ticket, g in zip(parts, groups):
        path = teacher if parts[ticket] == "b" else model
        assert_close(found[ticket].ref_logprobs, one_by_one(path, g))
    weights = []
    for decoder in ours._decoders:
        weights += decoder.parameters()
    assert len(ours._decoders) == 2
    assert [p.data_ptr() for p in weights] == [p.data_ptr() for p in ours.offloadable()]


# --- With a stream: completions are read while they grow ---


LONGEST = 24
LENGTHS = {1: (3, 1, 6, 2), 2: (14, 0, 9), 3: (5, 20)}  # of a ticket's completions


def of_ticket(ticket):
    return group(ticket, lengths=LENGTHS[ticket])


def streaming(model, *, cache_tokens=8 * LONGEST, piece_tokens=4, native=True, **settings):
    made = reference(
        model,
        microbatch_tokens=16,
        prompts=FakeStream(lambda ticket: Prompt(group(ticket).prompt_ids, "question", {})),
        stream=StreamSettings(
            piece_tokens=piece_tokens, cache_tokens=cache_tokens, longest=LONGEST
        ),
        **{"reproducible": True, **settings},
    )
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
        give(ours, record)
        ours.step()


def assert_scored(ours, model, *tickets):
    """These tickets are sent, with the logprobs of their sequences alone."""
    found = sent(ours)
    assert sorted(found) == list(tickets)
    for ticket, g in found.items():
        assert_close(g.ref_logprobs, one_by_one(model, of_ticket(ticket)))


def num_held(ours):
    """How many completions the streams hold something about."""
    held = [s._parts.keys() | s._whole.keys() | s._read.keys() for s in ours._logprobs._streams]
    return sum(map(len, held))


def test_what_has_ended_is_read_to_its_end_before_its_group_comes(model):
    ours = streaming(model)
    hear(ours, stretch(2, 0, 0, 10), stretch(2, 2, 0, 9))
    assert set(ours.metrics.spans) == {"read ahead"}
    hear(ours, stretch(2, 0, 10, has_ended=True), stretch(2, 2, 9, has_ended=True))
    assert not sent(ours) and ours.metrics.spans[-1] == "read to the end"
    assert ours.waiting_for() is None
    num_passes = len(ours.metrics.spans)
    hear(ours, of_ticket(2))
    assert_scored(ours, model, 2)
    assert len(ours.metrics.spans) == num_passes
    assert ours.metrics.means["reference/prefilled_early"] == [1.0]
    assert len(ours.metrics.means["reference/tail_s"]) == 1 and num_held(ours) == 0


def test_the_rest_is_read_when_the_group_comes_and_nothing_twice(model):
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
    assert_scored(ours, model, 3)
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
                ids = draw(st.lists(st.integers(0, VOCAB - 1), max_size=20))
                other = torch.tensor(ids, dtype=torch.int64)
                records.append(Stretch(ticket, sample, 0, other, draw(st.booleans())))
        records.append(of_ticket(ticket))
    return draw(st.permutations(records))


@cache
def unheard(model, native):
    """ticket -> the logprobs of its group, of which nothing was heard before."""
    ours = streaming(model, native=native)
    hear(ours, *map(of_ticket, LENGTHS))
    found = {ticket: g.ref_logprobs for ticket, g in sent(ours).items()}
    for ticket, logprobs in found.items():
        assert_close(logprobs, one_by_one(model, of_ticket(ticket)))
    return found


@pytest.mark.bitwise("streamed logprobs are those of the whole")
@pytest.mark.parametrize("native", [True, False])
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=heard(), cache_tokens=st.sampled_from([LONGEST, 3 * LONGEST, 9 * LONGEST]))
def test_logprobs_have_the_same_bits_whatever_was_heard_before(
    model, native, records, cache_tokens
):
    ours = streaming(model, cache_tokens=cache_tokens, native=native)
    hear(ours, *records)
    found = sent(ours)
    assert found.keys() == LENGTHS.keys()
    for ticket, logprobs in unheard(model, native).items():
        assert torch.equal(found[ticket].ref_logprobs, logprobs)


def test_pieces_may_be_read_together_and_the_temperature_is_the_policys(model):
    ours = streaming(model, temperature=0.5, native=False, reproducible=False)
    hear(ours, *map(of_ticket, LENGTHS))
    for ticket, found in sent(ours).items():
        wanted = one_by_one(model, of_ticket(ticket), temperature=0.5)
        assert_close(found.ref_logprobs, wanted, 2 * LOGPROBS)
        plain = scored(reference(model, temperature=0.5), of_ticket(ticket))
        assert_close(found.ref_logprobs, plain, 2 * LOGPROBS)


def test_what_was_sampled_anew_is_read_anew(model):
    ours = streaming(model)
    others = torch.arange(9)
    hear(ours, Stretch(1, 2, 0, others, False), Stretch(1, 2, 9, others[:0], True))
    hear(ours, Stretch(3, 1, 0, others, True))  # all at once: it has begun nothing
    assert num_held(ours) == 1
    # Of ticket 3 it has not been read when the group is there.
    give(ours, Stretch(3, 1, 0, others, False), Stretch(3, 1, 9, others, True))
    hear(ours, of_ticket(3), of_ticket(1))
    assert_scored(ours, model, 1, 3)


def test_completions_whose_groups_never_come_are_forgotten(model):
    ours = streaming(model, cache_tokens=LONGEST)  # a slot
    for ticket in range(100, 160):
        ids = torch.randint(0, VOCAB, (6,), generator=torch.Generator().manual_seed(ticket))
        hear(ours, Stretch(ticket, 0, 0, ids, False), Stretch(ticket, 1, 0, ids, False))
        hear(ours, Stretch(ticket, 0, 6, ids[:0], True))
    assert 16 <= num_held(ours) <= 16 + 4 + 1
    hear(ours, of_ticket(2))
    assert_scored(ours, model, 2)


def test_a_full_channel_keeps_groups_and_lets_it_read(model):
    ours = streaming(model)
    sink = ours.outputs.of(Group)
    hear(ours, of_ticket(1))
    assert_scored(ours, model, 1)
    sink.room = 0
    hear(ours, of_ticket(2), stretch(3, 1, 0, 12))
    assert not sent(ours) and len(ours.inputs.of(Group).records) == 1
    assert ours.metrics.spans[-1] == "read ahead"
    assert ours.waiting_for() == "room: in channel groups, which the trainer empties"
    sink.room = 9
    hear(ours, group(4, lengths=(0, 0)), of_ticket(3))
    found = sent(ours)
    assert list(found) == [2, 4, 3] and found[4].ref_logprobs.shape == (0,)


@pytest.mark.parametrize("build", [reference, streaming])
def test_logprobs_that_are_not_finite_are_an_error_that_names_the_ticket(model, build):
    ours = build(model)
    ours.decoder.layers[0].attn.q_proj.weight.data.fill_(NAN)
    with pytest.raises(NotFinite, match="reference on rank 0, ticket 1: its logprobs sum to nan"):
        scored(ours, of_ticket(1))


@pytest.mark.parametrize("begin, size, prompt, wanted", [
    (0, 4, 5, 0),  # all of it is prompt, and so is what it predicts
    (0, 4, 4, 1),  # the last one predicts the first of the completion
    (4, 4, 6, 3),
    (8, 2, 3, 2),
])  # fmt: skip
def test_a_piece_gives_the_logprobs_of_the_completions_tokens(begin, size, prompt, wanted):
    place = {"key": (0, 0), "slot": 0, "begin": begin, "prompt_size": prompt}
    piece = Piece(**place, token_ids=torch.arange(size), next_id=size, is_last=True)
    head = LogprobHead(temperature=1.0)
    assert head.num_values(piece) == wanted
    if wanted:  # the token behind each has almost all probability
        hidden = torch.eye(size + 1)[1:]
        logprobs = head(hidden, 50 * torch.eye(size + 1), piece)
        assert logprobs.shape == (wanted,) and logprobs.min() > -1e-6


# --- That is reset ---


class Versions:
    """Brings versions in order; version v has every parameter scaled by 1 + v / 1000."""

    def __init__(self):
        self.coming = deque()

    @property
    def staged(self):
        return SimpleNamespace(version=self.coming[0]) if self.coming else None

    def bind(self, config, parameters):
        self.parameters = [(p, p.detach().clone()) for _, p in parameters]

    def swap(self):
        version = self.coming.popleft()
        for p, start in self.parameters:
            p.data = start * (1 + version / 1000)
        return SimpleNamespace(version=version)

    def close(self):
        pass


@pytest.fixture
def make(model):
    def make(reset_every=10, timeout_s=5.0, rank=0, ranks=(0,), boxes=None):
        return reference(
            model,
            group=ExecutorGroup("reference", ranks, rank, torch.device("cpu")),
            inputs={ReferencePolicy: Versions()},
            control=FakeControl(rank, boxes),
            reset_every=reset_every,
            timeout_s=timeout_s,
        )

    return make


@pytest.fixture
def ours(make):
    return make()


def by_versions(ticket, *versions):
    """A group whose only completion has tokens of these versions."""
    stamps = torch.tensor(versions, dtype=torch.int64)
    return group(ticket, [len(versions)], prompt=2, policy_versions=stamps)


def tell(ours, topic, **payload):
    ours.control.post(ours.group.rank, topic, payload)


def reset(ours, version, *, told=True):
    ours.inputs.of(ReferencePolicy).coming.append(version)
    if told:
        tell(ours, RESET, version=version)


def test_a_group_waits_for_the_reference_of_its_newest_token(ours):
    versions = {0: (3, 9), 1: (9, 10), 2: (), 3: (25,)}
    give(ours, *(by_versions(ticket, *of) for ticket, of in versions.items()))
    assert ours.step() and sent(ours).keys() == {0, 2}
    assert not ours.step()
    assert "version 10 from the trainer, to score ticket 1" in ours.waiting_for()
    reset(ours, 10)
    ((ticket, g),) = sent(ours).items()
    assert (ticket, g.ref_version) == (1, 10) and ours.version == 10
    reset(ours, 20)
    assert sent(ours)[3].ref_version == 20 and ours.waiting_for() is None


def test_scores_are_those_of_the_version_that_was_taken_in(ours, model):
    before = scored(ours, by_versions(0, 0, 0))
    reset(ours, 10)
    after = scored(ours, by_versions(0, 11, 11))
    alone = reference(model)
    assert_close(scored(alone, by_versions(0, 0, 0)), before)
    for p in alone.decoder.parameters():
        p.data *= 1.01
    assert_close(scored(alone, by_versions(0, 0, 0)), after)
    assert (before - after).abs().max() > 10 * LOGPROBS


def test_no_version_is_taken_in_that_the_trainer_has_not_told_of_or_ahead_of_a_snapshot(ours):
    reset(ours, 10, told=False)
    assert not ours.step() and ours.version == 0
    tell(ours, "save", step=9, is_last=False)
    tell(ours, RESET, version=10)
    assert not ours.step() and ours.version == 0
    ours.control.take("save")
    assert ours.may_checkpoint(9)
    assert ours.version == 0, "version 10 was made after step 9"
    assert ours.step() and ours.version == 10


def test_a_snapshot_waits_for_what_was_sent_before_it_and_takes_in_nothing_newer(ours):
    tell(ours, RESET, version=10)
    assert not ours.may_checkpoint(10) and not ours.step()
    reset(ours, 10, told=False)
    tell(ours, RESET, version=20)
    assert ours.step() and ours.version == 10
    reset(ours, 20, told=False)
    assert not ours.step() and ours.version == 10
    assert ours.may_checkpoint(10) and ours.state_dict()["version"] == 10
    assert ours.step() and ours.version == 20


def test_a_snapshot_does_not_wait_for_ever(make):
    ours = make(timeout_s=0.05)
    tell(ours, RESET, version=10)
    with pytest.raises(TimedOut, match="for version 10 from the trainer"):
        while not ours.may_checkpoint(10):
            time.sleep(0.01)


def test_a_resumed_reference_has_the_weights_of_its_version(ours, make):
    start = ours.state_dict()
    assert start == {"version": 0, "boxes": {}}, "the starting weights are where the model is"
    reset(ours, 10)
    ours.step()
    state, resumed = ours.state_dict(), make()
    resumed.load_state_dict(iter([state]))
    assert resumed.version == 10
    again, wanted = (scored(one, by_versions(0, 12, 12)) for one in (resumed, ours))
    assert_close(again, wanted)
    names = {f"model/{name}" for name, _ in named_parameters_hf(ours.decoder)}
    assert state.keys() == names | {"version", "boxes"}
    assert {f"model/{name}" for name in state["boxes"]} == names
    assert ours.has_state() and not make(reset_every=None).has_state()
    for spoil, said in (
        (lambda boxes: boxes.update(other=[[0], [1]]), "other does not fit"),
        (lambda boxes: boxes.clear(), "the checkpoint lacks "),
    ):
        spoil(state["boxes"])
        with pytest.raises(ValueError, match=said):
            make().load_state_dict(iter([state]))


@pytest.fixture
def pair(make):
    """Two ranks of a reference, (the first, the other), that each hold the model whole."""
    boxes = {}
    return [make(rank=rank, ranks=(0, 1), boxes=boxes) for rank in (0, 1)]


def test_a_version_is_swapped_in_once_it_has_come_to_all_ranks(pair):
    first, other = pair
    reset(first, 10)
    assert not first.step() and not other.step()
    reset(other, 10)
    assert not first.step() and first.version == 0, "the other has not said that it came"
    assert not other.step()
    assert first.step() and first.version == 10 and other.version == 0
    assert other.step() and other.version == 10


def test_the_other_ranks_checkpoint_is_of_its_step_though_the_first_is_past_it(pair):
    first, other = pair
    reset(first, 10)
    reset(other, 10, told=False)
    tell(other, "save", step=9, is_last=False)
    other.step()
    assert first.step() and first.version == 10
    assert not other.step() and other.version == 0, "nor has it heard of version 10"
    tell(other, RESET, version=10)
    assert not other.step() and other.version == 0, "it has not saved step 9"
    other.control.take("save")
    assert other.may_checkpoint(9)
    assert other.version == 0 and other.state_dict()["version"] == 0
    assert other.step() and other.version == 10


def test_every_rank_takes_in_what_was_sent_before_its_checkpoint(pair):
    first, other = pair
    for one in pair:
        reset(one, 10)
    # The first has not heard yet that the version has come to the other, nor the other of the swap.
    assert not first.may_checkpoint(10) and not other.may_checkpoint(10)
    assert first.may_checkpoint(10) and other.may_checkpoint(10)
    assert first.version == other.version == 10


@pytest.mark.parametrize("is_leader", [True, False])
def test_every_rank_of_the_trainer_sends_a_reset_and_the_leader_announces_it(is_leader):
    seen = []
    sender = SimpleNamespace(publish=lambda *what, **how: seen.append((*what, how)))
    sender.receivers = (2, 3)
    control = SimpleNamespace(is_leader=is_leader, post=lambda *what: seen.append(what))
    send_reset(sender, 5, control)
    # Nothing is announced that a stop keeps from coming.
    options = {"must_load": True, "must_arrive": True, "must_differ": False}
    told = [(rank, RESET, {"version": 5}) for rank in (2, 3)]
    assert seen == [(5, options), *(told if is_leader else [])]
