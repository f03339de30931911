"""kind: novelty. How unlike a completion is to those before it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from llamarl.config.kinds.novelty import NoveltyKindSettings
from llamarl.launch.embedders import check_embedder, embedder_settings
from llamarl.launch.kinds.kind import Kind
from llamarl.launch.scorers import embedder_bytes
from llamarl.memory import Price
from llamarl.models.fingerprint import model_digest
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.novelty import Novelty, NoveltySettings
from llamarl.scoring.scorer import MakeScorer
from llamarl.words.choices import START


class NoveltyKind(Kind[NoveltyKindSettings]):
    """A history of completions, and an embedder."""

    def check(self) -> None:
        """Check the directory and the tokenizer of the embedder. ValueError."""
        check_embedder(self.job, self.settings.embedder, self.given.key("embedder"))

    @property
    def identity(self) -> str:
        """What is compared, and the digest of the embedder."""
        s = self.settings
        to = "all" if s.nearest is None else f"{s.nearest} nearest"
        return f"novelty to {to} of {s.history} by {model_digest(self._embedder)}"

    @property
    def _embedder(self) -> str:
        """The embedder's directory."""
        given = self.settings.embedder
        return str(self.job.model_path) if given == START else given

    def describe(self) -> str:
        """Return its identity, or the name of its embedder if that does not exist yet."""
        return f"novelty by {self._embedder}" if self.job.without_weights else self.identity

    def memory(self) -> Iterator[Price]:
        """Yield the bytes of the embedder."""
        yield Price(self.price_name, self.ranks, embedder_bytes(self.job, self.settings.embedder))

    def make(self, stream: StreamSettings | None) -> MakeScorer:
        """Return a function that makes the scorer."""
        settings = NoveltySettings(
            embedder=embedder_settings(self.job, self.settings.embedder),
            history=self.settings.history,
            nearest=self.settings.nearest,
            groups_per_step=self.job.config.groups_per_step,
        )
        return partial(Novelty, self.given.name, settings)


KIND = NoveltyKind
