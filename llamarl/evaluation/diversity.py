"""Diversity: how far apart the completions of an evaluation are.

    samples of each prompt --embed--> mean pairwise cosine distance --> eval/diversity

TBA's measure of red-teaming (arXiv 2503.18929, 5.2, figure 5) takes 1024 attacks, all completions
of one prompt. With several prompts this is the mean of the prompts' measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.evaluation.ask import Answers
from llamarl.evaluation.judges import EvalJudge, JudgeWork
from llamarl.scoring.embedding import (
    Embedder,
    EmbedderSettings,
    load_embedder,
    mean_pairwise_distance,
)
from llamarl.scoring.scorer import Site

TEXTS_A_CALL = 32


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean distance of two samples of a prompt, for each prompt of a set."""

    distances: list[float]

    def metrics(self) -> dict[str, float]:
        """Return the column eval/diversity: the mean over the prompts."""
        return {"eval/diversity": math.fsum(self.distances) / len(self.distances)}


class Diversity(EvalJudge[Spread]):
    """Embeds the samples of evaluations. Its model is whole on the first rank of the site."""

    is_computing = True  # a piece of work is a forward

    def __init__(self, site: Site, settings: EmbedderSettings):
        self._settings = settings
        self._device = site.group.device
        self._embedder: Embedder | None = None

    def start(self) -> None:
        """Load the model. ValueError or OSError for what cannot be used."""
        self._embedder = load_embedder(self._settings, self._device)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the embedder's weights."""
        if self._embedder is not None:
            yield from self._embedder.tensors()

    def judge(self, version: int, answers: Answers) -> JudgeWork[Spread]:
        """Embed TEXTS_A_CALL samples a piece."""
        assert self._embedder is not None, "it was started"
        texts = []
        sizes: dict[int, int] = {}  # samples of each prompt, set after set
        for own in answers.values():
            for answer in own:
                if not answer.completion.greedy:
                    number = answer.completion.prompt_index
                    texts.append(answer.item.text)
                    sizes[number] = sizes.get(number, 0) + 1
        vectors = []
        for begin in range(0, len(texts), TEXTS_A_CALL):
            yield
            vectors.append(self._embedder.embed(texts[begin : begin + TEXTS_A_CALL]))
        of_prompts = dict(zip(sizes, torch.cat(vectors).split(list(sizes.values()))))
        found = {}
        for one in answers:
            found[one] = Spread([mean_pairwise_distance(of_prompts[j]) for j in one.numbers])
        return found
