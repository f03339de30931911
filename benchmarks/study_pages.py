"""What is written of a study: what it announces, what came of it, its figure, and the row of
benchmarks/results/claims.md.

A page begins with the announcement, between two markers. It is a function of the settings alone, is
committed before the first run, and no run is made while the committed page has another one.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import textwrap
from collections.abc import Mapping
from pathlib import Path

from running import PAGE_COLUMNS, ROOT, as_item, as_paragraph
from study_terms import (
    HELD,
    NOT_ANSWERED,
    NOT_RUN,
    OPPOSITE,
    SMALLER,
    STEP,
    Last,
    Question,
    Run,
    Study,
)
from study_verdicts import Answer, Outcome, half_interval, outcome

PAGES = ROOT / "benchmarks" / "results" / "claims"
ANNOUNCED = "<!-- announced -->"
END = "<!-- end of what was announced -->"
LEAST_FOR_BAND = 5  # runs: of fewer, an interval is wider than all that they span
# How verdicts follow from questions. Pages that were announced with the former rules keep them.
RULES = (
    "Held: all questions hold. Opposite, or smaller than its margin: one is. Not answered: an "
    "interval lies across its margin, or a run was not in a state to answer."
)
FORMER_RULES = (
    "Held: all questions hold. Refuted: one is refuted. Not answered: an interval lies across its "
    "margin, or a run was not in a state to answer."
)
PATTERN = re.compile(rf"{ANNOUNCED}\n(.*?)\n{END}", re.DOTALL)


class NotAnnounced(Exception):
    """The committed page of a study does not announce what its settings say."""


# --- Before the runs ---


def announcement(study: Study, rules: str = RULES) -> str:
    """Return what is fixed before a run, in Markdown."""
    seeds = ", ".join(map(str, study.seeds))
    fixed = (
        f"Seeds {seeds}: each runs all arms, and differences are of runs of one seed. The interval "
        f"of a difference is that of its mean, 95 %, by Student's t. {rules} A core takes some "
        f"{study.minutes} minutes for all."
    )
    parts = [
        f"# {study.title}",
        as_paragraph(f"**The claim** ({study.paper}, {study.section}): {study.claim}"),
        as_paragraph(f"**What would refute it**: {study.refuted_by}"),
        "**Asked by**",
        "\n".join(as_item(question.said + ".") for question in study.questions),
        "**In a state to answer**",
        "\n".join(as_item(check.said + ".") for check in study.checks) or "- Whatever comes.",
        as_paragraph(fixed),
        *map(as_paragraph, study.remarks),
        f"`recipes/{study.recipe}`, with all arms:",
        _block(study.common),
        "and each with:",
        "\n\n".join(_arm(arm) for arm in study.arms),
    ]
    return "\n\n".join(parts)


def announces(text: str | None, study: Study) -> bool:
    """Whether a text is the announcement of a study, by these rules or the former ones."""
    return text in (announcement(study), announcement(study, FORMER_RULES))


def _block(words: tuple[str, ...]) -> str:
    text = textwrap.fill(" ".join(words), PAGE_COLUMNS, break_on_hyphens=False)
    return f"```\n{text}\n```"


def _arm(arm) -> str:
    ranks = "" if arm.ranks == 1 else f", on {arm.ranks} ranks"
    if arm.made_by is not None:
        what = " ".join(arm.made_by.__doc__.split())
        return as_paragraph(f"[{arm.name}]: no run. {what}")
    if not arm.overrides:
        return f"[{arm.name}]{ranks}: nothing else."
    return f"[{arm.name}]{ranks}:\n\n{_block(arm.overrides)}"


def page_file(study: Study, folder: Path = PAGES) -> Path:
    return folder / f"{study.name}.md"


def announced_in(text: str) -> str | None:
    """Return what a page announces; None if it has no such part."""
    found = PATTERN.search(text)
    return found[1] if found else None


def committed(file: Path) -> str | None:
    """Return a file as git's last commit has it; None if it has none."""
    shown = subprocess.run(
        ["git", "show", f"HEAD:./{file.name}"], cwd=file.parent, capture_output=True, text=True
    )
    return shown.stdout if shown.returncode == 0 else None


