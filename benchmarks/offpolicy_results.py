"""What benchmarks/offpolicy.py makes of finished runs: numbers, Markdown tables, JSON."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from forked import Run

TARGETS = (0.8, 0.9)
TO_TARGET = ("search", "table", "tba")  # studies of how soon, rather than how far
# Student's t, two-sided 95 %, of 2 to 10 pairs; more pairs are given the last.
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


@dataclass(frozen=True)
class Case:
    """One setting of a study. panel: the plot, or the table's column, that it is in; curve: its
    name there.
    """

    study: str
    panel: str
    curve: str
    overrides: tuple[str, ...]
    updates_a_step: int = 1


@dataclass(frozen=True)
class Curve:
    """A case with its runs, one a seed."""

    case: Case
    runs: tuple[Run, ...]


def accuracies(rows: list[dict]) -> list[tuple[int, float]]:
    """(step, held-out accuracy) of the evaluated rows."""
    return [(r["step"], r["eval/accuracy"]) for r in rows if r.get("eval/accuracy") is not None]


def steps_to(rows: list[dict], target: float) -> float:
    """The first evaluated step at which held-out accuracy is `target` or more; inf: none."""
    return next((step for step, accuracy in accuracies(rows) if accuracy >= target), math.inf)


def seconds_to(rows: list[dict], target: float) -> float:
    """Wall seconds from the run's first weights to the end of that evaluation; inf: none."""
    reached = steps_to(rows, target)
    return next((r["time/evaluated_s"] for r in rows if r["step"] == reached), math.inf)


def final(run: Run) -> float:
    """The last accuracy measured."""
    return accuracies(run.rows)[-1][1]


def best(run: Run) -> float:
    return max(accuracy for _, accuracy in accuracies(run.rows))


