"""kind: model. A decoder that scores, over the ranks of the reward."""

from __future__ import annotations

from typing import ClassVar, Literal

from llamarl.config.kinds.kind import Given, KindSettings, RunFacts
from llamarl.words.fields import AnyText, Count, Number, Text, settings_dataclass
from llamarl.words.findings import Findings


@settings_dataclass
class ModelKindSettings(KindSettings):
    kind: Literal["model"]
    path: Text
    """Directory of a ...ForSequenceClassification decoder, with its tokenizer. With other
    tokens than the policy's it reads the text anew.
    """
    label: AnyText | None
    """Label that scores; null: the only one."""
    dtype: Literal["float32", "bfloat16"]
    """Type of its weights. The head computes in float32."""
    microbatch_tokens: Count
    """Packed tokens of a forward pass of a rank."""
    scale: Number
    """The reward is (score - shift) * scale."""
    shift: Number
    """Such as the mean score of reference answers."""

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
