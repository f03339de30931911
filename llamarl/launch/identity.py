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

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from llamarl.config.conversion import flat, is_marked, to_values, value_differences
from llamarl.config.schema import Config
from llamarl.config.sections.victim import ATTACK, placed_victim
from llamarl.launch.inputs import JobInputs
from llamarl.launch.scorers import gold_kind, reward_kinds
from llamarl.models.config import read_config
from llamarl.models.directory import model_digest, tokenizer_digest, weights_digest
from llamarl.models.given import ModelParts, architecture_of, parts_of
from llamarl.tasks.special import stop_tokens
from llamarl.words.choices import START
from llamarl.words.findings import show

THE_DATA = "the data itself has changed, or the tokenizer or chat template, under the same settings"

OTHER_WEIGHTS = "other weights"


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


def identity_of(inputs: JobInputs) -> Identity:
    """Return the identity of this run. This reads a little of many models' files, so only one rank
    calls it, once.
    """
    return Identity(
        config=to_values(inputs.config),
        prompts=inputs.prompt_fingerprints,
        reward=reward_identity(inputs),
        models=_models(inputs),
        kept=_kept(inputs),
        adapters=_adapters(inputs),
    )


def _models(inputs: JobInputs) -> dict[str, ModelParts]:
    """Return by key what tells each model that the run reads from others."""
    c = inputs.config
    policy = {
        "config.json": architecture_of(read_config(inputs.model_path)),
        "tokenizer": tokenizer_digest(inputs.model_path),
        "stop tokens": list(inputs.stop_token_ids),
        # A fingerprint of prompts lacks what a template writes behind an environment's turns.
        "template_options": dict(c.model.template_options),
        "weights": weights_digest(inputs.model_path),
    }
    found: dict[str, ModelParts] = {"model.path": policy}
    if c.trainer.critic.path:
        found["trainer.critic.path"] = parts_of(c.trainer.critic.path)
    for key, path in c.reference.given.items():
        found[key] = parts_of(path)
    gold = gold_kind(inputs)
    if gold is not None and gold.model is not None:
        found["eval.gold"] = gold.model
    if c.eval.base is not None:
        found["eval.base"] = parts_of(c.eval.base)
    if c.eval.embedder not in (None, START):
        found["eval.embedder"] = {"files": model_digest(c.eval.embedder)}
    return found


def _kept(inputs: JobInputs) -> list[str]:
    """Return the keys of the models whose weights are in every checkpoint."""
    c = inputs.config
    # If it is needed as training started from it, under adapters, as a reference or as an embedder,
    # the checkpoint does not hold it.
    refers = c.reference.kind != "none" and not c.reference.given
    starts_here = c.trainer.lora.rank > 0 or refers
    if starts_here or c.eval.embedder == START:
        return ["trainer.critic.path"]
    return ["model.path", "trainer.critic.path"]


def _adapters(inputs: JobInputs) -> dict[str, object]:
    lora = inputs.config.trainer.lora
    if not lora.rank:
        return {"rank": 0}
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}


def reward_identity(inputs: JobInputs) -> str:
    """Return a text about what scores. Two jobs that give other rewards have other texts."""
    named = []
    for kind in reward_kinds(inputs):
        weight = kind.given.weight
        named.append(kind.identity if weight is None else f"{weight:g} * {kind.identity}")
    rewards = " + ".join(named)
    if inputs.victim_path is None:
        return rewards
    v = placed_victim(inputs.config.victim)
    asked = f"{v.template!r}, chat {v.chat}, system prompt {v.system_prompt!r}"
    sampled = f"{v.max_new_tokens} tokens at {v.temperature:g}, top-p {v.top_p:g}, {v.dtype}"
    # How it reads an attack depends on its chat template too.
    reads = hashlib.sha256(str(inputs.victim_prompt_ids(ATTACK)).encode()).hexdigest()[:16]
    ends = stop_tokens(inputs.victim_path, inputs.victim_tokenizer, chat=v.chat)
    asked += f", as tokens {reads}, until {ends}"
    victim = f"model {model_digest(inputs.victim_path)} asked {asked}"
    return f"{rewards} of {v.replies} answers of {victim}; {sampled}"


# --- Two runs compared ---


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
