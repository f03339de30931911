"""Hugging Face datasets on disk: what `save_to_disk` wrote, or a directory of parquet, JSON or
arrow files.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path

from llamarl.tasks.base import Example
from llamarl.tasks.jsonl import check_keys, row_to_example
from llamarl.tasks.sampled import check_row_keys

log = logging.getLogger(__name__)

EVAL_SPLITS = ("test", "validation", "valid", "eval", "dev")


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
    """Return a SHA-256 of all files of a dataset directory, by their names and contents."""
    path = Path(path)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            digest.update(str(file.relative_to(path)).encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def read_hf_dataset(
    path: str | Path, prompt_key: str, answer_key: str | None
) -> tuple[HFExamples, HFExamples | None]:
    """Read (training split, evaluation split or None). A directory with one split of any name has
    it for training.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "task.kind=hf_dataset needs the package `datasets`: pip install datasets"
        ) from error
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path}: no such directory; task.path must be a dataset directory on this machine"
        )
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        loaded = datasets.load_from_disk(str(path))
    else:
        try:
            loaded = datasets.load_dataset(str(path))
        except (FileNotFoundError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
            need = "need parquet, JSON or arrow files, or what save_to_disk wrote"
            raise ValueError(f"{path}: not a dataset, {need}: {error}") from error
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    train = "train" if "train" in splits else next(iter(splits))
    held_out = [name for name in EVAL_SPLITS if name in splits and name != train]

    def examples(split: str) -> HFExamples:
        if not len(splits[split]):
            raise ValueError(f"{path} ({split}): empty; need at least one row")
        return HFExamples(splits[split], prompt_key, answer_key, f"{path} ({split})")

    return examples(train), examples(held_out[0]) if held_out else None
