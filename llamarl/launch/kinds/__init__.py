"""What scores, of every kind: a file of this folder has what a job does with one of them, as KIND.

    conf/reward/NAME.yaml           its values, and what each of them means
    llamarl/config/kinds/NAME.py    its settings, and what cannot go together with them
    llamarl/launch/kinds/NAME.py    how it is checked, told from others, described and made

The file is found by the name of the kind, so that no list has to be kept. What a kind's `make`
returns is any Scorer (llamarl/scoring/scorer.py).
"""

from __future__ import annotations

import importlib
from typing import Any

from llamarl.config.kinds.kind import Given
from llamarl.launch.job import Job, Scored
from llamarl.launch.kinds.kind import Kind
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.weighted import Part


def kind_of(given: Given, job: Job, scored: Scored) -> Kind[Any]:
    """Return what a job does with a scorer. scored: what it is shown."""
    module = importlib.import_module(f"{__name__}.{given.settings.kind}")
    return module.KIND(given.settings, given, job, scored)


def reward_kinds(job: Job) -> list[Kind[Any]]:
    """Return the parts of the reward, in their order."""
    return [kind_of(given, job, job.scored) for given in job.config.reward_parts]


def gold_kind(job: Job) -> Kind[Any] | None:
    """Return what judges evaluations besides the reward; None without eval.gold. It is shown what
    the policy says, also where a victim answers that.
    """
    given = job.config.given_gold
    return None if given is None else kind_of(given, job, job.sampled)


def scorers_of(job: Job) -> list[Kind[Any]]:
    """Return all that scores: the parts of the reward, and what judges evaluations besides."""
    gold = gold_kind(job)
    return [*reward_kinds(job), *([] if gold is None else [gold])]


def reward_parts(job: Job, stream: StreamSettings | None) -> list[Part]:
    """Return what scores, with its weights. stream: how its models read what is being sampled."""
    parts = []
    for kind in reward_kinds(job):
        weight = 1.0 if kind.given.weight is None else kind.given.weight
        parts.append(Part(kind.given.name, kind.make(stream), weight))
    return parts
