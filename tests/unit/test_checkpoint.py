"""Checkpoints are on disk as a whole or not at all, and any damage is found and named."""

import contextlib
import json
import logging
import os
import shutil
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from llamarl.checkpoint import checkpointer as checkpoint
from llamarl.checkpoint import latest as latest_file
from llamarl.checkpoint import manifest
from llamarl.checkpoint.checkpointer import Checkpointer, find, verify
from llamarl.checkpoint.latest import latest_in, point_to
from llamarl.checkpoint.parts import in_work, load_part, ranks_of
from llamarl.errors import CheckpointError, OtherFormat
from llamarl.models.config import tiny_directory
from llamarl.models.sharded_state import box_of
from tests.simulated_mail import SimulatedMail


class Mail(SimulatedMail):
    loss = None


def controls(num_ranks):
    world = []
    world += [Mail(rank, world, lambda: None) for rank in range(num_ranks)]
    return world


STATE = {
    "model/w": torch.arange(6, dtype=torch.float32).view(2, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "adam_step": torch.tensor(3.0),
    "rows": {"w": [0, 2]},
    "version": 7,
    "best": None,
}
NO_ROOM = "No space left on device"
EXPECTED = [("trainer", 0), ("trainer", 1), ("controller", 0)]


def checkpointers(run_dir, keep=2, timeout_s=60.0):
    """Those of a leader and another rank, as one run has them."""
    options = {"keep": keep, "expected": EXPECTED, "extra_parts": ("hf",), "timeout_s": timeout_s}
    return [Checkpointer(run_dir, control=control, **options) for control in controls(2)]


def lone(run_dir, *expected, **options):
    """That of a run of one rank that writes these parts."""
    (control,) = controls(1)
    return Checkpointer(run_dir, keep=1, control=control, expected=expected, **options)


def names_in(leader):
    return {path.name for path in leader.folder.iterdir()}


def write(leader, other, step):
    """All parts of one step, in the order in which a run writes them; a generator, to be left at
    any point.
    """
    folder = leader.begin(step)
    yield
    leader.save_part(step, "controller", 0, {"ledger": {"step": step}})
    yield
    other.begin(step)
    other.save_part(step, "trainer", 1, STATE)
    yield
    leader.save_part(step, "trainer", 0, {**STATE, "version": step})
    yield
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    (folder / "hf" / "model.safetensors").write_bytes(bytes(range(64)))
    yield
    with leader.writing(step, "hf", num_bytes=66):
        leader.register_files(step, "hf", sorted((folder / "hf").iterdir()))
    leader.pump()


def save(leader, other, *steps):
    for step in steps:
        for _ in write(leader, other, step):
            leader.pump()
    return leader.folder / f"step_{steps[-1]}"


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


# --- what is saved comes back ---


def test_parts_come_back_bit_for_bit_in_their_types(tmp_path):
    path = save(*checkpointers(tmp_path), 20)
    loaded = load_part(path, "trainer", 1)
    assert loaded.keys() == STATE.keys()
    for key, value in STATE.items():
        if isinstance(value, torch.Tensor):
            assert loaded[key].dtype == value.dtype and torch.equal(loaded[key], value)
        else:
            assert loaded[key] == value
    assert load_part(path, "trainer", 0)["version"] == 20
    assert (ranks_of(path, "trainer"), ranks_of(path, "controller")) == ([0, 1], [0])
    with pytest.raises(CheckpointError, match="no state of critic, only of controller, trainer"):
        ranks_of(path, "critic")


def test_tickets_in_work_are_those_that_any_part_names(tmp_path):
    leader = lone(tmp_path, ("generator", 0), ("generator", 1), ("trainer", 0))
    leader.save_part(1, "generator", 0, {"in_work": [3, 8], "tickets": torch.tensor([3, 3, 8])})
    leader.save_part(1, "generator", 1, {"in_work": [5]})
    leader.save_part(1, "trainer", 0, STATE)
    leader.pump()
    assert in_work(leader.folder / "step_1") == {3, 5, 8}


def test_tied_views_and_empty_tensors_can_be_saved(tmp_path):
    weight = torch.arange(12.0).view(3, 4)
    leader = lone(tmp_path, ("trainer", 0))
    views = {"w": weight, "tied": weight, "transposed": weight.T, "row": weight[1]}
    state = {**views, "none": torch.empty(0), "also_none": torch.empty(0)}
    leader.save_part(1, "trainer", 0, state)
    leader.pump()
    loaded = load_part(leader.folder / "step_1", "trainer", 0)
    assert all(torch.equal(loaded[key], value) for key, value in state.items())


@pytest.mark.parametrize(
    "value",
    [{1: "a"}, {"a": [object()]}, [torch.zeros(1)], {1, 2}],
    ids=["key", "object", "tensor", "set"],
)
def test_state_that_would_not_come_back_the_same_is_refused(tmp_path, value):
    leader, _ = checkpointers(tmp_path)
    with pytest.raises(TypeError, match="trainer.rank0: odd|trainer: odd"):
        leader.save_part(1, "trainer", 0, {"odd": value})


def test_of_a_part_only_what_is_asked_for_is_read(tmp_path):
    path = save(*checkpointers(tmp_path), 20)
    part = load_part(path, "trainer", 1)
    read = []

    class Watched:
        def __getattr__(self, name):
            def looked(key):
                read.append(key)
                return getattr(file, name)(key)

            return looked

        def keys(self):
            return file.keys()

    assert part["version"] == 7 and "_file" not in vars(part), "not opened for a JSON value"
    file, part._file = part._file, Watched()
    assert "half" in part and "missing" not in part and read == []
    rows = box_of(part, "model/w", (slice(1, 2), slice(0, 2)))
    assert torch.equal(rows, STATE["model/w"][1:2, :2]) and read == ["model/w"]
    assert torch.equal(box_of(STATE, "half", (slice(1, 2),)), box_of(part, "half", (slice(1, 2),)))
    assert part["adam_step"] == 3 and read == ["model/w", "half", "adam_step"]


# --- sealing ---


def test_a_checkpoint_is_sealed_by_its_last_part_and_not_before(tmp_path):
    leader, other = checkpointers(tmp_path)
    left = []
    for _ in write(leader, other, 20):
        leader.pump()
        left.append(leader.missing(20))
        assert not leader.sealed(20) and find("auto", tmp_path) is None
    everything = ["controller.rank0", "trainer.rank0", "trainer.rank1", "hf"]
    assert left == [everything, everything[1:], ["trainer.rank0", "hf"], ["hf"], ["hf"]]
    assert leader.sealed(20) and other.sealed(20)
    assert find("auto", tmp_path) == tmp_path / "checkpoints" / "step_20"
    assert os.readlink(tmp_path / "checkpoints" / "latest") == "step_20"


def test_parts_of_two_steps_may_come_interleaved(tmp_path):
    leader, other = checkpointers(tmp_path)
    first, second = write(leader, other, 20), write(leader, other, 40)
    for _ in zip(first, second):
        pass
    for _ in second:
        pass
    assert leader.sealed(20) and leader.sealed(40)
    assert verify(leader.folder / "step_20") == verify(leader.folder / "step_40") == []


def test_files_that_the_leader_sees_late_are_waited_for(tmp_path):
    """As on a file system that shows what one host has written to the others later."""
    leader, other = checkpointers(tmp_path)
    writing = write(leader, other, 20)
    for _ in range(5):
        next(writing)
    file = leader.begin(20) / "trainer.rank1.json"
    whole = file.read_bytes()
    for seen in (None, whole[:-1]):  # not at all, then not all of it
        if seen is None:
            file.unlink()
        else:
            file.write_bytes(seen)
        list(writing)
        leader.pump()
        assert not leader.sealed(20) and leader.missing(20) == []
        assert leader.unseen(20) == ["trainer.rank1.json"]
    file.write_bytes(whole)
    leader.pump()
    assert leader.sealed(20) and verify(leader.folder / "step_20") == []


def test_files_that_the_leader_does_not_see_are_an_error_that_says_what_to_share(tmp_path):
    leader, other = checkpointers(tmp_path, timeout_s=0.0)
    writing = write(leader, other, 20)
    for _ in range(5):
        next(writing)
    (leader.begin(20) / "trainer.rank1.json").unlink()
    with pytest.raises(
        CheckpointError,
        match="does not see trainer.rank1.json, .*put the run's directory where all hosts see",
    ):
        list(writing)


# --- kill at every point ---


class Killed(BaseException):
    pass


class Disk:
    """The primitives of the file system, of which one call fails or is the last."""

    PRIMITIVES = [(os, "fsync"), (os, "replace"), (os, "open"), (shutil, "rmtree")]
    PRIMITIVES += [(checkpoint.Path, "rename"), (checkpoint.Path, "write_text")]
    PRIMITIVES += [(os, "symlink"), (os, "unlink")]

    def __init__(self, patch, at, ends):
        self.calls = 0
        for target, name in self.PRIMITIVES:
            patch.setattr(target, name, self._counted(getattr(target, name), at, ends))

    def _counted(self, real, at, ends):
        def call(*args, **kwargs):
            here = self.calls
            self.calls += 1
            if here == at and ends == "refused":
                raise OSError(28, NO_ROOM)
            if here >= at and ends == "killed":
                raise Killed
            return real(*args, **kwargs)

        return call


def is_whole(path):
    return verify(path) == []


@pytest.mark.parametrize("ends, step", [("killed", 20), ("killed", 40), ("refused", 20)], ids=str)
def test_at_each_call_to_the_disk_there_is_a_whole_checkpoint(tmp_path, monkeypatch, ends, step):
    """While step 20 is sealed again, or step 40 takes its place. keep=1: there is no other one to
    go back to.
    """
    monkeypatch.setattr(os, "fsync", lambda file: None)  # no power is cut here

    def seal(leader, step, value):
        leader.save_part(step, "trainer", 0, {"w": torch.tensor([value]), "value": value})
        leader.pump()

    values = set()
    for at in range(1000):
        run_dir = tmp_path / str(at)
        seal(lone(run_dir, ("trainer", 0)), 20, 1.0)
        leader = lone(run_dir, ("trainer", 0))
        with monkeypatch.context() as patch:
            disk = Disk(patch, at, ends)
            with contextlib.suppress(Killed):
                seal(leader, step, 2.0)
        latest = latest_in(leader.folder)
        is_between = step == 20 and not (leader.folder / "step_20").exists()
        assert latest is None or is_whole(latest) or is_between, at
        found = find("auto", run_dir)
        assert latest_in(leader.folder) == found, at
        assert all(verify(path) == [] for path in leader.folder.glob("step_??")), at
        part = load_part(found, "trainer", 0)
        assert part["w"].item() == part["value"]
        assert found.name == ("step_20" if part["value"] == 1.0 else f"step_{step}")
        values.add(part["value"])
        restarted = lone(run_dir, ("trainer", 0))
        assert find("auto", run_dir) == found and not list(leader.folder.glob("step_*.*"))
        seal(restarted, 60, 3.0)
        assert names_in(leader) == {"step_60", "latest"}, at
        if disk.calls <= at:
            break
    assert at > 10 and values == {1.0, 2.0}


# --- damage ---


def damaged_in_every_way(path):
    """(file, what is done to it, the doing)."""
    for file in files_of(path):
        yield file.relative_to(path), "truncated", lambda f: f.write_bytes(f.read_bytes()[:-1])
        yield file.relative_to(path), "absent", lambda f: f.unlink()
        yield file.relative_to(path), "empty", lambda f: f.write_bytes(b"")
        for at in (0, file.stat().st_size // 2, file.stat().st_size - 1):
            yield file.relative_to(path), f"byte {at} flipped", partial(flip, at=at)


def flip(file, at):
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_every_damage_to_every_file_is_found_named_and_passed_over(tmp_path, caplog):
    path = save(*checkpointers(tmp_path), 20, 40)
    whole = tmp_path / "whole"
    shutil.copytree(path, whole)
    cases = list(damaged_in_every_way(whole))
    # Two files of each trainer, one of the controller, two of hf, the manifest.
    assert len(cases) == 6 * 8
    for name, how, damage in cases:
        shutil.rmtree(path)
        shutil.copytree(whole, path)
        assert verify(path) == []
        damage(path / name)
        assert any(problem.startswith(name.as_posix()) for problem in verify(path)), (name, how)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert find("auto", tmp_path).name == "step_20", (name, how)
        assert str(path) in caplog.text and name.as_posix() in caplog.text


@pytest.mark.parametrize(
    "was, now",
    [('"step": 20', '"step": 21'), ('"trainer": [', '"critic": ['), ("sha256", "digest")],
)
def test_what_the_manifest_says_of_itself_is_checked(tmp_path, was, now):
    path = save(*checkpointers(tmp_path), 20).rename(tmp_path / "copied")  # whose name says no step
    manifest = path / "manifest.json"
    assert was in manifest.read_text()
    manifest.write_text(manifest.read_text().replace(was, now, 1))
    assert verify(path) == ["manifest.json: its contents have changed (SHA-256)"]


def test_a_renamed_checkpoint_is_damaged_and_without_a_whole_one_nothing_is_resumed(tmp_path):
    path = save(*checkpointers(tmp_path), 20)
    moved = path.rename(path.with_name("step_99"))
    assert verify(moved) == ["manifest.json: is of step 20"]
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        find("auto", tmp_path)


def test_the_one_asked_for_is_used_or_refused_and_never_another(tmp_path):
    path = save(*checkpointers(tmp_path), 20, 40)
    older = path.with_name("step_20")
    assert find(str(older), tmp_path) == older
    (older / "hf" / "config.json").write_text("{ }")
    with pytest.raises(CheckpointError, match="hf/config.json: 3 bytes, 2 were written"):
        find(str(older), tmp_path)
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        find(str(tmp_path / "step_1"), tmp_path)
    with pytest.raises(CheckpointError, match="was never finished, or is no checkpoint"):
        find(str(tmp_path), tmp_path)


def test_another_format_is_refused_and_not_passed_over(tmp_path):
    older, path = (save(*checkpointers(tmp_path), step) for step in (20, 40))
    body = manifest.read_manifest(path)
    assert body["format"] == 1
    body["format"] = 4
    text = json.dumps({**body, "sha256": manifest.digest_of(body)})
    (path / manifest.MANIFEST).write_text(text)
    for resume in ("auto", str(path)):
        with pytest.raises(OtherFormat) as refused:
            find(resume, tmp_path)
        assert str(refused.value) == (
            f"{path / manifest.MANIFEST}: format 4, where this commit of llamarl reads format 1; "
            "finish the run with the commit that began it"
        )
    assert find(str(older), tmp_path) == older


def test_a_part_that_cannot_be_read_is_named(tmp_path):
    path = save(*checkpointers(tmp_path), 20)
    (path / "trainer.rank1.safetensors").write_bytes(b"no tensors")
    part = load_part(path, "trainer", 1)
    with pytest.raises(CheckpointError, match="trainer.rank1.safetensors: cannot be read"):
        part["no JSON value"]
    (path / "trainer.rank1.json").write_text("no values")
    with pytest.raises(CheckpointError, match="trainer.rank1: cannot be read"):
        load_part(path, "trainer", 1)


# --- keeping ---


def test_the_newest_valid_ones_are_kept(tmp_path):
    leader, other = checkpointers(tmp_path, keep=2)
    save(leader, other, 20, 40, 60)
    assert names_in(leader) == {"step_40", "step_60", "latest"}
    (leader.folder / "step_60" / "manifest.json").unlink()
    save(leader, other, 80)  # a damaged one does not count among those kept
    assert names_in(leader) == {"step_40", "step_80", "latest"}


def test_a_run_resumed_from_before_forgets_the_steps_after(tmp_path):
    save(*checkpointers(tmp_path, keep=3), 20, 40, 60)
    leader, other = checkpointers(tmp_path, keep=3)  # resumed from step_20, at another rhythm
    save(leader, other, 30)
    assert names_in(leader) == {"step_20", "step_30", "latest"}
    assert find("auto", tmp_path).name == "step_30"


def test_what_cannot_be_deleted_is_named_and_tried_again_and_ends_nothing(
    tmp_path, monkeypatch, caplog
):
    leader, other = checkpointers(tmp_path, keep=1)
    remove = shutil.rmtree

    def protected(path, *args, **kwargs):
        if "step_20" in str(path):
            raise PermissionError(1, "Operation not permitted", "config.json")
        remove(path, *args, **kwargs)

    save(leader, other, 20)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", protected)
        save(leader, other, 40)
        assert "step_20.old cannot be deleted" in caplog.text
        assert "may be deleted by hand" in caplog.text
        leader, other = checkpointers(tmp_path, keep=1)  # a resume
        save(leader, other, 60)
        assert names_in(leader) == {"step_20.old", "step_60", "latest"}
    save(leader, other, 80)
    assert names_in(leader) == {"step_80", "latest"}


@pytest.mark.parametrize("name, unread", [("verify", "step_30"), ("_newest_first", "")])
def test_an_old_checkpoint_that_cannot_be_read_is_named_and_tried_again_and_ends_nothing(
    tmp_path, monkeypatch, caplog, name, unread
):
    leader, other = checkpointers(tmp_path, keep=1)
    save(leader, other, 20)
    save(leader, other, 40)
    (leader.folder / "step_40").rename(leader.folder / "step_30")  # damaged, so it is looked at
    usual = getattr(checkpoint, name)

    def refuse(path, *args, **kwargs):
        if path == leader.folder / unread:
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, *args, **kwargs)

    leader._keep = 2
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, name, refuse)
        save(leader, other, 60)
    assert leader.sealed(60) and leader.newest_sealed == 60 and leader.failed == {}
    said = f"{leader.folder / unread}: cannot be read ([Errno 13] Permission denied"
    assert said in caplog.text
    assert names_in(leader) == {"step_30", "step_60", "latest"}
    save(leader, other, 80)
    assert names_in(leader) == {"step_60", "step_80", "latest"}