def check_announced(study: Study, text: str | None) -> None:
    """Raise NotAnnounced unless the committed text of a study's page announces its settings."""
    name = study.name
    if text is None:
        raise NotAnnounced(
            f"{name}: no page of it is committed. Write it by `study.py {name} --announce`, and "
            "commit it before the first run"
        )
    if not announces(announced_in(text), study):
        raise NotAnnounced(
            f"{name}: the committed page announces something else than the settings say. Announce "
            f"it anew by `study.py {name} --announce`, and commit that; what was kept of the old "
            "one stays, dated"
        )


# --- After the runs ---


def entry(study: Study, by_seed: Mapping[int, Mapping[str, Run]], about: dict) -> dict:
    """Return what is kept of a study: all that its page, its figure and its claim are made of."""
    runs = []
    for seed, of_seed in by_seed.items():
        for arm, run in of_seed.items():
            one = {
                "arm": arm,
                "seed": seed,
                "failed": run.failed,
                "seconds": round(run.seconds, 1),
                "load": round(run.load, 1),
                "columns": _columns(study, run),
            }
            runs.append(one)
    return {"study": study.name, "announced": announcement(study), **about, "runs": runs}


def _columns(study: Study, run: Run) -> dict:
    """Return each column's steps and values: most are known at looks alone."""
    found = {}
    for name in study.columns:
        rows = run.known(name)
        if rows and name != STEP:
            values = [_short(row[name]) for row in rows]
            found[name] = [[row[STEP] for row in rows], values]
    return found


def _short(value: float | int) -> float | int:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def runs_of(kept: dict) -> dict[int, dict[str, Run]]:
    """Return the runs of an entry: seed -> arm -> run."""
    found: dict[int, dict[str, Run]] = {}
    for one in kept["runs"]:
        rows: dict[int, dict] = {}
        for name, (steps, values) in one["columns"].items():
            for step, value in zip(steps, values, strict=True):
                rows.setdefault(step, {STEP: step})[name] = value
        ordered = tuple(rows[step] for step in sorted(rows))
        run = Run(ordered, one["failed"], one["seconds"], one["load"])
        found.setdefault(one["seed"], {})[one["arm"]] = run
    return found


def results_file(study: Study, folder: Path = PAGES) -> Path:
    return folder / f"{study.name}.json"


def read_entry(study: Study, folder: Path = PAGES) -> dict | None:
    """Return what is kept of a study's runs as it is announced now; None if there is nothing."""
    file = results_file(study, folder)
    if not file.exists():
        return None
    kept = json.loads(file.read_text())
    return kept if announces(kept["announced"], study) else None


def write_entry(file: Path, kept: dict) -> None:
    """Write it a run a line."""
    head = {name: value for name, value in kept.items() if name != "runs"}
    lines = ",\n".join(json.dumps(run) for run in kept["runs"])
    file.write_text(f'{json.dumps(head)[:-1]}, "runs": [\n{lines}\n]}}\n')


def said(question: Question, found: Answer) -> str:
    """Return a difference with its interval, in words."""
    if found.mean is None or found.interval is None:
        return "not known of all seeds"
    low, high = found.interval
    form = question.form
    return f"{found.mean:+{form}} [{low:+{form}}, {high:+{form}}] {question.unit}"


def telling(study: Study, found: Outcome) -> tuple[Question, Answer]:
    """Return the question that a verdict is told by, and its answer: of those that decide the first
    with that verdict, or else the first.
    """
    pairs = deciding(study, found)
    for question, answer in pairs:
        if answer.verdict == found.verdict and found.verdict in (OPPOSITE, SMALLER):
            return question, answer
    return pairs[0]


