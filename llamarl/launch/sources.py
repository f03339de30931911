"""What scores texts, as the user gave it: a function in worker processes, a judge, an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from llamarl.config.rewards import (
    EncoderSourceSettings,
    FunctionSourceSettings,
    JudgeSourceSettings,
)
from llamarl.launch.job import Job
from llamarl.tasks.classifier import Classifier, ClassifierSettings
from llamarl.tasks.pool import RewardPool, Sample, check_reward
from llamarl.tasks.source import MakeSource, Outcome, try_source

# Of what reads texts.
TextSourceSettings = FunctionSourceSettings | JudgeSourceSettings | EncoderSourceSettings


def source_of(
    settings: TextSourceSettings, job: Job, *, section: str, fn_key: str = ""
) -> MakeSource:
    """How to make the source. section: of the configuration, where its settings are. fn_key: the
    key that names the function, where it is not section.fn. ValueError or OSError for a template
    that cannot be read.
    """
    if settings.kind == "function":
        return partial(
            RewardPool,
            settings.fn or job.task.default_reward,
            num_workers=settings.num_workers,
            timeout_s=settings.timeout_s,
            memory_mb=settings.memory_mb,
            section=section,
            fn_key=fn_key,
            **job.conversation,
        )
    if settings.kind == "encoder":
        return partial(
            Classifier,
            classifier_settings(settings),
            device=job.world.device,
            reproducible=job.config.max_lag == 0,
        )
    # Most runs have no use for an HTTP client.
    from llamarl.tasks.endpoint import EndpointSettings
    from llamarl.tasks.judge import Judge

    endpoint = EndpointSettings(
        url=settings.url,
        model=settings.model,
        api_key_env=settings.api_key_env,
        max_parallel=settings.max_parallel,
        timeout_s=settings.timeout_s,
        max_retries=settings.max_retries,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        section=section,
    )
    return partial(
        Judge,
        endpoint,
        ask=settings.ask,
        template=read_template(settings.template),
        lowest=settings.lowest,
        highest=settings.highest,
    )


def classifier_settings(settings: EncoderSourceSettings) -> ClassifierSettings:
    """As the classifier takes them."""
    return ClassifierSettings(
        path=settings.path,
        label=settings.label,
        output=settings.output,
        reads=settings.reads,
        dtype=settings.dtype,
        max_tokens=settings.max_tokens,
        batch_size=settings.batch_size,
    )


def check_sources(job: Job, samples: Sequence[Sample]) -> dict[str, list[Outcome]]:
    """The outcomes of samples, in order, by the key of each function or judge of the reward.
    ValueError if one of them cannot be used, or fails on all samples. A task's own function is not
    tried without samples.
    """
    scored = {}
    for key, part in job.config.reward_parts.items():
        if part.kind in ("function", "judge"):
            scored[key] = _check_source(part, job, samples, section=key)
    return scored


def _check_source(
    settings: TextSourceSettings, job: Job, samples: Sequence[Sample], *, section: str
) -> list[Outcome]:
    if settings.kind == "function":
        if not (settings.fn or samples):
            return []
        limits = dict(timeout_s=settings.timeout_s, memory_mb=settings.memory_mb)
        fn = settings.fn or job.task.default_reward
        return check_reward(fn, samples, section=section, **limits, **job.conversation)
    judge = source_of(settings, job, section=section)(on_result=lambda: None)
    return try_source(judge, samples, given=f"{section}.url={settings.url}")


def read_template(file: str | None) -> str | None:
    """The text of a judge's template; None if there is no file. ValueError if it is no text."""
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the judge's template {file}: not UTF-8: {error.reason}") from error
