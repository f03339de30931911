"""A function as a reward, and the prompts and words that it is asked about."""

from __future__ import annotations

import torch

from llamarl.types import Prompt

FN = "scoring:score"


USER_MODULE = '''
def score(prompt, completion, meta):
    """1 for the answer; what the prompt asks for by name otherwise."""
    if completion == "error":
        raise RuntimeError("cannot score " + prompt)
    if completion == "abstain":
        return None
    return float(completion == meta["answer"])


def rank(prompts, completions, metas):
    """The share of its group's completions that each equals."""
    return [completions.count(c) / len(completions) for c in completions]
'''
WORDS = ["error", "abstain", "right", "wrong"]  # token id -> text; prompt i has the answer "right"


def make_prompt(text):
    return Prompt(torch.tensor([1, 2]), text, {"answer": "right"})


def train_prompt(ticket):
    """Return the prompt of a ticket: that of ticket 7 is "train 7"."""
    return make_prompt(f"train {ticket}")
