"""Reads prompts from files: JSON lines (GSM8K's too), and Hugging Face datasets on disk, which are
what `save_to_disk` wrote, or parquet, JSON or arrow files.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from llamarl.tasks.base import Example, Examples, conversation_of, shown
from llamarl.tasks.forms import check_row_keys
from llamarl.words.names import nearest
from llamarl.words.texts import first_of

Made = TypeVar("Made")

SHOWN_PROBLEMS = 10
LARGE_BYTES = 1 << 28  # of a file that is said to be held in memory

_UNPACK = "need JSON lines in UTF-8: unpack it"
_OTHER_FILES = (  # what they begin with, what they are, and what to do
    (b"\x1f\x8b", "a gzip file", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "a zstd file", _UNPACK),
    (b"\xfd7zX", "an xz file", _UNPACK),
    (b"BZh", "a bzip2 file", _UNPACK),
    (b"PK\x03\x04", "a zip file", _UNPACK),
    (b"PAR1", "a parquet file", "task=hf_dataset reads it"),
    (b"\xff\xfe", "a text in UTF-16", "need JSON lines in UTF-8: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "a text in UTF-16", "need JSON lines in UTF-8: iconv -f UTF-16 -t UTF-8"),
)

log = logging.getLogger(__name__)
GSM8K_INSTRUCTION = (
    "\n\nThink step by step. Finish with the final answer on a line of its own: #### number"
)


def read_jsonl(path: str | Path, make: Callable[[dict], Made]) -> list[Made]:
    """Return what `make` makes of each row of a file, without its blank lines. `make` raises
    ValueError for a row that is not right.

    ValueError names FILE:LINE for each bad line (the first SHOWN_PROBLEMS), FileNotFoundError says
    that there is no file.
    """
    with _open(path) as lines:
        made = list(_each(path, lines, make))
    if not made:
        raise ValueError(f"{path}: empty; need at least one JSON object a line")
    return made


def _open(path: str | Path) -> BinaryIO:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; set task.path or task.eval_path to a JSONL file"
        )
    file = path.open("rb")
    begin = file.read(4)
    file.seek(0)
    for mark, kind, remedy in _OTHER_FILES:
        if begin.startswith(mark):
            file.close()
            raise ValueError(f"{path}: looks like {kind}; {remedy}")
    return file


def _each(path: str | Path, lines: Iterable[bytes], make: Callable[[dict], Made]) -> Iterator[Made]:
    """Yield what `make` makes of each row. After the last row ValueError names the bad lines."""
    problems = []
    for number, line in enumerate(lines, start=1):
        try:
            row = _row_of(line, number)
            if row is None:
                continue
            made = make(row)
        except json.JSONDecodeError as error:
            what = f"not JSON: {error.msg} at column {error.colno}"
            problems.append(f"{path}:{number}: {what}")
        except RecursionError:
            problems.append(f"{path}:{number}: JSON nested too deep to be read")
        except ValueError as error:  # UnicodeDecodeError is one
            problems.append(f"{path}:{number}: {error}")
        else:
            yield made
    refuse("bad lines", problems)


def _row_of(line: bytes, number: int) -> dict | None:
    """Return the object of line `number`, counted from 1; None for a blank one."""
    encoding = "utf-8-sig" if number == 1 else "utf-8"
    text = line.decode(encoding)
    if not text.strip():
        return None
    row = json.loads(text)
    if not isinstance(row, dict):
        raise ValueError(f"need a JSON object, this is {type(row).__name__}")
    return row


class JsonlExamples:
    """Gives the rows of a file as examples: held as the file's bytes, and read when asked for.

    digest: SHA-256 of the file. FileNotFoundError, or ValueError if it is empty.
    """

    def __init__(
        self,
        path: str | Path,
        make: Callable[[dict], Example],
        keys: tuple[str, str | None] = ("prompt", "answer"),
    ):
        self._path = path
        self._make = make
        self.keys = keys
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size >= LARGE_BYTES:
                held = f"{size / 1e9:.1f} GB and 16 bytes a row"
                log.info("%s: each rank holds it in memory: %s", path, held)
            self._data = file.read()  # bytes, because parsed rows take more memory
        self.digest = hashlib.sha256(self._data).hexdigest()
        self._begins = array("q")  # of the lines that are not blank, in bytes
        self._numbers = array("q")  # of those lines, from 1
        begin = 0
        for number, line in enumerate(io.BytesIO(self._data), start=1):
            if not _is_blank(line, number):
                self._begins.append(begin)
                self._numbers.append(number)
            begin += len(line)
        if not self._numbers:
            raise ValueError(f"{path}: empty; need at least one JSON object a line")

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, i: int) -> Example:
        begin = self._begins[i]
        end = self._data.find(b"\n", begin)
        line = self._data[begin : end if end >= 0 else None]
        row = _row_of(line, self._numbers[i])
        assert row is not None, "blank lines have no place here"
        return self._make(row)

    def __iter__(self) -> Iterator[Example]:
        """Yield all rows in order."""
        for i in range(len(self)):
            yield self[i]

    def check(self) -> None:
        """Read all rows of the file. ValueError names FILE:LINE of the bad ones."""
        for _ in _each(self._path, io.BytesIO(self._data), self._make):
            pass

    def where(self, i: int) -> str:
        """Return FILE:LINE of a row."""
        return f"{self._path}:{self._numbers[i]}"

    def select(self, rows: Sequence[int]) -> JsonlExamples:
        """Return the examples at these places, in this order."""
        selected = copy(self)
        selected._begins = array("q", (self._begins[i] for i in rows))
        selected._numbers = array("q", (self._numbers[i] for i in rows))
        return selected


def _is_blank(line: bytes, number: int) -> bool:
    """Whether a line is skipped. A line that is no text is not skipped: it is a bad line."""
    if line[:1] == b"{":
        return False
    encoding = "utf-8-sig" if number == 1 else "utf-8"
    return not line.decode(encoding, "replace").strip()


def refuse(what: str, problems: Sequence[str]) -> None:
    """Raise ValueError that counts the problems and shows the first SHOWN_PROBLEMS, if there are
    any.
    """
    if problems:
        shown = first_of(problems, SHOWN_PROBLEMS)
        raise ValueError("\n  ".join([f"{len(problems)} {what}:", *shown]))


def row_to_example(row: dict, prompt_key: str, answer_key: str | None) -> Example:
    """Make an example from a row: its prompt is under prompt_key, and the rest of the row is its
    meta, with the answer (if answer_key is given) also under "answer".

        row_to_example({"q": "1+1=", "a": "2"}, "q", "a")
        Example(prompt="1+1=", meta={"a": "2", "answer": "2"})

    A prompt that is a list of messages is a conversation, whose last turn is the user's. ValueError
    for a key that is absent or null, for one that is llamarl's own, for a prompt that is neither,
    and for a prompt or an answer that cannot be encoded.
    """
    check_keys(row, prompt_key, answer_key)
    check_row_keys(row.keys() - {prompt_key})
    prompt = row[prompt_key]
    if isinstance(prompt, list):
        prompt = conversation_of(prompt, prompt_key)
        for message in prompt:
            check_text(prompt_key, message.content)
    elif not isinstance(prompt, str) or not prompt:
        raise ValueError(
            f'"{prompt_key}" must be text that is not empty, or messages, this is {shown(prompt)}'
        )
    else:
        check_text(prompt_key, prompt)
    meta = {key: value for key, value in row.items() if key != prompt_key}
    if answer_key:
        if row[answer_key] is None:
            raise ValueError(f'"{answer_key}" is null; give the answer, or leave the row out')
        check_text(answer_key, str(row[answer_key]))
        meta["answer"] = row[answer_key]
    return Example(prompt, meta)


def check_text(key: str, text: str) -> None:
    """Raise ValueError if the value of a key is no text that a tokenizer or a server takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode()
        place = f"at character {error.start + 1}"
        raise ValueError(
            f'"{key}" holds {half} {place}, half of a surrogate pair; remove it'
        ) from error


