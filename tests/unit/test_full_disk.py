"""A full disk beside the checkpoints: traces, and the exported model that all trainer ranks make
together. Rows of metrics: test_held_rows.py.
"""

from types import SimpleNamespace

import pytest

import executors.trainer as trainer_module
from executors.trainer import FSDPTrainer
from llamarl.checkpoint.service import CheckpointService
from llamarl.controller import ExecutorController
from llamarl.errors import CheckpointError


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

    def weight(name):
        return name, SimpleNamespace(detach=lambda: made.append(name))

    def export(weights, *args, **kwargs):
        next(iter(weights))
        full()

    monkeypatch.setattr(trainer_module, "export", export)
    policy = SimpleNamespace(with_values=lambda value: map(weight, "abc"))
    trainer = SimpleNamespace(
        group=SimpleNamespace(replica=0, index=0),
        decoder=SimpleNamespace(tensor_parallel=None),
        model_path="",
        model_dtype="float32",
        _policy=policy,
        _average=SimpleNamespace(of=None),
    )
    trainer._write = lambda weights, out: FSDPTrainer._write(trainer, weights, out)
    if out is None:
        FSDPTrainer.export(trainer, out)
    else:
        with pytest.raises(OSError, match="No space left"):
            FSDPTrainer.export(trainer, out)
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