def deciding(study: Study, found: Outcome) -> list[tuple[Question, Answer]]:
    """Return the questions on which the verdict hangs, and their answers."""
    return [pair for pair in zip(study.asked, found.answers) if study.decides(pair[0])]


def worded(study: Study, found: Outcome) -> str:
    """Return the verdict in words, and how many of several deciding questions have it."""
    question, _ = telling(study, found)
    words = question.worded(found.verdict)
    pairs = deciding(study, found)
    if len(pairs) == 1 or found.verdict not in (HELD, OPPOSITE, SMALLER):
        return words
    count = sum(answer.verdict == found.verdict for _, answer in pairs)
    return f"{words}, {count} of {len(pairs)}"


def headline(study: Study, found: Outcome) -> str:
    """Return the answer in a line: the verdict, and the difference of its question."""
    question, answer = telling(study, found)
    if found.verdict == NOT_RUN or answer.mean is None:
        return f"{study.title}: {found.verdict}"
    return f"{study.title}: {worded(study, found)}; {said(question, answer)}"


def page(study: Study, kept: dict | None) -> str:
    """Return a study's page: what it announces, and what came of it."""
    announced = announcement(study) if kept is None else kept["announced"]
    parts = [f"{ANNOUNCED}\n{announced}\n{END}"]
    if kept is None:
        parts.append("## Not run yet\n\nNo run of it was made.")
        return "\n\n".join(parts) + "\n"
    found = outcome(study, runs_of(kept))
    where = kept["machine"]
    num_runs = len(kept["runs"])
    of_runs = len(study.arms) * len(study.seeds)
    about = (
        f"{num_runs} of {of_runs} runs, {kept['date']}, on {where['cores']} cores of an "
        f"{where['cpu']} that did other work too, torch {where['torch']}."
    )
    words = worded(study, found)
    parts += [f"## {words[0].upper()}{words[1:]}", as_paragraph(about)]
    if study.review is not None:
        parts.append(as_paragraph(f"**Found after the runs**: {study.review.said}"))
    pairs = zip(study.asked, found.answers)
    parts.append("\n".join(as_item(_answer_line(*pair)) for pair in pairs))
    if found.failed_checks:
        parts.append("These were not in a state to answer:")
        parts.append("\n".join(as_item(line + ".") for line in found.failed_checks))
    parts.append(table(study, runs_of(kept)))
    parts.append(f"![{study.title}: {words}]({study.name}.png)")
    return "\n\n".join(parts) + "\n"


def _answer_line(question: Question, found: Answer) -> str:
    each = ", ".join(_difference(question, value) for value in found.differences)
    verdict = question.worded(found.verdict)
    return (
        f"{question.name}: **{verdict}**, {said(question, found)}, where {question.bound} was "
        f"expected; by seed {each}."
    )


def _difference(question: Question, value: float | None) -> str:
    return "–" if value is None else f"{value:+{question.form}}"


def table(study: Study, by_seed: Mapping[int, Mapping[str, Run]]) -> str:
    """Return the arms with the last values of what the study looks at: means, and ranges. In two
    tables where a line would be too long.
    """
    columns = list(dict.fromkeys((study.y, *study.shown)))
    whole = _table(study, by_seed, ["n", *columns, "seconds"])
    if max(map(len, whole)) <= PAGE_COLUMNS:
        return "\n".join(whole)
    half = (len(columns) + 1) // 2
    first = _table(study, by_seed, ["n", *columns[:half]])
    second = _table(study, by_seed, [*columns[half:], "seconds"])
    return "\n".join([*first, "", *second])


def _table(study: Study, by_seed: Mapping[int, Mapping[str, Run]], columns: list[str]) -> list[str]:
    """Return the lines of a table of arms with these columns."""
    lines = [["arm", *columns], ["---"] * (len(columns) + 1)]
    for arm in study.arms:
        runs = [of_seed for of_seed in by_seed.values() if arm.name in of_seed]
        cells = [arm.name]
        for column in columns:
            if column == "n":
                cells.append(str(len(runs)))
            elif column == "seconds":
                cells.append(_spread([of_seed[arm.name].seconds for of_seed in runs], ".0f"))
            else:
                values = [Last(arm.name, column)(of_seed) for of_seed in runs]
                cells.append(_spread([value for value in values if value is not None], ".3g"))
        lines.append(cells)
    return [f"| {' | '.join(line)} |" for line in lines]


