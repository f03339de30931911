"""What scores, of every kind: from its settings to how a reward makes it."""

from __future__ import annotations

from functools import partial

from llamarl.config.rewards import AnySourceSettings
from llamarl.config.schema import Config
from llamarl.config.sections.evaluation import START
from llamarl.launch.job import Job, Scored
from llamarl.launch.scorers import transcript_of
from llamarl.launch.sources import source_of
from llamarl.models.config import read_config
from llamarl.models.scorer import label_of
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.embedding import EmbedderSettings
from llamarl.scoring.model import ModelScorer
from llamarl.scoring.novelty import Novelty, NoveltySettings
from llamarl.scoring.scorer import MakeScorer
from llamarl.scoring.sharded import ScorerSettings
from llamarl.scoring.weighted import Part


def reward_parts(config: Config, job: Job, stream: StreamSettings | None) -> list[Part]:
    """Return what scores, with its weights. stream: how its models read what is being sampled."""
    r = config.reward
    if r.kind != "parts":
        make = make_scorer(r, job, job.scored, name=r.kind, section="reward", stream=stream)
        return [Part(r.kind, make)]
    parts = []
    for name, part in r.parts.items():
        section = f"reward.parts.{name}"
        make = make_scorer(part, job, job.scored, name=name, section=section, stream=stream)
        parts.append(Part(name, make, part.weight))
    return parts


def make_scorer(
    settings: AnySourceSettings,
    job: Job,
    scored: Scored,
    *,
    name: str,
    section: str,
    fn_key: str = "",
    stream: StreamSettings | None = None,
) -> MakeScorer:
    """Return how to make a scorer of any kind. name: of the part that it is; section: of the
    configuration, where its settings are; fn_key: the key that names a function, where it is not
    section.fn.
    """
    if settings.kind == "novelty":
        novelty = NoveltySettings(
            embedder=embedder_settings(job.config, job, settings.embedder),
            history=settings.history,
            nearest=settings.nearest,
            groups_per_step=job.config.groups_per_step,
        )
        return partial(Novelty, name, novelty)
    if settings.kind != "model":
        return source_of(settings, job, section=section, fn_key=fn_key)
    scorer = ScorerSettings(
        path=settings.path,
        dtype=settings.dtype,
        label=label_of(read_config(settings.path), settings.label),
        microbatch_tokens=settings.microbatch_tokens,
        scale=settings.scale,
        shift=settings.shift,
        transcript=transcript_of(settings, scored),
    )
    return partial(ModelScorer, name, scorer, stream=stream)


def embedder_settings(config: Config, job: Job, given: str | None) -> EmbedderSettings | None:
    """What an embedder, given as START or a directory, is; None if none is."""
    if given is None:
        return None
    is_policy = given == START
    return EmbedderSettings(
        path=str(job.model_path) if is_policy else given,
        is_policy=is_policy,
        dtype=config.model.dtype,
        microbatch_tokens=config.trainer.microbatch_tokens,
    )
