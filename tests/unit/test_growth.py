"""What every rank does for every other is counted: messages, questions to the store and reads grow
with the number of ranks, and not with its square.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from llamarl.checkpoint import parts as parts_module
from llamarl.checkpoint.checkpointer import Checkpointer
from llamarl.checkpoint.parts import in_work, load_parts
from llamarl.checkpoint.service import CheckpointService
from llamarl.comm import wire
from llamarl.comm.channel import dp_rank_of
from llamarl.comm.control import Control
from llamarl.learning.buffer import GroupBuffer
from llamarl.tickets.service import TicketService
from tests.build.ledger import build_ledger
from tests.simulated_mail import SimulatedMail
from tests.unit.replaying import group

MANY = 16


def test_a_trainer_rank_is_told_its_own_part_of_a_batch_alone():
    told, world = [], []

    class Noting(SimulatedMail):
        def post(self, rank, topic, payload):
            if self.is_leader and rank != self.rank and topic == "taken":
                told.append(payload["tickets"])
            super().post(rank, topic, payload)

    ledger = build_ledger(groups_per_step=2 * MANY, overcommit=0, num_pools=MANY)
    for rank in range(MANY):
        world.append(Noting(rank, world, lambda: None))
    ranks = tuple(range(MANY))
    services = [TicketService(ledger, mail, trainer_ranks=ranks, timeout_s=1.0) for mail in world]
    tickets = [ticket.index for ticket in ledger.start(2 * MANY, version=0)]
    ledger.finish(tickets)
    batches = [service.take(0) for service in services]
    assert sum(map(len, told)) == 2 * (MANY - 1), "all but the leader's own"
    assert sorted(sum(batches, [])) == tickets
    for rank, batch in enumerate(batches):
        assert {dp_rank_of(ticket, MANY) for ticket in batch} == {rank}


class Store:
    """A store that counts the questions that it is asked."""

    def __init__(self):
        self._store = dist.HashStore()
        self.questions = 0

    def __getattr__(self, name):
        self.questions += name in ("check", "get", "multi_get")
        return getattr(self._store, name)


def control_of(rank: int, ranks: int, store=None, kind=Control) -> Control:
    return kind(store, rank=rank, world_size=ranks, leader=0, names=["one"] * ranks)


def test_the_leader_hears_of_all_beats_by_two_questions():
    store = Store()
    leader = control_of(0, MANY, store)
    seen = {rank: (b"", 0.0) for rank in range(1, MANY)}
    for rank in range(1, MANY):
        store.set(f"beat/{rank}", str(rank))
    leader._look_for_silent(store, seen)
    assert store.questions == 2
    assert [beat for beat, _ in seen.values()] == [b"%d" % rank for rank in range(1, MANY)]


def test_a_rank_that_has_not_beaten_yet_is_no_silent_one():
    store = Store()
    leader = control_of(0, 3, store)
    seen = {1: (b"", 0.0), 2: (b"", 0.0)}
    store.set("beat/2", "7")
    leader._look_for_silent(store, seen)
    assert seen[1][0] == b"" and seen[2][0] == b"7" and leader.failure is None


def test_trainer_ranks_that_meet_in_a_checkpoint_send_one_message_each_to_the_leader_and_back():
    posted = []

    class Mail(Control):
        def post(self, rank, topic, payload):
            posted.append((self.rank, rank))

    trainer = SimpleNamespace(group=SimpleNamespace(ranks=tuple(range(MANY))))
    for rank in range(MANY):
        control = control_of(rank, MANY, kind=Mail)
        others = range(1, MANY) if rank == 0 else [0]
        for other in others:
            control._messages["at"].append((other, {"step": 4, "place": "before the export"}))
        service = CheckpointService(None, [], control, None, None, identity={})
        service._meet(4, "before the export", trainer)
    to_leader = [(rank, 0) for rank in range(1, MANY)]
    from_leader = [(0, rank) for rank in range(1, MANY)]
    assert sorted(posted) == sorted(to_leader + from_leader)


@pytest.mark.parametrize(
    "reads, most", [(in_work, 1), (lambda path: load_parts(path, "generator"), 2)]
)
def test_a_manifest_is_not_read_again_for_each_part(tmp_path, reads, most):
    """Of a checkpoint of many generators."""
    expected = [("generator", rank) for rank in range(MANY)]
    writer = Checkpointer(tmp_path, keep=1, control=control_of(0, 1), expected=expected)
    for rank in range(MANY):
        writer.save_part(1, "generator", rank, {"in_work": [rank], "x": torch.zeros(1)})
    writer.pump()
    read_manifest = parts_module.read_manifest
    with mock.patch.object(parts_module, "read_manifest", side_effect=read_manifest) as read:
        assert len(reads(tmp_path / "checkpoints" / "step_1")) == MANY
    assert read.call_count <= most


def test_a_rank_decodes_its_own_groups_of_a_stored_part_alone(monkeypatch):
    buffer = GroupBuffer(max_lag=1)
    buffer.put([group(ticket) for ticket in range(MANY)])
    state = buffer.state_dict()
    decoded = []
    decode = wire.decode

    def watched(message):
        found = decode(message)
        decoded.extend(found)
        return found

    monkeypatch.setattr(wire, "decode", watched)
    mine = GroupBuffer(max_lag=1)
    mine.load([state], set(range(MANY)), lambda ticket: ticket % 4 == 1)
    assert mine.tickets() == [one.ticket for one in decoded] == [1, 5, 9, 13]
