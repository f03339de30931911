"""Checks the judges of held-out completions, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from llamarl.launch.inputs import Inputs
from llamarl.launch.kinds import gold_kind
from llamarl.launch.model_directory import read_model
from llamarl.launch.sources import samples_of
from llamarl.models.config import read_config
from llamarl.tasks.held_out import EvalSet, set_of
from llamarl.tasks.special import reply_ids
from llamarl.types import Prompt


def check_gold(inputs: Inputs) -> None:
    """Check the gold scorer, the base model, and that each held-out row has a text to compare with.
    ValueError or OSError that names what is wrong.
    """
    gold = gold_kind(inputs)
    if gold is not None:
        gold.check()
        gold_texts(inputs.eval_sets, inputs.eval_prompts, inputs.config.eval.reference_key)
    if inputs.config.eval.base is not None:
        _check_base(inputs, Path(inputs.config.eval.base))


def try_gold(inputs: Inputs) -> None:
    """Try the gold scorer, as far as that is cheap. ValueError if it cannot be used."""
    gold = gold_kind(inputs)
    if gold is not None:
        gold.try_out(samples_of(inputs))


def _check_base(inputs: Inputs, path: Path) -> None:
    """Check that eval.base is a language model that reads the policy's tokens."""
    config = read_model(path)
    if config.labels:
        raise ValueError(
            f"eval.base={path}: {config.architecture} gives scores and no tokens; need the "
            "language model that the policy started from"
        )
    policy = read_config(inputs.model_path)
    if config.vocab_size < policy.vocab_size or inputs.has_other_tokens(path):
        raise ValueError(
            f"eval.base={path}: its vocabulary is not that of the policy, {inputs.model_path}, and "
            "the perplexity is of the policy's tokens; need a model with the same tokenizer"
        )
    inputs.sampled.check_context(config, f"eval.base={path}")
    inputs.check_weights(path, config)


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


def gold_ids(inputs: Inputs, prompt: Prompt, text: str) -> Tensor:
    """Return the tokens [L] of a text as if the policy had sampled it behind the prompt, with the
    end token.
    """
    chat = inputs.sampled.conversation["chat"]
    ids = reply_ids(inputs.tokenizer, prompt.prompt_ids.tolist(), text, chat=chat)
    return torch.tensor(ids, dtype=torch.int64)
