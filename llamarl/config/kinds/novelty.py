"""kind: novelty. How unlike a completion is to those before it, by embeddings."""

from __future__ import annotations

from typing import ClassVar, Literal

from llamarl.config.kinds.kind import Given, KindSettings, RunFacts
from llamarl.words.choices import START
from llamarl.words.fields import Count, Text, settings_dataclass
from llamarl.words.findings import Findings


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


SETTINGS = NoveltyKindSettings
