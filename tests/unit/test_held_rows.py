"""Rows that the disk refuses are held, and written once it takes them: in order, each once, whole.

The disk is os.pwrite with so much room as a test gives it; one test fills a small one for good.
"""

import errno
import json
import logging
import os

import pytest

from llamarl.launch.start import RUN_ENDS
from llamarl.observe import Jsonl, MetricsError, RowWriter
from llamarl.observe import sinks as sinks_module

TRAINED = "loss/value"


class Disk:
    """Takes `room` bytes more, of a write perhaps a part; then it refuses with `number`."""

    def __init__(self, monkeypatch, room=None, number=errno.ENOSPC):
        self.room = room
        self.number = number
        self.write = os.pwrite
        monkeypatch.setattr(sinks_module.os, "pwrite", self.pwrite)

    def pwrite(self, descriptor, data, offset):
        if self.room is None:
            return self.write(descriptor, data, offset)
        if not self.room:
            raise OSError(self.number, os.strerror(self.number))
        taken = self.write(descriptor, data[: self.room], offset)
        self.room -= taken
        return taken


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def row(step):
    return {"step": step, "value": 0.5}


def steps_of(path):
    """The steps of the file, in which every line is whole."""
    text = path.read_text()
    assert text.endswith("\n") or not text
    rows = [json.loads(line) for line in text.splitlines()]
    assert all(one == row(one["step"]) for one in rows)
    return [one["step"] for one in rows]


LINE = len(json.dumps(row(1))) + 1


@pytest.mark.parametrize("room, number", [(LINE - 1, errno.ENOSPC), (LINE + 3, errno.EIO)])
def test_refused_rows_are_held_and_written_with_the_next_one_the_disk_takes(
    tmp_path, disk, caplog, room, number
):
    file = Jsonl(tmp_path / "metrics.jsonl")
    file.write(row(1))
    disk.room, disk.number = room, number
    num_taken = room // LINE
    for step in (2, 3, 4):
        file.write(row(step))
        assert steps_of(file.path) == list(range(1, 2 + min(num_taken, step - 1)))
    assert steps_of(file.path) == list(range(1, 2 + num_taken)), "no line is torn"
    assert [one["step"] for one in file.held] == list(range(2 + num_taken, 5))
    assert [one["step"] for one in file.read()] == [1, 2, 3, 4]
    (warned,) = [record for record in caplog.records if record.levelname == "ERROR"]
    said = warned.getMessage()
    assert os.strerror(number) in said and f"row of step {2 + num_taken}" in said
    assert "Make room there; training goes on" in said
    disk.room = None
    file.write(row(5))
    assert steps_of(file.path) == [1, 2, 3, 4, 5] and file.held == []
    assert "which were held, are written" in caplog.text
    file.close()


def test_a_disk_that_refuses_at_the_close_of_a_file_gets_all_of_it_again(tmp_path, monkeypatch):
    """As a network file system with a quota does."""
    file = Jsonl(tmp_path / "metrics.jsonl")
    file.write(row(1))
    close = os.close

    def refuse(descriptor):
        close(descriptor)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(sinks_module.os, "close", refuse)
        file.write(row(2))
    assert [one["step"] for one in file.held] == [2]
    file.write(row(3))
    assert steps_of(file.path) == [1, 2, 3]