def check_keys(keys: Collection[str], prompt_key: str, answer_key: str | None) -> None:
    """Raise ValueError, with the nearest key, if the prompt's or the answer's is not among
    `keys`.
    """
    for key in filter(None, (prompt_key, answer_key)):
        if key not in keys:
            near = nearest(key, keys, cutoff=0.5)
            hint = f'did you mean "{near}"?'
            if near is None:
                names = ", ".join(f'"{name}"' for name in keys)
                hint = f"there is {names or 'none at all'}"
            raise ValueError(f'no key "{key}"; {hint}')


def gsm8k_row(row: dict) -> Example:
    """Make an example from a row of GSM8K, whose "answer" is a worked solution with the final
    number behind "####".
    """
    example = row_to_example(row, "question", "answer")
    if not isinstance(example.prompt, str):
        raise ValueError('"question" must be text; messages are for task=jsonl')
    solution = example.meta["answer"]
    if not isinstance(solution, str) or "####" not in solution:
        raise ValueError('"answer" must be a worked solution that ends in "#### number"')
    number = solution.rpartition("####")[2].strip()
    return Example(example.prompt, {"answer": number, "solution": solution})


EVAL_SPLITS = ("test", "validation", "valid", "eval", "dev")
_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".arrow": "arrow"}
_WORD = re.compile(r"[a-z]+")


