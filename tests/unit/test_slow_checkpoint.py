"""A checkpoint may take as long as it needs: whoever waits for a rank that gets on with its part is
patient, and one whose writing stands still is named.

The clock is the test's own, and moves only where a fake makes it.
"""

import math
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from llamarl.checkpoint import checkpointer as checkpointer_module
from llamarl.checkpoint import service as service_module
from llamarl.checkpoint.checkpointer import Checkpointer
from llamarl.checkpoint.service import CheckpointService
from llamarl.comm import dropped
from llamarl.controller import ExecutorController
from llamarl.errors import CheckpointError, PeerDied, TimedOut

TIMEOUT_S = 8.0


class Clock:
    """Time that passes by PASS_S at each wait of a Control."""

    PASS_S = 1.0

    def __init__(self, monkeypatch, module):
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


class FakeControl:
    """A leader's, which hears from the others what `script` yields: a list of mail at each wait.

    "writing" is word of progress.
    """

    rank = leader = 0
    loss = None
    stopping = False

    @property
    def is_leader(self):
        return self.rank == self.leader

    def __init__(self, clock, script=()):
        self.clock = clock
        self.script = iter(script)
        self.progressed_at = -math.inf
        self.mail = []
        self.posted = []

    def post(self, rank, topic, payload):
        self.posted.append((rank, topic, payload))

    def post_all(self, topic, payload):
        self.posted.append(("all", topic, payload))

    def take(self, topic):
        found = [(sender, payload) for sender, kind, payload in self.mail if kind == topic]
        self.mail = [one for one in self.mail if one[1] != topic]
        return found

    def check(self):
        pass

    def saving(self, measure):
        return nullcontext()

    def wait(self, timeout_s):
        self.clock.now += self.clock.PASS_S
        for one in next(self.script, []):
            if one == "writing":
                self.progressed_at = self.clock.now
            else:
                self.mail.append(one)


class Trainer:
    name = "trainer"
    leads = True

    def __init__(self, ranks):
        self.group = SimpleNamespace(ranks=ranks, index=0)


def service_of(clock, script, checkpointer=None, executors=()):
    control = FakeControl(clock, script)
    made = CheckpointService(
        checkpointer, list(executors), control, None, None, identity={}, timeout_s=TIMEOUT_S
    )
    return made, control


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch, service_module)


SLOW = [["writing"]] * 40  # five times as long as TIMEOUT_S


# --- trainer ranks, at a checkpoint together ---


def at(sender, step=4, place="before the export"):
    return (sender, "at", {"step": step, "place": place})


def test_a_trainer_rank_waits_as_long_as_another_ones_part_gets_on(clock):
    service, control = service_of(clock, [*SLOW, [at(1)]])
    began = clock.now
    service._meet(4, "before the export", Trainer((0, 1)))
    assert clock.now - began > 4 * TIMEOUT_S
    assert [(rank, topic) for rank, topic, _ in control.posted] == [(1, "at")]


def test_a_trainer_rank_whose_part_stands_still_is_named(clock):
    service, _ = service_of(clock, [[at(1)], *SLOW])
    message = r"rank 0 waited 8 s in the checkpoint of step 4, before the export, for ranks \[2\]"
    began = clock.now
    service._meet(4, "before the export", Trainer((0, 1)))
    assert clock.now == began + 1
    service, _ = service_of(clock, [["writing"], [at(1)]])
    with pytest.raises(TimedOut, match=message):
        service._meet(4, "before the export", Trainer((0, 1, 2)))


def test_word_of_another_place_or_step_is_kept_for_it(clock):
    script = [[at(1), at(1, place="after the export")], [at(1, step=5)]]
    service, _ = service_of(clock, script)
    trainer = Trainer((0, 1))
    service._meet(4, "before the export", trainer)
    now = clock.now
    service._meet(4, "after the export", trainer)
    assert clock.now == now
    service._meet(5, "before the export", trainer)
    assert clock.now == now + 1


def test_a_trainer_of_one_rank_waits_for_nobody(clock):
    service, control = service_of(clock, [])
    service._meet(4, "before the export", Trainer((0,)))
    assert not control.posted


# --- trainer ranks, at the end of the run ---


class Replica:
    """An executor that this rank leads, and that may still need other ranks."""

    leads = False

    def __init__(self, *ranks):
        self.needs = ranks

    def partners(self, version):
        return self.needs


def end(sender, step=4):
    return at(sender, step, "the end")


def test_no_rank_waits_at_the_end_while_another_may_still_need_it(clock):
    """A wait would stop the loop, and with it what the rank owes the others."""
    service, control = service_of(clock, [[end(1)]])
    trainer = Trainer((0, 1, 2))
    control.mail = [end(1)]
    began = clock.now
    assert not service.may_end(4, trainer) and not service.may_end(4, trainer)
    assert clock.now == began and not control.posted
    control.mail = [end(2)]
    assert service.may_end(4, trainer)
    assert [(rank, topic) for rank, topic, _ in control.posted] == [(1, "at"), (2, "at")]


