"""What makes a run that run: a checkpoint says it of itself, and only the same run may go on there.

    config    the resolved config; the keys that the schema marks IDENTITY must be the same
    prompts   fingerprints of the training prompts and of the held-out ones, by what they are and
              not by where they came from
    reward    what scores: import paths of functions, digests of models, judges and what they are
              asked

The config alone cannot tell whether ticket 7 is still the prompt that it was: the data may have
changed under the same path, or lie elsewhere unchanged. So prompts are compared by fingerprint, and
the config's keys only explain what differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.config.conversion import is_marked, show, value_differences
from llamarl.config.schema import Config

THE_DATA = "the data itself has changed, or the tokenizer or chat template, under the same settings"


@dataclass(frozen=True, slots=True)
class Identity:
    """JSON values, as a checkpoint holds them."""

    config: dict[str, object]  # nested, under the keys of the command line
    prompts: dict[str, str]  # "training prompts", "held-out prompts" -> fingerprint
    reward: str


@dataclass(frozen=True, slots=True)
class Difference:
    what: str  # a line for people
    permit: str | None  # the word of resume_with_other that lets it pass; None: nothing does


def differences(
    old: Identity, new: Identity, schema: type = Config, *, place: str = "the checkpoint"
) -> list[Difference]:
    """All that makes `new` another run than `old`. schema: of both configs. place: where `old` was
    read, in words.
    """
    changed = {}
    for key, (was, now) in value_differences(old.config, new.config).items():
        changed[key] = f"{key}: {show(was)} in {place}, {show(now)} now"
    found = []
    reasons = []
    for key, difference in changed.items():
        if is_marked(key, "identity", schema):
            found.append(Difference(difference, None))
        if is_marked(key, "data", schema):
            reasons.append(difference)
    others = [name for name in new.prompts if new.prompts[name] != old.prompts.get(name)]
    if others:
        what = f"other {' and '.join(others)}: {'; '.join(reasons) or THE_DATA}"
        found.append(Difference(what, permit="data"))
    if old.reward != new.reward:
        what = f"another reward: {old.reward} in {place}, {new.reward} now"
        found.append(Difference(what, permit="reward"))
    return found