class HFExamples:
    """Gives rows of a `datasets.Dataset` as examples, read from disk when asked for. Columns that
    JSON cannot hold are left out. where: the path and the split, for messages.
    """

    def __init__(self, dataset, keys: tuple[str, str | None], where: str, digest: str):
        prompt_key, answer_key = keys
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
        self.keys = keys
        self.digest = digest
        self._where = where
        self._rows: Sequence[int] = range(len(dataset))  # their numbers in the whole split

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> Example:
        return row_to_example(self._dataset[i], *self.keys)

    def __iter__(self) -> Iterator[Example]:
        """Yield all rows in order, read in batches. ValueError names the row of a prompt that is
        not text.
        """
        for i, row in enumerate(self._dataset):
            try:
                yield row_to_example(row, *self.keys)
            except ValueError as error:
                raise ValueError(f"{self.where(i)}: {error}") from error

    def check(self) -> None:
        """Do nothing: a row that is wrong is named when it is read."""

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
    path: str | Path, keys: tuple[str, str | None]
) -> tuple[HFExamples, HFExamples | None]:
    """Read (training split, evaluation split or None). ValueError where no split's name says that
    it is for training, or more than one does; see `_training_split`.
    """
    splits = _splits_of(path)
    names = list(splits)
    train = _training_split(path, names)
    held_out = held_out_split(names, train)
    log.info("%s: trains on split %s, holds out %s", path, train, held_out or "a part of it")
    digest = directory_digest(path)
    examples = _examples_of(path, splits[train], train, keys, digest)
    if held_out is None:
        return examples, None
    return examples, _examples_of(path, splits[held_out], held_out, keys, digest)


def read_held_out(path: str | Path, keys: tuple[str, str | None]) -> HFExamples:
    """Read the split of a path that is for evaluation, or the only one."""
    splits = _splits_of(path)
    names = list(splits)
    found = held_out_split(names, "train") or (names[0] if len(names) == 1 else None)
    if found is None:
        train = _training_split(path, names)
        found = held_out_split(names, train) or train
    return _examples_of(path, splits[found], found, keys, directory_digest(path))


def _training_split(path: str | Path, names: Sequence[str]) -> str:
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
    raise ValueError(f"{path}: {which} for training ({', '.join(names)}); {remedy}")


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


def _examples_of(path, dataset, split: str, keys: tuple[str, str | None], digest: str):
    if not len(dataset):
        raise ValueError(f"{path} ({split}): empty; need at least one row")
    return HFExamples(dataset, keys, f"{path} ({split})", digest)


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


# --- The rows of a task ---


def read_rows(
    kind: str, path: str | None, eval_path: str | None, keys: tuple[str, str | None]
) -> tuple[Examples, Examples | None]:
    """Read (training rows, held-out rows or None) of files of a kind: jsonl, gsm8k, hf_dataset.

    path None: there are no training rows. eval_path None: a dataset's own held-out split, if any.
    """
    train: Examples = []
    held_out: Examples | None = None
    if kind == "hf_dataset":
        if path is not None:
            train, held_out = read_hf_dataset(path, keys)
        if eval_path is not None:
            held_out = read_held_out(eval_path, keys)
        return train, held_out
    make = gsm8k_row
    if kind != "gsm8k":
        make = partial(row_to_example, prompt_key=keys[0], answer_key=keys[1])
    if path is not None:
        train = JsonlExamples(path, make, keys)
    if eval_path is not None:
        held_out = JsonlExamples(eval_path, make, keys)
    return train, held_out
