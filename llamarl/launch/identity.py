"""The identity of a run: a checkpoint holds it, and only the same run may go on there.

    config    the resolved config; the keys that the schema marks IDENTITY must be the same
    prompts   fingerprints of the training prompts and of the held-out ones: their contents,
              whatever file they came from
    reward    the scorers: import paths of functions, digests of models, judges and what they are
              asked
    models    for each model that the run reads, by its key: its contents, wherever it lies
    kept      keys of the models whose weights are in every checkpoint
    adapters  trainer.lora, if there are adapters

The config alone cannot tell whether ticket 7 still has the same prompt: the data may have changed
under the same path, or lie elsewhere unchanged. So prompts are compared by fingerprint, and the
config's keys only explain the difference. The same holds for models. Other keys that change what is
learned, such as lr, may differ, which is said.

If a resumed run reads weights from a model's directory again, other weights make another run:
weights under adapters, a reference's, and those of judges of evaluations. A model that is trained
as a whole is in the checkpoint, so other weights in its directory only bring a warning: from that
directory a run reads only config.json, the tokenizer and the stop tokens again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llamarl.config.conversion import flat, is_marked, value_differences
from llamarl.config.findings import show
from llamarl.config.schema import Config
from llamarl.models.config import ModelConfig, read_config
from llamarl.models.fingerprint import weights_digest

THE_DATA = "the data itself has changed, or the tokenizer or chat template, under the same settings"

OTHER_WEIGHTS = "other weights"
# Parts of a model: a digest, a list of numbers, or the fields of its config.json.
ModelParts = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Identity:
    """JSON values, as a checkpoint holds them."""

    config: dict[str, object]  # nested, under the keys of the command line
    prompts: dict[str, str]  # "training prompts", "held-out prompts" -> fingerprint
    reward: str
    models: dict[str, ModelParts]  # "model.path" -> {"config.json": ..., "weights": ...}
    kept: list[str]
    adapters: dict[str, object]  # {"rank": 4, "alpha": 8.0, "targets": [...]}; {"rank": 0}


@dataclass(frozen=True, slots=True)
class Difference:
    what: str  # a line for people
    permit: str | None  # the word of resume_with_other that permits it; None: no word does
    refuses: bool = True  # otherwise it only brings a warning


def architecture_of(model: ModelConfig) -> dict[str, object]:
    """Return the fields of a decoder's config.json, as JSON values."""
    return {**dataclasses.asdict(model), "labels": list(model.labels)}


def parts_of(path: str | Path) -> ModelParts:
    """Return the parts that tell a decoder from others, wherever it lies."""
    return {"config.json": architecture_of(read_config(path)), "weights": weights_digest(path)}


def differences(
    old: Identity, new: Identity, schema: type = Config, *, place: str = "the checkpoint"
) -> list[Difference]:
    """Return all that makes `new` another run than `old`. schema: of both configs. place: where
    `old` was read, in words.
    """
    changed = {}
    for key, pair in value_differences(old.config, new.config).items():
        changed[key] = _change(key, pair, place)
    # Another kind of a section has other keys. Adapters are compared below.
    both = flat(old.config).keys() & flat(new.config).keys()
    told = {key for key in both if not key.startswith("trainer.lora.")}
    found = []
    reasons = []
    for key, difference in changed.items():
        if is_marked(key, "identity", schema):
            found.append(Difference(difference, None))
        elif is_marked(key, "data", schema):
            reasons.append(difference)
        elif not is_marked(key, "outward", schema) and key in told:
            found.append(Difference(difference, permit=None, refuses=False))
    adapters = value_differences(old.adapters, new.adapters)
    if 0 in adapters.get("rank", ()):  # only the other run has these keys
        adapters = {"rank": adapters["rank"]}
    for key, pair in adapters.items():
        found.append(Difference(_change(f"trainer.lora.{key}", pair, place), None))
    others = [name for name in new.prompts if new.prompts[name] != old.prompts.get(name)]
    if others:
        what = f"other {' and '.join(others)}: {'; '.join(reasons) or THE_DATA}"
        found.append(Difference(what, permit="data"))
    if old.reward != new.reward:
        what = f"another reward: {old.reward} in {place}, {new.reward} now"
        found.append(Difference(what, permit="reward"))
    found += _other_models(old, new, place)
    return found


def _other_models(old: Identity, new: Identity, place: str) -> list[Difference]:
    """Return the models that differ. A model that only one run reads is no difference, because
    there is nothing to compare it with.
    """
    before = flat(old.config)
    now = flat(new.config)
    found = []
    for key in sorted(old.models.keys() & new.models.keys()):
        where = f"{key}={show(now.get(key))}"
        if before.get(key) != now.get(key):
            where += f" ({show(before.get(key))} in {place})"
        is_kept = key in new.kept
        what = _other_parts(old.models[key], new.models[key], place)
        if is_kept and OTHER_WEIGHTS in what:
            what.remove(OTHER_WEIGHTS)
            told = (
                f"another model, {where}: {OTHER_WEIGHTS}, which are not read; {place} has its own"
            )
            found.append(Difference(told, permit=None, refuses=False))
        if what:
            found.append(Difference(f"another model, {where}: {'; '.join(what)}", permit="model"))
    return found


def _other_parts(old: ModelParts, new: ModelParts, place: str) -> list[str]:
    """Return what differs in the parts that both have, in words."""
    what = []
    for part in [name for name in new if name in old and old[name] != new[name]]:
        was, is_now = old[part], new[part]
        if isinstance(was, Mapping) and isinstance(is_now, Mapping):
            changes = value_differences(was, is_now)
            what += [_change(f"{part}: {field}", pair, place) for field, pair in changes.items()]
        elif isinstance(was, list):
            what.append(_change(part, (was, is_now), place))
        else:
            what.append(f"other {part}")
    return what


def _change(name: str, pair: tuple[object, object], place: str) -> str:
    was, now = pair
    return f"{name}: {show(was)} in {place}, {show(now)} now"
