"""What makes a run that run: a checkpoint says it of itself, and only the same run may go on there.

    config    the resolved config; the keys that the schema marks IDENTITY must be the same
    prompts   fingerprints of the training prompts and of the held-out ones, by what they are and
              not by where they came from
    reward    what scores: the import path of a function, or a judge and what it is asked

The config alone cannot tell whether ticket 7 is still the prompt that it was: the data may have
changed under the same path, or lie elsewhere unchanged. So prompts are compared by fingerprint, and
the config's keys only explain what differs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from llamarl.config.conversion import is_marked, show, value_differences
from llamarl.config.schema import Mark

THE_DATA = "the data itself has changed, or the tokenizer or chat template, under the same settings"


@dataclass(frozen=True, slots=True)
class Identity:
    """JSON values, as a checkpoint holds them."""

    config: dict[str, object]  # nested, under the keys of the command line
    prompts: dict[str, str]  # "training prompts", "held-out prompts" -> fingerprint
    reward: str

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)


def identity_of(state: object) -> Identity | None:
    """What `to_json` gave; None for anything else, such as what an earlier version wrote."""
    try:
        return Identity(**state)
    except TypeError:  # no mapping, or one of other names
        return None


@dataclass(frozen=True, slots=True)
class Difference:
    what: str  # a line for people
    permit: str | None  # the word of resume_with_other that lets it pass; None: nothing does


def differences(old: Identity, new: Identity) -> list[Difference]:
    """All that makes `new` another run than `old`."""
    changed = {}
    for key, (was, now) in value_differences(old.config, new.config).items():
        changed[key] = f"{key}: {show(was)} in the checkpoint, {show(now)} now"
    found = [Difference(changed[key], None) for key in changed if is_marked(key, Mark.IDENTITY)]
    others = [name for name in new.prompts if new.prompts[name] != old.prompts.get(name)]
    if others:
        reasons = "; ".join(changed[key] for key in changed if is_marked(key, Mark.DATA))
        what = f"other {' and '.join(others)}: {reasons or THE_DATA}"
        found.append(Difference(what, permit="data"))
    if old.reward != new.reward:
        what = f"another reward: {old.reward} in the checkpoint, {new.reward} now"
        found.append(Difference(what, permit="reward"))
    return found