def _spread(values: list[float], form: str) -> str:
    if not values:
        return "–"
    return f"{statistics.mean(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def draw(study: Study, kept: dict, file: Path) -> None:
    """Draw what the study looks at, arm by arm with 95 % intervals over the seeds, or each seed's
    line where they are few, beside its questions' differences. The title is the answer.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_seed = runs_of(kept)
    found = outcome(study, by_seed)
    figure, (curves, forest) = plt.subplots(
        1, 2, figsize=(11, 4), layout="constrained", width_ratios=(3, 2)
    )
    for arm, colour in zip(study.arms, plt.get_cmap("tab20").colors):
        runs = [of_seed[arm.name] for of_seed in by_seed.values() if arm.name in of_seed]
        if runs:
            _draw_arm(curves, study, arm.name, runs, colour)
    curves.set_xlabel(study.x, fontsize=8)
    curves.set_ylabel(study.y, fontsize=8)
    curves.legend(fontsize=7, frameon=False)
    _draw_answers(forest, study, found)
    for ax in (curves, forest):
        ax.grid(alpha=0.3)
        ax.tick_params(labelsize=8)
    figure.suptitle("\n".join(textwrap.wrap(headline(study, found), 110)), fontsize=10)
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _draw_arm(ax, study: Study, name: str, runs: list[Run], colour: tuple) -> None:
    """One arm: its mean at each look that all its runs have, and the interval of that. Where runs
    are few, each run's line is drawn in place of an interval that is much wider than they are.
    """
    looks = []
    for run in runs:
        looks.append({row[STEP]: row for row in run.known(study.x, study.y)})
    steps = sorted(set.intersection(*(set(found) for found in looks)))
    across = []
    middle = []
    halves = []
    for step in steps:
        across.append(statistics.mean(found[step][study.x] for found in looks))
        values = [found[step][study.y] for found in looks]
        middle.append(statistics.mean(values))
        halves.append(half_interval(values) if len(values) > 1 else 0.0)
    if len(steps) == 1:
        ax.errorbar(across, middle, yerr=halves, color=colour, label=name, fmt="o", ms=4)
        return
    ax.plot(across, middle, color=colour, label=name, lw=1.4)
    if len(runs) < LEAST_FOR_BAND:
        for found in looks:
            own_across = [found[step][study.x] for step in steps]
            own = [found[step][study.y] for step in steps]
            ax.plot(own_across, own, color=colour, alpha=0.5, lw=0.7)
        return
    low = [value - half for value, half in zip(middle, halves)]
    high = [value + half for value, half in zip(middle, halves)]
    ax.fill_between(across, low, high, color=colour, alpha=0.15, lw=0)


def _draw_answers(ax, study: Study, found: Outcome) -> None:
    """Each question's difference, in units of its margin where it has one: held lies beyond 1."""
    colours = {
        HELD: "tab:green",
        SMALLER: "tab:orange",
        OPPOSITE: "tab:red",
        NOT_ANSWERED: "tab:gray",
        NOT_RUN: "tab:gray",
    }
    names = []
    for y, (question, one) in enumerate(zip(study.asked, found.answers)):
        names.append("\n".join(textwrap.wrap(question.name, 34)))
        if one.mean is None or one.half is None:
            continue
        scale = abs(question.margin) or 1.0
        ax.errorbar(
            [one.mean / scale], [y], xerr=[one.half / scale], fmt="o", color=colours[one.verdict]
        )
    ax.axvline(0, color="black", lw=0.8)
    for margin in (-1, 1):
        ax.axvline(margin, color="black", lw=0.8, ls=":")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlabel("difference, in margins", fontsize=8)
