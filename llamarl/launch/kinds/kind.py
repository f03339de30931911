"""What a job does with a scorer, from the first check to making it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from llamarl.config.kinds.kind import Given, KindSettings
from llamarl.launch.inputs import JobInputs, ScoredText
from llamarl.launch.model_directory import ModelParts
from llamarl.launch.placement import Placement
from llamarl.memory import Price
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.routing import ByOwnReward, EnvironmentReward, InTurn
from llamarl.scoring.scorer import Item, Scorer, Site
from llamarl.tasks.environment import GIVEN
from llamarl.types import Outcome

Settings = TypeVar("Settings", bound=KindSettings)


class Kind(ABC, Generic[Settings]):
    """A scorer of one kind, as a job knows it. A file of this folder has the class of its kind.

        kind = ModelKind(settings, given, inputs, scored)
        kind.check()             # on every rank, before any weight is read
        kind.try_out(samples)    # on rank 0, before the run's directory is made
        kind.identity            # "(model 3fe1...  - 0) * 1", which a resumed run must have too
        kind.describe()          # a line of the dry run
        kind.memory(placement)   # its bytes on each rank
        kind.make(site)          # the scorer

    scored: the text and tokens that it scores. A kind that loads nothing and cannot fail before it
    scores only needs `identity` and `make`.
    """

    def __init__(self, settings: Settings, given: Given, inputs: JobInputs, scored: ScoredText):
        self.settings = settings
        self.given = given
        self.inputs = inputs
        self.scored = scored

    def check(self) -> None:
        """Check the files that it reads. ValueError or OSError names the key and what is wrong."""
        return None

    def try_out(self, samples: Sequence[Item]) -> None:
        """Let it score samples, as far as that is cheap. ValueError if it cannot be used."""
        return None

    def score(self, samples: Sequence[Item]) -> list[Outcome] | None:
        """Return the outcomes of samples, which a dry run shows; None if that would need a model.
        ValueError if it cannot be used.
        """
        return None

    @property
    def checks_rows(self) -> bool:
        """Whether it can say of a row that no completion of it could be scored."""
        return False

    def row_problems(
        self, rows: Sequence[Item], wait_longer: Callable[[], bool]
    ) -> list[str | None]:
        """Return of each row why no completion of it could be scored, "" where one could be, and
        None for those that were not looked at when wait_longer said no.
        """
        raise NotImplementedError

    @property
    @abstractmethod
    def identity(self) -> str:
        """A text that differs if other scores would be given, and is the same for the same scorer
        at another path.
        """

    @property
    def model(self) -> ModelParts | None:
        """The parts that tell its model from others; None without a model."""
        return None

    def describe(self) -> str:
        """Return a description of it, for people."""
        return self.identity

    def notes(self, placement: Placement) -> list[str]:
        """Return further lines of the dry run."""
        return []

    def memory(self, placement: Placement) -> Iterator[Price]:
        """Yield the prices of its memory on its ranks."""
        yield from ()

    @abstractmethod
    def make(self, site: Site, stream: StreamSettings | None = None) -> Scorer:
        """Return the scorer of a site. stream: how it reads completions while these are sampled, if
        it can.
        """

    @property
    def price_name(self) -> str:
        """Its name in lines about memory."""
        return f"{self.given.section} ({self.settings.kind})"


def by_own_reward(
    main: str, others: Sequence[str], make_pool: Callable[[str], Scorer], name: str
) -> Scorer:
    """Return the scorer of prompts of several kinds.

    main: the default reward, an import path or GIVEN (the environment's reward). others: rewards
    that some prompts name for themselves. make_pool: makes the scorer of an import path. name: of
    the scorer, in messages.
    """
    scorers: dict[str, Scorer] = {}
    for path in dict.fromkeys((main, *others)):
        scorers[path] = EnvironmentReward(name) if path == GIVEN else make_pool(path)
    default = scorers.pop(main)
    return InTurn(ByOwnReward(default, scorers) if scorers else default)
