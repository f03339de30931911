"""What benchmarks/rlhf/pipeline.py has found, in a table and in plots.

    python benchmarks/rlhf/report.py DIR

DIR is the `out` of a pipeline that is done up to its last stage. Writes DIR/rlhf.png and
DIR/rlhf.json, and prints the table. Exit status: 0, or 2 for a DIR that lacks something.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llamarl.observe.alarms import Columns
from llamarl.observe.compare import GOLD, LENGTH, completion_kl
from llamarl.observe.plots import COLOURS, LOOK
from llamarl.observe.report import read_columns
from llamarl.observe.rows import EVALUATED, FILE_NAME
from llamarl.tasks.facts import worth

AGREEMENT = "eval/accuracy"  # of the reward model with gold, on held-out pairs
AGREEMENT_WANTED = 0.85


@dataclass(frozen=True, slots=True)
class Quality:
    """Gold's judgement of many summaries, in the mean."""

    gold: float
    f1: float
    excess_words: float
    format_faults: float
    words: float


@dataclass(frozen=True, slots=True)
class Findings:
    """The numbers of the table."""

    qualities: dict[str, Quality]  # by whose answers
    agreement: float  # share of clean held-out pairs that the reward model ranks as gold
    kl: float  # nats a completion to the SFT model, as the last step's completions have it
    proxy: tuple[float, float]  # the reward model's mean score of held-out answers: before, after
    seconds: dict[str, tuple[float, float]]  # of each stage: by the clock, and of CPU


def quality_of(summaries: list[tuple[str, str]]) -> Quality:
    """Return the quality of (post, summary)s."""
    values = []
    for post, summary in summaries:
        found = worth(post, summary)
        num_words = len(summary.split())
        values.append([found.gold, found.f1, found.excess_words, found.format_faults, num_words])
    means = np.mean(values, axis=0)
    return Quality(*(round(float(mean), 4) for mean in means))


def read_findings(out: Path, scorer: Columns, policy: Columns) -> Findings:
    """Read what there is in a directory, beside the rows of its reward model's run and of its
    policy's. OSError or ValueError for what is missing, KeyError for a column.
    """
    qualities = {"teacher": quality_of(_texts(out / "teacher.jsonl", lambda row: True))}
    for label, name in (("SFT", "sft"), ("RL", "rl")):
        file = out / f"judged_{name}.jsonl"
        qualities[f"{label}, greedy"] = quality_of(_texts(file, lambda row: not row["sample"]))
        qualities[f"{label}, sampled"] = quality_of(_texts(file, lambda row: row["sample"]))
    proxy = _known(policy[EVALUATED])
    return Findings(
        qualities=qualities,
        agreement=float(_known(scorer[AGREEMENT])[-1]),
        kl=float(_known(completion_kl(policy))[-1]),
        proxy=(float(proxy[0]), float(proxy[-1])),
        seconds=_seconds(out),
    )


