"""The section `metrics`: where rows and traces go."""

from __future__ import annotations

from importlib.util import find_spec

from llamarl.words.fields import Flag, Natural, settings_dataclass
from llamarl.words.findings import Findings


@settings_dataclass
class MetricsSettings:
    tensorboard: Flag
    """Write metrics for TensorBoard too."""
    wandb: Flag
    """Send metrics to Weights & Biases too."""
    trace: Flag
    """Write a bounded Perfetto trace of what every rank did."""


@settings_dataclass
class RunMetricsSettings(MetricsSettings):
    """Those of a run of RL, which has samples to look at."""

    samples: Natural
    """Groups of a step that are kept in RUN_DIR/samples.jsonl for the report; 0: none
    (docs/watching.md).
    """
    show_every: Natural
    """Steps between two looks of the console at the best and the worst completion of such a
    group; 0: never.
    """


def find_metrics(metrics: MetricsSettings, found: Findings) -> None:
    """Find places for rows whose package is not installed: each is an extra of its own name."""
    for name, is_wanted in (("tensorboard", metrics.tensorboard), ("wandb", metrics.wandb)):
        if is_wanted and find_spec(name) is None:
            what = f"the package {name} is missing; pip install 'llamarl[{name}]'"
            found.add(what, f"metrics.{name}")
