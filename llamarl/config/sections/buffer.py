"""The section `buffer`: what holds groups until they are trained on, and what cannot go together
with a replay buffer's size and what is drawn from it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from llamarl.config.sections.loss import LossSettings, declarations, declares
from llamarl.config.sections.run import RunSettings
from llamarl.config.sections.trainer import TrainerSettings
from llamarl.words.choices import Priority
from llamarl.words.fields import (
    ByKind,
    Count,
    Natural,
    Number,
    Positive,
    Share,
    marked,
    settings_dataclass,
)
from llamarl.words.findings import Findings


@settings_dataclass
class FifoBufferSettings:
    kind: Literal["fifo"] = marked("identity")
    """fifo: groups are trained on once, earliest deadline first."""


@settings_dataclass
class ReplayBufferSettings:
    kind: Literal["replay"] = marked("identity")
    """replay: a step draws completions of any age (TBA, 4.1 and 4.2; docs/algorithms.md)."""
    draw: Literal["local", "shared", "split"] = marked("identity")
    """local: each trainer rank draws its share of a step's prompts from its own groups; shared:
    all ranks draw from all groups; split: the same, and each rank trains on a share of every
    prompt's completions (loss=tb).
    """
    sync_period: Count
    """k, the steps after which new groups become visible; with max_lag=null a quarter of a
    batch at least.
    """
    most_on_policy: Share
    """m, the probability that a prompt is drawn from the newest by policy version, and not by
    reward.
    """
    priority: Priority
    """How a prompt's completions are drawn: by the softmax of their rewards, or uniform."""
    temperature: Positive
    """Temperature of the softmax, in units of reward."""
    completions_per_prompt: Count | None
    """K, the completions of a prompt that a step draws; null: group_size, which is S."""
    max_size: Count
    """Completions over all trainer ranks at most. The oldest groups leave."""
    grow_until: Count | None
    """Step from which on the buffer holds no more than it held then (TBA, B.3); null: it grows
    to max_size.
    """
    good_reward: Number | None
    """buffer/distinct_good counts the different completions that were ever found with at least
    this reward; null: not.
    """
    initial_completions: Natural | None
    """Completions that the first step waits for; null: one batch."""


AnyBufferSettings = Annotated[FifoBufferSettings | ReplayBufferSettings, ByKind()]


def find_buffer(
    buffer: AnyBufferSettings,
    run: RunSettings,
    found: Findings,
    *,
    loss: LossSettings,
    trainer: TrainerSettings,
    seeks_novelty: bool,
) -> None:
    """Find what cannot be drawn from a replay buffer. seeks_novelty: whether a reward does."""
    if isinstance(buffer, FifoBufferSettings):
        return
    by_token = trainer.advantages == "gae" or loss.ignores_rewards
    _find_sizes(buffer, run, found, by_token=by_token)
    # A user's own loss tells its marks only once it is imported, which is later.
    needs_whole = loss.fn in declarations() and not declares(loss.fn, "group_means")
    if buffer.draw == "split" and needs_whole:
        found.add(
            "draw=split gives each rank some of a prompt's completions, and this loss needs all "
            "of them; buffer.draw=shared, or loss=tb",
            "buffer.draw",
            "loss.fn",
        )
    if buffer.draw == "split" and trainer.filter_groups:
        found.add(
            "draw=split gives each rank a part of every group, and a part does not show whether "
            "all rewards of the group are equal; trainer.filter_groups=false, or "
            "buffer.draw=shared",
            "buffer.draw",
            "trainer.filter_groups",
        )
    if buffer.good_reward is not None and seeks_novelty:
        found.add(
            "good completions are counted by reward, and a reward with novelty does not measure "
            "success; buffer.good_reward=null, or a reward without novelty",
            "buffer.good_reward",
            "reward.kind",
        )


def _find_sizes(
    buffer: ReplayBufferSettings, run: RunSettings, found: Findings, *, by_token: bool
) -> None:
    """Find more completions than there are. by_token: whether each token has an advantage."""
    per_prompt = buffer.completions_per_prompt or run.group_size
    trained = run.groups_per_step * per_prompt
    initial = buffer.initial_completions or 0
    if buffer.max_size < trained:
        found.add(
            f"the buffer is smaller than a step's {trained} completions; raise buffer.max_size",
            "buffer.max_size",
            "groups_per_step",
        )
    if per_prompt > run.group_size:
        found.add(
            "a prompt has fewer completions than a step draws of it (TBA needs S >= K); raise "
            "group_size",
            "buffer.completions_per_prompt",
            "group_size",
        )
    if buffer.completions_per_prompt == 1 and run.group_size > 1 and not by_token:
        found.add(
            "a single completion of a prompt has no baseline, so its advantage is always 0; need "
            "at least 2, or trainer.advantages=gae",
            "buffer.completions_per_prompt",
            "trainer.advantages",
        )
    if run.max_lag is not None and initial > run.groups_per_step * run.group_size:
        found.add(
            "if the lag is bounded, the first step begins with one batch; max_lag=null, or a "
            "smaller fill",
            "buffer.initial_completions",
            "max_lag",
        )
    if initial > buffer.max_size:
        found.add(
            "the buffer is smaller than its initial fill; raise buffer.max_size, or lower "
            "buffer.initial_completions",
            "buffer.initial_completions",
            "buffer.max_size",
        )
