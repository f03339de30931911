"""What the settings of every kind of scorer have, and how a scorer is given on a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from llamarl.words.fields import settings_dataclass
from llamarl.words.findings import Findings


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Values of the rest of the configuration, which a scorer's settings must go together with."""

    unanswered: tuple[str, ...]  # the keys of answers that are null: rows have none to compare with
    group_size: int
    asks_greedily_alone: bool  # an evaluation has one greedy completion of a prompt, and no other
    longest: int  # tokens of a prompt that is trained on and its completion at most
    max_lag: int | None
    offload: bool
    generator_kind: str
    has_victim: bool
    has_environment: bool


@settings_dataclass
class KindSettings:
    """The settings that every kind of scorer has. Each file of this folder adds those of one kind.

    Readers ask what a kind is like, never which kind it is. A kind has the values given here unless
    its file gives others.
    """

    kind: str

    # The ranks of the reward hold its model together. reward.replicate, tensor_parallel and stream
    # apply to such a model alone.
    is_sharded: ClassVar[bool] = False
    # The first rank of the reward takes every completion, and the others follow it.
    acts_as_one: ClassVar[bool] = False
    # It compares a completion with earlier ones, so its scores do not measure success.
    is_novelty: ClassVar[bool] = False
    has_labels: ClassVar[bool] = False  # its model may have labels; the key `label` names one

    @property
    def compares(self) -> bool:
        """Whether it compares the completions of a prompt with each other."""
        return False

    @property
    def sharded_model(self) -> str | None:
        """The directory of the model that the reward's ranks hold together."""
        return None

    @property
    def rescaling(self) -> tuple[float, float]:
        """(scale, shift): the reward is (raw score - shift) * scale."""
        return 1.0, 0.0

    def find(self, given: Given, run: RunFacts, found: Findings) -> None:
        """Add to `found` what cannot go together, and files that are not there."""
        return None


@dataclass(frozen=True, slots=True)
class Given:
    """A scorer as it is given on a command line.

        reward=model reward.path=DIR
        Given(settings=ModelKindSettings(...), name="model", section="reward", ...)

    name: of it, in metrics and messages. section: where its keys are. weight: of its scores in a
    sum; None: it stands alone. remedy: what to do where it fails, besides correcting it.
    must_score: a failure on all samples ends the start. reads_ahead: it reads completions while
    they are sampled, if its kind can. own_keys: keys that are not section.field, by field.
    """

    settings: KindSettings
    name: str
    section: str
    remedy: str
    must_score: bool
    weight: float | None = None
    reads_ahead: bool = False
    own_keys: Mapping[str, str] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """Return the key of the command line that gives this field."""
        return self.own_keys.get(name, f"{self.section}.{name}")
