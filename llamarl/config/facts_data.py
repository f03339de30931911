"""The settings of recipes/facts_data.py, which recipes/rlhf.py knows too. Imports no torch."""

from __future__ import annotations

from llamarl.config.marks import settings_dataclass
from llamarl.config.ranges import Count, Natural, Text
from llamarl.config.script import REQUIRED

DEFAULTS = {"out": REQUIRED, "seed": 0, "rows": 20_000, "width": 128}


@settings_dataclass
class FactsDataSettings:
    out: Text
    seed: Natural
    rows: Count  # of teacher.jsonl
    width: Count  # of the model, in channels: a multiple of a head's
