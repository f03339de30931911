"""The reference of the columns of metrics.jsonl, which `python -m llamarl.observe` makes."""

import re
from itertools import chain

from llamarl.observe.__main__ import page
from llamarl.observe.columns import COLUMNS, SUPERVISED, is_timing, rows_of
from tests.house import ROOT, python_files

# Columns of the table that the code puts together of parts.
COMPOSED = re.compile(r"[A-Z]{2}|\.\.\.|/idle_fraction|/evictions$")
READERS = {f"{name}.py" for name in ("columns", "alarms", "compare", "console", "plots", "report")}


def test_the_page_is_what_the_table_says():
    assert (ROOT / "docs/columns.md").read_text() == page()


def test_every_column_of_the_table_is_reported():
    told = ""
    for file in python_files("llamarl", "executors"):
        if file.parent.name != "observe" or file.name not in READERS:
            told += file.read_text()
    names = {*COLUMNS, *chain.from_iterable(names for names, _ in rows_of(SUPERVISED))}
    plain = {name for name in names if not COMPOSED.search(name)}
    # A loss names the sum that becomes a mean, and the count that becomes a share.
    assert not {name for name in plain if f'"{name}"' not in told}


def test_what_depends_on_the_clock_is_a_timing_column():
    timing = "time/step_s generator/tokens_per_s trainer/idle_fraction/data weights/swap_stall_s"
    assert all(map(is_timing, f"{timing} reward/model/tokens reference/tail_s".split()))
    assert not any(map(is_timing, "loss/value tokens/trained reward/right/mean".split()))
