"""Checkpoints: the state of all executors at a step boundary, on disk whole or not at all.

    RUN_DIR/checkpoints/
        latest -> step_20                the newest one that was sealed (latest.py)
        step_20/
            trainer.rank0.safetensors    tensors of one executor on one of its ranks
            trainer.rank0.json           its other state
            controller.rank0.json        ...
            hf/, hf_ema/                 directories that transformers loads: the weights, and their
                                         average if kept
            adapter/                     their adapters, if they have any, as peft loads them
            manifest.json                bytes and SHA-256 of every file; written last
        step_40.tmp/                     being written
        step_10.old/                     being deleted

Each rank writes its parts into step_N.tmp and tells the leader their sizes and hashes. When all
expected parts are in, the leader writes the manifest and renames the directory. So a directory with
a manifest is a whole checkpoint, and its files can be verified. All ranks must see the same
run_dir, perhaps with a delay: the leader waits until it sees all files before it seals. All files
are safetensors or JSON, which run no code when they are read.

A resumed run may seal a step again. It renames the old directory away before the new one takes its
name. After a kill between the two renames step_N.tmp is whole, and `find` renames it.

While a rank writes, hashes and syncs its part, `progress` reports how far it is, so that others
wait for it as long as it advances (Control.saving).

A full or failing disk ends no run: the checkpoint is given up as a whole, and the log says so. Only
the run's last checkpoint waits for room (room.py). A directory that cannot be deleted is logged,
and tried again with the next checkpoint.

    message      from -> to           handled         meaning
    checkpoint   any rank -> leader   by its pump()   a part of step n is on disk: its files, sizes
                                                      and hashes; or why it is not
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from llamarl.checkpoint.latest import LATEST, latest_in, point_to
from llamarl.checkpoint.manifest import (
    MANIFEST,
    Files,
    Sight,
    digest_of,
    read_manifest,
    unseen,
)
from llamarl.checkpoint.parts import stem_of
from llamarl.checkpoint.room import DiskRoom
from llamarl.comm.control import Control
from llamarl.disk.files import FORMAT
from llamarl.disk.space import (
    aside,
    check_room,
    discard,
    named_if_unread,
    shown_free,
)
from llamarl.errors import CheckpointError, OtherFormat
from llamarl.executor import State
from llamarl.words.texts import first_of

TOPIC = "checkpoint"
_SHOWN = 10  # damaged files that a message names
_CHUNK_BYTES = 1 << 20  # read at once for a digest
_SYNC_BYTES = 1 << 26  # synced at once
_HASHERS = 4  # files of a part that are hashed at once
# Flags of sync_file_range(2): start writing a range, and wait until it is written.
_WRITE_AND_WAIT = 1 | 2 | 4
_SEALED = re.compile(r"step_(\d+)")
_LEFTOVER = re.compile(r"step_(\d+)\.(tmp|old|tmp\.old)(\.\d+)?")
_WRITTEN = re.compile(r"step_(\d+)\.tmp")

log = logging.getLogger(__name__)


# --- Reading ---


def verify(
    path: Path,
    *,
    hashes: bool = True,
    share: tuple[int, int] = (0, 1),
    progress: Callable[[], None] = lambda: None,
) -> list[str]:
    """Return the problems of a checkpoint, a line a file; [] if there are none.

    Without `hashes` only names and sizes are compared. share: (i, n) for the i-th of n processes
    that share the files, each with about as many bytes. progress is called while a file is read.
    OtherFormat if this commit does not read it.
    """
    try:
        manifest = read_manifest(path)
    except OtherFormat:
        raise
    except CheckpointError as error:
        return [str(error)]
    files = manifest["files"]
    # The largest first, dealt in turn: no share has more than one file's bytes over another.
    by_size = sorted(files, key=lambda name: (-files[name][0], name))
    index, count = share
    mine = set(by_size[index::count])
    problems = []
    named = _SEALED.fullmatch(path.name)
    if named and int(named[1]) != manifest["step"]:
        problems.append(f"{MANIFEST}: is of step {manifest['step']}")
    for name, (size, digest) in files.items():
        file = path / name
        if name not in mine:
            continue
        if not file.is_file():
            problems.append(f"{name}: absent")
        elif file.stat().st_size != size:
            problems.append(f"{name}: {file.stat().st_size} bytes, {size} were written")
        elif hashes and _sha256(file, progress) != digest:
            problems.append(f"{name}: its contents have changed (SHA-256)")
    return problems


def find(
    resume: str, run_dir: str | Path | None, check: Callable[[Path], list[str]] = verify
) -> Path | None:
    """Return the checkpoint to go on from.

    For "auto" that is the newest valid one of run_dir, to which `latest` is pointed, or None
    without one; else `resume`. With "auto" the caller must hold the directory's lock, because
    `find` changes names in it. Damaged ones are passed over with a warning. check returns the
    problems of one. CheckpointError if all are damaged, or the given one is; OtherFormat if this
    commit does not read it; FileNotFoundError if it does not exist.
    """
    if resume != "auto":
        path = Path(resume)
        if path.name == LATEST:
            path = latest_in(path.parent) or path
        if not path.is_dir():
            raise FileNotFoundError(
                f"{path}: no such checkpoint; give a step_N directory, or resume=auto with the "
                "run's run_dir"
            )
        problems = check(path)
        if problems:
            remedy = "Use another step_N, or resume=auto for the newest valid one"
            raise CheckpointError(f"{damage(path, problems)}\n{remedy}")
        return path
    assert run_dir is not None, "a run that goes on has a directory"
    folder = Path(run_dir) / "checkpoints"
    name_whole_ones(folder)
    candidates = _newest_first(folder, _SEALED)
    for _, path in candidates:
        problems = check(path)
        if not problems:
            point_to(path)
            return path
        log.warning("%s\nIt is passed over", damage(path, problems))
    if candidates:
        raise CheckpointError(
            f"{run_dir}: no checkpoint is whole (see above). To start over, choose another run_dir"
        )
    return None


def name_whole_ones(folder: Path) -> None:
    """Rename step_N.tmp to step_N where a kill came between its manifest and its renaming.

    The caller holds the directory's lock. OSError if the disk refuses.
    """
    for step, path in _newest_first(folder, _WRITTEN):
        final = folder / f"step_{step}"
        if not final.exists() and not verify(path, hashes=False):
            path.rename(final)
            log.warning("%s: sealed, but a kill had kept it from its name; it has it now", final)


# --- Writing ---


class Checkpointer:
    """Writes a rank's parts of checkpoints. The leader's also seals and prunes checkpoints.

    expected: the parts of a whole checkpoint, (executor, place of a rank within it); extra_parts:
    those of `register_files`. optional: executors whose parts may be absent after a loss
    (llamarl.comm.control). keep: how many of the newest valid checkpoints stay, at least one.
    timeout_s: how long the leader waits to see files of other hosts. tell(step, arrived, expected)
    is called on the leader for each part that arrives.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        keep: int,
        control: Control,
        expected: Iterable[tuple[str, int]],
        extra_parts: Iterable[str] = (),
        optional: Iterable[str] = (),
        timeout_s: float = 600.0,
        tell: Callable[[int, int, int], None] = lambda step, come, expected: None,
    ):
        self._tell = tell
        self.folder = Path(run_dir) / "checkpoints"
        self._keep = keep
        self._control = control
        self._expected = sorted(expected)
        self._extra_parts = tuple(extra_parts)
        self._optional = frozenset(optional)
        # Step -> part -> its "files", file -> [bytes, sha256]; or the "error", why it has none.
        self._arrived: dict[int, dict[str, dict]] = {}
        self._sight = Sight(timeout_s)
        self.failed: dict[int, str] = {}  # on the leader: step -> why it was given up
        self.newest_sealed: int | None = None  # on the leader: the newest step of this process
        # The part that this rank writes: the folder of its step, and a pattern of its files there.
        self._under_way: tuple[Path, str] | None = None
        self._num_chunks = 0  # hashed or synced so far, and looks at a full disk
        self.room = DiskRoom(self.folder, control, self._got_on)
        if control.is_leader:
            name_whole_ones(self.folder)
            for _, path in _newest_first(self.folder, _LEFTOVER):
                discard(path)

    def progress(self) -> tuple[int, int]:
        """Return this rank's progress with its part: chunks hashed or synced, and bytes written.
        Any thread may call it.
        """
        num_bytes = 0
        if self._under_way is not None:
            folder, pattern = self._under_way
            for file in folder.glob(pattern):
                try:
                    status = file.stat()
                except OSError:
                    continue  # renamed meanwhile
                # A file may have its size before its contents: its blocks show the writing.
                num_bytes += status.st_size + 512 * status.st_blocks
        return self._num_chunks, num_bytes

    def _got_on(self) -> None:
        self._num_chunks += 1

    def begin(self, step: int) -> Path:
        """Return the directory that the parts of `step` are written to.

        Any rank may call it, any number of times.
        """
        if self._control.is_leader:
            self._arrived.setdefault(step, {})
            self.failed.pop(step, None)
        path = self.folder / f"step_{step}.tmp"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def save_part(self, step: int, name: str, rank: int, state: State) -> None:
        """Write the state of an executor's rank to disk, durably, and tell the leader. If the disk
        refuses, tell the leader why. Values are tensors (of this rank, of any device) or JSON;
        TypeError names the key of anything else.
        """
        tensors, values = _split(name, state)
        text = json.dumps(values)
        num_bytes = len(text) + sum(tensor.nbytes for tensor in tensors.values())
        part = stem_of(name, rank)

        def write() -> None:
            folder = self.begin(step)
            for torn in folder.glob(f"{part}.*"):  # by a disk that became full
                torn.unlink()
            check_room(folder, num_bytes)
            self._under_way = (folder, f"{part}.*")
            files = [folder / f"{part}.json"]
            files[0].write_text(text)
            if tensors:
                files.append(folder / f"{part}.safetensors")
                safetensors.torch.save_file(tensors, files[1])
            self.register_files(step, part, files)

        with self.writing(step, part, num_bytes):
            self.room.until_there(step, write)

    @contextmanager
    def writing(self, step: int, part: str, num_bytes: int) -> Iterator[None]:
        """Report an error of the disk within the block to the leader as the part's error; `step` is
        then not sealed. num_bytes: the part's size, for the message.
        """
        try:
            yield
        except (OSError, SafetensorError) as error:
            free = shown_free(self.folder)
            why = f"{part}: {error}; it needs {num_bytes:,} bytes, and {free}"
            self._tell_leader({"step": step, "part": part, "error": why})

    def _tell_leader(self, message: dict) -> None:
        self._control.post(self._control.leader, TOPIC, message)

    def place_for(self, step: int, part: str, num_bytes: int) -> Path | None:
        """Return `begin(step)`; None, and tell the leader why, if the disk has no room there."""
        with self.writing(step, part, num_bytes):
            folder = self.begin(step)
            self.room.until_there(step, lambda: check_room(folder, num_bytes))
            self._under_way = (folder, f"{part}*/*")
            return folder
        return None

    def register_files(self, step: int, part: str, files: list[Path]) -> None:
        """Sync and hash files below `begin(step)`, and report them to the leader as a part."""
        folder = self.begin(step)
        written: Files = {}
        for file in files:
            _sync(file, self._got_on)
        with ThreadPoolExecutor(_HASHERS) as pool:
            digests = list(pool.map(partial(_sha256, progress=self._got_on), files))
        for file, digest in zip(files, digests):
            name = file.relative_to(folder).as_posix()
            written[name] = [file.stat().st_size, digest]
        for directory in {file.parent for file in files}:
            _sync(directory)
        self._tell_leader({"step": step, "part": part, "files": written})

    def pump(self) -> None:
        """On the leader: read the reports, and seal each whole step. Elsewhere do nothing."""
        for _, message in self._control.take(TOPIC):
            parts = self._arrived.setdefault(message["step"], {})
            parts[message["part"]] = message
            step = message["step"]
            self._tell(step, len(parts), len(parts) + len(self.missing(step)))
        for step in list(self._arrived):
            if not self.missing(step) and self._is_seen(step):
                self._settle(step)

    def missing(self, step: int) -> list[str]:
        """On the leader: return the required parts of `step` that have not arrived."""
        arrived = self._arrived.get(step, {})
        # After a loss some of the optional parts will not arrive.
        waived = frozenset() if self._control.loss is None else self._optional
        needed = [stem_of(name, rank) for name, rank in self._expected if name not in waived]
        needed += self._extra_parts
        return [part for part in needed if part not in arrived]

    def sealed(self, step: int) -> bool:
        """Whether the checkpoint of `step` is whole and in place (and not being written again)."""
        return step not in self._arrived and (self.folder / f"step_{step}" / MANIFEST).is_file()

    def unseen(self, step: int) -> list[str]:
        """On the leader: return the files of `step` that were reported and are not seen here."""
        return unseen(self.folder / f"step_{step}.tmp", self._files(step))

    def _files(self, step: int) -> Files:
        files: Files = {}
        for part in self._arrived.get(step, {}).values():
            files |= part.get("files", {})
        return files

    def _is_seen(self, step: int) -> bool:
        """Whether this host sees all reported files of `step`, or a part reported an error.
        CheckpointError if files do not appear.
        """
        parts = self._arrived[step].values()
        if any("error" in part for part in parts):
            return True
        return self._sight.sees(self.folder / f"step_{step}.tmp", self._files(step))

    def _settle(self, step: int) -> None:
        """Seal a step, or give it up if a part of it could not be written."""
        parts = self._arrived[step].values()
        errors = [part["error"] for part in parts if "error" in part]
        if not errors:
            try:
                self._seal(step)
            except OSError as error:
                if self.room.may_wait(step, error):
                    return  # the next `pump` tries again
                errors = [str(error)]
            else:
                with named_if_unread(self.folder):
                    self._prune(step)
                return
        del self._arrived[step]
        path = self.folder / f"step_{step}.tmp"
        why = (
            f"{path}: the checkpoint of step {step} could not be written: {'; '.join(errors)}. "
            "Make room there, or lower checkpoint.keep"
        )
        self.failed[step] = why
        log.error("%s. Training goes on; the next checkpoint is tried when it is due", why)
        discard(path)

    def _seal(self, step: int) -> None:
        """Write the manifest, rename into place, point `latest` to it.

        OSError if it is not in place.
        """
        writing = self.folder / f"step_{step}.tmp"
        final = self.folder / f"step_{step}"
        arrived = self._arrived[step]
        files = self._files(step)
        parts: dict[str, list[int]] = {}
        for name, rank in self._expected:
            ranks = parts.setdefault(name, [])
            if stem_of(name, rank) in arrived:
                ranks.append(rank)
        body = {"format": FORMAT, "step": step, "parts": parts, "files": files}
        # The manifest vouches for the files; its own digest vouches for it.
        text = json.dumps({**body, "sha256": digest_of(body)}, indent=1)
        _write(writing / MANIFEST, text)
        before: Path | None = None
        if final.exists():  # of a run that was resumed before it, or damaged
            before = aside(final)
            final.rename(before)
        try:
            writing.rename(final)
        except OSError:
            if before is not None:
                before.rename(final)
            raise
        del self._arrived[step]
        self.newest_sealed = step
        point_to(final)

    def _prune(self, newest: int) -> None:
        """Keep the newest valid checkpoints, after step `newest` was sealed.

        Steps are sealed in order. So a sealed later step is one that a resume has abandoned. But
        another rank may have begun a later step_N.tmp already, which stays. Directories that could
        not be deleted or read before are tried again.
        """
        for step, path in _newest_first(self.folder, _LEFTOVER):
            if step <= newest or path.suffix != ".tmp":
                discard(path)
        kept = 0
        for step, path in _newest_first(self.folder, _SEALED):
            if kept == self._keep or step > newest:
                discard(path)
                continue
            with named_if_unread(path):  # an unreadable one stays: it may be valid
                if verify(path, hashes=False):
                    discard(path)
                else:
                    kept += 1


