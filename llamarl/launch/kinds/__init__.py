"""What a job does with scorers of every kind. Each file of this folder has one kind, as KIND.

    conf/reward/NAME.yaml           its values
    llamarl/config/kinds/NAME.py    its settings, their meaning, and what cannot go together
    llamarl/launch/kinds/NAME.py    how it is checked, told from others, described and made

The file is found by the name of the kind, so that no list has to be kept. A kind's `make` returns
any Scorer (llamarl/scoring/scorer.py).
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from llamarl.config.kinds.kind import Given
from llamarl.launch.inputs import JobInputs, ScoredText
from llamarl.launch.kinds.kind import Kind
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.weighted import WeightedPart


def kind_of(given: Given, inputs: JobInputs, scored: ScoredText) -> Kind[Any]:
    """Return the kind of a scorer. scored: the text and tokens that it scores."""
    module = importlib.import_module(f"{__name__}.{given.settings.kind}")
    return module.KIND(given.settings, given, inputs, scored)


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
    gold = gold_kind(inputs)
    return [*reward_kinds(inputs), *([] if gold is None else [gold])]


def reward_parts(inputs: JobInputs, stream: StreamSettings | None) -> list[WeightedPart]:
    """Return the reward's scorers with their weights. stream: how models read completions while
    these are sampled.
    """
    parts = []
    for kind in reward_kinds(inputs):
        weight = 1.0 if kind.given.weight is None else kind.given.weight
        parts.append(WeightedPart(kind.given.name, partial(kind.make, stream=stream), weight))
    return parts
