"""A step of the trainer begins once its weights have room, and replicas that share its ranks have
ended what needs two of them.
"""

from types import SimpleNamespace

from executors.trainer import FSDPTrainer
from llamarl.executor import Inputs
from llamarl.learning.buffer import GroupBuffer
from llamarl.types import Group
from tests.executors.fakes import FakeReceiver


def trainer_of(*, shares_replicas, may_begin):
    """Return a trainer of version 3 with a whole batch, tickets 12 and 13, and what it did."""
    seen = []
    trainer = object.__new__(FSDPTrainer)  # without what a model needs
    trainer.group = SimpleNamespace(ranks=(0, 1), index=0)
    trainer.inputs = Inputs("trainer", [(Group, FakeReceiver())])
    trainer.buffer = GroupBuffer()
    trainer.version = trainer._published = 3
    trainer.settings = SimpleNamespace(max_steps=9)
    trainer.done = trainer._is_at_end = False
    trainer._taken = None
    trainer._wait_since = 0.0
    trainer.shares_replicas = shares_replicas
    trainer.control = SimpleNamespace(stopping=False)
    room = SimpleNamespace(has_room=lambda: True)
    trainer.weights = room
    trainer.resets_reference = lambda version: False

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
    assert trainer.waiting_for().startswith(
        "begin: all trainer ranks, [0, 1], to come to the begin"
    )
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
