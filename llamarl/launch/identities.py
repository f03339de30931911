"""The identity of a job, which its checkpoints hold (llamarl/launch/identity.py)."""

from __future__ import annotations

import hashlib

from llamarl.config.conversion import to_values
from llamarl.config.sections.victim import ATTACK, placed_victim
from llamarl.launch.identity import Identity, ModelParts, architecture_of, parts_of
from llamarl.launch.job import Job, stop_tokens
from llamarl.launch.kinds import gold_kind, reward_kinds
from llamarl.models.config import read_config
from llamarl.models.fingerprint import model_digest, tokenizer_digest, weights_digest
from llamarl.words.choices import START


def identity_of(job: Job) -> Identity:
    """Return the identity of this run. This reads a little of many models' files, so only one rank
    calls it, once.
    """
    return Identity(
        config=to_values(job.config),
        prompts=job.prompt_fingerprints,
        reward=reward_identity(job),
        models=_models(job),
        kept=_kept(job),
        adapters=_adapters(job),
    )


def _models(job: Job) -> dict[str, ModelParts]:
    """Return by key what tells each model that the run reads from others."""
    c = job.config
    policy = {
        "config.json": architecture_of(read_config(job.model_path)),
        "tokenizer": tokenizer_digest(job.model_path),
        "stop tokens": list(job.stop_token_ids),
        "weights": weights_digest(job.model_path),
    }
    found: dict[str, ModelParts] = {"model.path": policy}
    if c.trainer.critic.path:
        found["trainer.critic.path"] = parts_of(c.trainer.critic.path)
    gold = gold_kind(job)
    if gold is not None and gold.model is not None:
        found["eval.gold"] = gold.model
    if c.eval.base is not None:
        found["eval.base"] = parts_of(c.eval.base)
    if c.eval.embedder not in (None, START):
        found["eval.embedder"] = {"files": model_digest(c.eval.embedder)}
    return found


def _kept(job: Job) -> list[str]:
    """Return the keys of the models whose weights are in every checkpoint."""
    c = job.config
    # If it is needed as training started from it, under adapters, as a reference or as an embedder,
    # the checkpoint does not hold it.
    starts_here = c.trainer.lora.rank > 0 or c.reference.kind != "none"
    if starts_here or c.eval.embedder == START:
        return ["trainer.critic.path"]
    return ["model.path", "trainer.critic.path"]


def _adapters(job: Job) -> dict[str, object]:
    lora = job.config.trainer.lora
    if not lora.rank:
        return {"rank": 0}
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}


def reward_identity(job: Job) -> str:
    """Return a text about what scores. Two jobs that give other rewards have other texts."""
    named = []
    for kind in reward_kinds(job):
        weight = kind.given.weight
        named.append(kind.identity if weight is None else f"{weight:g} * {kind.identity}")
    rewards = " + ".join(named)
    if job.victim_path is None:
        return rewards
    v = placed_victim(job.config.victim)
    asked = f"{v.template!r}, chat {v.chat}, system prompt {v.system_prompt!r}"
    sampled = f"{v.max_new_tokens} tokens at {v.temperature:g}, top-p {v.top_p:g}, {v.dtype}"
    # How it reads an attack depends on its chat template too.
    reads = hashlib.sha256(str(job.victim_prompt_ids(ATTACK)).encode()).hexdigest()[:16]
    ends = stop_tokens(job.victim_path, job.victim_tokenizer, chat=v.chat)
    asked += f", as tokens {reads}, until {ends}"
    victim = f"model {model_digest(job.victim_path)} asked {asked}"
    return f"{rewards} of {v.replies} answers of {victim}; {sampled}"
