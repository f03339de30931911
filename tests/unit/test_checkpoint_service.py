"""A checkpoint may take as long as it needs: whoever waits for a rank that gets on with its part is
patient, and one whose writing stands still is named. The last one waits for room on a full disk,
which hides no earlier error.

The clock is the test's own, and moves only where a fake makes it.
"""

import math
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from llamarl.checkpoint import checkpointer as checkpointer_module
from llamarl.checkpoint import service as service_module
from llamarl.checkpoint.checkpointer import Checkpointer, verify
from llamarl.checkpoint.service import CheckpointService
from llamarl.comm import dropped
from llamarl.controller import ExecutorController
from llamarl.errors import CheckpointError, PeerDied, TimedOut
from llamarl.learning import trained_model
from llamarl.learning.trained_model import TrainedModel

TIMEOUT_S = 8.0


class Clock:
    """Time that passes by PASS_S at each wait of a Control."""

    PASS_S = 1.0

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(service_module.time, "monotonic", lambda: self.now)


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
        if rank == self.rank:
            self.mail.append((rank, topic, payload))

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


def service_of(clock, script=(), checkpointer=None, executors=()):
    control = FakeControl(clock, script)
    options = {"identity": {}, "timeout_s": TIMEOUT_S}
    return CheckpointService(checkpointer, list(executors), control, None, None, **options), control


def after_the_last_save(clock, script=(), **changes):
    """The leader's service once it has saved step 8, which is not sealed. changes: of the
    checkpointer.
    """
    checkpointer = SimpleNamespace(
        sealed=lambda step: False,
        failed={},
        missing=lambda step: ["trainer.rank1"],
        pump=lambda: None,
    )
    vars(checkpointer).update(changes)
    service, control = service_of(clock, script, checkpointer)
    service._saved = 8
    return service, control


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


SLOW = [["writing"]] * 40  # five times as long as TIMEOUT_S


# --- trainer ranks, at a checkpoint together ---


def at(sender, step=4, place="before the export"):
    return (sender, "at", {"step": step, "place": place})


def told(control):
    return [(rank, topic) for rank, topic, _ in control.posted]


def test_a_trainer_rank_waits_as_long_as_another_ones_part_gets_on(clock):
    service, control = service_of(clock, [*SLOW, [at(1)]])
    began = clock.now
    service._meet(4, "before the export", Trainer((0, 1)))
    assert clock.now - began > 4 * TIMEOUT_S
    assert told(control) == [(1, "at")]


def test_a_trainer_rank_whose_part_stands_still_is_named(clock):
    service, _ = service_of(clock, [["writing"], [at(1)]])
    message = r"rank 0 waited 8 s in the checkpoint of step 4, before the export, for ranks \[2\]"
    with pytest.raises(TimedOut, match=message):
        service._meet(4, "before the export", Trainer((0, 1, 2)))


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
    assert told(control) == [(1, "at"), (2, "at")]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_may_begin_more_has_not_come_to_the_end(clock, rank):
    replica = Replica(2)
    service, control = service_of(clock, executors=[replica])
    control.rank = rank
    trainer = Trainer((0, 1, 2))
    others = [end(0)] if rank else [end(1), end(2)]
    control.mail = list(others)
    assert not service.may_end(4, trainer) and not control.posted
    replica.needs = (3,)  # no trainer's
    assert service.may_end(4, trainer) and control.posted


def test_after_a_stop_nothing_more_begins(clock):
    service, control = service_of(clock, executors=[Replica(1)])
    control.stopping = True
    control.mail = [end(1)]
    assert service.may_end(4, Trainer((0, 1)))


def test_a_step_begins_once_no_rank_has_begun_what_needs_another(clock):
    replica = Replica(1)
    service, control = service_of(clock, executors=[replica])
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
    service, control = service_of(clock, (), checkpointer, [late, ready])
    began = clock.now

    def ask(step):
        control.mail = [(0, "save", {"step": step, "is_last": False})]
        return service.serve()

    assert ask(4) and saved == [("generator", 4, 9)]
    assert ask(8) and saved[1:] == [("generator", 8, 9)]
    assert not service.serve() and clock.now == began
    late.version = 4
    assert service.serve() and saved[2:] == [("reference", 4, 4)]
    late.version = 8
    assert service.serve() and saved[3:] == [("reference", 8, 8)]
    late.version = 0
    assert ask(12) is False  # the generator, of version 9, is not ready either
    service.leave_out(late)
    ready.version = 12
    assert service.serve() and saved[4:] == [("generator", 12, 12)]


# --- the leader, for the last checkpoint ---


def wait_for_the_seal(service, control):
    while not service.is_sealed(TIMEOUT_S):
        control.wait(0.02)


