"""kind: encoder. A classifier that reads a text both ways, by transformers, whole on each rank of
the reward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from llamarl.errors import NoWeights
from llamarl.memory import ITEMSIZES, Price, encoder_numbers
from llamarl.models.directory import model_digest
from llamarl.scoring.kinds.kind import Given, Kind, KindSettings, Places, RunFacts
from llamarl.words.choices import ClassifierOutput, ClassifierReads
from llamarl.words.fields import AnyText, Count, Text, settings_dataclass
from llamarl.words.findings import Findings

if TYPE_CHECKING:
    from llamarl.scoring.ahead import StreamSettings
    from llamarl.scoring.scorer import Scorer, Site


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


class EncoderKind(Kind[EncoderKindSettings]):
    """An encoder with a head that classifies."""

    def check(self) -> None:
        """Check its directory, labels, weights and tokenizer. ValueError or OSError."""
        from llamarl.scoring.classifier import check_encoder

        s = self.settings
        with self.job.weights_may_wait():
            try:
                check_encoder(s.path, s.label, s.max_tokens)
            except NoWeights:
                raise
            except ValueError as error:
                path = f"{self.given.key('path')}={s.path}"
                label = f"{self.given.key('label')}={s.label or 'null'}"
                raise ValueError(f"{path} {label}: {error}") from error

    @property
    def identity(self) -> str:
        """The digest of its files, what it reads and what it gives."""
        s = self.settings
        read = f"{s.output} of {s.label or 'its label'}, reads {s.reads}"
        return f"encoder {model_digest(s.path)}, {read}"

    def describe(self) -> str:
        """Return the encoder's directory, and where it will lie."""
        s = self.settings
        return f"{s.path}, an encoder in {s.dtype}, whole on each reward rank"

    def memory(self, places: Places) -> Iterator[Price]:
        """Yield the bytes of its weights."""
        numbers = encoder_numbers(self.settings.path)
        yield Price(self.price_name, places["reward"], numbers * ITEMSIZES[self.settings.dtype])

    def make(self, site: Site, stream: StreamSettings | None = None) -> Scorer:
        """Return the scorer."""
        from llamarl.scoring.classifier import Classifier
        from llamarl.scoring.routing import InTurn

        return InTurn(Classifier(self.settings, site, reproducible=self.job.reproducible))


SETTINGS = EncoderKindSettings
KIND = EncoderKind