def test_a_file_that_somebody_emptied_meanwhile_has_no_hole(tmp_path):
    file = Jsonl(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        file.write(row(step))
    os.truncate(file.path, LINE)
    file.write(row(4))
    assert steps_of(file.path) == [1, 4]
    file.path.unlink()
    file.write(row(5))
    assert steps_of(file.path) == [5]


def test_what_stands_behind_the_last_whole_line_is_cut_off(tmp_path):
    """As what the disk took of a line and would not cut off again."""
    file = Jsonl(tmp_path / "metrics.jsonl")
    file.write(row(1))
    with file.path.open("a") as end:
        end.write(json.dumps(row(2))[:-3] + " " * LINE)
    file.write(row(2))
    assert steps_of(file.path) == [1, 2]


def test_a_directory_that_cannot_be_made_yet_loses_no_row(tmp_path):
    (tmp_path / "run").write_text("a file in the directory's place")
    file = Jsonl(tmp_path / "run" / "metrics.jsonl")
    file.write(row(1))
    (tmp_path / "run").unlink()
    assert file.retry() and steps_of(file.path) == [1]


def test_rows_are_held_within_a_bound_and_what_is_beyond_it_is_named(
    tmp_path, disk, monkeypatch, caplog
):
    monkeypatch.setattr(sinks_module, "MOST_HELD_BYTES", 3 * LINE)
    file = Jsonl(tmp_path / "metrics.jsonl")
    disk.room = 0
    for step in range(1, 7):
        file.write(row(step))
    assert [one["step"] for one in file.held] == [1, 2, 3]
    assert "those from step 4 on are lost" in caplog.text
    with pytest.raises(MetricsError, match=r"No checkpoint holds 6 rows \(steps 1 to 6\)"):
        file.close()
    disk.room = None
    with pytest.raises(MetricsError, match=r"3 rows \(steps 4 to 6\) could not be written"):
        file.close()
    assert steps_of(file.path) == [1, 2, 3]


def test_at_the_end_the_error_says_which_rows_a_checkpoint_holds(tmp_path, disk):
    file = Jsonl(tmp_path / "metrics.jsonl")
    disk.room = 0
    for step in (7, 8, 9):
        file.write(row(step))
    with pytest.raises(MetricsError) as refused:
        file.close(sealed_step=8)
    said = str(refused.value)
    assert f"{file.path}: 3 rows (steps 7 to 9) could not be written ([Errno 28]" in said
    assert "The checkpoint of step 8 holds 2 rows (steps 7 to 8)" in said
    assert "resume=auto, which writes them" in said
    assert "No checkpoint holds the row of step 9" in said
    assert MetricsError in RUN_ENDS


# --- a run's rows ---


def writer(run_dir, sinks=()):
    return RowWriter(run_dir, list(sinks), eval_due=lambda step: False, first_step=1)


def train(rows, *steps):
    for step in steps:
        rows.ingest(step, {TRAINED: step / 8})
        rows.flush()


def written(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize(
    "sealed_step, is_written_before_the_kill", [(4, False), (4, True), (3, False)]
)
def test_a_checkpoint_holds_the_rows_that_the_disk_refuses_and_a_resume_writes_each_once(
    tmp_path, disk, sealed_step, is_written_before_the_kill
):
    """And no row that the resume will train again."""
    first = writer(tmp_path)
    train(first, 1, 2)
    disk.room = LINE // 2
    train(first, 3, 4)
    state = json.loads(json.dumps(first.state_dict(sealed_step)))
    sealed = list(range(1, sealed_step + 1))
    assert [one["step"] for one in state["held"]] == sealed[2:]
    disk.room = None
    if is_written_before_the_kill:
        train(first, 5)
        assert written(tmp_path) == [1, 2, 3, 4, 5]
    second = writer(tmp_path)
    second.load_state_dict(state)
    assert written(tmp_path) == sealed
    train(second, *range(sealed_step + 1, 6))
    second.close()
    assert written(tmp_path) == [1, 2, 3, 4, 5]


def test_rows_that_are_refused_at_the_end_keep_no_sink_open(tmp_path, disk):
    kept = Kept()
    rows = writer(tmp_path, [kept])
    disk.room = 0
    train(rows, 1)
    with pytest.raises(MetricsError):
        rows.close()
    assert kept.is_closed and kept.steps == [1]


class Broken:
    """A sink whose service is gone."""

    def write(self, row):
        raise RuntimeError("no route to host")

    def close(self):
        raise OSError(28, "No space left on device")


class Kept:
    def __init__(self):
        self.steps = []
        self.is_closed = False

    def write(self, row):
        self.steps.append(row["step"])

    def close(self):
        self.is_closed = True


def test_a_sink_that_fails_is_warned_of_once_and_hinders_neither_the_file_nor_the_others(
    tmp_path, caplog
):
    kept = Kept()
    rows = writer(tmp_path, [Broken(), kept])
    with caplog.at_level(logging.WARNING, "llamarl"):
        train(rows, 1, 2, 3)
        rows.close()
    assert written(tmp_path) == kept.steps == [1, 2, 3] and kept.is_closed
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("Broken did not take a row (RuntimeError: no route to host)")