def test_a_rank_that_the_leader_has_not_answered_has_come_to_the_end_once(clock):
    service, control = service_of(clock, [])
    control.rank = 1
    trainer = Trainer((0, 1, 2))
    assert not service.may_end(4, trainer) and not service.may_end(4, trainer)
    assert control.posted == [end(0)]
    control.mail = [end(0)]
    assert service.may_end(4, trainer)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_may_begin_more_has_not_come_to_the_end(clock, rank):
    replica = Replica(2)
    service, control = service_of(clock, [], executors=[replica])
    control.rank = rank
    trainer = Trainer((0, 1, 2))
    others = [end(0)] if rank else [end(1), end(2)]
    control.mail = list(others)
    assert not service.may_end(4, trainer) and not control.posted
    replica.needs = (3,)  # no trainer's
    assert service.may_end(4, trainer) and control.posted


def test_after_a_stop_nothing_more_begins(clock):
    service, control = service_of(clock, [], executors=[Replica(1)])
    control.stopping = True
    control.mail = [end(1)]
    assert service.may_end(4, Trainer((0, 1)))


def test_a_step_begins_once_no_rank_has_begun_what_needs_another(clock):
    replica = Replica(1)
    service, control = service_of(clock, [], executors=[replica])
    trainer = Trainer((0, 1))
    control.mail = [at(1, 4, "the begin")]
    assert not service.may_begin(4, trainer) and not control.posted
    replica.needs = ()
    assert service.may_begin(4, trainer)
    assert control.posted == [at(1, 4, "the begin")]


# --- an executor that is not ready for a save ---


class Slow(SimpleNamespace):
    """An executor whose state is that of a version which has come, or not yet."""

    leads = False
    group = SimpleNamespace(index=0)
    version = 0

    def has_state(self):
        return True

    def may_checkpoint(self, step):
        return self.version >= step

    def state_dict(self):
        return {"version": self.version}


def test_a_save_waits_for_an_executor_that_is_not_ready_and_the_loop_does_not(clock):
    saved = []
    checkpointer = SimpleNamespace(
        save_part=lambda step, name, index, state: saved.append((name, step, state["version"])),
        pump=lambda: None,
        progress=lambda: (0, 0),
    )
    ready = Slow(name="generator", version=9)
    late = Slow(name="reference")
    service, control = service_of(clock, [], checkpointer, [late, ready])
    began = clock.now
    control.mail = [(0, "save", {"step": 4, "is_last": False})]
    assert service.serve() and saved == [("generator", 4, 9)]
    control.mail = [(0, "save", {"step": 8, "is_last": False})]
    assert service.serve() and saved[1:] == [("generator", 8, 9)]
    assert not service.serve() and clock.now == began
    late.version = 4
    assert service.serve() and saved[2:] == [("reference", 4, 4)]
    late.version = 8
    assert service.serve() and saved[3:] == [("reference", 8, 8)]
    late.version = 0
    control.mail = [(0, "save", {"step": 12, "is_last": False})]
    assert service.serve() is False  # the generator, of version 9, is not ready either
    service.leave_out(late)
    ready.version = 12
    assert service.serve() and saved[4:] == [("generator", 12, 12)]


# --- the leader, for the last checkpoint ---


def wait_for_the_seal(service, control):
    while not service.is_sealed(TIMEOUT_S):
        control.wait(0.02)


def test_the_last_checkpoint_is_waited_for_while_a_rank_gets_on_with_its_part(clock):
    parts = iter([False] * len(SLOW) + [True])
    checkpointer = SimpleNamespace(
        sealed=lambda step: next(parts), failed={}, missing=lambda step: []
    )
    service, control = service_of(clock, SLOW, checkpointer)
    service._saved = 8
    began = clock.now
    wait_for_the_seal(service, control)
    assert clock.now - began > 4 * TIMEOUT_S


@pytest.mark.parametrize("stopping, limit", [(False, "timeout_s"), (True, "stop_s")])
def test_the_last_checkpoint_ends_in_words_once_nothing_of_it_is_written(clock, stopping, limit):
    checkpointer = SimpleNamespace(
        sealed=lambda step: False, failed={}, missing=lambda step: ["trainer.rank1"]
    )
    service, control = service_of(clock, [["writing"]] * 3, checkpointer)
    control.stopping = stopping
    service._saved = 8
    message = rf"parts \['trainer.rank1'\] did not come within 8 s; .* Raise {limit} if"
    with pytest.raises(TimedOut, match=message):
        wait_for_the_seal(service, control)


def test_a_stop_amid_the_last_checkpoint_has_a_patience_of_its_own(clock):
    checkpointer = SimpleNamespace(
        sealed=lambda step: False, failed={}, missing=lambda step: ["generator.rank1"]
    )
    service, control = service_of(clock, [], checkpointer)
    service._saved = 8
    assert not service.is_sealed(600.0)
    clock.now += 100.0
    control.stopping = True
    assert not service.is_sealed(TIMEOUT_S)
    clock.now += TIMEOUT_S
    assert not service.is_sealed(TIMEOUT_S)
    clock.now += 1.0
    with pytest.raises(TimedOut, match="did not come within 8 s"):
        service.is_sealed(TIMEOUT_S)


