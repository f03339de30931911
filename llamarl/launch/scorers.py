"""The scorers of a job, each as its kind (llamarl/scoring/kinds/)."""

from __future__ import annotations

from functools import partial
from typing import Any

from llamarl.launch.inputs import JobInputs
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.kinds import kind_of
from llamarl.scoring.kinds.kind import Kind
from llamarl.scoring.weighted import WeightedPart


def reward_kinds(inputs: JobInputs) -> list[Kind[Any]]:
    """Return the parts of the reward, in their order."""
    return [kind_of(given, inputs, inputs.scored) for given in inputs.config.reward_parts]


def gold_kind(inputs: JobInputs) -> Kind[Any] | None:
    """Return the gold scorer; None without eval.gold. It scores what the policy samples, even if a
    victim replies to that.
    """
    given = inputs.config.given_gold
    return None if given is None else kind_of(given, inputs, inputs.sampled)


def scorers_of(inputs: JobInputs) -> list[Kind[Any]]:
    """Return all scorers: the parts of the reward, and the gold scorer."""
    kinds = reward_kinds(inputs)
    gold = gold_kind(inputs)
    if gold is not None:
        kinds.append(gold)
    return kinds


def reward_parts(inputs: JobInputs, stream: StreamSettings | None) -> list[WeightedPart]:
    """Return the reward's scorers with their weights. stream: how models read completions while
    these are sampled.
    """
    parts = []
    for kind in reward_kinds(inputs):
        weight = 1.0 if kind.given.weight is None else kind.given.weight
        parts.append(WeightedPart(kind.given.name, partial(kind.make, stream=stream), weight))
    return parts
