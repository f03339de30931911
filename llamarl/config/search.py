"""The sections of the schema for the buffer, and for options of the loss that follow a schedule."""

from __future__ import annotations

from typing import Literal

from llamarl.config.marks import settings_dataclass
from llamarl.config.ranges import Count, Natural, NonNegative, Positive


@settings_dataclass
class ConstantBetaSettings:
    kind: Literal["constant"]


@settings_dataclass
class LinearBetaSettings:
    kind: Literal["linear"]
    final: NonNegative
    end_step: Count


@settings_dataclass
class CutBetaSettings:
    kind: Literal["cut"]
    final: NonNegative
    end_step: Count
    cut_step: Natural


@settings_dataclass
class ConstantTemperatureSettings:
    kind: Literal["constant"]


@settings_dataclass
class LinearTemperatureSettings:
    kind: Literal["linear"]
    final: Positive
    end_step: Count


AnyTemperatureSettings = ConstantTemperatureSettings | LinearTemperatureSettings