def test_a_checkpoint_that_cannot_be_sealed_hides_no_loss(clock):
    def pump():
        raise CheckpointError("step 8: its files are not seen here")

    checkpointer = SimpleNamespace(sealed=lambda step: False, failed={}, pump=pump)
    service, control = service_of(clock, [], checkpointer)
    service._saved = 8
    with pytest.raises(CheckpointError, match="not seen here"):
        service.serve()
    control.loss = PeerDied("rank 3 is gone", [3])
    assert not service.serve()
    with pytest.raises(CheckpointError, match="not seen here"):
        service.is_sealed(TIMEOUT_S)


# --- an executor that waits for what the writer owes it ---


@pytest.mark.parametrize("gets_on", [True, False])
def test_a_wait_counts_only_while_no_rank_gets_on_with_a_checkpoint(monkeypatch, gets_on):
    clock = Clock(monkeypatch, service_module)
    lost = []
    control = SimpleNamespace(progressed_at=-math.inf, lose=lost.append)
    made = object.__new__(ExecutorController)
    made._breakable = {}
    made.world = SimpleNamespace(rank=1)
    made.control = control
    made.settings = SimpleNamespace(timeout_s=TIMEOUT_S)
    generator = SimpleNamespace(
        name="generator", step=lambda: False, waiting_for=lambda: "tickets: none is granted"
    )
    waits = dropped.Clock(clock.now)
    for _ in range(40):
        clock.now += 1.0
        if gets_on:
            control.progressed_at = clock.now
        made._step(generator, waits)
    assert bool(lost) != gets_on
    if lost:
        assert "generator on rank 1 waited 9 s for tickets" in str(lost[0])


# --- what a writer measures ---


def test_progress_grows_with_what_is_written_synced_and_hashed(tmp_path, monkeypatch):
    control = FakeControl(SimpleNamespace())
    made = Checkpointer(tmp_path, keep=1, control=control, expected=[("trainer", 0)])
    seen = [made.progress()]

    def look(name):
        real = getattr(checkpointer_module, name)

        def looked(file, progress=lambda: None):
            def and_look():
                progress()
                seen.append(made.progress())

            return real(file, and_look)

        monkeypatch.setattr(checkpointer_module, name, looked)

    look("_sync")
    look("_sha256")
    monkeypatch.setattr(checkpointer_module, "_SYNC_BYTES", 1 << 20)
    made.save_part(3, "trainer", 0, {"model/w": torch.zeros(3 << 20, dtype=torch.uint8)})
    num_chunks = [chunks for chunks, _ in seen]
    assert num_chunks == sorted(num_chunks) and len(set(seen)) >= 7
    assert seen[1][1] > 3 << 20, "bytes of the files of this part"
    other = Checkpointer(tmp_path, keep=1, control=control, expected=[("trainer", 1)])
    assert other.progress() == (0, 0)


def test_an_export_is_measured_while_its_files_grow(tmp_path):
    control = FakeControl(SimpleNamespace())
    made = Checkpointer(tmp_path, keep=1, control=control, expected=[], extra_parts=("hf",))
    folder = made.place_for(3, "hf", 100)
    (folder / "hf").mkdir()
    sizes = [made.progress()[1]]
    for count in (10, 20_000):
        (folder / "hf" / "shard-0.safetensors").write_bytes(bytes(count))
        sizes.append(made.progress()[1])
    assert sizes[0] == 0 and sizes == sorted(set(sizes))
    (folder / "hf" / "shard-0.safetensors").rename(folder / "hf" / "model.safetensors")
    assert made.progress()[1] == sizes[-1]


def test_a_save_is_told_of_from_its_begin_to_its_end(tmp_path):
    """The watch thread of Control measures it then, and no other time."""
    inside = threading.Event()
    measured = []

    class Told:
        def __init__(self, measure):
            measured.append(measure)

        def __enter__(self):
            inside.set()

        def __exit__(self, *_):
            inside.clear()

    control = FakeControl(SimpleNamespace())
    control.saving = Told
    checkpointer = Checkpointer(tmp_path, keep=1, control=control, expected=[])
    state = []

    class Reference(SimpleNamespace):
        def state_dict(self):
            state.append(inside.is_set())
            return {"version": 3}

    reference = Reference(
        name="reference",
        leads=False,
        has_state=lambda: True,
        may_checkpoint=lambda step: True,
        group=SimpleNamespace(index=0),
    )
    service = CheckpointService(checkpointer, [reference], control, None, None, identity={})
    control.mail.append((0, "save", {"step": 3, "is_last": False}))
    assert service.serve() and state == [True] and not inside.is_set()
    assert measured == [checkpointer.progress]
    service.leave_out(reference)
    control.mail.append((0, "save", {"step": 4, "is_last": False}))
    assert not service.serve() and state == [True], "nothing is asked of what is lost"
