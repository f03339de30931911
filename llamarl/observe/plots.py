"""Plots of the report: the tables of panels, and how matplotlib draws one.

To add a curve, add a Panel.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from llamarl.observe.alarms import Columns
from llamarl.observe.rates import EVALUATED, Idle
from llamarl.words.choices import column_of

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

SMOOTH_FROM = 80  # values; shorter curves are shown as they are


BINS = 1000  # of a long curve, which is drawn by the least and the greatest value of each


COLOURS = ("#3366cc", "#dd7711", "#339955", "#aa4499", "#888888", "#bb3333", "#117777")


LOOK: dict[RcKeyType, object] = {  # of every plot, as matplotlib's settings
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "#eeeeee",
    "legend.edgecolor": "none",
    "legend.framealpha": 0.6,
    "legend.loc": "upper right",  # matplotlib takes long to find the best place
    "lines.markersize": 3,
    "svg.fonttype": "none",
    "svg.hashsalt": "llamarl",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot over steps, of some columns of the rows."""

    title: str
    series: dict[str, str]  # the label of each column
    note: str = ""  # how to read it
    log: bool = False
    percent: bool = False
    smooth: bool = True  # where there are many rows
    band: tuple[str, str] | None = None  # columns: the first series' least and greatest
    from_zero: bool = True


PANELS = (
    Panel(
        "Reward",
        {"reward/mean": "mean", "reward/std": "std"},
        "Over a step's completions.",
        from_zero=False,
    ),
    Panel(
        "Evaluation",
        {
            EVALUATED: "greedy",
            "eval/pass_at_1_sampled": "sampled",
            "eval/pass_at_k": "best of eval.num_samples",
        },
        "Mean reward over held-out prompts.",
        smooth=False,
        from_zero=False,
    ),
    Panel(
        "Gold score",
        {"eval/gold": "completions", "eval/gold_references": "what they are compared with"},
        "Mean over held-out prompts, by a scorer that nothing is trained on.",
        smooth=False,
        from_zero=False,
    ),
    Panel(
        "Win rate",
        {
            "eval/win_rate": "by gold; shaded: 95 %",
            "eval/win_rate_length_controlled": "at equal lengths",
        },
        "Held-out completions that gold prefers to the rows' answers; a tie is half a win.",
        percent=True,
        smooth=False,
        band=("eval/win_rate_low", "eval/win_rate_high"),
    ),
    Panel(
        "Perplexity under the base model",
        {"eval/perplexity": "of held-out completions"},
        "Rises as the policy moves away from eval.base.",
        smooth=False,
        from_zero=False,
    ),
    Panel(
        "Length of held-out completions",
        {"eval/length_mean": "tokens, mean"},
        smooth=False,
    ),
    Panel("Loss", {"loss/value": ""}, "A policy-gradient loss need not fall.", from_zero=False),
    Panel("Gradient norm", {"grad_norm": "before clipping"}),
    Panel("KL to the reference", {"kl/ref": "nats a token"}),
    Panel(
        "KL to the generator",
        {"kl/generator": "nats a token"},
        "The price of asynchrony: rises with lag.",
    ),
    Panel(
        "Entropy",
        {"entropy": "nats a token"},
        "A fall to 0 early in the run means lost exploration.",
    ),
    Panel(
        "Ratio, raw",
        {"ratio/max": "max", "ratio/mean": "mean"},
        "Before capping. A mean far from 1: too much lag, or the trainer and the generator "
        "disagree on logprobs.",
        log=True,
        smooth=False,
    ),
    Panel("Ratio, capped share", {"ratio/capped_fraction": "of trained tokens"}, percent=True),
    Panel(
        "Lag",
        {"lag/max": "max", "lag/mean": "mean"},
        "Steps (batches) between sampling and training.",
        smooth=False,
    ),
    Panel(
        "Trained tokens by lag",
        {
            f"lag/tokens/{lags}": f"{lags} steps"
            for lags in ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64+")
        },
        "What a replay buffer's most-on-policy probability and size make of it.",
        percent=True,
    ),
    Panel(
        "Replay buffer, age",
        {"buffer/age_max": "max", "buffer/age_mean": "mean", "buffer/age_min": "min"},
        "Steps, of what it holds. A least age that rises: no newer data comes.",
        smooth=False,
    ),
    Panel("Completion length", {"completion/length_mean": "tokens, mean"}),
    Panel(
        "Truncated completions",
        {
            "completion/truncated_fraction": "by max_new_tokens",
            "completion/deadline_truncated_fraction": "by time, not trained on",
        },
        percent=True,
    ),
    Panel(
        "Successful attacks",
        {"eval/success": "sampled in evaluations", "reward/success": "of the generator"},
        "The share of attacks whose replies have a mean score above victim.threshold.",
        percent=True,
    ),
    Panel("Generated tokens/s", {"generator/tokens_per_s": ""}),
    Panel("Step time", {"time/step_s": "seconds", "time/wait_for_data_s": "waiting for data"}),
    Panel("Reward errors", {"reward/error_rate": ""}, percent=True, smooth=False),
)


# What a run has learned, whatever its kind.
LEARNED = Panel(
    "Learned",
    {
        "reward/mean": "reward",
        EVALUATED: "held out",
        "preference/accuracy": "accuracy",
        "eval/accuracy": "held-out accuracy",
        "eval/loss": "held-out loss",
    },
    from_zero=False,
)


SUPERVISED = "examples/trained"  # the column that says of a run that it is no RL


