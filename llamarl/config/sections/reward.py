"""The section `reward`: what scores, alone or as one part of several; and what eval.gold is.

The settings of each kind of scorer are in llamarl/scoring/kinds/. They are held under `scorer` in
code, and on the command line their keys lie beside those of the section:

    reward.path=DIR reward.max_error_rate=0.1     config.reward.scorer.path
                                                  config.reward.max_error_rate
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from llamarl.config.sections.generator import find_reading_ahead
from llamarl.scoring.kinds import KINDS
from llamarl.scoring.kinds.function import FunctionKindSettings
from llamarl.scoring.kinds.kind import Given, KindSettings, RunFacts
from llamarl.scoring.kinds.model import ModelKindSettings
from llamarl.words.fields import (
    ByKind,
    Count,
    Flag,
    Flat,
    Number,
    Share,
    Texts,
    settings_dataclass,
)
from llamarl.words.findings import Findings, did_you_mean

# The time limit for one completion and the memory of the worker, if eval.gold is a function.
GOLD_TIMEOUT_S = 30.0
GOLD_MEMORY_MB = 4096
_SHARDED = tuple(kind for kind in KINDS if kind.is_sharded)
_UNSHARDED = tuple(kind for kind in KINDS if not kind.is_sharded)


@settings_dataclass
class PartSettings:
    """A part of a weighted sum."""

    scorer: Annotated[KindSettings, ByKind(KINDS), Flat()]
    weight: Number
    """Weight of its score in the sum."""


@settings_dataclass
class PartsSettings:
    """A weighted sum of scorers."""

    kind: Literal["parts"]
    parts: dict[str, Annotated[PartSettings, ByKind()]]
    """Scorers by names of your own: name -> kind, weight (1 if not given) and the keys of that
    kind. Keys that are not given have the values of conf/reward/KIND.yaml.
    """
    outcomes: Texts
    """Parts that say whether a completion succeeded, not how; []: all but novelty
    (docs/rewards.md).
    """


@settings_dataclass
class RewardSettings:
    """A reward whose models each lie on one rank."""

    scorer: Annotated[KindSettings, ByKind(_UNSHARDED), Flat()]
    max_error_rate: Share
    """Share of failed scores above which the run stops."""

    replicate: ClassVar[int] = 1
    tensor_parallel: ClassVar[int] = 1
    stream: ClassVar[bool] = False
    piece_tokens: ClassVar[None] = None
    cache_tokens: ClassVar[None] = None
    outcomes: ClassVar[list[str]] = []

    @property
    def kind(self) -> str:
        """The kind of the scorer."""
        return self.scorer.kind


@settings_dataclass
class ShardedRewardSettings:
    """A reward whose models may be spread over ranks, and may read completions while these are
    sampled.
    """

    scorer: Annotated[KindSettings | PartsSettings, ByKind((*_SHARDED, PartsSettings)), Flat()]
    replicate: Count
    """Copies of the model, each sharded over an equal share of the ranks (FSDP2)."""
    tensor_parallel: Count
    """Ranks that share each layer. Each of these parts is sharded."""
    max_error_rate: Share
    """Share of failed scores above which the run stops."""
    stream: Flag
    """Read completions while they are sampled, so that a score is ready soon after the last
    token (docs/rewards.md).
    """
    piece_tokens: Count | Literal["auto"] | None
    """With stream: tokens of a completion that are read at a time; null: an eighth of
    max_new_tokens; auto: the fastest of a half to a sixteenth of those, tried again every 50
    steps.
    """
    cache_tokens: Count | None
    """With stream: places of the K/V cache of a data-parallel rank; null: as many as the
    generators hold.
    """

    @property
    def kind(self) -> str:
        """The kind of the scorer; "parts" for a sum of several."""
        return self.scorer.kind

    @property
    def outcomes(self) -> list[str]:
        """The parts that say whether a completion succeeded; []: all but novelty."""
        return self.scorer.outcomes if isinstance(self.scorer, PartsSettings) else []


AnyRewardSettings = Annotated[RewardSettings | ShardedRewardSettings, ByKind()]


def parts_of(reward: AnyRewardSettings) -> tuple[Given, ...]:
    """Return the scorers: each part of a sum, or the only one."""
    remedy = "go on without its scores: reward.max_error_rate=1"
    must_score = reward.max_error_rate < 1
    scorer = reward.scorer
    if not isinstance(scorer, PartsSettings):
        only = Given(
            settings=scorer,
            name=scorer.kind,
            section="reward",
            remedy=remedy,
            must_score=must_score,
            reads_ahead=reward.stream,
        )
        return (only,)
    parts = []
    for name, part in scorer.parts.items():
        given = Given(
            settings=part.scorer,
            name=name,
            section=f"reward.parts.{name}",
            remedy=remedy,
            must_score=must_score,
            reads_ahead=reward.stream,
            weight=part.weight,
        )
        parts.append(given)
    return tuple(parts)


def find_reward(reward: AnyRewardSettings, run: RunFacts, found: Findings) -> None:
    """Add to `found` settings of scorers that cannot go together."""
    parts = parts_of(reward)
    for part in parts:
        part.settings.find(part, run, found)
    if not parts:
        found.add("a sum needs parts; 'reward.parts={rm: {kind: model, path: DIR}}'", "reward.kind")
    names = [part.name for part in parts]
    unknown = [name for name in reward.outcomes if name not in names]
    if unknown:
        near = did_you_mean(unknown[0], names)
        found.add(f"no part is called {unknown[0]}{near}", "reward.outcomes")
    if reward.stream:
        _find_stream(reward, run, found)


def find_gold(gold: Given | None, label: str | None, run: RunFacts, found: Findings) -> None:
    """Add to `found` settings of eval.gold that cannot go together. label: eval.gold_label."""
    if label is not None and (gold is None or not gold.settings.has_labels):
        what = "only the directory of a scorer has labels; eval.gold_label=null, or eval.gold=DIR"
        found.add(what, "eval.gold_label", "eval.gold")
    if gold is not None:
        gold.settings.find(gold, run, found)


def _find_stream(reward: AnyRewardSettings, run: RunFacts, found: Findings) -> None:
    """Add settings that keep models from reading completions while these are sampled."""
    parts = parts_of(reward)
    if reward.piece_tokens == "auto" and run.max_lag == 0:
        found.add(
            "auto measures which size is fastest, and a synchronous run must not depend on a "
            "clock; a number, null, or max_lag=1",
            "reward.piece_tokens",
            "max_lag",
        )
    if parts and not any(part.settings.is_sharded for part in parts):
        found.add(
            "only scorers of kind model read tokens ahead, and there is none; reward.stream=false",
            "reward.stream",
            "reward.kind",
        )
    if run.has_victim:
        found.add(
            "the victim's replies are scored, and they begin only when an attack has ended; "
            "reward.stream=false",
            "reward.stream",
            "victim.kind",
        )
    find_reading_ahead(
        reward,
        found,
        section="reward",
        reader="scorer",
        generator_kind=run.generator_kind,
        offload=run.offload,
        longest=run.longest,
    )


def gold_of(
    gold: str, label: str | None, *, dtype: Literal["float32", "bfloat16"], microbatch_tokens: int
) -> Given:
    """Return the scorer that eval.gold names: a function, or a model's directory. label:
    eval.gold_label. dtype and microbatch_tokens are used by a model alone.
    """
    settings: KindSettings
    if ":" in gold:
        settings = FunctionKindSettings(
            kind="function",
            fn=gold,
            options={},
            num_workers=1,
            timeout_s=GOLD_TIMEOUT_S,
            memory_mb=GOLD_MEMORY_MB,
        )
    else:
        settings = ModelKindSettings(
            kind="model",
            path=gold,
            label=label,
            dtype=dtype,
            microbatch_tokens=microbatch_tokens,
            scale=1.0,
            shift=0.0,
        )
    return Given(
        settings=settings,
        name=gold,
        section="eval.gold",
        remedy="leave eval.gold out",
        must_score=True,
        own_keys={"fn": "eval.gold", "path": "eval.gold", "label": "eval.gold_label"},
    )
