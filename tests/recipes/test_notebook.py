"""The notebook runs from its first cell to its last, and its kept outputs are of such a run."""

import itertools
import json

import pytest

from tests.house import text_of
from tests.notebook import CELL_S, FIRST_RUN, executed


def outputs_of(notebook):
    return [cell.get("outputs", []) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def last_text(outputs):
    return "".join(outputs[-1].get("text") or outputs[-1]["data"]["text/plain"])


def test_the_kept_outputs_are_of_all_cells_and_name_no_folder_of_a_machine():
    notebook = json.loads(text_of(FIRST_RUN))
    kept = outputs_of(notebook)
    assert all(kept)
    whole = list(itertools.chain.from_iterable(kept))
    assert not [output for output in whole if "ename" in output]
    assert sum("image/png" in output.get("data", {}) for output in whole) == 2
    for folder in ("/tmp/", "/home/", "/root/", "/work/"):
        assert folder not in text_of(FIRST_RUN)


@pytest.mark.slow
@pytest.mark.timeout(3 * CELL_S)
def test_the_notebook_runs_and_both_rewards_are_learned(tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMARL_SMOLLM2", raising=False)
    run, table, _, _, refused, _, accuracy, _ = outputs_of(executed(FIRST_RUN, tmp_path))
    assert "step 30/30" in last_text(run) and "eval/accuracy" in last_text(table)
    assert "did you mean reward.fn?" in last_text(refused)
    assert float(last_text(accuracy)) > 0.6  # from 0.4
