"""JSON lines: one object a line, with a prompt and, if the reward needs one, an answer. GSM8K's
files are of this kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from llamarl.tasks.base import Example

SHOWN_PROBLEMS = 10
GSM8K_INSTRUCTION = (
    "\n\nThink step by step. Finish with the final answer on a line of its own: #### number"
)


def read_jsonl(path: str | Path, to_example: Callable[[dict], Example]) -> list[Example]:
    """All examples of a file; blank lines are skipped. `to_example` raises ValueError for a row
    that is not right.

    ValueError naming FILE:LINE for each bad line (the first ten), FileNotFoundError if there is no
    file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; set task.path or task.eval_path to a JSONL file"
        )
    examples, problems = [], []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    examples.append(to_example(_parse_object(text)))
            except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
                problems.append(f"{path}:{number}: {error}")
    if problems:
        more = (
            f"\n  and {len(problems) - SHOWN_PROBLEMS} more"
            if len(problems) > SHOWN_PROBLEMS
            else ""
        )
        raise ValueError(
            f"{len(problems)} bad lines:\n  " + "\n  ".join(problems[:SHOWN_PROBLEMS]) + more
        )
    if not examples:
        raise ValueError(f"{path}: empty; need at least one JSON object a line")
    return examples


def _parse_object(line: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise ValueError(f"need a JSON object, this is {type(row).__name__}")
    return row


def row_to_example(row: dict, prompt_key: str, answer_key: str | None) -> Example:
    """The prompt under prompt_key; meta is the rest of the row, with the answer (if answer_key is
    given) under "answer".

    ValueError for a key that is absent or null, and for a prompt that is no text or cannot be
    encoded.
    """
    for key in filter(None, (prompt_key, answer_key)):
        if key not in row:
            raise ValueError(missing_key(key, row))
    prompt = row[prompt_key]
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(
            f'"{prompt_key}" must be text that is not empty, this is {json.dumps(prompt, default=str)[:60]}'
        )
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        half = prompt[error.start].encode("unicode_escape").decode()
        raise ValueError(
            f'"{prompt_key}" holds {half} at character {error.start + 1}, half of a surrogate pair; remove it'
        ) from error
    if answer_key and row[answer_key] is None:
        raise ValueError(f'"{answer_key}" is null; give the answer, or leave the row out')
    meta = {k: v for k, v in row.items() if k != prompt_key}
    return Example(prompt, meta | {"answer": row[answer_key]} if answer_key else meta)


def missing_key(key: str, keys) -> str:
    """What to say when `key` is not among `keys`."""
    near = get_close_matches(key, list(keys), n=1, cutoff=0.5)
    hint = (
        f'did you mean "{near[0]}"?'
        if near
        else "there is " + (", ".join(f'"{k}"' for k in keys) or "none at all")
    )
    return f'no key "{key}"; {hint}'


def gsm8k_row(row: dict) -> Example:
    """GSM8K: "answer" is a worked solution whose final number follows "####"."""
    example = row_to_example(row, "question", "answer")
    solution = example.meta["answer"]
    if not isinstance(solution, str) or "####" not in solution:
        raise ValueError('"answer" must be a worked solution that ends in "#### number"')
    return Example(
        example.text, {"answer": solution.rpartition("####")[2].strip(), "solution": solution}
    )