SUPERVISED_PANELS = (
    Panel("Loss", {"loss/value": "of a step", "eval/loss": "held out"}),
    Panel(
        "Accuracy",
        {"preference/accuracy": "of a step", "eval/accuracy": "held out"},
        "The share of pairs in which a reward model scores the chosen one higher.",
        percent=True,
    ),
    Panel("Perplexity", {"eval/perplexity": "held out"}, smooth=False),
    Panel("Margin", {"preference/margin": "of a step", "eval/margin": "held out"}, from_zero=False),
    Panel(
        "Scores",
        {
            "preference/score_chosen": "chosen",
            "preference/score_rejected": "rejected",
            "eval/score_std": "held out, std",
        },
        "Only differences are learned: loss.center_coef keeps the mean near 0.",
        from_zero=False,
    ),
    Panel(
        "Reliability",
        {
            f"calibration/accuracy/{sure}": f"{sure} % sure"
            for sure in ("50-55", "60-65", "70-75", "80-85", "90-95", "95-100")
        },
        "Held-out pairs ranked right, by how sure the model was. Below the label: too sure.",
        percent=True,
        smooth=False,
    ),
    Panel("Calibration error", {"eval/calibration_error": "expected"}, percent=True, smooth=False),
    Panel("Gradient norm", {"grad_norm": "before clipping"}),
    Panel("Learning rate", {"lr": ""}, smooth=False),
    Panel("Tokens/s", {"trainer/tokens_per_s": ""}),
    Panel("Step time", {"time/step_s": "seconds"}),
)


def is_of_evaluations(panel: Panel) -> bool:
    """Whether a panel has a curve of held-out prompts."""
    return any(column.startswith("eval/") for column in panel.series)


def of_set(panel: Panel, name: str) -> Panel:
    """Return the same panel for a set of held-out prompts."""
    series = {}
    for column, label in panel.series.items():
        if column.startswith("eval/"):
            series[column_of(name, column)] = label
    band = None
    if panel.band is not None:
        least, greatest = panel.band
        band = (column_of(name, least), column_of(name, greatest))
    return replace(panel, title=f"{panel.title}: {name}", series=series, band=band)


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Return the centred mean over `width` (odd) values, over fewer at the ends, without NaNs."""
    known = ~np.isnan(values)
    window = np.ones(width)
    total = np.convolve(np.where(known, values, 0), window, mode="same")
    count = np.convolve(known, window, mode="same")
    return np.where(count > 0.5, total / np.maximum(count, 1), np.nan)


def draw(columns: Columns, panel: Panel) -> Figure:
    """Draw the plot of one panel."""
    figure, axes = _figure(panel.percent)
    shown = {column: label for column, label in panel.series.items() if column in columns}
    for (column, label), colour in zip(shown.items(), COLOURS):
        values = columns[column]
        known = ~np.isnan(values)
        steps = columns["step"][known]
        width = smoothing_width(len(steps)) if panel.smooth else 1
        if width > 1:
            places = drawn(values[known])
            axes.plot(steps[places], values[known][places], color=colour, linewidth=0.6, alpha=0.3)
            values = moving_mean(values, width)
        marker = marker_of(len(steps))
        places = drawn(values[known])
        axes.plot(steps[places], values[known][places], color=colour, marker=marker, label=label)
    if panel.band and columns.keys() >= set(panel.band):
        least, greatest = (columns[name] for name in panel.band)
        known = ~np.isnan(least)
        steps = columns["step"][known]
        edges = (least[known], greatest[known])
        places = np.union1d(*map(drawn, edges))
        low, high = (edge[places] for edge in edges)
        axes.fill_between(steps[places], low, high, color=COLOURS[0], alpha=0.15, linewidth=0)
    if panel.log:
        axes.set_yscale("log")
    elif panel.from_zero:
        low, high = axes.dataLim.intervaly
        top = high * 1.05 if high > 0 else 1
        axes.set_ylim(min(0, low * 1.05), top)
    if len(shown) > 1:
        axes.legend()
    else:
        for label in shown.values():
            axes.set_ylabel(label)
    return figure


def smoothing_width(num_values: int) -> int:
    """Return over how many values a curve is smoothed: an odd number, about a twentieth of all; 1
    for a short curve, which is not smoothed.
    """
    if num_values < SMOOTH_FROM:
        return 1
    return min(101, num_values // 40 * 2 + 1)


def drawn(values: np.ndarray) -> np.ndarray:
    """Return the places of the values that are drawn, ascending: all of a short curve; of a long
    one the first, the last, and the least and the greatest of each of BINS bins.
    """
    num_values = len(values)
    if num_values <= 2 * BINS:
        return np.arange(num_values)
    edges = np.linspace(0, num_values, BINS + 1).astype(int)
    places = [0, num_values - 1]
    for begin, end in itertools.pairwise(edges):
        inside = values[begin:end]
        places += [begin + inside.argmin(), begin + inside.argmax()]
    return np.unique(places)


def marker_of(num_values: int) -> str:
    """Return matplotlib's marker for a curve of so many values: dots for a short one, else none."""
    return "o" if num_values <= 40 else ""


def draw_idle(columns: Columns, idle: Idle) -> Figure:
    """Draw an executor's idle share over steps, its causes stacked."""
    figure, axes = _figure(percent=True)
    column = f"{idle.executor}/idle_fraction"
    share = columns[column]
    known = ~np.isnan(share)
    places = drawn(share[known])
    steps = columns["step"][known][places]
    causes = [cause for cause, mean in idle.causes if mean > 0]
    if causes:
        of_rows = [columns[f"{column}/{cause}"] for cause in causes]
        shares = [np.nan_to_num(values[known][places]) for values in of_rows]
        axes.stackplot(steps, *shares, labels=causes, colors=COLOURS, alpha=0.75)
    axes.plot(steps, share[known][places], color="#222", linewidth=1, label="idle")
    axes.set_ylim(0, 1)
    axes.legend()
    return figure


def _figure(percent: bool) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.4, 2.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    return figure, axes
