"""What a reward scores by the words of its completions, or by a model of transformers."""

from __future__ import annotations

from functools import partial

import torch

from llamarl.scoring.model import ModelScorer
from llamarl.scoring.scorer import Scorer
from llamarl.scoring.weighted import WeightedPart
from llamarl.types import Completion, EvalCompletion, Group, Outcome, Prompt
from tests.build.completion import build_completion
from tests.scorers import SCORES, asked_for

SIZE = 3
ASKED = asked_for(4, SIZE)  # of ticket i, and of held-out prompt i


class Lengths(Scorer):
    """A scorer: the number of words of a completion; an error for none, None for "hm"."""

    name = "lengths"

    def __init__(self, site):
        self._known = []
        self.batches: list[list[int]] = []

    @property
    def pending(self):
        return len(self._known)

    def submit(self, key, item):
        words = len(item.text.split(","))
        meta = item.prompt.meta
        outcome = Outcome("score", float(words), "")
        if words == meta.get("error_at"):
            outcome = Outcome.error("cannot count")
        if words == meta.get("abstain_at"):
            outcome = Outcome.abstain("does not care to")
        self._known.append((key, outcome))

    def release(self, keys):
        self.batches.append(list(keys))

    def poll(self):
        known, self._known = self._known, []
        return known

    def wait(self, timeout_s):
        return bool(self._known)

    def close(self):
        self._known = []


def prompt(i, **meta):
    return Prompt(ASKED[i].prompt_ids, f"question {i}", meta)


def completion(ticket, sample, *, finish_reason="stop"):
    asked = ASKED[ticket]
    ids = asked.completions[sample].tolist()
    prompt = asked.prompt_ids.tolist()
    return build_completion(ticket, sample, ids, prompt=prompt, finish_reason=finish_reason)


def answer(i):
    ids = ASKED[i].completions[0]
    return EvalCompletion(
        prompt_index=i,
        greedy=True,
        sample_index=0,
        token_ids=ids,
        policy_versions=torch.full_like(ids, 5),
        finish_reason="stop",
    )


def words(ids):
    return ",".join(map(str, ids))


def part(name, settings, weight=1.0, **options):
    return WeightedPart(name, partial(ModelScorer, name, settings, **options), weight)


def feed(executor, *records):
    executor.inputs.of(Completion).records.extend(records)
    while executor.step():
        pass
    return {group.ticket: group for group in executor.outputs.of(Group).records}


def all_of(ticket):
    return [completion(ticket, sample) for sample in range(SIZE)]


def close_to(rewards, wanted):
    torch.testing.assert_close(rewards, wanted, rtol=0, atol=SCORES)
