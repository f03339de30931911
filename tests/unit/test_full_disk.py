"""A full disk beside the checkpoints: traces, and the exported model that all trainer ranks make
together. Rows of metrics: test_held_rows.py.
"""

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from llamarl.checkpoint import checkpointer as checkpointer_module
from llamarl.checkpoint.checkpointer import Checkpointer, verify
from llamarl.checkpoint.service import CheckpointService
from llamarl.controller import ExecutorController
from llamarl.errors import CheckpointError
from llamarl.learning import trained_model
from llamarl.learning.trained_model import TrainedModel


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
    assert (
        "while ending: [Errno 28]" in caplog.text and "trace.rank0.json: not written" in caplog.text
    )


def test_a_full_disk_is_the_error_where_there_is_no_earlier_one(tmp_path):
    closed = []
    with pytest.raises(OSError, match="No space left"):
        ExecutorController._close(
            closing_controller(tmp_path, closed, trace=False), ended_well=True
        )
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


def test_the_last_checkpoint_that_could_not_be_written_ends_the_run_with_the_reason(tmp_path):
    checkpointer = SimpleNamespace(
        sealed=lambda step: False, failed={8: "step 8: no room"}, pump=lambda: None
    )
    control = SimpleNamespace(
        loss=None, take=lambda topic: [], wait=lambda s: None, progressed_at=0.0
    )
    checkpoints = CheckpointService(checkpointer, [], control, None, None, identity={})
    checkpoints._saved = 8
    with pytest.raises(CheckpointError, match="step 8: no room"):
        checkpoints.is_sealed(60.0)


# --- The last checkpoint waits for room ---


class Clock:
    """Time that passes while somebody waits; `frees_at`: when the disk has room again."""

    def __init__(self, monkeypatch, frees_at):
        self.now = 100.0
        self.frees_at = frees_at
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


class WaitingControl:
    """A run's only rank."""

    rank = leader = 0
    is_leader = True
    loss = None
    stopping = False
    progressed_at = 0.0

    def __init__(self, clock):
        self.clock = clock
        self.mail = {}

    def post(self, rank, topic, payload):
        self.mail.setdefault(topic, []).append((0, payload))

    def post_all(self, topic, payload):
        pass

    def take(self, topic):
        return self.mail.pop(topic, [])

    def check(self):
        pass

    def wait(self, timeout_s):
        self.clock.now += timeout_s

    def saving(self, measure):
        return nullcontext()


class Trainer:
    """One that has an array, and exports a file."""

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
REFUSED = ("check_room", "save_file", "_write")


@pytest.mark.parametrize("refused", REFUSED)
@pytest.mark.parametrize(("frees_at", "is_sealed"), [(130.0, True), (1000.0, False)])
def test_the_last_checkpoint_waits_for_room_until_timeout_s(
    monkeypatch, tmp_path, caplog, refused, frees_at, is_sealed
):
    clock = Clock(monkeypatch, frees_at)
    control = WaitingControl(clock)
    service, checkpointer = service_with(control, tmp_path)
    owner = safetensors.torch if refused == "save_file" else checkpointer_module
    allowed = getattr(owner, refused)

    def write(*args, **kwargs):
        if clock.now < frees_at:
            full()
        return allowed(*args, **kwargs)

    monkeypatch.setattr(owner, refused, write)
    service.save(3, Trainer(), is_last=True)
    while clock.now < 200.0 and not checkpointer.failed and not checkpointer.sealed(3):
        service.serve()
        control.wait(1.0)
    assert checkpointer.sealed(3) == is_sealed
    assert caplog.text.count("it waits 60 s (timeout_s) for room") == 1
    if is_sealed:
        assert verify(tmp_path / "checkpoints" / "step_3") == []
        assert clock.now < frees_at + 10
    else:
        assert "No space left" in checkpointer.failed[3] and 160 <= clock.now < 170
        assert checkpointer.progress()[0] > 20 or refused == "_write", (
            "others are patient meanwhile"
        )


def test_an_earlier_checkpoint_waits_for_nothing(monkeypatch, tmp_path):
    control = WaitingControl(Clock(monkeypatch, 1000.0))
    service, checkpointer = service_with(control, tmp_path)
    monkeypatch.setattr(checkpointer_module, "check_room", full)
    service.save(3, Trainer())
    service.serve()
    assert "No space left" in checkpointer.failed[3] and control.clock.now == 100.0
