"""kind: encoder. A classifier that transformers reads, whole on each rank of the reward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llamarl.config.kinds.encoder import EncoderKindSettings
from llamarl.errors import NoWeights
from llamarl.launch.kinds.kind import Kind
from llamarl.launch.placement import Placement
from llamarl.memory import ITEMSIZES, Price, encoder_numbers
from llamarl.models.directory import model_digest
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.classifier import Classifier, ClassifierSettings, check_encoder
from llamarl.scoring.routing import InTurn
from llamarl.scoring.scorer import Scorer, Site


class EncoderKind(Kind[EncoderKindSettings]):
    """An encoder with a head that classifies."""

    def check(self) -> None:
        """Check its directory, labels, weights and tokenizer. ValueError or OSError."""
        s = self.settings
        with self.inputs.weights_may_wait(), self._named():
            check_encoder(s.path, s.label, s.max_tokens)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add to a ValueError of the body the keys that name the encoder."""
        try:
            yield
        except NoWeights:
            raise
        except ValueError as error:
            path = f"{self.given.key('path')}={self.settings.path}"
            label = f"{self.given.key('label')}={self.settings.label or 'null'}"
            raise ValueError(f"{path} {label}: {error}") from error

    @property
    def identity(self) -> str:
        """The digest of its files, what it reads and what it gives."""
        s = self.settings
        read = f"{s.output} of {s.label or 'its label'}, reads {s.reads}"
        return f"encoder {model_digest(s.path)}, {read}"

    def describe(self) -> str:
        """Return the encoder's directory, and where it will lie."""
        return (
            f"{self.settings.path}, an encoder in {self.settings.dtype}, whole on each reward rank"
        )

    def memory(self, placement: Placement) -> Iterator[Price]:
        """Yield the bytes of its weights."""
        numbers = encoder_numbers(self.settings.path)
        yield Price(self.price_name, placement["reward"], numbers * ITEMSIZES[self.settings.dtype])

    def make(self, site: Site, stream: StreamSettings | None = None) -> Scorer:
        """Return the scorer."""
        s = self.settings
        settings = ClassifierSettings(
            path=s.path,
            label=s.label,
            output=s.output,
            reads=s.reads,
            dtype=s.dtype,
            max_tokens=s.max_tokens,
            batch_size=s.batch_size,
        )
        scorer = Classifier(
            settings,
            device=site.group.device,
            reproducible=self.inputs.config.reproducible,
            on_result=site.on_result,
        )
        return InTurn(scorer)


KIND = EncoderKind
