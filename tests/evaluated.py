"""Answers of evaluations, as judges take them, and what transformers says of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from llamarl.evaluation.ask import ScoredAnswer
from llamarl.evaluation.judges import Judges, advance
from llamarl.evaluation.metrics import Evaluation
from llamarl.models.config import tiny_directory
from llamarl.scoring.scorer import Item
from llamarl.tasks.parts import EvalSet, numbered
from llamarl.types import Outcome, Prompt
from llamarl.words.choices import OWN
from tests.build.eval_completion import build_eval_completion

SCORED = Outcome.score(0.0)


def own_set(count: int) -> tuple[EvalSet, ...]:
    """Return the sets of a run that asks so many prompts of the task's own, and no others."""
    return numbered({OWN: count})


@dataclass(frozen=True)
class Said:
    """A finding that consists of these columns."""

    columns: dict[str, float]

    def metrics(self):
        return self.columns


def evaluated(
    text: str,
    *,
    prompt: int = 0,
    sample: int = 0,
    prompt_ids: tuple[int, ...] = (1, 2),
    tokens: tuple[int, ...] = (3, 4),
    version: int = 0,
    outcome: Outcome = SCORED,
) -> ScoredAnswer:
    """An answer to a held-out prompt; sample 0 is the greedy one, and 1 .. k are those sampled."""
    completion = build_eval_completion(prompt, sample, tokens, version=version)
    item = Item(
        prompt=Prompt(torch.tensor(prompt_ids), f"prompt {prompt}", {}),
        token_ids=completion.token_ids,
        text=text,
        has_ended=True,
        is_held_out=True,
    )
    return ScoredAnswer(completion, item, outcome)


def by_set(answers, sets=None):
    """The answers of each set; without sets, all are of the task's own prompts."""
    if sets is None:
        sets = (EvalSet("", 0, 1 + max(answer.completion.prompt_index for answer in answers)),)
    found = {}
    for one in sets:
        found[one] = [answer for answer in answers if answer.completion.prompt_index in one.numbers]
    return found


def begun(judge, answers, *, version=0, sets=None):
    """The work of a judge on these answers, which has begun."""
    work = judge.judge(version, by_set(answers, sets))
    assert advance(work) is None
    return work


def finished(judge, work):
    """What the judge finds about each set, in their order."""
    for _ in range(100):
        found = advance(work)
        if found is not None:
            return list(found.values())
        judge.wait(0.0)
    raise AssertionError("it does not end")


def columns_of(judge, answers, *, version=0, sets=None):
    """The columns that a judge adds to an evaluation."""
    judges = Judges([judge])
    judges.begin(Evaluation(version, by_set(answers, sets), {}))
    for _ in range(100):
        for judged, columns in judges.poll():
            assert judged == version
            return columns
    raise AssertionError("it does not end")


@torch.no_grad()
def logprobs_by_transformers(items):
    """How likely answers to held-out prompts are: [N] float64, nats. Each has its own pass."""
    model = AutoModelForCausalLM.from_pretrained(tiny_directory(), dtype=torch.float64)
    found = []
    for item in items:
        prompt = item.prompt.prompt_ids
        logits = model(torch.cat([prompt, item.token_ids])[None]).logits[0].log_softmax(-1)
        places = torch.arange(item.token_ids.numel()) + prompt.numel() - 1
        found.append(float(logits[places, item.token_ids].sum()))
    return np.array(found)
