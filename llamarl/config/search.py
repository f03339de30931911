"""The sections of the schema for the buffer, and for options of the loss that follow a schedule."""

from __future__ import annotations

from typing import Literal

from llamarl.config.marks import marked, settings_dataclass
from llamarl.config.ranges import Count, Natural, NonNegative, Positive, Share
from llamarl.words.choices import Priority


@settings_dataclass
class FifoBufferSettings:
    kind: Literal["fifo"] = marked("identity")


@settings_dataclass
class ReplayBufferSettings:
    kind: Literal["replay"] = marked("identity")
    draw: Literal["local", "shared", "split"] = marked("identity")
    sync_period: Count
    most_on_policy: Share
    priority: Priority
    temperature: Positive
    completions_per_prompt: Count | None
    max_size: Count
    grow_until: Count | None
    good_reward: float | None
    initial_completions: Natural | None


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
