"""Types of numbers and texts with bounds, for the schema of a configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, slots=True)
class Range:
    """low <= value <= high; low < value when open."""

    low: float
    high: float = math.inf
    open: bool = False

    def __contains__(self, value: float) -> bool:
        if self.open and value == self.low:
            return False
        return self.low <= value <= self.high

    def __str__(self) -> str:
        if self.high < math.inf:
            excluded = f", {self.low} excluded" if self.open else ""
            return f"between {self.low} and {self.high}{excluded}"
        return f"above {self.low}" if self.open else f"of at least {self.low}"


@dataclass(frozen=True, slots=True)
class NonEmpty:
    """A text of at least one character."""

    def __contains__(self, value: str) -> bool:
        return value != ""

    def __str__(self) -> str:
        return "that is not empty"


@dataclass(frozen=True, slots=True)
class Between:
    """Two numbers, of which the second is not below the first."""

    def __contains__(self, values: list[float]) -> bool:
        return len(values) == 2 and values[0] <= values[1]

    def __str__(self) -> str:
        return "the lowest and the highest, such as [0.7,2.0]"


Text = Annotated[str, NonEmpty()]
Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, open=True)]
NonNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
PositiveInterval = Annotated[list[Positive], Between()]
PositiveShare = Annotated[float, Range(0, 1, open=True)]
Beta = Annotated[float, Range(0, 0.999999)]
