"""What every kind of scorer has: settings, as they are given on a command line, and what a job does
with them, from the first check to making the scorer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from llamarl.memory import Price
from llamarl.models.config import ModelConfig
from llamarl.words.fields import settings_dataclass
from llamarl.words.findings import Findings

if TYPE_CHECKING:
    from llamarl.models.given import ModelParts
    from llamarl.scoring.ahead import StreamSettings
    from llamarl.scoring.embedding import EmbedderSettings
    from llamarl.scoring.scorer import Item, Scorer, Site
    from llamarl.tasks.base import Task
    from llamarl.types import Outcome


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


@dataclass(frozen=True)
class ScoredText:
    """Text and tokens that a scorer may be asked to score.

    tokenizer: of the model that sampled them. longest: the most tokens of a prompt and its
    completion. longest_keys: the keys that set `longest`. chat, system_prompt: how that model reads
    prompts.
    """

    tokenizer: Any
    longest: int
    longest_keys: str
    chat: bool
    system_prompt: str | None

    def check_context(self, config: ModelConfig, given: str) -> None:
        """Raise ValueError if a model's context is shorter than the longest sequence. given: how
        the user named the model.
        """
        context = config.max_position_embeddings
        if self.longest > context:
            raise ValueError(
                f"{given}: its context is {context} tokens, but "
                f"{self.longest_keys} = {self.longest}; lower one of them"
            )

    @property
    def conversation(self) -> dict[str, Any]:
        """How the model read a prompt, for RewardPool: chat and system_prompt."""
        has_template = bool(getattr(self.tokenizer, "chat_template", None))
        return {"chat": self.chat and has_template, "system_prompt": self.system_prompt}


class JobView(Protocol):
    """The part of a job that scorers may know. JobInputs (llamarl/launch/inputs.py) has it.

    is_told: whether this rank warns of what it finds. model_path: the model that training starts
    from. without_weights: the weights that a dry run did not find, in words.
    """

    is_told: bool
    model_path: Path
    without_weights: list[str]

    @property
    def reproducible(self) -> bool:
        """Whether the run promises the same bits from run to run."""

    @property
    def groups_per_step(self) -> int:
        """Prompts of a training step."""

    @property
    def environment_paths(self) -> list[str]:
        """The import paths of the environments that play."""

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""

    @property
    def task(self) -> Task:
        """The task, with its prompts."""

    @property
    def set_rewards(self) -> list[str]:
        """The rewards of the kinds of eval.sets, each once."""

    @property
    def part_rewards(self) -> list[str]:
        """The rewards of the kinds of a mixture's parts, each once; none for another task."""

    def weights_may_wait(self) -> AbstractContextManager[None]:
        """Let a dry run go on without the weights that the body reads. A run needs them:
        NoWeights.
        """

    def check_weights(
        self, path: str | Path, model: ModelConfig, *, may_lack: Collection[str] = ()
    ) -> None:
        """Check that a directory has the weights of its config.json, which may wait."""

    def chat_template_of(self, path: Path) -> AbstractContextManager[None]:
        """Turn errors of a directory's chat template into a ValueError that names its file."""

    def embedder(self, given: str) -> EmbedderSettings:
        """Return the settings of an embedder that is given as START or a directory."""

    def check_embedder(self, given: str, key: str) -> None:
        """Check the directory of an embedder. ValueError names the key and what is wrong."""


class Places(Protocol):
    """The ranks of a run, and what they hold. Placement (llamarl/launch/placement.py) has it."""

    def __getitem__(self, name: str, /) -> tuple[int, ...]:
        """Return the ranks of an executor."""

    def stream_cache(self, model: ModelConfig, dtype: str) -> tuple[int, int]:
        """Return the tokens and the bytes of the cache in which a model reads ahead, on each rank
        of the reward.
        """

    def asked_by_reward(self, name: str, path: str, dtype: str, *, ahead: bool = False) -> Price:
        """Return the price of a model that the reward's ranks hold together and ask. ahead: it
        reads completions while these are sampled.
        """


Settings = TypeVar("Settings", bound=KindSettings)


class Kind(ABC, Generic[Settings]):
    """A scorer of one kind, as a job knows it. A file of this folder has the class of its kind.

        kind = ModelKind(settings, given, job, scored)
        kind.check()             # on every rank, before any weight is read
        kind.try_out(samples)    # on rank 0, before the run's directory is made
        kind.identity            # "(model 3fe1...  - 0) * 1", which a resumed run must have too
        kind.describe()          # a line of the dry run
        kind.memory(places)      # its bytes on each rank
        kind.make(site)          # the scorer

    scored: the text and tokens that it scores. A kind that loads nothing and cannot fail before it
    scores only needs `identity` and `make`.
    """

    def __init__(self, settings: Settings, given: Given, job: JobView, scored: ScoredText):
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

    def notes(self, places: Places) -> list[str]:
        """Return further lines of the dry run."""
        return []

    def memory(self, places: Places) -> Iterator[Price]:
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