def test_the_last_checkpoint_is_waited_for_while_a_rank_gets_on_with_its_part(clock):
    parts = iter([False] * len(SLOW) + [True])
    began = clock.now
    wait_for_the_seal(*after_the_last_save(clock, SLOW, sealed=lambda step: next(parts)))
    assert clock.now - began > 4 * TIMEOUT_S


@pytest.mark.parametrize("stopping, limit", [(False, "timeout_s"), (True, "stop_s")])
def test_the_last_checkpoint_ends_in_words_once_nothing_of_it_is_written(clock, stopping, limit):
    service, control = after_the_last_save(clock, [["writing"]] * 3)
    control.stopping = stopping
    message = rf"parts \['trainer.rank1'\] did not come within 8 s; .* Raise {limit} if"
    with pytest.raises(TimedOut, match=message):
        wait_for_the_seal(service, control)


def test_a_stop_amid_the_last_checkpoint_has_a_patience_of_its_own(clock):
    service, control = after_the_last_save(clock)
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

    service, control = after_the_last_save(clock, pump=pump)
    with pytest.raises(CheckpointError, match="not seen here"):
        service.serve()
    control.loss = PeerDied("rank 3 is gone", [3])
    assert not service.serve()
    with pytest.raises(CheckpointError, match="not seen here"):
        service.is_sealed(TIMEOUT_S)


def test_the_last_checkpoint_that_could_not_be_written_ends_the_run_with_the_reason(clock):
    service, _ = after_the_last_save(clock, failed={8: "step 8: no room"})
    with pytest.raises(CheckpointError, match="step 8: no room"):
        service.is_sealed(60.0)


# --- an executor that waits for what the writer owes it ---


@pytest.mark.parametrize("gets_on", [True, False])
def test_a_wait_counts_only_while_no_rank_gets_on_with_a_checkpoint(clock, gets_on):
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


def test_a_save_is_told_of_from_its_begin_to_its_end(tmp_path):
    """The watch thread of Control measures it then, and no other time."""
    inside = threading.Event()
    measured = []

    @contextmanager
    def told_of(measure):
        measured.append(measure)
        inside.set()
        yield
        inside.clear()

    control = FakeControl(SimpleNamespace())
    control.saving = told_of
    checkpointer = Checkpointer(tmp_path, keep=1, control=control, expected=[])
    state = []

    class Reference(Slow):
        def state_dict(self):
            state.append(inside.is_set())
            return {"version": 3}

    reference = Reference(name="reference", version=9)
    service = CheckpointService(checkpointer, [reference], control, None, None, identity={})
    control.mail.append((0, "save", {"step": 3, "is_last": False}))
    assert service.serve() and state == [True] and not inside.is_set()
    assert measured == [checkpointer.progress]
    service.leave_out(reference)
    control.mail.append((0, "save", {"step": 4, "is_last": False}))
    assert not service.serve() and state == [True], "nothing is asked of what is lost"


# --- a full disk ---


def full(*args, **kwargs):
    raise OSError(28, "No space left on device")


def closing_controller(tmp_path, closed, trace):
    executor = SimpleNamespace(teardown=lambda: closed.append("executor"))
    metrics = SimpleNamespace(close=full, trace=SimpleNamespace(dump=full))
    controller = SimpleNamespace(
        local=[executor],
        _endpoints=[SimpleNamespace(close=lambda: closed.append("channel"))],
        metrics=metrics,
        checkpoints=SimpleNamespace(sealed_step=None),
        _was_left=lambda executor: False,
        settings=SimpleNamespace(trace=trace, run_dir=tmp_path),
        world=SimpleNamespace(rank=0),
        control=SimpleNamespace(let_go=lambda: None, close=lambda: closed.append("control")),
    )
    controller._dump_trace = lambda: ExecutorController._dump_trace(controller)
    return controller


def test_a_full_disk_at_the_end_hides_no_earlier_error_and_skips_no_farewell(tmp_path, caplog):
    closed = []
    ExecutorController._close(closing_controller(tmp_path, closed, trace=True), ended_well=False)
    assert closed == ["executor", "channel", "control"]
    assert "while ending: [Errno 28]" in caplog.text
    assert "trace.rank0.json: not written" in caplog.text


def test_a_full_disk_is_the_error_where_there_is_no_earlier_one(tmp_path):
    closed = []
    controller = closing_controller(tmp_path, closed, trace=False)
    with pytest.raises(OSError, match="No space left"):
        ExecutorController._close(controller, ended_well=True)
    assert closed == ["executor", "channel", "control"]


