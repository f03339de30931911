"""Checks the judges of held-out completions, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from llamarl.launch.job import Job, read_model
from llamarl.launch.kinds import gold_kind
from llamarl.launch.scorers import check_context, other_tokens
from llamarl.launch.sources import samples_of
from llamarl.models.config import read_config
from llamarl.tasks.held_out import EvalSet, set_of
from llamarl.tasks.special import reply_ids
from llamarl.types import Prompt


def check_gold(job: Job) -> None:
    """Check the gold scorer, the base model, and that each held-out row has a text to compare with.
    ValueError or OSError that names what is wrong.
    """
    gold = gold_kind(job)
    if gold is not None:
        gold.check()
        gold_texts(job.eval_sets, job.eval_prompts, job.config.eval.reference_key)
    if job.config.eval.base is not None:
        _check_base(job, Path(job.config.eval.base))


def try_gold(job: Job) -> None:
    """Try the gold scorer, as far as that is cheap. ValueError if it cannot be used."""
    gold = gold_kind(job)
    if gold is not None:
        gold.try_out(samples_of(job))


def _check_base(job: Job, path: Path) -> None:
    """Check that eval.base is a language model that reads the policy's tokens."""
    config = read_model(path)
    if config.labels:
        raise ValueError(
            f"eval.base={path}: {config.architecture} gives scores and no tokens; need the "
            "language model that the policy started from"
        )
    policy = read_config(job.model_path)
    if config.vocab_size < policy.vocab_size or other_tokens(job, path):
        raise ValueError(
            f"eval.base={path}: its vocabulary is not that of the policy, {job.model_path}, and "
            "the perplexity is of the policy's tokens; need a model with the same tokenizer"
        )
    check_context(job.sampled, config, f"eval.base={path}")
    job.check_weights(path, config)


def gold_texts(
    sets: Sequence[EvalSet], prompts: Mapping[int, Prompt], key: str | None
) -> list[str] | None:
    """Return the texts that held-out rows have under this key; None without a key. prompts: the
    prompts of these sets, by number. ValueError for the first row without a text.
    """
    if key is None:
        return None
    texts = []
    for number, prompt in prompts.items():
        text = prompt.meta.get(key)
        if not isinstance(text, str) or not text:
            keys = ", ".join(prompt.meta) or "none"
            one = set_of(sets, number)
            row = f"{number - one.first}{one.place}"
            raise ValueError(
                f"eval.reference_key={key}: held-out row {row} ({prompt.text[:40]!r}) has no text "
                f"under this key to compare with (its keys: {keys}); choose another key, or "
                "eval.reference_key=null"
            )
        texts.append(text)
    return texts


def gold_ids(job: Job, prompt: Prompt, text: str) -> Tensor:
    """Return the tokens [L] of a text as if the policy had sampled it behind the prompt, with the
    end token.
    """
    chat = job.sampled.conversation["chat"]
    ids = reply_ids(job.tokenizer, prompt.prompt_ids.tolist(), text, chat=chat)
    return torch.tensor(ids, dtype=torch.int64)
