"""JSON lines: one object a line, with a prompt and, if the reward needs one, an answer. GSM8K's
files are of this kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from llamarl.tasks.base import Example
from llamarl.tasks.source import check_row_keys
from llamarl.words.lists import first_of
from llamarl.words.names import nearest

Made = TypeVar("Made")

SHOWN_PROBLEMS = 10
GSM8K_INSTRUCTION = (
    "\n\nThink step by step. Finish with the final answer on a line of its own: #### number"
)


def read_jsonl(path: str | Path, make: Callable[[dict], Made]) -> list[Made]:
    """What `make` makes of each row of a file, without its blank lines. It raises ValueError for a
    row that is not right.

    ValueError names FILE:LINE for each bad line (the first SHOWN_PROBLEMS), FileNotFoundError says
    that there is no file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; set task.path or task.eval_path to a JSONL file"
        )
    made = []
    problems = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                encoding = "utf-8-sig" if number == 1 else "utf-8"
                text = line.decode(encoding)
                if text.strip():
                    row = json.loads(text)
                    if not isinstance(row, dict):
                        raise ValueError(f"need a JSON object, this is {type(row).__name__}")
                    made.append(make(row))
            except json.JSONDecodeError as error:
                what = f"not JSON: {error.msg} at column {error.colno}"
                problems.append(f"{path}:{number}: {what}")
            except RecursionError:
                problems.append(f"{path}:{number}: JSON nested too deep to be read")
            except ValueError as error:  # UnicodeDecodeError is one
                problems.append(f"{path}:{number}: {error}")
    refuse("bad lines", problems)
    if not made:
        raise ValueError(f"{path}: empty; need at least one JSON object a line")
    return made


def refuse(what: str, problems: Sequence[str]) -> None:
    """ValueError that counts the problems and shows the first SHOWN_PROBLEMS, if there are any."""
    if problems:
        shown = first_of(problems, SHOWN_PROBLEMS)
        raise ValueError("\n  ".join([f"{len(problems)} {what}:", *shown]))


def row_to_example(row: dict, prompt_key: str, answer_key: str | None) -> Example:
    """A row as an example: its prompt is under prompt_key, and the rest of the row is its meta,
    with the answer (if answer_key is given) also under "answer".

        row_to_example({"q": "1+1=", "a": "2"}, "q", "a")
        Example(text="1+1=", meta={"a": "2", "answer": "2"})

    ValueError for a key that is absent or null, for one that is llamarl's own, for a prompt that is
    no text, and for a prompt or an answer that cannot be encoded.
    """
    check_keys(row, prompt_key, answer_key)
    check_row_keys(row.keys() - {prompt_key})
    prompt = row[prompt_key]
    if not isinstance(prompt, str) or not prompt:
        shown = json.dumps(prompt, default=str)[:60]
        raise ValueError(f'"{prompt_key}" must be text that is not empty, this is {shown}')
    check_text(prompt_key, prompt)
    meta = {key: value for key, value in row.items() if key != prompt_key}
    if answer_key:
        if row[answer_key] is None:
            raise ValueError(f'"{answer_key}" is null; give the answer, or leave the row out')
        check_text(answer_key, str(row[answer_key]))
        meta["answer"] = row[answer_key]
    return Example(prompt, meta)


def check_text(key: str, text: str) -> None:
    """ValueError if what is under a key is no text that a tokenizer or a server takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode()
        place = f"at character {error.start + 1}"
        raise ValueError(
            f'"{key}" holds {half} {place}, half of a surrogate pair; remove it'
        ) from error


def check_keys(keys: Collection[str], prompt_key: str, answer_key: str | None) -> None:
    """ValueError, with the nearest key, if the prompt's or the answer's is not among `keys`."""
    for key in filter(None, (prompt_key, answer_key)):
        if key not in keys:
            near = nearest(key, keys, cutoff=0.5)
            hint = f'did you mean "{near}"?'
            if near is None:
                names = ", ".join(f'"{name}"' for name in keys)
                hint = f"there is {names or 'none at all'}"
            raise ValueError(f'no key "{key}"; {hint}')


def gsm8k_row(row: dict) -> Example:
    """A row of GSM8K's, whose "answer" is a worked solution with the final number behind "####"."""
    example = row_to_example(row, "question", "answer")
    solution = example.meta["answer"]
    if not isinstance(solution, str) or "####" not in solution:
        raise ValueError('"answer" must be a worked solution that ends in "#### number"')
    number = solution.rpartition("####")[2].strip()
    return Example(example.text, {"answer": number, "solution": solution})
