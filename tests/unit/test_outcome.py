"""How a run ended is on record for programs, and which ends are orderly."""

import json
import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from llamarl.launch import start
from llamarl.launch.run_files import recorded
from llamarl.observe import ended, sinks
from llamarl.observe.rows import RowWriter


def run(step, *, is_leader=True, reached_target=False):
    return SimpleNamespace(step=step, is_leader=is_leader, reached_target=reached_target)


@pytest.mark.parametrize(
    "one, ended",
    [
        (run(10), "finished"),
        (run(7, reached_target=True), "finished"),
        (run(7), "stopped"),
    ],
)
def test_a_run_that_ended_well_has_finished_or_was_stopped(tmp_path, one, ended):
    with recorded(one, tmp_path, max_steps=10):
        assert not (tmp_path / "outcome.json").exists()
    said = json.loads((tmp_path / "outcome.json").read_text())
    assert said == {"ended": ended, "step": one.step, "max_steps": 10}


def test_a_run_that_an_error_ends_has_failed_whatever_it_made(tmp_path):
    with pytest.raises(RuntimeError), recorded(run(10), tmp_path, max_steps=10):
        raise RuntimeError
    assert json.loads((tmp_path / "outcome.json").read_text())["ended"] == "failed"


@pytest.mark.parametrize(
    "step, code, line", [(10, 0, "finished after step 10"), (7, 75, "stopped after step 7")]
)
def test_a_script_hears_by_an_exit_code_how_a_run_ended(tmp_path, capsys, step, code, line):
    with recorded(run(step), tmp_path, max_steps=10):
        assert ended.main([str(tmp_path)]) == 3
        assert "under way, was killed, or never started" in capsys.readouterr().out
    assert ended.main([str(tmp_path)]) == code
    assert line in capsys.readouterr().out


def test_a_script_hears_of_a_failure_and_of_what_is_no_outcome(tmp_path, capsys):
    with pytest.raises(RuntimeError), recorded(run(10), tmp_path, max_steps=10):
        raise RuntimeError
    assert ended.main([str(tmp_path)]) == 1
    for text in ("{", "[]", "{}", '{"ended": "gone", "step": 1}'):
        (tmp_path / "outcome.json").write_text(text)
        assert ended.main([str(tmp_path)]) == 2
        assert f"{tmp_path / 'outcome.json'}: {text!r} is no outcome" in capsys.readouterr().err


def test_only_the_leader_writes_and_a_disk_that_refuses_is_no_other_end(tmp_path, caplog):
    with recorded(run(10, is_leader=False), tmp_path, max_steps=10):
        pass
    assert list(tmp_path.iterdir()) == []
    with recorded(run(10), tmp_path / "absent", max_steps=10):
        pass
    assert "outcome.json" in caplog.text


@pytest.fixture
def a_rank_of_two(monkeypatch):
    """The orderly ends that it made, and the codes with which it ended at once."""
    ends = SimpleNamespace(orderly=0, codes=[])

    def leave():
        ends.orderly += 1

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "destroy_process_group", leave)
    monkeypatch.setattr(os, "_exit", ends.codes.append)
    return ends


def test_a_rank_that_fails_in_a_way_that_nobody_foresaw_waits_for_nobody(
    a_rank_of_two, capsys, process_state
):
    released = []
    with start.explained() as ending:
        ending.callback(lambda: released.append(True))
        raise KeyError("a mistake of ours")
    assert a_rank_of_two.orderly == 0 and a_rank_of_two.codes == [1] and released == [True]
    said = capsys.readouterr().err
    assert "Traceback" in said and "KeyError: 'a mistake of ours'" in said


def test_ranks_that_end_well_end_in_order(a_rank_of_two, process_state):
    with start.explained():
        pass
    with pytest.raises(SystemExit), start.explained():
        raise SystemExit(0)  # after a dry run
    assert a_rank_of_two.orderly == 2 and a_rank_of_two.codes == []


def test_a_process_alone_raises_what_nobody_foresaw_and_leaves_no_group(
    a_rank_of_two, monkeypatch, process_state
):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with pytest.raises(KeyError), start.explained():
        raise KeyError
    assert a_rank_of_two.orderly == 1 and a_rank_of_two.codes == []


def test_rows_that_a_checkpoint_counts_as_written_are_on_the_disk_for_good(tmp_path, monkeypatch):
    """Also where the disk refuses to say so: the checkpoint is made all the same."""
    synced = []

    def fsync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(sinks.os, "fsync", fsync)
    writer = RowWriter(tmp_path, [], eval_due=lambda step: False, first_step=1)
    assert writer.state_dict(0)["next_row"] == 1 and synced == []
    writer.ingest(1, {"loss/value": 0.5})
    writer.flush()
    assert synced == [], "not at every row"
    assert writer.state_dict(1)["next_row"] == 2
    assert synced == [str(tmp_path / "metrics.jsonl")]

    def refused(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(sinks.os, "fsync", refused)
    assert writer.state_dict(1)["next_row"] == 2
