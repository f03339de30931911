"""The trainer between its channels: when a step begins, records that arrive in it, and a checkpoint
that does not fit.
"""

from types import SimpleNamespace

import pytest
import torch

from executors.trainer import FSDPTrainer
from llamarl.checkpoint.checkpointer import Checkpointer
from llamarl.checkpoint.service import CheckpointService
from llamarl.errors import CheckpointError
from llamarl.executor import Inputs
from llamarl.learning.buffer import GroupBuffer
from llamarl.learning.update import StepAborted
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


# --- Checkpoints ---


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
