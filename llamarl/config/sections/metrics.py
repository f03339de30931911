"""The section `metrics`: where rows and traces go."""

from __future__ import annotations

from importlib.util import find_spec

from llamarl.config.fields import Flag, Natural, settings_dataclass
from llamarl.config.findings import Findings


@settings_dataclass
class MetricsSettings:
    tensorboard: Flag
    wandb: Flag
    trace: Flag


@settings_dataclass
class RunMetricsSettings(MetricsSettings):
    """Those of a run of RL, which has samples to look at."""

    samples: Natural
    show_every: Natural


def find_metrics(metrics: MetricsSettings, found: Findings) -> None:
    """Find places for rows whose package is not installed: each is an extra of its own name."""
    for name, is_wanted in (("tensorboard", metrics.tensorboard), ("wandb", metrics.wandb)):
        if is_wanted and find_spec(name) is None:
            what = f"the package {name} is missing; pip install 'llamarl[{name}]'"
            found.add(what, f"metrics.{name}")
