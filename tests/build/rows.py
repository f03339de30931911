"""Files of rows, a JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def write_rows(file: Path, *rows: Mapping[str, object]) -> Path:
    """Write the rows and return the file.

    write_rows(tmp_path / "rows.jsonl", {"prompt": "1+1=", "answer": "2"})
    """
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read_rows(file: Path) -> list[dict]:
    """Return the rows of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]
