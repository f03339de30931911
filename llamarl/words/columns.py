"""Columns of evaluations and of a reward's parts. The task's own held-out prompts have eval/...; a
set NAME of eval.sets has eval/NAME/...
"""

from __future__ import annotations

OWN = ""  # the name of the task's own set
# What follows eval/ in the columns of the task's own, and so is no set's name.
OWN_COLUMNS = (
    "accuracy",
    "diversity",
    "errors",
    "gold",
    "gold_masked",
    "gold_references",
    "left_out",
    "left_out_reason",
    "length_mean",
    "pass_at_1_sampled",
    "pass_at_k",
    "perplexity",
    "reward",
    "success",
    "win_rate",
    "win_rate_high",
    "win_rate_length_controlled",
    "win_rate_low",
)
_PREFIX = "eval/"


def part_column(name: str) -> str:
    """Return the column of a reward's part: what it gave, before its weight."""
    return f"reward/{name}/mean"


def column_of(name: str, column: str) -> str:
    """Return the column of a set for what the task's own prompts have as "eval/..."."""
    assert column.startswith(_PREFIX), column
    return f"{_PREFIX}{name}/{column.removeprefix(_PREFIX)}" if name else column
