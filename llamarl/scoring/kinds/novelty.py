"""kind: novelty. How unlike a completion is to those before it, by embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from llamarl.memory import Price
from llamarl.models.directory import model_digest
from llamarl.scoring.kinds.kind import Given, Kind, KindSettings, Places, RunFacts
from llamarl.words.choices import START
from llamarl.words.fields import Count, Text, settings_dataclass
from llamarl.words.findings import Findings

if TYPE_CHECKING:
    from llamarl.scoring.ahead import StreamSettings
    from llamarl.scoring.embedding import EmbedderSettings
    from llamarl.scoring.scorer import Scorer, Site


@settings_dataclass
class NoveltyKindSettings(KindSettings):
    kind: Literal["novelty"]
    embedder: Text
    """start: the model that training starts from; or a sentence encoder's directory."""
    history: Count
    """Completions that are remembered, the newest."""
    nearest: Count | None
    """Most similar ones of these that a completion is compared with; null: all."""

    acts_as_one: ClassVar[bool] = True  # it has one history
    is_novelty: ClassVar[bool] = True

    def find(self, given: Given, run: RunFacts, found: Findings) -> None:
        """Add offload, and a directory without an embedder."""
        if run.offload:
            what = (
                "novelty embeds each group once it is whole, also while another executor has the "
                "device; offload=false"
            )
            found.add(what, given.key("kind"), "offload")
        if self.embedder != START:
            found.add_unless_model(self.embedder, given.key("embedder"))


class NoveltyKind(Kind[NoveltyKindSettings]):
    """A history of completions, and an embedder."""

    def check(self) -> None:
        """Check the directory and the tokenizer of the embedder. ValueError."""
        self.job.check_embedder(self.settings.embedder, self.given.key("embedder"))

    @property
    def _embedder(self) -> EmbedderSettings:
        return self.job.embedder(self.settings.embedder)

    @property
    def identity(self) -> str:
        """What is compared, and the digest of the embedder."""
        s = self.settings
        to = "all" if s.nearest is None else f"{s.nearest} nearest"
        return f"novelty to {to} of {s.history} by {model_digest(self._embedder.path)}"

    def describe(self) -> str:
        """Return its identity, or the name of its embedder if that does not exist yet."""
        return f"novelty by {self._embedder.path}" if self.job.without_weights else self.identity

    def memory(self, places: Places) -> Iterator[Price]:
        """Yield the bytes of the embedder."""
        yield Price(self.price_name, places["reward"], self._embedder.num_bytes)

    def make(self, site: Site, stream: StreamSettings | None = None) -> Scorer:
        """Return the scorer."""
        from llamarl.scoring.novelty import Novelty

        groups_per_step = self.job.groups_per_step
        return Novelty(self.given.name, self.settings, self._embedder, groups_per_step, site)


SETTINGS = NoveltyKindSettings
KIND = NoveltyKind
