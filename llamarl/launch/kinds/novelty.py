"""kind: novelty. How unlike a completion is to those before it."""

from __future__ import annotations

from collections.abc import Iterator

from llamarl.config.kinds.novelty import NoveltyKindSettings
from llamarl.launch.embedders import check_embedder, embedder_bytes, embedder_settings
from llamarl.launch.kinds.kind import Kind
from llamarl.launch.placement import Placement
from llamarl.memory import Price
from llamarl.models.directory import model_digest
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.novelty import Novelty, NoveltySettings
from llamarl.scoring.scorer import Scorer, Site
from llamarl.words.choices import START


class NoveltyKind(Kind[NoveltyKindSettings]):
    """A history of completions, and an embedder."""

    def check(self) -> None:
        """Check the directory and the tokenizer of the embedder. ValueError."""
        check_embedder(self.inputs, self.settings.embedder, self.given.key("embedder"))

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
        return str(self.inputs.model_path) if given == START else given

    def describe(self) -> str:
        """Return its identity, or the name of its embedder if that does not exist yet."""
        return f"novelty by {self._embedder}" if self.inputs.without_weights else self.identity

    def memory(self, placement: Placement) -> Iterator[Price]:
        """Yield the bytes of the embedder."""
        held = embedder_bytes(self.inputs, self.settings.embedder)
        yield Price(self.price_name, placement["reward"], held)

    def make(self, site: Site, stream: StreamSettings | None = None) -> Scorer:
        """Return the scorer."""
        settings = NoveltySettings(
            embedder=embedder_settings(self.inputs, self.settings.embedder),
            history=self.settings.history,
            nearest=self.settings.nearest,
            groups_per_step=self.inputs.config.groups_per_step,
        )
        return Novelty(self.given.name, settings, site)


KIND = NoveltyKind
