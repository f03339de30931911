"""Checkpoints: every station's state at one step boundary, on disk as a whole or not at all.

    RUN_DIR/checkpoints/latest                            "step_20": the newest one that was sealed
                        step_20/trainer.rank0.safetensors tensors of one executor on one of its ranks
                                trainer.rank0.json        its other state
                                controller.rank0.json     ...
                                hf/, hf_ema/              directories that transformers loads: the weights, and their average if kept
                                manifest.json             bytes and SHA-256 of every file; written last
                        step_40.tmp/                      being written

Each rank writes its parts into step_N.tmp and tells the leader their sizes and hashes. When all expected parts are in,
the leader writes the manifest and renames the directory into place: a checkpoint with a manifest is complete, and what
it says about itself can be checked. All ranks must see the same run_dir. No pickle: safetensors and JSON only.

    message      from -> to            handled          meaning
    checkpoint   any rank -> leader    by its pump()    a part of step n is on disk: its files, sizes and hashes
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Iterable, Mapping

if TYPE_CHECKING:
    from torch import Tensor

    from llamarl.control import Control

FORMAT = 3
MANIFEST, LATEST, TOPIC = "manifest.json", "latest", "checkpoint"
_CHUNK_BYTES = 1 << 20  # read at once for a digest
_SEALED = re.compile(r"step_(\d+)")
_LEFTOVER = re.compile(r"step_\d+\.(tmp|old)")

log = logging.getLogger(__name__)

State = Mapping[str, "Tensor | int | float | str | list | dict | None"]


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or used; the message names the file and what to do."""


# --- Reading ---


def find(resume: str, run_dir: str | Path, check: Callable[[Path], list[str]] | None = None) -> Path | None:
    """The checkpoint to go on from: for "auto" the newest valid one of run_dir (None if it has none at all), else `resume`.

    Damaged ones are named in a warning and passed over. CheckpointError if all are damaged, or the one asked for is;
    FileNotFoundError if that does not exist. check: says what is wrong with one, as `verify`, which it is by default.
    """
    check = check or verify
    if resume != "auto":
        path = Path(resume)
        if not path.is_dir():
            raise FileNotFoundError(f"{path}: no such checkpoint; give a step_N directory, or resume=auto with the run's run_dir")
        if problems := check(path):
            raise CheckpointError(_damage(path, problems) + "\nUse another step_N, or resume=auto for the newest valid one")
        return path
    candidates = sorted(_steps(Path(run_dir) / "checkpoints").items(), reverse=True)
    for _, path in candidates:
        problems = check(path)
        if not problems:
            return path
        log.warning("%s\nIt is passed over", _damage(path, problems))
    if candidates:
        raise CheckpointError(f"{run_dir}: no checkpoint is whole (see above). To start over, choose another run_dir")
    return None


def verify(
    path: str | Path,
    *,
    hashes: bool = True,
    share: tuple[int, int] = (0, 1),
    progress: Callable[[], None] = lambda: None,
) -> list[str]:
    """What is wrong with a checkpoint, a line a file; [] if nothing. Without `hashes` only names and sizes are compared.

    share: (i, n) for the i-th of n processes that verify it together, each some of the files and about as many bytes. progress is
    called while a file is read.
    """
    path = Path(path)
    try:
        manifest = _read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    named = _SEALED.fullmatch(path.name)
    if named and int(named[1]) != manifest["step"]:
        problems.append(f"{MANIFEST}: is of step {manifest['step']}")
    for name in _share(manifest["files"], *share):
        size, digest = manifest["files"][name]
        file = path / name
        if not file.is_file():
            problems.append(f"{name}: absent")
        elif file.stat().st_size != size:
            problems.append(f"{name}: {file.stat().st_size} bytes, {size} were written")
        elif hashes and _sha256(file, progress) != digest:
            problems.append(f"{name}: its contents have changed (SHA-256)")
    return problems


def ranks_of(path: str | Path, name: str) -> list[int]:
    """The ranks (places within the executor) that saved a part of `name`. CheckpointError if none did."""
    parts = _read_manifest(Path(path))["parts"]
    if name not in parts:
        raise CheckpointError(f"{path}: holds no state of {name}, only of {', '.join(parts)}; it was made by another recipe")
    return parts[name]


