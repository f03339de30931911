"""How ranks meet at the start, within a deadline, and how a run's end is on record for programs."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from llamarl.comm import meeting
from llamarl.comm.groups import threads_per_rank
from llamarl.controller import ExecutorController
from llamarl.errors import BadNetwork, TimedOut
from llamarl.launch import start
from llamarl.launch.run_files import recorded
from llamarl.machine.device import CPU
from llamarl.observe import ended, sinks
from llamarl.observe.rows import RowWriter


def meet(rank, store, timeout_s, what, check=lambda: None):
    """Have one of three ranks meet the others."""
    world = SimpleNamespace(rank=rank, size=3, store=lambda: store)
    control = SimpleNamespace(check=check, names=["trainer", "generator", "reward"])
    settings = SimpleNamespace(timeout_s=timeout_s)
    of_rank = SimpleNamespace(world=world, settings=settings, control=control)
    ExecutorController._meet(of_rank, what)


def test_ranks_that_do_not_come_are_named():
    store = dist.HashStore()
    store.set("met/channel policy/1", "")
    said = r"rank 0 waited 1 s at the start for ranks 2 \(reward\), which must join channel policy"
    with pytest.raises(TimedOut, match=said):
        meet(0, store, 1.0, "channel policy")


def test_a_rank_that_dies_meanwhile_ends_the_wait():
    def dead():
        raise RuntimeError("rank 2 has not been heard of")

    with pytest.raises(RuntimeError, match="not been heard of"):
        meet(0, dist.HashStore(), 60.0, "start", check=dead)


def test_all_go_on_when_the_last_has_come():
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda rank: meet(rank, store, 60.0, "start"), range(3), timeout=30))


@pytest.mark.parametrize("ranks", [2, 1000])
@pytest.mark.parametrize("waited_s", [0.004, 0.1, 1.0, 60.0])
def test_a_wait_is_hardly_longer_than_it_must_be_with_few_looks(monkeypatch, waited_s, ranks):
    clock = [100.0]

    def sleep(seconds):
        clock[0] += seconds

    fake = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    monkeypatch.setattr(meeting, "time", fake)
    for number, now in enumerate(meeting._looks(ranks)):
        if now - 100.0 >= waited_s:
            break
    most_s = max(min(0.05, 0.001 * ranks), waited_s / 8)
    assert now - 100.0 - waited_s <= min(0.2, most_s) * 1.001
    assert number < 50 + 6 * waited_s
    assert number <= 1 + waited_s / min(0.05, 0.001 * ranks) + 1e-6


UNDER_TORCHRUN = {"LOCAL_WORLD_SIZE": "2"}
THREADS = {  # the environment, and the threads of an asynchronous rank
    "nothing is set": ({}, 4),
    "the user asks for two": ({"OMP_NUM_THREADS": "2"}, 2),
    "the user asks for one, in one process": ({"OMP_NUM_THREADS": "1"}, 1),
    "torchrun's own one": ({"OMP_NUM_THREADS": "1"} | UNDER_TORCHRUN, 2),
    "the user asks for three, under torchrun": ({"OMP_NUM_THREADS": "3"} | UNDER_TORCHRUN, 3),
    "a number a nesting level": ({"OMP_NUM_THREADS": "3,1"}, 3),
    "no number": ({"OMP_NUM_THREADS": "many"}, 4),
}


@pytest.mark.parametrize("variables, wanted", THREADS.values(), ids=THREADS)
def test_omp_num_threads_is_honoured_where_the_user_has_set_it(monkeypatch, variables, wanted):
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(4))
    assert threads_per_rank(None, synchronous=False, device=CPU) == wanted
    assert threads_per_rank(7, synchronous=False, device=CPU) == 7, "the config comes first"
    assert threads_per_rank(None, synchronous=True, device=CPU) == 1, "its bits depend on the count"


def test_half_of_a_launchers_variables_is_named(monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(BadNetwork, match="WORLD_SIZE=8 .*RANK, MASTER_ADDR, MASTER_PORT are not"):
        meeting.launcher_store(1.0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(BadNetwork, match="MASTER_PORT is not set; start with torchrun"):
        meeting.launcher_store(1.0)


def run(step, *, is_leader=True, reached_target=False):
    return SimpleNamespace(step=step, is_leader=is_leader, reached_target=reached_target)


def said_of(one, folder, *, error=None):
    """The record of a run of 10 steps that ends with this error, if any."""
    with pytest.raises(error) if error else nullcontext(), recorded(one, folder, max_steps=10):
        assert not (folder / "outcome.json").exists()
        assert ended.main([str(folder)]) == 3
        if error:
            raise error
    return json.loads((folder / "outcome.json").read_text())


@pytest.mark.parametrize(
    "one, error, how, code",
    [
        (run(10), None, "finished", 0),
        (run(7, reached_target=True), None, "finished", 0),
        (run(7), None, "stopped", 75),
        (run(10), RuntimeError, "failed", 1),  # whatever it made
    ],
)
def test_how_a_run_ended_is_on_record_and_a_script_hears_it_by_an_exit_code(
    tmp_path, capsys, one, error, how, code
):
    said = said_of(one, tmp_path, error=error)
    assert "under way, was killed, or never started" in capsys.readouterr().out
    assert said == {"ended": how, "step": one.step, "max_steps": 10}
    assert ended.main([str(tmp_path)]) == code
    assert f"{how} after step {one.step}" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"ended": "gone", "step": 1}'])
def test_a_script_hears_of_what_is_no_outcome(tmp_path, capsys, text):
    file = tmp_path / "outcome.json"
    file.write_text(text)
    assert ended.main([str(tmp_path)]) == 2
    assert f"{file}: {text!r} is no outcome" in capsys.readouterr().err


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
