"""A trainer takes in what arrives while it computes: what is on its way makes room at once."""

from types import SimpleNamespace

import torch

from executors.trainer import FSDPTrainer
from llamarl.executor import Inputs
from llamarl.learning.buffer import GroupBuffer
from llamarl.learning.update import StepAborted
from llamarl.types import Group
from tests.executors.fakes import FakeReceiver


def test_what_arrives_between_two_microbatches_is_told_before_the_step_ends():
    inbox, told = FakeReceiver(), []
    trainer = object.__new__(FSDPTrainer)  # without what a model needs
    trainer.inputs = Inputs("trainer", [(Group, inbox)])
    trainer.buffer = GroupBuffer()
    trainer.version = 3
    trainer.done = False
    trainer._wait_since = 0.0
    trainer.control = SimpleNamespace(ending=False)
    trainer.checkpoints = SimpleNamespace(save=lambda version, executor, is_last: None)
    trainer.tickets = SimpleNamespace(
        finish=lambda tickets, verdicts: told.append(list(tickets)),
        given_back=lambda: [],
        untake=lambda step: None,
    )

    class Update:
        def run(self, groups, version, stop):
            for ticket in (7, 9):
                inbox.records.append(
                    SimpleNamespace(ticket=ticket, trained_outcomes=torch.zeros(2))
                )
                assert not stop()
                assert told[-1] == [ticket]
            trainer.control.ending = True
            assert stop()
            raise StepAborted

    trainer._update = Update()
    trainer._train([])
    assert told == [[7], [9]] and trainer.buffer.tickets() == [7, 9] and trainer.done