@pytest.mark.parametrize("out", ["hf", None])
def test_a_rank_that_cannot_write_still_takes_part_in_making_every_tensor(monkeypatch, out):
    made = []

    def shard(name):
        parameter = SimpleNamespace(detach=lambda: made.append(name))
        return SimpleNamespace(name=name, parameter=parameter)

    def export(weights, *args, **kwargs):
        next(iter(weights))
        full()

    monkeypatch.setattr(trained_model, "export", export)
    model = object.__new__(TrainedModel)  # without what a decoder needs
    model.settings = SimpleNamespace(path="", dtype="float32", lora=None)
    model._group = SimpleNamespace(replica=0, index=0)
    model.decoder = SimpleNamespace(tensor_parallel=None, config=SimpleNamespace(labels=()))
    model.shards = [shard(name) for name in "abc"]
    model.average = SimpleNamespace(of=lambda parameter: parameter)
    if out is None:
        model.export(out)
    else:
        with pytest.raises(OSError, match="No space left"):
            model.export(out)
    assert made == ["a", "b", "c"] * 2


class Exporting:
    """A trainer that has an array, and exports a file."""

    name = "trainer"
    leads = True
    group = SimpleNamespace(index=0, ranks=(0,))
    export_bytes = 40

    def state_dict(self):
        return {"w": torch.arange(10.0)}

    def export(self, out):
        if out is not None:
            Path(out).mkdir()
            (Path(out) / "model").write_text("weights")


def service_with(control, run_dir):
    checkpointer = Checkpointer(
        run_dir, keep=2, control=control, expected=[("trainer", 0)], extra_parts=("hf",)
    )
    told = SimpleNamespace(pump=lambda: None, state_dict=lambda *step: {})
    service = CheckpointService(checkpointer, [], control, told, told, identity={}, timeout_s=60.0)
    return service, checkpointer


# Which of the writes the disk refuses while it is full: the look at its room, a file of a part, the
# manifest of the whole.
@pytest.mark.parametrize(
    "refused, frees_after_s, is_sealed",
    [("check_room", 30.0, True), ("save_file", 900.0, False), ("_write", 30.0, True)],
)
def test_the_last_checkpoint_waits_for_room_until_timeout_s(
    clock, monkeypatch, tmp_path, caplog, refused, frees_after_s, is_sealed
):
    control = FakeControl(clock)
    service, checkpointer = service_with(control, tmp_path)
    began = clock.now
    owner = safetensors.torch if refused == "save_file" else checkpointer_module
    allowed = getattr(owner, refused)

    def write(*args, **kwargs):
        if clock.now < began + frees_after_s:
            full()
        return allowed(*args, **kwargs)

    monkeypatch.setattr(owner, refused, write)
    service.save(3, Exporting(), is_last=True)
    while clock.now < began + 100 and not checkpointer.failed and not checkpointer.sealed(3):
        service.serve()
        control.wait(1.0)
    assert checkpointer.sealed(3) == is_sealed
    assert caplog.text.count("it waits 60 s (timeout_s) for room") == 1
    if is_sealed:
        assert verify(tmp_path / "checkpoints" / "step_3") == []
        assert clock.now < began + frees_after_s + 10
    else:
        assert "No space left" in checkpointer.failed[3] and 60 <= clock.now - began < 70
        assert checkpointer.progress()[0] > 20, "others are patient meanwhile"


def test_an_earlier_checkpoint_waits_for_no_room(clock, monkeypatch, tmp_path):
    service, checkpointer = service_with(FakeControl(clock), tmp_path)
    began = clock.now
    monkeypatch.setattr(checkpointer_module, "check_room", full)
    service.save(3, Exporting())
    service.serve()
    assert "No space left" in checkpointer.failed[3] and clock.now == began


def test_what_a_full_disk_has_taken_of_a_part_goes_before_the_next_try(
    clock, monkeypatch, tmp_path
):
    control = FakeControl(clock)
    service, checkpointer = service_with(control, tmp_path)
    allowed = safetensors.torch.save_file
    tries = []

    def save_file(tensors, path):
        tries.append(path)
        if len(tries) == 1:
            path.write_bytes(b"half")
            full()
        allowed(tensors, path)

    def check_room(folder, num_bytes):
        if any(file.read_bytes() == b"half" for file in folder.glob("*.safetensors")):
            full()  # what it takes is the room that is lacking

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    monkeypatch.setattr(checkpointer_module, "check_room", check_room)
    service.save(3, Exporting(), is_last=True)
    give_up = clock.now + 50
    while clock.now < give_up and not checkpointer.failed and not checkpointer.sealed(3):
        service.serve()
        control.wait(1.0)
    assert checkpointer.sealed(3) and len(tries) == 2
