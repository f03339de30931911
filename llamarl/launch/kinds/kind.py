"""What a job does with a scorer, from the first check to making it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic, TypeVar

from llamarl.config.kinds.kind import Given, KindSettings
from llamarl.config.placement import Ranks
from llamarl.launch.identity import ModelParts
from llamarl.launch.job import Job, ScoredText
from llamarl.memory import Price
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.by_own_reward import ByOwnReward
from llamarl.scoring.environment import EnvironmentReward
from llamarl.scoring.in_turn import InTurn
from llamarl.scoring.scorer import Item, MakeScorer, Outcome, Scorer, Site
from llamarl.tasks.environment import GIVEN

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

    scored: the text and tokens that it scores. A kind that loads nothing and cannot fail before it
    scores only needs `identity` and `make`.
    """

    def __init__(self, settings: Settings, given: Given, job: Job, scored: ScoredText):
        self.settings = settings
        self.given = given
        self.job = job
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

    def notes(self) -> list[str]:
        """Return further lines of the dry run."""
        return []

    def memory(self) -> Iterator[Price]:
        """Yield the prices of its memory on its ranks."""
        yield from ()

    @abstractmethod
    def make(self, stream: StreamSettings | None) -> MakeScorer:
        """Return a function that makes the scorer. stream: how it reads completions while these are
        sampled, if it can.
        """

    @property
    def ranks(self) -> Ranks:
        """The ranks that hold its model."""
        return self.job.placement["reward"]

    @property
    def price_name(self) -> str:
        """Its name in lines about memory."""
        return f"{self.given.section} ({self.settings.kind})"


def in_turn(make: Callable[..., Scorer]) -> MakeScorer:
    """Return a function that makes a scorer of texts, which gets as many as keep it busy,
    evaluations first.
    make: takes on_result, a function to call when there is something to poll.
    """
    return partial(_in_turn, make)


def _in_turn(make: Callable[..., Scorer], site: Site) -> InTurn:
    return InTurn(make(on_result=site.on_result))


def by_own_reward(
    main: str, others: Sequence[str], pool: Callable[..., Scorer], name: str
) -> MakeScorer:
    """Return a function that makes the scorer of prompts of several kinds. main: the reward of all
    whose own is not among `others`: an import path, of which `pool` makes a scorer, or GIVEN, for
    what an environment gave. name: of the scorer, in messages.
    """
    makes = {}
    for path in dict.fromkeys((main, *others)):
        makes[path] = partial(_given, name) if path == GIVEN else partial(pool, path)
    make_main = makes.pop(main)
    return in_turn(partial(ByOwnReward, make_main, makes) if makes else make_main)


def _given(name: str, *, on_result: Callable[[], None]) -> EnvironmentReward:
    """Make the scorer of what an environment gave, which is there at once: nobody is called."""
    return EnvironmentReward(name)
