"""What scores texts, as the user gave it: a function in worker processes, a judge, an encoder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from llamarl.config.rewards import (
    EncoderSourceSettings,
    FunctionSourceSettings,
    JudgeSourceSettings,
)
from llamarl.launch.job import Job
from llamarl.scoring.by_set import BySet
from llamarl.scoring.classifier import Classifier, ClassifierSettings
from llamarl.scoring.in_turn import InTurn
from llamarl.scoring.pool import RewardPool, check_reward
from llamarl.scoring.scorer import Item, MakeScorer, Outcome, Scorer, Site, site_alone
from llamarl.scoring.trial import commonest, try_scorer
from llamarl.tasks.special import text_ids

NUM_SAMPLES = 3

log = logging.getLogger("llamarl")

# Of what reads texts.
TextSourceSettings = FunctionSourceSettings | JudgeSourceSettings | EncoderSourceSettings


def source_of(
    settings: TextSourceSettings, job: Job, *, section: str, fn_key: str = ""
) -> MakeScorer:
    """Return how to make what reads texts. section: of the configuration, where its settings are.
    fn_key: the key that names the function, where it is not section.fn. ValueError or OSError for a
    template that cannot be read.
    """
    if settings.kind == "function":
        pool = partial(
            RewardPool,
            num_workers=settings.num_workers,
            timeout_s=settings.timeout_s,
            memory_mb=settings.memory_mb,
            section=section,
            fn_key=fn_key,
            **job.conversation,
        )
        path = settings.fn or job.task.default_reward
        others = [] if settings.fn else [fn for fn in job.set_rewards if fn != path]
        if not others:
            return partial(_in_turn, partial(pool, path))
        own = {fn: partial(pool, fn) for fn in others}
        return partial(_in_turn, partial(BySet, partial(pool, path), own))
    if settings.kind == "encoder":
        make = partial(
            Classifier,
            classifier_settings(settings),
            device=job.world.device,
            reproducible=job.config.max_lag == 0,
        )
        return partial(_in_turn, make)
    # Most runs have no use for an HTTP client.
    from llamarl.scoring.endpoint import EndpointSettings
    from llamarl.scoring.judge import Judge

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
    make = partial(
        Judge,
        endpoint,
        ask=settings.ask,
        template=read_template(settings.template),
        lowest=settings.lowest,
        highest=settings.highest,
    )
    return partial(_in_turn, make)


def _in_turn(make: Callable[..., Scorer], site: Site) -> InTurn:
    return InTurn(make(on_result=site.on_result))


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


def samples_of(job: Job) -> list[Item]:
    """Return what a reward is tried on: of the first NUM_SAMPLES training prompts the row's own
    answer, or the prompt's text where it has none, as a completion that ended by itself.
    """
    tokenizer = job.scored.tokenizer
    samples = []
    for number in range(min(NUM_SAMPLES, job.task.num_train)):
        prompt = job.task.train_prompt(number)
        text = str(prompt.meta.get("answer", "")) or prompt.text
        token_ids = text_ids(tokenizer, text)
        if tokenizer.eos_token_id is not None:
            token_ids.append(tokenizer.eos_token_id)
        sample = Item(
            prompt=prompt,
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            text=text,
            has_ended=True,
            is_held_out=False,
            decode_raw=partial(tokenizer.decode, skip_special_tokens=False),
        )
        samples.append(sample)
    return samples


def check_sources(job: Job) -> None:
    """Try each function that the user gave on samples, and ask each judge once; in one process of a
    job, before anything heavy starts. ValueError if one cannot be used, or if a function fails on
    all samples in the same way, unless reward.max_error_rate is 1.

    A judge is not tried on samples, for its replies may cost money.
    """
    samples = samples_of(job)
    for key, part in job.config.reward_parts.items():
        if part.kind == "function" and part.fn:
            outcomes = try_part(part, job, samples, section=key)
            _warn_of_no_score(f"{key}.fn={part.fn}", outcomes)
        elif part.kind == "judge":
            try_part(part, job, [], section=key)


def try_sources(job: Job, samples: Sequence[Item]) -> dict[str, list[Outcome]]:
    """The outcomes of samples, in order, by the key of each function or judge of the reward.
    ValueError as check_sources says.
    """
    scored = {}
    for key, part in job.config.reward_parts.items():
        if part.kind in ("function", "judge"):
            scored[key] = try_part(part, job, samples, section=key)
    return scored


def try_part(
    settings: FunctionSourceSettings | JudgeSourceSettings,
    job: Job,
    samples: Sequence[Item],
    *,
    section: str,
) -> list[Outcome]:
    """The outcomes of samples by one function or judge. ValueError as check_sources says."""
    remedy = "correct what scores, or go on all the same with reward.max_error_rate=1"
    if settings.kind == "function":
        return check_reward(
            settings.fn or job.task.default_reward,
            samples,
            section=section,
            remedy=remedy,
            must_score=job.config.reward.max_error_rate < 1,
            timeout_s=settings.timeout_s,
            memory_mb=settings.memory_mb,
            **job.conversation,
        )
    judge = source_of(settings, job, section=section)(site_alone(job.world.device))
    return try_scorer(judge, samples, given=f"{section}.url={settings.url}", remedy=remedy)


def _warn_of_no_score(given: str, outcomes: Sequence[Outcome]) -> None:
    """Say so where a function that may be used has scored none of the samples."""
    if any(outcome.kind == "score" for outcome in outcomes):
        return
    for kind, word in (("abstain", "abstains"), ("error", "fails")):
        reasons = [outcome.reason for outcome in outcomes if outcome.kind == kind]
        if reasons:
            log.warning(
                "%s %s on %d of the %d samples that it was tried on, and scores none: %s",
                given,
                word,
                len(reasons),
                len(outcomes),
                commonest(reasons),
            )


def read_template(file: str | None) -> str | None:
    """The text of a judge's template; None if there is no file. ValueError if it is no text."""
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the judge's template {file}: not UTF-8: {error.reason}") from error
