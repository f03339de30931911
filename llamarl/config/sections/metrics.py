"""The section `metrics`: where rows and traces go."""

from __future__ import annotations

from llamarl.config.marks import settings_dataclass


@settings_dataclass
class MetricsSettings:
    tensorboard: bool
    wandb: bool
    trace: bool
