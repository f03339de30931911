"""The section `metrics`: where rows and traces go."""

from __future__ import annotations

from llamarl.config.marks import settings_dataclass
from llamarl.config.ranges import Natural


@settings_dataclass
class MetricsSettings:
    tensorboard: bool
    wandb: bool
    trace: bool


@settings_dataclass
class RunMetricsSettings(MetricsSettings):
    """Those of a run of RL, which has samples to look at."""

    samples: Natural
    show_every: Natural
