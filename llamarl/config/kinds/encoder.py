"""kind: encoder. A classifier that reads a text both ways, by transformers."""

from __future__ import annotations

from typing import ClassVar, Literal

from llamarl.config.kinds.kind import Given, KindSettings, RunFacts
from llamarl.words.choices import ClassifierOutput, ClassifierReads
from llamarl.words.fields import AnyText, Count, Text, settings_dataclass
from llamarl.words.findings import Findings


@settings_dataclass
class EncoderKindSettings(KindSettings):
    kind: Literal["encoder"]
    path: Text
    """Directory of a ...ForSequenceClassification encoder, with its tokenizer and its weights
    as safetensors.
    """
    label: AnyText | None
    """Label that scores; null: the only one."""
    output: ClassifierOutput
    """What scores of that label: its logit, or its probability among all labels (of a single
    label by the logistic function), or the logarithm of that.
    """
    reads: ClassifierReads
    """completion: that alone; pair: prompt and completion, as the tokenizer joins two texts."""
    dtype: Literal["float32", "bfloat16"]
    """Type of its weights."""
    max_tokens: Count
    """Tokens of a text at most. A longer text is an error."""
    batch_size: Count
    """Texts at a time, padded. With max_lag=0 each by itself, so that no score depends on its
    neighbours.
    """

    has_labels: ClassVar[bool] = True

    def find(self, given: Given, run: RunFacts, found: Findings) -> None:
        """Add offload, and a directory without a model."""
        if run.offload:
            what = "the encoder stays on its device and computes at any time; offload=false"
            found.add(what, given.key("kind"), "offload")
        found.add_unless_model(self.path, given.key("path"))


SETTINGS = EncoderKindSettings
