"""kind: encoder. A classifier that reads a text both ways, by transformers."""

from __future__ import annotations

from typing import ClassVar, Literal

from llamarl.config.fields import Count, Text, settings_dataclass
from llamarl.config.findings import Findings
from llamarl.config.kinds.kind import Given, KindSettings, RunFacts
from llamarl.words.choices import ClassifierOutput, ClassifierReads


@settings_dataclass
class EncoderKindSettings(KindSettings):
    kind: Literal["encoder"]
    path: Text
    label: str | None
    output: ClassifierOutput
    reads: ClassifierReads
    dtype: Literal["float32", "bfloat16"]
    max_tokens: Count
    batch_size: Count

    has_labels: ClassVar[bool] = True

    def find(self, given: Given, run: RunFacts, found: Findings) -> None:
        """Add offload, and a directory without a model."""
        if run.offload:
            what = "the encoder stays on its device and computes at any time; offload=false"
            found.add(what, given.key("kind"), "offload")
        found.add_unless_model(self.path, given.key("path"))


SETTINGS = EncoderKindSettings