def _texts(file: Path, is_wanted: Callable[[dict], bool]) -> list[tuple[str, str]]:
    """(prompt, completion) of the rows of a file that are wanted."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    found = [(row["prompt"], row["completion"]) for row in rows if is_wanted(row)]
    if not found:
        raise ValueError(f"{file}: no answers of this kind; was it evaluated with samples=1?")
    return found


def _known(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


def _seconds(out: Path) -> dict[str, tuple[float, float]]:
    """Return the seconds of the stages that are done, in the order in which they were."""
    files = sorted((out / "stages").glob("*.json"), key=lambda file: file.stat().st_mtime)
    took = {file.stem: json.loads(file.read_text()) for file in files}
    return {name: (stage["seconds"], stage["cpu_seconds"]) for name, stage in took.items()}


def table(findings: Findings) -> list[str]:
    """Return the lines to print."""
    lines = [f"{'':16}{'gold':>8}{'F1':>8}{'excess words':>14}{'format faults':>15}{'words':>8}"]
    for name, q in findings.qualities.items():
        facts = f"{q.gold:8.3f}{q.f1:8.3f}{q.excess_words:14.2f}{q.format_faults:15.2f}"
        lines.append(f"{name:16}{facts}{q.words:8.1f}")
    before, after = findings.proxy
    lines += [
        "",
        f"reward model    ranks {findings.agreement:.1%} of the clean held-out pairs as gold does",
        f"                scores held-out greedy answers {before:.3f} -> {after:.3f}",
        f"KL to SFT       {findings.kl:.2f} nats a completion at the end",
        "",
        f"{'':16}{'seconds':>8}{'of CPU':>8}",
    ]
    totals = np.zeros(2)
    for name, seconds in findings.seconds.items():
        totals += seconds
        lines.append(f"{name:16}{seconds[0]:8.0f}{seconds[1]:8.0f}")
    lines.append(f"{'all':16}{totals[0]:8.0f}{totals[1]:8.0f}")
    return lines


@matplotlib.rc_context(LOOK)
def draw(scorer: Columns, policy: Columns) -> Figure:
    """Three plots: proxy and gold over the root of KL, the reward model's agreement, lengths."""
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    over_kl, agreement, lengths = figure.subplots(1, 3)
    _draw_over_kl(over_kl, policy)
    _draw_agreement(agreement, scorer)
    _draw_lengths(lengths, policy)
    return figure


def _draw_over_kl(axes: Axes, policy: Columns) -> None:
    axes.set(xlabel="√KL to the SFT model, √nats a completion", title="Held-out greedy answers")
    axes.set_ylabel("gold", color=COLOURS[0])
    right = axes.twinx()
    right.grid(visible=False)
    right.set_ylabel("proxy: the reward model's score", color=COLOURS[1])
    root = np.sqrt(np.maximum(completion_kl(policy), 0))
    for place, column, colour in ((axes, GOLD, COLOURS[0]), (right, EVALUATED, COLOURS[1])):
        known = ~np.isnan(policy[column]) & ~np.isnan(root)
        place.plot(root[known], policy[column][known], color=colour, marker="o")


def _draw_agreement(axes: Axes, scorer: Columns) -> None:
    axes.set(xlabel="step of the reward model", title="Pairs ranked right")
    series = (
        ("preference/accuracy", "of a step, as they are labelled", COLOURS[4]),
        (AGREEMENT, "held out, clean", COLOURS[0]),
    )
    for column, label, colour in series:
        known = ~np.isnan(scorer[column])
        axes.plot(scorer["step"][known], scorer[column][known], color=colour, label=label)
    axes.axhline(AGREEMENT_WANTED, color=COLOURS[5], linewidth=0.8, linestyle=(0, (4, 3)))
    axes.legend()


def _draw_lengths(axes: Axes, policy: Columns) -> None:
    axes.set(xlabel="step of RL", ylabel="tokens", title="Length of sampled answers")
    known = ~np.isnan(policy[LENGTH])
    axes.plot(policy["step"][known], policy[LENGTH][known], color=COLOURS[2])
    axes.set_ylim(0, 1.1 * np.nanmax(policy[LENGTH]))


def run(out: Path) -> None:
    """Print the table, write it, and draw. OSError, ValueError or KeyError for what is missing."""
    scorer = read_columns(out / "reward_model" / FILE_NAME)
    policy = read_columns(out / "rl" / FILE_NAME)
    findings = read_findings(out, scorer, policy)
    print("\n".join(table(findings)))
    (out / "rlhf.json").write_text(json.dumps(asdict(findings), indent=2) + "\n")
    draw(scorer, policy).savefig(out / "rlhf.png", dpi=150)
    print(f"\nwritten  {out / 'rlhf.png'}, {out / 'rlhf.json'}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    try:
        run(args.out)
    except (ValueError, OSError) as error:
        print(f"rlhf_report: {error}", file=sys.stderr)
        return 2
    except KeyError as error:
        print(f"rlhf_report: {args.out}: no values of {error} in a run's rows", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
