"""Hugging Face datasets on disk: what `save_to_disk` wrote, a directory of parquet, JSON or arrow
files, or some of these files.
"""

from __future__ import annotations

import hashlib
import logging
import re
from array import array
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path

from llamarl.tasks.base import Example
from llamarl.tasks.jsonl import check_keys, row_to_example
from llamarl.tasks.sampled import check_row_keys

log = logging.getLogger(__name__)

EVAL_SPLITS = ("test", "validation", "valid", "eval", "dev")
_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".arrow": "arrow"}
_WORD = re.compile(r"[a-z]+")


class HFExamples:
    """Gives rows of a `datasets.Dataset` as examples, read from disk when asked for. Columns that
    JSON cannot hold are left out.
    """

    def __init__(self, dataset, prompt_key: str, answer_key: str | None, where: str):
        try:
            check_keys(dataset.column_names, prompt_key, answer_key)
            check_row_keys(set(dataset.column_names) - {prompt_key})
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        odd = {
            field.name: str(field.type)
            for field in dataset.features.arrow_schema
            if not _fits_json(field.type)
        }
        for key in odd.keys() & {prompt_key, answer_key}:
            what = f'"{key}" is {odd[key]}, which JSON cannot hold'
            raise ValueError(f"{where}: {what}; cast it to text or a number")
        if odd:
            named = ", ".join(f"{name} ({kind})" for name, kind in odd.items())
            log.warning("%s: left out what JSON cannot hold: %s", where, named)
            dataset = dataset.remove_columns(list(odd))
        # Rows are Python values whatever format was saved with them.
        self._dataset = dataset.with_format(None)
        self._keys = (prompt_key, answer_key)
        self._where = where
        self._rows: Sequence[int] = range(len(dataset))  # their numbers in the whole split

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> Example:
        return row_to_example(self._dataset[i], *self._keys)

    def __iter__(self) -> Iterator[Example]:
        """Yield all rows in order, read in batches. ValueError names the row of a prompt that is
        not text.
        """
        for i, row in enumerate(self._dataset):
            try:
                yield row_to_example(row, *self._keys)
            except ValueError as error:
                raise ValueError(f"{self.where(i)}: {error}") from error

    def where(self, i: int) -> str:
        """Return the dataset, the split and the number of a row."""
        return f"{self._where}: row {self._rows[i]}"

    def select(self, rows: Sequence[int]) -> HFExamples:
        """Return the examples at these places, in this order."""
        selected = copy(self)
        selected._dataset = self._dataset.select(rows)
        selected._rows = array("q", (self._rows[i] for i in rows))
        return selected


def _fits_json(kind) -> bool:
    """Whether values of an Arrow type are JSON values in Python. Bytes, dates, times and decimals,
    also inside of others, are not.
    """
    from pyarrow import types

    if hasattr(kind, "storage_type"):
        return _fits_json(kind.storage_type)
    if types.is_dictionary(kind):
        return _fits_json(kind.value_type)
    if types.is_nested(kind):
        return all(_fits_json(kind.field(i).type) for i in range(kind.num_fields))
    held = (
        types.is_string,
        types.is_large_string,
        types.is_string_view,
        types.is_integer,
        types.is_floating,
        types.is_boolean,
        types.is_null,
    )
    return any(is_held(kind) for is_held in held)


def directory_digest(path: str | Path) -> str:
    """Return a SHA-256 of all files of a dataset directory, by their names and contents; or of the
    files that a path or a pattern names.
    """
    path = Path(path)
    digest = hashlib.sha256()
    for file in _files_of(path) or sorted(path.rglob("*")):
        if file.is_file():
            digest.update(str(file.relative_to(path if path.is_dir() else path.parent)).encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _files_of(path: Path) -> list[Path]:
    """Return the file of this path, or the files that it is a pattern of; [] for a directory."""
    if path.is_dir():
        return []
    return [path] if path.is_file() else sorted(path.parent.glob(path.name))


def read_hf_dataset(
    path: str | Path, prompt_key: str, answer_key: str | None
) -> tuple[HFExamples, HFExamples | None]:
    """Read (training split, evaluation split or None). ValueError where no split's name says that
    it is for training, or more than one does; see `training_split`.
    """
    splits = _splits_of(path)
    try:
        train = training_split(list(splits))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    held_out = held_out_split(list(splits), train)
    log.info("%s: trains on split %s, holds out %s", path, train, held_out or "a part of it")

    def examples(split: str) -> HFExamples:
        return _examples_of(path, splits, split, prompt_key, answer_key)

    return examples(train), examples(held_out) if held_out else None


def read_held_out(path: str | Path, prompt_key: str, answer_key: str | None) -> HFExamples:
    """Read the split of a path that is for evaluation, or the only one."""
    splits = _splits_of(path)
    names = list(splits)
    found = held_out_split(names, "train") or (names[0] if len(names) == 1 else None)
    if found is None:
        try:
            train = training_split(names)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        found = held_out_split(names, train) or train
    return _examples_of(path, splits, found, prompt_key, answer_key)


def training_split(names: Sequence[str]) -> str:
    """Return the split to train on: the one called train, or the only one whose name says so, such
    as train_sft; or the only one at all, unless its name says that it is for evaluation.
    """
    said = [name for name in names if "train" in _WORD.findall(name.lower())]
    if "train" in names:
        return "train"
    if len(said) == 1:
        return said[0]
    if len(names) == 1 and not set(_WORD.findall(names[0].lower())) & {*EVAL_SPLITS}:
        return names[0]
    which = "several of its splits are" if said else "none of its splits is"
    remedy = (
        "name one of them in task.path: the folder of a split that save_to_disk wrote, or the "
        "files of one, as 'DIR/NAME-*.parquet', and those to hold out in task.eval_path"
    )
    raise ValueError(f"{which} for training ({', '.join(names)}); {remedy}")


def held_out_split(names: Sequence[str], train: str) -> str | None:
    """Return the split to hold out: beside train_sft that is test_sft, or test; None if there is
    none.
    """
    ending = train.removeprefix("train")
    for word in EVAL_SPLITS:
        for name in (word + ending, word):
            if name in names and name != train:
                return name
    return None


def _examples_of(path, splits, split: str, prompt_key: str, answer_key: str | None) -> HFExamples:
    if not len(splits[split]):
        raise ValueError(f"{path} ({split}): empty; need at least one row")
    return HFExamples(splits[split], prompt_key, answer_key, f"{path} ({split})")


def _splits_of(path: str | Path):
    """Load the splits of a directory, of a file or of the files that a pattern names, by name."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "task.kind=hf_dataset needs the package `datasets`: pip install datasets"
        ) from error
    path = Path(path)
    files = _files_of(path)
    if not files and not path.is_dir():
        raise FileNotFoundError(
            f"{path}: no such directory, file or pattern of files on this machine; task.path must "
            "be a dataset directory, or parquet, JSON or arrow files"
        )
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        loaded = datasets.load_from_disk(str(path))
    else:
        need = "need parquet, JSON or arrow files, or what save_to_disk wrote"
        try:
            if files:
                kind = _FORMATS.get(files[0].suffix)
                if kind is None:
                    raise ValueError(f"it ends in {files[0].suffix or 'no suffix'}")
                names = [str(file) for file in files]
                loaded = datasets.load_dataset(kind, data_files=names, split="train")
            else:
                loaded = datasets.load_dataset(str(path))
        except (FileNotFoundError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
            raise ValueError(f"{path}: not a dataset, {need}: {error}") from error
    return loaded if isinstance(loaded, dict) else {"train": loaded}
