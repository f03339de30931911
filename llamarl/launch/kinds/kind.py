"""What a job does with a scorer, from the first look at what was given to its making."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic, TypeVar

from llamarl.config.kinds.kind import Given, KindSettings
from llamarl.config.placement import Ranks
from llamarl.launch.identity import ModelParts
from llamarl.launch.job import Job, Scored
from llamarl.launch.prices import Price
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.in_turn import InTurn
from llamarl.scoring.scorer import Item, MakeScorer, Outcome, Scorer, Site

Settings = TypeVar("Settings", bound=KindSettings)


class Kind(ABC, Generic[Settings]):
    """A scorer of one kind, as a job knows it. A file of this folder has the class of its kind.

        kind = ModelKind(settings, given, job, scored)
        kind.check()             # on every rank, before any weight is read
        kind.try_out(samples)    # on rank 0, before the run's directory is made
        kind.identity            # "(model 3fe1...  - 0) * 1", which a resumed run must have too
        kind.describe()          # a line of the dry run
        kind.memory()            # its bytes on each rank
        kind.make(None)          # what the reward makes its scorer by

    scored: what it is shown. A kind that loads nothing and cannot fail before it scores needs
    `identity` and `make` alone.
    """

    def __init__(self, settings: Settings, given: Given, job: Job, scored: Scored):
        self.settings = settings
        self.given = given
        self.job = job
        self.scored = scored

    def check(self) -> None:
        """Look at the files that it reads. ValueError or OSError, which name the key and what is
        wrong.
        """
        return None

    def try_out(self, samples: Sequence[Item]) -> None:
        """Have it score samples as far as that is cheap. ValueError if it cannot be used."""
        return None

    def score(self, samples: Sequence[Item]) -> list[Outcome] | None:
        """Return the outcomes of samples, for a dry run to show; None if they would take a model.
        ValueError if it cannot be used.
        """
        return None

    @property
    @abstractmethod
    def identity(self) -> str:
        """What it is, so that what gives other scores has another name, and the same thing at
        another path has the same.
        """

    @property
    def model(self) -> ModelParts | None:
        """What tells its model from others, part by part; None without one."""
        return None

    def describe(self) -> str:
        """Return what it is, for people."""
        return self.identity

    def notes(self) -> list[str]:
        """Return further lines of the dry run."""
        return []

    def memory(self) -> Iterator[Price]:
        """Yield what it takes of its ranks' memory."""
        yield from ()

    @abstractmethod
    def make(self, stream: StreamSettings | None) -> MakeScorer:
        """Return how to make it. stream: how it reads what is being sampled, if it can."""

    @property
    def ranks(self) -> Ranks:
        """The ranks where its model is."""
        return self.job.placement["reward"]

    @property
    def price_name(self) -> str:
        """What a line about its memory calls it."""
        return f"{self.given.section} ({self.settings.kind})"


def in_turn(make: Callable[..., Scorer]) -> MakeScorer:
    """Return how to make what reads texts: it is given as much as keeps it busy, evaluations first.
    make: takes on_result, which it calls when there is something to poll.
    """
    return partial(_in_turn, make)


def _in_turn(make: Callable[..., Scorer], site: Site) -> InTurn:
    return InTurn(make(on_result=site.on_result))
