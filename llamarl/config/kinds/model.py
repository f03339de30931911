"""kind: model. A decoder that scores, over the ranks of the reward."""

from __future__ import annotations

from typing import ClassVar, Literal

from llamarl.config.fields import Count, Number, Text, settings_dataclass
from llamarl.config.findings import Findings
from llamarl.config.kinds.kind import Given, KindSettings, RunFacts


@settings_dataclass
class ModelKindSettings(KindSettings):
    kind: Literal["model"]
    path: Text
    label: str | None
    dtype: Literal["float32", "bfloat16"]
    microbatch_tokens: Count
    scale: Number
    shift: Number

    is_sharded: ClassVar[bool] = True
    acts_as_one: ClassVar[bool] = True
    has_labels: ClassVar[bool] = True

    @property
    def sharded_model(self) -> str:
        """The directory of the model."""
        return self.path

    @property
    def rescaling(self) -> tuple[float, float]:
        """(scale, shift): the reward is (raw score - shift) * scale."""
        return self.scale, self.shift

    def find(self, given: Given, run: RunFacts, found: Findings) -> None:
        """Add a scale of 0, and a directory without a model."""
        if self.scale == 0:
            found.add("every score would be the same; need any other number", given.key("scale"))
        found.add_unless_model(self.path, given.key("path"))


SETTINGS = ModelKindSettings
