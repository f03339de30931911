"""Executes a notebook in a folder of its own.

python -m tests.notebook    # writes the outputs of notebooks/first_run.ipynb anew
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.house import ROOT

FIRST_RUN = ROOT / "notebooks" / "first_run.ipynb"
CELL_S = 600  # longer than any cell takes on a busy machine


def executed(file: Path, folder: Path) -> NotebookNode:
    """Return the notebook with its outputs, which name no folder of this machine."""
    notebook = nbformat.read(file, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", resources=where).execute()
    for cell in notebook.cells:
        cell.metadata = {}  # when it ran
        if cell.cell_type == "code":
            text = json.dumps(merged(cell.outputs)).replace(f"{folder}/", "")
            cell.outputs = [nbformat.from_dict(output) for output in json.loads(text)]
    return notebook


def merged(outputs: list[dict]) -> list[dict]:
    """Return the outputs of a cell with each stream's texts joined."""
    joined: list[dict] = []
    for output in outputs:
        before = joined[-1] if joined else {}
        if output.get("name") and output["name"] == before.get("name"):
            before["text"] += output["text"]
        else:
            joined.append(dict(output))
    return joined


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        nbformat.write(executed(FIRST_RUN, Path(made)), FIRST_RUN)