# --- Files ---


def _newest_first(folder: Path, pattern: re.Pattern) -> list[tuple[int, Path]]:
    """Return (step, directory) of the directories with such names, the newest step first."""
    found = []
    for path in folder.glob("step_*"):
        name = pattern.fullmatch(path.name)
        if name and path.is_dir():
            found.append((int(name[1]), path))
    return sorted(found, reverse=True)


def damage(path: Path, problems: list[str]) -> str:
    """Format what `verify` found, for people."""
    return "\n  ".join([f"checkpoint {path} is damaged:", *first_of(problems, _SHOWN)])


def _split(name: str, state: State) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Split a state into (tensors, ready for safetensors; JSON values)."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, object] = {}
    storages = set()
    for key, value in state.items():
        if isinstance(value, Tensor):
            tensor = value.detach().cpu().contiguous()
            storage = tensor.untyped_storage().data_ptr()
            # Safetensors refuses tensors that share memory (tied weights, views).
            tensors[key] = tensor.clone() if storage in storages else tensor
            storages.add(storage)
        else:
            _check_json(f"{name}: {key}", value)
            values[key] = value
    return tensors, values


def _check_json(where: str, value: object) -> None:
    """Raise TypeError for what JSON cannot hold or would change: an integer key becomes a text."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"state of {where}: key {key!r} is a {type(key).__name__}; JSON keys are texts"
                )
            _check_json(f"{where}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_json(f"{where}[]", item)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(
            f"state of {where}: {type(value).__name__} is neither a tensor (at the top) nor a JSON "
            "value"
        )


def _sha256(file: Path, progress: Callable[[], None] = lambda: None) -> str:
    """Return the SHA-256 of a file. progress is called after every _CHUNK_BYTES."""
    digest = hashlib.sha256()
    chunk = bytearray(_CHUNK_BYTES)
    with file.open("rb") as stream:
        while size := stream.readinto(chunk):
            digest.update(memoryview(chunk)[:size])
            progress()
    return digest.hexdigest()


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    _sync(file)


def _sync(path: Path, progress: Callable[[], None] = lambda: None) -> None:
    """Sync a file's contents, or a directory's entries, to the disk. On Linux progress is called
    after every _SYNC_BYTES of a file.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync_in_chunks(descriptor, progress)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_in_chunks(descriptor: int, progress: Callable[[], None]) -> None:
    """Put most of a file on disk, so that the fsync after it is short. Errors are ignored: only
    that fsync says whether all is there.
    """
    sync_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it
    status = os.fstat(descriptor)
    if sync_range is None or not stat.S_ISREG(status.st_mode):
        return
    for begin in range(0, status.st_size, _SYNC_BYTES):
        sync_range(
            ctypes.c_int(descriptor),
            ctypes.c_int64(begin),
            ctypes.c_int64(_SYNC_BYTES),
            ctypes.c_uint(_WRITE_AND_WAIT),
        )
        progress()
