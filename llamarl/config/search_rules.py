"""What no single value of a configuration shows of the buffer, of schedules and of temperatures."""

from __future__ import annotations

from llamarl.config.loss_options import declarations, declares
from llamarl.config.schema import Config

Rule = tuple[str, bool, str]  # the keys, whether they are wrong, the remedy


def schedule_rules(c: Config) -> list[Rule]:
    """Of options of the loss that follow a schedule."""
    examples = {"beta": "0.01", "log_reward_temperature": "2", "reference_temperature": "1"}
    rules = []
    for option, section in c.scheduled_options.items():
        has_option = isinstance(c.loss.options.get(option), int | float)
        follows = getattr(c, section).kind != "constant"
        what = f"needs a loss with an option {option}, and its first value: "
        rules.append(
            (
                f"{section}.kind loss.fn",
                follows and not has_option,
                f"{what}loss.{option}={examples[option]}",
            )
        )
    return rules


def temperature_rules(c: Config) -> list[Rule]:
    """Of completions that are sampled at other temperatures than they are trained on at. An
    importance weight pi/mu is right for them too: mu is what they were sampled from.
    """
    key = "generator.temperature"
    others = not c.samples_as_trained
    return [
        (
            f"{key} loss.fn",
            others and declares(c.loss.fn, "holds_to_generator"),
            "holds the policy near what sampled, which is hotter or colder than the policy; "
            f"loss=tb, tba or aipo, or {key}=null",
        ),
        (
            f"{key} trainer.reward_kl_coef",
            others and c.trainer.reward_kl_coef > 0,
            "takes the KL of what sampled for that of the policy; "
            f"loss.kl_coef in its place, or {key}=null",
        ),
    ]


def replay_rules(c: Config) -> list[Rule]:
    """Of a replay buffer's size and of what is drawn from it."""
    b = c.buffer
    if b.kind != "replay":
        return []
    trained = c.groups_per_step * c.trained_per_prompt
    batch = c.groups_per_step * c.group_size
    initial = b.initial_completions or 0
    by_token = c.trainer.advantages == "gae"
    # A loss of the user's own is asked for its mark when it is imported.
    needs_whole = c.loss.fn in declarations() and not declares(c.loss.fn, "group_means")
    return [
        (
            "buffer.max_size groups_per_step",
            b.max_size < trained,
            f"does not hold the {trained} completions of a step; raise it",
        ),
        (
            "buffer.completions_per_prompt group_size",
            c.trained_per_prompt > c.group_size,
            "a prompt has fewer completions than are trained on at once: TBA's S >= K; "
            "raise group_size",
        ),
        (
            "buffer.completions_per_prompt trainer.advantages",
            b.completions_per_prompt == 1 and c.group_size > 1 and not by_token,
            "one completion of a prompt has no baseline: its advantage is always 0; "
            "need at least 2, or trainer.advantages=gae",
        ),
        (
            "buffer.draw loss.fn",
            b.draw == "split" and needs_whole,
            "gives a rank a part of each prompt's completions, and this loss needs all of them; "
            "buffer.draw=shared, or loss=tb",
        ),
        (
            "buffer.draw trainer.filter_groups",
            b.draw == "split" and c.trainer.filter_groups,
            "gives a rank a part of each group, which does not show whether all its rewards are "
            "equal; trainer.filter_groups=false, or buffer.draw=shared",
        ),
        (
            "buffer.good_reward reward.kind",
            b.good_reward is not None and any(p.kind == "novelty" for p in c.reward_parts.values()),
            "counts completions by their rewards, of which novelty is a part and no success; "
            "buffer.good_reward=null, or a reward without novelty",
        ),
        (
            "buffer.initial_completions max_lag",
            c.max_lag is not None and initial > batch,
            "with a bounded lag a step begins with one batch; max_lag=null, or a smaller fill",
        ),
        (
            "buffer.initial_completions buffer.max_size",
            initial > b.max_size,
            "the buffer does not hold its initial fill",
        ),
    ]