# --- latest ---


def test_transformers_loads_what_latest_names_in_a_run_that_was_moved(tmp_path):
    leader, other = checkpointers(tmp_path / "run")
    for at in write(leader, other, 20):
        hf = leader.begin(20) / "hf"
        if hf.exists():
            shutil.copytree(tiny_directory(), hf, dirs_exist_ok=True)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    model = AutoModelForCausalLM.from_pretrained(moved / "checkpoints" / "latest" / "hf")
    assert model.num_parameters() > 1_000_000
    assert find(str(moved / "checkpoints" / "latest"), None).name == "step_20"


def no_links(*_, **__):
    raise OSError(1, "Operation not permitted")


def test_without_links_latest_is_a_text_and_a_later_run_that_can_makes_it_a_link(
    tmp_path, monkeypatch, caplog
):
    leader, other = checkpointers(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "symlink", no_links)
        save(leader, other, 20, 40)
    latest = leader.folder / "latest"
    assert latest.read_text() == "step_40\n" and not latest.is_symlink()
    assert latest_in(leader.folder) == leader.folder / "step_40"
    said = f"{latest}: cannot be a symbolic link here ([Errno 1] Operation not permitted"
    assert caplog.text.count(said) == 1 and "step_N/hf" in caplog.text
    find("auto", tmp_path)
    assert os.readlink(latest) == "step_40"


