"""Keys of earlier releases: the answer to whoever sets one today, and how a configuration that an
earlier release saved is read.
"""

from __future__ import annotations

from collections.abc import Mapping

# Key -> its name of today.
RENAMED = {
    "beta_schedule": "loss.schedules.beta.kind",
    "deadline_s": "timeout_s",
    "generator.quantize_keep": "generator.quantize_exclude",
    "log_reward_schedule": "loss.schedules.log_reward_temperature.kind",
    "loss.length_normalise": "loss.length_normalize",
    "loss.normalise": "loss.normalize",
    "reference.chunk_tokens": "reference.piece_tokens",
    "reference.enabled": "reference.kind",
    "reference_schedule": "loss.schedules.reference_temperature.kind",
    "reward.chunk_tokens": "reward.piece_tokens",
    "victim.answers": "victim.replies",
}
# Keys of RENAMED that saved configurations have, with the same values as today's.
_MOVED = ("reference.chunk_tokens", "reward.chunk_tokens", "victim.answers")
# Key that is gone -> what holds in its place.
REMOVED = {
    "trainer.reward_kl_estimator": (
        "it was removed: the KL in the reward is always k1, and loss.kl_estimator chooses the "
        "estimator of the KL in the loss"
    ),
}
# The section `tickets` as it was before there was one.
_TICKETS = {
    "informative": False,
    "max_refill": 4,
    "sampler": "uniform",
    "half_life": 2.0,
    "candidates": 4,
}
# Section -> its name of today, where its keys have the same names as ever.
_RENAMED_SECTIONS = {
    "beta_schedule": "loss.schedules.beta",
    "log_reward_schedule": "loss.schedules.log_reward_temperature",
    "reference_schedule": "loss.schedules.reference_temperature",
}


def answer_to(key: str) -> str | None:
    """Return what to say about a key of an earlier release, after a semicolon; None if it never
    was one.
    """
    section, _, rest = key.rpartition(".")
    today = RENAMED.get(key)
    if section in _RENAMED_SECTIONS:
        today = f"{_RENAMED_SECTIONS[section]}.{rest}"
    if today is not None:
        return f"it is called {today} now"
    return REMOVED.get(key)


def of_today(saved: Mapping[str, object]) -> dict[str, object]:
    """Return the nested values of a saved configuration under today's keys."""
    values = dict(saved)
    schedules = {}
    for section, today in _RENAMED_SECTIONS.items():
        schedule = values.pop(section, None)
        if isinstance(schedule, Mapping) and schedule.get("kind") != "constant":
            schedules[today.rpartition(".")[2]] = schedule
    loss = values.get("loss")
    if isinstance(loss, Mapping):
        values["loss"] = {"schedules": schedules, **loss}
    for key in _MOVED:
        section, _, name = key.partition(".")
        kept = values.get(section)
        if isinstance(kept, Mapping) and name in kept:
            today = RENAMED[key].rpartition(".")[2]
            values[section] = {today if one == name else one: kept[one] for one in kept}
    for key in REMOVED:
        section, _, name = key.partition(".")
        kept = values.get(section)
        if isinstance(kept, Mapping):
            values[section] = {other: value for other, value in kept.items() if other != name}
    reward = values.get("reward")
    if isinstance(reward, Mapping) and reward.get("kind") == "function":
        values["reward"] = {"options": {}, **reward}
    elif isinstance(reward, Mapping) and reward.get("kind") == "parts":
        values["reward"] = {"outcomes": [], **reward}
    placement = values.get("placement")
    if isinstance(placement, Mapping):
        values["placement"] = {"sheet": None, **placement}
    if "governor" in values:  # a configuration of a job with tickets
        values["tickets"] = {**_TICKETS, **_section(values, "tickets")}
    metrics = values.get("metrics")
    if isinstance(metrics, Mapping) and "generator" in values:  # a run of RL
        values["metrics"] = {"samples": 2, "show_every": 25, **metrics}
    evaluation = values.get("eval")
    if isinstance(evaluation, Mapping):
        values["eval"] = {"sets": {}, **evaluation}
    return values


def _section(values: Mapping[str, object], name: str) -> dict[str, object]:
    """Return the keys of a section; none where it is not there."""
    section = values.get(name)
    return dict(section) if isinstance(section, Mapping) else {}
