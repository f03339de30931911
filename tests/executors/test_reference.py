"""Reference alone: its scores are those of each prompt with each completion in a forward of
its own.
"""

from dataclasses import fields

import pytest
import torch

from llamarl.errors import NotFinite
from llamarl.scoring import sharded
from llamarl.types import Group
from tests.executors.references import (
    LOGPROBS,
    NAN,
    executor,
    group,
    one_by_one,
    scored,
    scored_all,
)

pytestmark = pytest.mark.machine


@pytest.fixture
def model(reference_model):
    return reference_model


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
    ],
)
def test_scores_are_those_of_each_sequence_alone(model, packings, budget, lengths, microbatches):
    g = group(lengths=lengths)
    got, want = scored(executor(model, microbatch_tokens=budget), g), one_by_one(model, g)
    assert (got.dtype, got.device.type, got.shape) == (torch.float32, "cpu", g.token_ids.shape)
    assert want.std() > 1
    torch.testing.assert_close(got, want, atol=LOGPROBS, rtol=0)
    assert [len(p.microbatches) for p in packings] == [microbatches]


def test_the_order_is_the_groups_though_microbatches_hold_another(model, packings):
    g = group(lengths=(1, 2, 7), prompt=2)
    got = scored(executor(model, microbatch_tokens=8), g)
    places = []
    for packed in packings:
        places += [microbatch.places.tolist() for microbatch in packed.microbatches]
    assert places == [[0, 3, 4, 5, 6, 7, 8, 9], [1, 2]]
    torch.testing.assert_close(got, one_by_one(model, g), atol=LOGPROBS, rtol=0)


def test_the_temperature_is_the_policys(model):
    g = group()
    cool = scored(executor(model, temperature=0.5), g)
    torch.testing.assert_close(
        cool, one_by_one(model, g, temperature=0.5), atol=2 * LOGPROBS, rtol=0
    )
    assert (cool - scored(executor(model), g)).abs().max() > 0.1


def test_masked_and_aborted_completions_are_scored_too(model):
    """Lengths must fit the group's, and a reward that failed says nothing of the tokens."""
    g = group()
    values = {f.name: getattr(g, f.name) for f in fields(Group)}
    values |= {
        "rewards": torch.tensor([NAN, 0.0, 1.0, NAN]),
        "finish_reasons": ("aborted", "stop", "length", "stop"),
    }
    values |= {"outcomes": ("error", "score", "score", "abstain")}
    torch.testing.assert_close(
        scored(executor(model), Group(**values)), one_by_one(model, g), atol=LOGPROBS, rtol=0
    )


def test_completions_without_tokens_take_no_place(model):
    g = group(lengths=(0, 3, 0, 2))
    torch.testing.assert_close(
        scored(executor(model), g), one_by_one(model, g), atol=LOGPROBS, rtol=0
    )
    assert scored(executor(model), group(lengths=(0, 0))).shape == (0,)


def test_a_step_passes_groups_on_in_order_with_scores_and_nothing_else_changed(model):
    ours, groups = executor(model, groups_per_batch=2), [group(ticket) for ticket in (4, 2, 9)]
    source, sink = ours.inputs.of(Group), ours.outputs.of(Group)
    source.records.extend(groups)
    assert ours.step() and [g.ticket for g in sink.records] == [4, 2]
    assert ours.step() and [g.ticket for g in sink.records] == [4, 2, 9]
    assert not ours.step() and ours.waiting_for() is None
    for got, sent in zip(sink.records, groups):
        torch.testing.assert_close(got.ref_logprobs, one_by_one(model, sent), atol=LOGPROBS, rtol=0)
        assert not got.ref_logprobs.requires_grad
        for field in fields(Group):
            ours_, theirs = getattr(got, field.name), getattr(sent, field.name)
            is_made = field.name in ("ref_logprobs", "trained")  # by the reference, and by a Group
            assert is_made or ours_ is theirs
        assert torch.equal(got.trained, sent.trained)


def test_a_full_channel_stops_it_before_it_takes_anything(model):
    ours = executor(model)
    ours.inputs.of(Group).records.append(group())
    ours.outputs.of(Group).room = 0
    assert not ours.step() and len(ours.inputs.of(Group).records) == 1
    assert ours.waiting_for() == "room: in channel groups, which the trainer empties"


@pytest.mark.bitwise("a reproducible reference scores a group alike whatever is beside it")
@pytest.mark.filterwarnings("ignore:sequences longer")
@pytest.mark.parametrize("budget", [1000, 16])
def test_together_groups_share_microbatches_and_alone_they_keep_their_bits(model, packings, budget):
    groups = [group(ticket, lengths=(ticket + 1, 2)) for ticket in range(4)]
    ours = executor(model, microbatch_tokens=budget, reproducible=True)
    alone = [scored(ours, g) for g in groups]
    beside = scored_all(ours, groups)
    assert len(packings) == 2 * len(groups)
    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))
    together = scored_all(executor(model, microbatch_tokens=budget), groups)
    assert len(packings) == 2 * len(groups) + 1
    for found, wanted in zip(together, alone, strict=True):
        torch.testing.assert_close(found, wanted, atol=LOGPROBS, rtol=0)


def test_logprobs_that_are_not_finite_are_an_error_that_names_the_ticket(model):
    ours = executor(model)
    ours.decoder.layers[0].attn.q_proj.weight.data.fill_(NAN)
    with pytest.raises(NotFinite, match="reference on rank 0, ticket 7: its logprobs sum to nan"):
        scored_all(ours, [group(7)])


def test_scoring_leaves_weights_and_gradients_alone(model):
    ours = executor(model)
    before = [p.clone() for p in ours.decoder.parameters()]
    scored(ours, group())
    assert all(
        torch.equal(p, b) and p.grad is None and not p.requires_grad
        for p, b in zip(ours.decoder.parameters(), before)
    )