def load_part(path: str | Path, name: str, rank: int) -> dict:
    """What `save_part` was given, on the CPU. CheckpointError naming the file if it is absent or cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    stem, state = Path(path) / _stem(name, rank), _load_values(path, name, rank)
    tensors_file = Path(f"{stem}.safetensors")
    try:
        if tensors_file.name in _read_manifest(Path(path))["files"]:
            state.update(load_file(tensors_file))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{stem}: cannot be read: {error}") from error
    return state


def _load_values(path: str | Path, name: str, rank: int) -> dict:
    """What `save_part` was given but tensors."""
    stem = Path(path) / _stem(name, rank)
    try:
        return json.loads(Path(f"{stem}.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{stem}: cannot be read: {error}") from error


def in_work(path: str | Path) -> set[int]:
    """The tickets whose unfinished completions some station saved: those under `in_work` in its part."""
    parts = [(name, rank) for name, ranks in _read_manifest(Path(path))["parts"].items() for rank in ranks]
    return {ticket for part in parts for ticket in _load_values(path, *part).get("in_work", [])}


# --- Writing ---


class Checkpointer:
    """A rank's hand in writing checkpoints; the leader's also seals and prunes them.

    expected: the parts of a whole checkpoint, (executor, place of a rank within it); extra_parts: those of
    `register_files`. keep: how many of the newest valid ones stay.
    """

    ranks_of, load_part, in_work = staticmethod(ranks_of), staticmethod(load_part), staticmethod(in_work)

    def __init__(
        self,
        run_dir: str | Path,
        *,
        keep: int,
        control: Control,
        expected: Iterable[tuple[str, int]],
        extra_parts: Iterable[str] = (),
    ):
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the newest checkpoint must stay")
        self.folder = Path(run_dir) / "checkpoints"
        self._keep, self._control = keep, control
        self._expected, self._extra_parts = sorted(expected), tuple(extra_parts)
        self._arrived: dict[int, dict[str, dict[str, list]]] = {}  # step -> part -> file -> [bytes, sha256]
        self._own: set[int] = set()  # steps sealed by this process
        if self._leads:
            for path in _matching(self.folder, _LEFTOVER):
                shutil.rmtree(path)

    def begin(self, step: int) -> Path:
        """The directory that the parts of `step` are written to. Any rank may call it, any number of times."""
        path = self.folder / f"step_{step}.tmp"
        path.mkdir(parents=True, exist_ok=True)
        if self._leads:
            self._arrived.setdefault(step, {})
        return path

    def save_part(self, step: int, name: str, rank: int, state: State) -> None:
        """Write one executor's state of one rank, to disk for good, and tell the leader.

        Values are tensors (of this rank, of any device) or JSON. TypeError, naming the key, for anything else.
        """
        stem = self.begin(step) / _stem(name, rank)
        tensors, values = _split(name, state)
        files = [Path(f"{stem}.json")]
        files[0].write_text(json.dumps(values))
        if tensors:
            from safetensors.torch import save_file

            files.append(Path(f"{stem}.safetensors"))
            save_file(tensors, files[1])
        self._report(step, _stem(name, rank), files)

    def register_files(self, step: int, part: str, files: Iterable[Path]) -> None:
        """Make files that the caller wrote below `begin(step)` the extra part `part`."""
        if part not in self._extra_parts:
            raise ValueError(f"{part} is not among extra_parts {self._extra_parts}")
        self._report(step, part, list(files))

    def pump(self) -> None:
        """On the leader: take in what was reported, and seal each step whose parts are all there. Elsewhere nothing."""
        if not self._leads:
            return
        for _, message in self._control.take(TOPIC):
            step = message["step"]
            self._arrived.setdefault(step, {})[message["part"]] = message["files"]
            if not self.missing(step):
                self._seal(step)

    def missing(self, step: int) -> list[str]:
        """On the leader: the parts of `step` that have not come."""
        arrived = self._arrived.get(step, {})
        return [part for part in (*(_stem(*e) for e in self._expected), *self._extra_parts) if part not in arrived]

    def sealed(self, step: int) -> bool:
        """Whether the checkpoint of `step` is whole and in place (and not being written again)."""
        return step not in self._arrived and (self.folder / f"step_{step}" / MANIFEST).is_file()

    @property
    def _leads(self) -> bool:
        return self._control.rank == self._control.leader

    def _report(self, step: int, part: str, files: list[Path]) -> None:
        folder, written = self.begin(step), {}
        for file in files:
            _sync(file)
            written[file.relative_to(folder).as_posix()] = [file.stat().st_size, _sha256(file)]
        for directory in {file.parent for file in files}:
            _sync(directory)
        self._control.post(self._control.leader, TOPIC, {"step": step, "part": part, "files": written})

    def _seal(self, step: int) -> None:
        """Write the manifest, rename into place, point `latest` to it, prune."""
        writing, final, old = (self.folder / f"step_{step}{end}" for end in (".tmp", "", ".old"))
        files = {name: entry for part in self._arrived[step].values() for name, entry in part.items()}
        absent = [name for name in files if not (writing / name).is_file()]
        if absent:
            unseen = ", ".join(absent)
            raise CheckpointError(f"{writing}: the leader does not see {unseen}; put run_dir where all hosts see the same files")
        parts: dict[str, list[int]] = {}
        for name, rank in self._expected:
            parts.setdefault(name, []).append(rank)
        _write(writing / MANIFEST, _manifest_text({"format": FORMAT, "step": step, "parts": parts, "files": files}))
        if final.exists():  # of a run that was resumed before it, or damaged
            final.rename(old)
        writing.rename(final)
        _sync(self.folder)
        _write(self.folder / f"{LATEST}.tmp", f"{final.name}\n")
        os.replace(self.folder / f"{LATEST}.tmp", self.folder / LATEST)
        _sync(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        del self._arrived[step]
        self._own.add(step)
        self._prune(step)

    def _prune(self, newest: int) -> None:
        """Keep the newest valid ones. Later steps of an earlier process are a future that a resume has abandoned."""
        kept = 0
        for step, path in sorted(_steps(self.folder).items(), reverse=True):
            abandoned = step > newest and step not in self._own
            if kept < self._keep and not abandoned and not verify(path, hashes=False):
                kept += 1
            else:
                # Renamed first: a kill while it is being deleted must not leave what looks like a damaged checkpoint.
                shutil.rmtree(path.rename(f"{path}.old"))


# --- Files ---


def _stem(name: str, rank: int) -> str:
    return f"{name}.rank{rank}"


def _matching(folder: Path, pattern: re.Pattern) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and pattern.fullmatch(path.name)] if folder.is_dir() else []


def _steps(folder: Path) -> dict[int, Path]:
    return {int(path.name.removeprefix("step_")): path for path in _matching(folder, _SEALED)}


def _damage(path: Path, problems: list[str]) -> str:
    shown = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
    return f"checkpoint {path} is damaged:\n  " + "\n  ".join(shown)


def _manifest_text(body: dict) -> str:
    # The manifest vouches for the files; its own digest vouches for it.
    return json.dumps({**body, "sha256": _digest(body)}, indent=1)


def _digest(body: dict) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> dict:
    """CheckpointError, naming the file, if it is absent, damaged or of another format."""
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{MANIFEST}: absent; {path.name} was never finished, or is no checkpoint")
    try:
        body = json.loads(file.read_text())
        digest = body.pop("sha256", None)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST}: not readable: {error}") from error
    if digest != _digest(body):
        raise CheckpointError(f"{MANIFEST}: its contents have changed (SHA-256)")
    if body["format"] != FORMAT:
        raise CheckpointError(f"{MANIFEST}: format {body['format']}, this version reads {FORMAT}")
    return body


def _split(name: str, state: State) -> tuple[dict[str, Tensor], dict[str, object]]:
    """(tensors, ready for safetensors; JSON values)."""
    from torch import Tensor

    tensors, values, storages = {}, {}, set()
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
    """TypeError for what JSON cannot hold, or would silently change (an integer key becomes a text)."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"state of {where}: key {key!r} is a {type(key).__name__}; JSON keys are texts")
            _check_json(f"{where}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_json(f"{where}[]", item)
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        raise TypeError(f"state of {where}: {type(value).__name__} is neither a tensor (at the top) nor a JSON value")


def _share(files: Mapping[str, list], index: int, count: int) -> list[str]:
    """The names of the index-th of `count` shares: the largest files first, each to the share that has the fewest bytes so far."""
    shares: list[list[str]] = [[] for _ in range(count)]
    num_bytes = [0] * count
    for name in sorted(files, key=lambda name: (-files[name][0], name)):
        least = num_bytes.index(min(num_bytes))
        shares[least].append(name)
        num_bytes[least] += files[name][0]
    mine = set(shares[index])
    return [name for name in files if name in mine]


def _sha256(file: Path, progress: Callable[[], None] = lambda: None) -> str:
    """progress is called after every _CHUNK_BYTES."""
    digest, chunk = hashlib.sha256(), bytearray(_CHUNK_BYTES)
    with file.open("rb") as stream:
        while size := stream.readinto(chunk):
            digest.update(memoryview(chunk)[:size])
            progress()
    return digest.hexdigest()


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    _sync(file)


def _sync(path: Path) -> None:
    """Have the kernel put a file's contents, or a directory's entries, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
