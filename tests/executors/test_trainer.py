"""The trainer between its channels: when a step begins, records that arrive in it, and the rows
of a checkpoint that it reads.
"""

from types import SimpleNamespace

import pytest
import torch

from executors.trainer import FSDPTrainer
from llamarl.checkpoint.checkpointer import Checkpointer
from llamarl.checkpoint.parts import SavedPart
from llamarl.checkpoint.service import CheckpointService
from llamarl.errors import CheckpointError
from llamarl.executor import Inputs
from llamarl.learning.buffer import GroupBuffer
from llamarl.learning.update import StepAborted
from llamarl.models.sharded_state import Shard, box_from
from llamarl.models.sharding import Box
from llamarl.types import Group
from tests.build.control import lone_control
from tests.executors.fakes import FakeReceiver

# --- When a step begins ---


def bare_trainer():
    """A trainer of version 3 without what a model needs."""
    trainer = object.__new__(FSDPTrainer)
    trainer.group = SimpleNamespace(ranks=(0, 1), index=0)
    trainer.inputs = Inputs("trainer", [(Group, FakeReceiver())])
    trainer.buffer = GroupBuffer()
    trainer.version = trainer._published = 3
    trainer.settings = SimpleNamespace(max_steps=9)
    trainer.done = trainer._is_at_end = False
    trainer._taken = None
    trainer._wait_since = 0.0
    trainer.control = SimpleNamespace(stopping=False, ending=False)
    trainer.weights = SimpleNamespace(has_room=lambda: True)
    trainer.resets_reference = lambda version: False
    return trainer


def trainer_of(*, shares_replicas, may_begin):
    """Return a trainer with a whole batch, tickets 12 and 13, and what it did."""
    seen = []
    trainer = bare_trainer()
    trainer.shares_replicas = shares_replicas

    def take(step, waited):
        seen.append(("take", step))
        return [12, 13]

    def ask(step, executor):
        seen.append(("ask", step))
        return next(may_begin)

    trainer.tickets = SimpleNamespace(take=take, given_back=lambda: [])
    trainer.checkpoints = SimpleNamespace(may_begin=ask, may_end=ask)
    trainer._train = lambda tickets: seen.append(("train", *tickets))
    return trainer, seen


def test_a_batch_that_is_whole_waits_for_what_the_replicas_have_begun():
    trainer, seen = trainer_of(shares_replicas=True, may_begin=iter([False, False, True]))
    assert not trainer.step() and not trainer.step()
    assert seen == [("take", 3), ("ask", 3), ("ask", 3)], "it is taken once"
    assert trainer.waiting_for().startswith("begin: all trainer ranks, [0, 1], to come")
    assert trainer.step() and seen[3:] == [("ask", 3), ("train", 12, 13)]
    assert trainer._taken is None


def test_a_trainer_without_them_asks_nobody():
    trainer, seen = trainer_of(shares_replicas=False, may_begin=iter([]))
    assert trainer.step() and seen == [("take", 3), ("train", 12, 13)]


def test_at_a_stop_it_comes_to_its_end_though_nobody_takes_its_weights(monkeypatch):
    trainer, seen = trainer_of(shares_replicas=False, may_begin=iter([False, True]))
    full = SimpleNamespace(has_room=lambda: False)
    monkeypatch.setattr(FSDPTrainer, "_sender_to_reference", full)
    trainer.resets_reference = lambda version: True
    trainer.weights = full
    trainer.tickets.take = lambda step, waited: seen.append(("take", step))
    trainer._finish = lambda: seen.append(("finish",))
    assert not trainer.step() and seen == [], "it waits for room"
    trainer.control.stopping = True
    assert not trainer.step() and seen == [("take", 3), ("ask", 3)]
    assert trainer.step() and seen[2:] == [("take", 3), ("ask", 3), ("finish",)]


# --- Records that arrive in a step ---


def test_what_arrives_between_two_microbatches_is_told_before_the_step_ends():
    trainer, told = bare_trainer(), []
    inbox = trainer.inputs.of(Group)
    trainer.checkpoints = SimpleNamespace(save=lambda version, executor, is_last: None)
    trainer.tickets = SimpleNamespace(
        finish=lambda tickets, verdicts: told.append(list(tickets)),
        given_back=lambda: [],
        untake=lambda step: None,
    )

    class Update:
        def run(self, groups, version, stop):
            for ticket in (7, 9):
                group = SimpleNamespace(ticket=ticket, trained_outcomes=torch.zeros(2))
                inbox.records.append(group)
                assert not stop()
                assert told[-1] == [ticket]
            trainer.control.ending = True
            assert stop()
            raise StepAborted

    trainer._update = Update()
    trainer._train([])
    assert told == [[7], [9]] and trainer.buffer.tickets() == [7, 9] and trainer.done


# --- Restored shards ---


SAVED = torch.arange(24.0).view(8, 3)  # rows 0 to 7, by two ranks


class Watched(SavedPart):
    """A part whose reads are counted, in elements."""

    def __init__(self, values, tensors):
        self._values = values
        self._names = frozenset(tensors)
        self._tensors = tensors
        self.read = 0

    def __getitem__(self, name):
        assert name not in self._names, f"{name} is read whole"
        return self._values[name]

    def box(self, name, index):
        taken = self._tensors[name][index]
        self.read += taken.numel()
        return taken


@pytest.mark.parametrize(
    "mine, expected", [((3, 0, 2), [3, 3]), ((0, 0, 4), [12, 0]), ((6, 0, 2), [0, 6])], ids=str
)
def test_only_rows_that_a_rank_holds_are_read(mine, expected):
    first, column, count = mine
    box = Box((first, column), (count, 3))
    parameter = torch.nn.Parameter(torch.zeros(count, 3))
    shard = Shard("w", parameter, box)
    optimizer = SimpleNamespace(state={parameter: {}})
    parts = []
    found = 0
    for start in (0, 4):
        boxes = {"w": [[start, 0], [4, 3]]}
        rows = SAVED[start : start + 4]
        part = Watched({"boxes": boxes}, {"model/w": rows, "exp_avg/w": rows + 100})
        theirs = box_from(part["boxes"]["w"])
        found += shard.load(part, theirs, optimizer, weights="model/", moments="")
        parts.append(part)
    assert found == count * 3 and torch.equal(parameter.detach(), SAVED[first : first + count])
    assert torch.equal(optimizer.state[parameter]["exp_avg"], SAVED[first : first + count] + 100)
    assert [part.read for part in parts] == [2 * n for n in expected], "weights, and one moment"


def test_an_executor_that_cannot_go_on_is_an_end_in_words_with_the_checkpoints_name(tmp_path):
    control = lone_control()
    expected = [("controller", 0), ("trainer", 0)]
    checkpointer = Checkpointer(tmp_path, keep=1, control=control, expected=expected)
    checkpointer.save_part(3, "controller", 0, {"ledger": {}, "metrics": {}})
    checkpointer.save_part(3, "trainer", 0, {"w": torch.zeros(2)})
    checkpointer.pump()

    def refuse(parts):
        raise ValueError(f"{list(parts)[0]['w'].numel()} elements do not fit")

    executor = SimpleNamespace(
        name="trainer",
        leads=True,
        has_state=lambda: True,
        state_may_be_absent=False,
        load_state_dict=refuse,
    )
    stateful = SimpleNamespace(load_state_dict=lambda *state: None)
    service = CheckpointService(checkpointer, [executor], control, stateful, stateful, identity={})
    with pytest.raises(CheckpointError, match="step_3: trainer: 2 elements do not fit"):
        service.restore(checkpointer.folder / "step_3")
