"""Prints docs/columns.md, the reference of all columns:
`python -m llamarl.observe > docs/columns.md`.
"""

from llamarl.observe.columns import RL, SUPERVISED, rows_of

HEAD = """# Columns

`python -m llamarl.observe > docs/columns.md` made this page from `llamarl/observe/columns.py`.
`RUN_DIR/metrics.jsonl` has one row per step. Names ending in `_s` are seconds. Values of
completions are means or sums over those that the step used, so two synchronous runs of one seed
differ only in timing columns (`is_timing` in `llamarl/observe/columns.py`)."""


def page() -> str:
    """Return the page."""
    lines = [HEAD]
    for title, table in (("RL", RL), ("Supervised training", SUPERVISED)):
        lines += ["", f"## {title}", "", "| column | meaning |", "|---|---|"]
        for names, meaning in rows_of(table):
            shown = ", ".join(f"`{name}`" for name in names)
            lines.append(f"| {shown} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