def test_latest_never_names_what_was_pruned_where_it_cannot_be_replaced(
    tmp_path, monkeypatch, caplog
):
    leader, other = checkpointers(tmp_path, keep=1)
    save(leader, other, 20)
    with monkeypatch.context() as patch:
        patch.setattr(latest_file, "put_in_place", no_links)
        save(leader, other, 40)
    assert names_in(leader) == {"step_40", "latest.tmp"}
    assert f"the newest checkpoint is {leader.folder / 'step_40'}" in caplog.text
    save(leader, other, 60)
    assert names_in(leader) == {"step_60", "latest"}


def test_a_copy_that_followed_the_link_becomes_a_link_again(tmp_path):
    save(*checkpointers(tmp_path / "run"), 20)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    latest = tmp_path / "copy" / "checkpoints" / "latest"
    assert latest.is_dir() and not latest.is_symlink()
    assert latest_in(latest.parent) == latest
    point_to(latest.with_name("step_20"))
    assert os.readlink(latest) == "step_20"
    assert {path.name for path in latest.parent.iterdir()} == {"step_20", "latest"}


# --- a disk that refuses ---


def check_given_up(leader, step, said):
    """That step is not sealed, and nothing of it is left; the one before is the newest; the next
    one is sealed.
    """
    assert said in leader.failed[step] and "Make room there" in leader.failed[step]
    assert not leader.sealed(step) and names_in(leader) == {"step_20", "latest"}
    assert find("auto", leader.folder.parent).name == "step_20"