def settled_lag(run: Run) -> float:
    """Mean lag of the trained completions, in steps, over the second half of the run: the window
    fills in the first.
    """
    trained = [r for r in run.rows if r["step"] > 0]
    return statistics.mean(r["lag/mean"] for r in trained[len(trained) // 2 :])


def soonest_first(curve: Curve) -> tuple[float, float]:
    """Sort key: the median of the steps to the last target, then the best accuracy."""
    steps = statistics.median(steps_to(run.rows, TARGETS[-1]) for run in curve.runs)
    return steps, -statistics.mean(best(run) for run in curve.runs)


def choose_rate(curves: list[Curve]) -> str:
    """Of one loss's search: the rate that is soonest at 90 %."""
    return min(curves, key=soonest_first).case.curve.removeprefix("lr ")


def spread(values: Iterable[float], form: str) -> str:
    """Mean, and the range over seeds."""
    values = list(values)
    return f"{statistics.mean(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def median(values: Iterable[float], form: str = ".0f") -> str:
    """Median over seeds, and the range; "-": half of them or more never did."""
    values = sorted(values)
    middle = statistics.median(values)
    if math.isinf(middle):
        reached = sum(not math.isinf(v) for v in values)
        return "-" if not reached else f"- ({reached} of {len(values)})"
    last = "never" if math.isinf(values[-1]) else format(values[-1], form)
    return f"{middle:{form}} ({values[0]:{form}}–{last})"


def tables(study: str, curves: list[Curve]) -> str:
    """A study's Markdown table."""
    if study in ("table", "tba"):
        return _to_target(curves)
    return _search(curves) if study == "search" else _finals(curves)


def page_tables(study: str, curves: list[Curve]) -> dict[str, str]:
    """All of a study's tables by their markers on the page."""
    found = {study: tables(study, curves)}
    if study in BASELINES:
        found[f"{study} paired"] = paired(study, curves)
    if study == "lag":
        found["lag reached"] = reached(curves)
    return found


def _markdown(rows: list[list[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    )


def grid(curves: list[Curve]) -> tuple[list[str], list[str], dict[tuple[str, str], Curve]]:
    """(curves' names, panels in order of their number, the curve of each pair)."""
    cells = {(c.case.curve, c.case.panel): c for c in curves}
    panels = sorted(dict.fromkeys(panel for _, panel in cells), key=_number)
    return list(dict.fromkeys(name for name, _ in cells)), panels, cells


def _number(panel: str) -> float:
    found = re.search(r"[\d.]+(e-?\d+)?", panel)
    return float(found[0]) if found else 0.0


def _finals(curves: list[Curve]) -> str:
    """Accuracy after the last step, a row a panel and a column a curve, and the lag that was
    reached.
    """
    names, panels, cells = grid(curves)
    seeds = max(len(c.runs) for c in curves)
    lags: dict[str, list[float]] = {panel: [] for panel in panels}
    for curve in curves:
        lags[curve.case.panel] += [settled_lag(run) for run in curve.runs]
    if panels == [""]:
        head = ["", "final accuracy, %", "mean lag, steps"]
        rows = [head]
        for curve in curves:
            lag = spread([settled_lag(run) for run in curve.runs], ".1f")
            rows.append([curve.case.curve, _final(curve, seeds), lag])
        return _markdown(rows)
    lagged = any(map(any, lags.values()))
    rows = [["final accuracy, %", *names, *["mean lag, steps"] * lagged]]
    for p in panels:
        found = [_final(cells[name, p], seeds) if (name, p) in cells else "" for name in names]
        rows.append([p, *found, *[spread(lags[p], ".1f")] * lagged])
    return _markdown(rows)


# What each curve of a study is compared with, seed by seed: (its name, its panel); None: its own.
BASELINES: dict[str, tuple[str | None, str | None]] = {
    "lag": (None, "max_lag 0"),
    "minibatches": (None, "N = 1"),
    "cap": ("ratio_cap null", None),
    "sync": ("max_lag 0", None),
}


def paired(study: str, curves: list[Curve]) -> str:
    """Final accuracy minus the baseline's of the same seed, in points; a row a curve."""
    names, panels, cells = grid(curves)
    same_name, same_panel = BASELINES[study]
    rows = [["", f"points, minus {same_name or same_panel}", "seed by seed"]]
    for panel in panels:
        for name in names:
            baseline = cells.get((same_name or name, same_panel or panel))
            curve = cells.get((name, panel))
            if curve is None or baseline is None or curve is baseline:
                continue
            label = f"{panel}, {name}" if panel else name
            rows.append([label, *difference(curve, baseline)])
    return _markdown(rows)


def difference(curve: Curve, baseline: Curve) -> tuple[str, str]:
    """(mean and half of the 95 % interval, the difference of each seed), in points.

    Both are "-" unless both curves have the same number of runs, in the order of their seeds, and
    at least two.
    """
    count = len(curve.runs)
    if count < 2 or count != len(baseline.runs):
        return "-", "-"
    points = [100 * (final(run) - final(other)) for run, other in zip(curve.runs, baseline.runs)]
    t95 = T95[min(count - 2, len(T95) - 1)]
    half = t95 * statistics.stdev(points) / math.sqrt(count)
    return f"{statistics.mean(points):+.1f} ± {half:.1f}", ", ".join(f"{p:+.1f}" for p in points)


def reached(curves: list[Curve]) -> str:
    """The lag that each curve's completions had in truth."""
    names, panels, cells = grid(curves)
    rows = [["mean lag, steps", *names]]
    for panel in panels:
        row = [panel]
        for name in names:
            curve = cells.get((name, panel))
            row.append(spread([settled_lag(run) for run in curve.runs], ".1f") if curve else "")
        rows.append(row)
    return _markdown(rows)


def _final(curve: Curve, seeds: int) -> str:
    """What befell a case; said where it has fewer runs than others, or not all of them ended."""
    diverged = sum(run.failed is not None for run in curve.runs)
    return spread([100 * final(run) for run in curve.runs], ".1f") + (
        f"; {diverged} diverged" * bool(diverged)
        + f" x{len(curve.runs)}" * (len(curve.runs) < seeds)
    )


def _search(curves: list[Curve]) -> str:
    losses = list(dict.fromkeys(c.case.panel for c in curves))
    rates = sorted(dict.fromkeys(c.case.curve for c in curves), key=_number)
    rows = [["steps to 90 % (best %)", *rates, "chosen"]]
    for loss in losses:
        by_rate = {c.case.curve: c for c in curves if c.case.panel == loss}
        cells = [_sought(by_rate[rate]) if rate in by_rate else "" for rate in rates]
        rows.append([loss, *cells, choose_rate(list(by_rate.values()))])
    return _markdown(rows)


def _sought(curve: Curve) -> str:
    run = curve.runs[0]
    steps = steps_to(run.rows, TARGETS[-1])
    return f"{'-' if math.isinf(steps) else steps} ({100 * best(run):.1f})"


def _to_target(curves: list[Curve]) -> str:
    """Steps, wall and CPU seconds to the targets; soonest first."""
    rows = [
        [
            "loss",
            "lr",
            "steps to 80 %",
            "steps to 90 %",
            "s to 80 %",
            "s to 90 %",
            "CPU s",
            "best, %",
            "mean lag",
        ]
    ]
    for curve in sorted(curves, key=soonest_first):
        runs = curve.runs
        steps = []
        seconds = []
        for target in TARGETS:
            steps.append(median(steps_to(run.rows, target) for run in runs))
            seconds.append(median(seconds_to(run.rows, target) for run in runs))
        rows.append(
            [
                curve.case.curve,
                curve.case.panel.removeprefix("lr "),
                *steps,
                *seconds,
                spread([r.cpu_s for r in runs], ".0f"),
                spread([100 * best(r) for r in runs], ".1f"),
                f"{statistics.mean(settled_lag(r) for r in runs):.1f}",
            ]
        )
    return _markdown(rows)


def refresh(file: Path, study: str, table: str) -> None:
    """Write a study's table between its markers. ValueError if the file has none."""
    text = file.read_text()
    fresh, found = re.subn(
        rf"(<!-- table {study} -->\n).*?(<!-- end -->)",
        lambda m: f"{m[1]}{table}\n{m[2]}",
        text,
        flags=re.DOTALL,
    )
    if not found:
        raise ValueError(
            f"{file} has no lines `<!-- table {study} -->` and `<!-- end -->`; "
            "add them where the table goes"
        )
    file.write_text(fresh)


def write_json(file: Path, curves: list[Curve], about: dict) -> None:
    """Everything that tables and plots are made of."""
    cases = []
    for curve in curves:
        case = {
            "study": curve.case.study,
            "panel": curve.case.panel,
            "curve": curve.case.curve,
            "overrides": curve.case.overrides,
            "updates_a_step": curve.case.updates_a_step,
            "runs": [_summary(run) for run in curve.runs],
        }
        cases.append(case)
    lines = ",\n".join(json.dumps(case) for case in cases)
    file.write_text(f'{{"about": {json.dumps(about)},\n"cases": [\n{lines}\n]}}\n')


def _summary(run: Run) -> dict:
    trained = [r for r in run.rows if r["step"] > 0]  # the start is evaluated, as step 0
    return {
        "accuracy": accuracies(run.rows),
        "seconds": [
            round(r["time/evaluated_s"], 2) for r in run.rows if r.get("eval/accuracy") is not None
        ],
        "reward": [round(r["reward/mean"], 3) for r in trained],
        "lag": [round(r["lag/mean"], 2) for r in trained],
        "settled_lag": round(settled_lag(run), 3),
        "ratio_max": round(max(r["ratio/max"] for r in trained), 2),
        "failed": run.failed,
        "cpu_s": round(run.cpu_s, 2),
        "load": round(run.load, 2),
    }


def read_json(file: Path) -> list[Curve]:
    """What write_json wrote, with as much of the rows as it kept."""
    curves = []
    for case in json.loads(file.read_text())["cases"]:
        runs = tuple(_run_of(summary) for summary in case.pop("runs"))
        curves.append(Curve(Case(**{**case, "overrides": tuple(case["overrides"])}), runs))
    return curves


def _run_of(summary: dict) -> Run:
    rows: dict[int, dict] = {0: {"step": 0}}
    for step, (reward, lag) in enumerate(zip(summary["reward"], summary["lag"]), start=1):
        rows[step] = {"step": step, "reward/mean": reward, "lag/mean": lag}
        rows[step]["ratio/max"] = summary["ratio_max"]
    for (step, accuracy), seconds in zip(summary["accuracy"], summary["seconds"]):
        rows[step] |= {"eval/accuracy": accuracy, "time/evaluated_s": seconds}
    return Run(
        overrides=(),
        rows=list(rows.values()),
        failed=summary["failed"],
        cpu_s=summary["cpu_s"],
        load=summary["load"],
    )