def test_a_disk_without_room_is_seen_before_anything_is_written_and_the_next_checkpoint_is_tried(
    tmp_path, monkeypatch, caplog
):
    leader, other = checkpointers(tmp_path)
    save(leader, other, 20)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
        patch.setattr("safetensors.torch.save_file", lambda *_: pytest.fail("written"))
        save(leader, other, 40)
    check_given_up(leader, 40, f"trainer.rank1: [Errno 28] {NO_ROOM}")
    assert "and 10 bytes are free" in caplog.text and "Training goes on" in caplog.text
    assert save(leader, other, 60) == find("auto", tmp_path)


@pytest.mark.parametrize(
    "call, error",
    [
        ("safetensors.torch.save_file", SafetensorError(f"{NO_ROOM} (os error 28)")),
        ("llamarl.checkpoint.checkpointer._write", OSError(28, NO_ROOM)),
    ],
)
def test_a_disk_that_fails_meanwhile_leaves_nothing_of_that_checkpoint(
    tmp_path, monkeypatch, call, error
):
    leader, other = checkpointers(tmp_path)
    save(leader, other, 20)
    with monkeypatch.context() as patch:
        patch.setattr(call, Mock(side_effect=error))
        save(leader, other, 40)
    check_given_up(leader, 40, NO_ROOM)
    assert save(leader, other, 60) == find("auto", tmp_path)


# --- without an executor that is gone ---


def test_parts_that_are_waived_are_not_waited_for_and_their_loss_is_on_record(tmp_path):
    expected = [("generator", 0), ("generator", 1), ("trainer", 0)]
    leader = lone(tmp_path, *expected, optional=["generator"])
    leader.save_part(5, "trainer", 0, STATE)
    leader.save_part(5, "generator", 1, {"in_work": [7]})
    leader.pump()
    assert leader.missing(5) == ["generator.rank0"] and not leader.sealed(5)
    leader._control.loss = RuntimeError("a generator is gone")
    leader.pump()
    path = leader.folder / "step_5"
    assert leader.sealed(5) and verify(path) == []
    assert (ranks_of(path, "generator"), ranks_of(path, "trainer")) == ([1], [0])
    assert in_work(path) == {7}
