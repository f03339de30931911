"""Diversity: how far apart the completions of an evaluation are.

    sampled answers of each prompt --embed--> mean pairwise cosine distance --> eval/diversity

TBA's measure of red-teaming (arXiv 2503.18929, 5.2, figure 5) takes 1024 attacks, all completions
of one prompt. With several prompts this is the mean of the prompts' measures. A call embeds only a
few completions, so that those of training are not held up for long.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.evaluation.judges import EvalJudge, Evaluated, Metrics
from llamarl.scoring.embedding import (
    Embedder,
    EmbedderSettings,
    load_embedder,
    mean_pairwise_distance,
)
from llamarl.scoring.scorer import Site
from llamarl.tasks.held_out import EvalSet

TEXTS_A_CALL = 32


@dataclass(eq=False, repr=False)
class _Evaluation:
    """A version's completions, and the vectors of those that are embedded."""

    version: int
    texts: list[str]
    sizes: list[int]  # completions of each prompt
    vectors: list[Tensor]
    num_embedded: int = 0


class Diversity(EvalJudge):
    """Measures evaluations, in the order in which they came. Its model is whole on the first rank.

    sets: the sets whose prompts are completed.
    """

    def __init__(self, settings: EmbedderSettings, sets: Sequence[EvalSet], site: Site):
        self._settings = settings
        self._sets = sets
        self._device = site.group.device
        self._evaluations: deque[_Evaluation] = deque()
        self._embedder: Embedder | None = None

    def start(self) -> None:
        """Load the model. ValueError or OSError for what cannot be used."""
        self._embedder = load_embedder(self._settings, self._device)

    @property
    def is_computing(self) -> bool:
        """Whether the next `poll` computes."""
        return bool(self._evaluations)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the embedder's weights."""
        if self._embedder is not None:
            yield from self._embedder.tensors()

    def begin(self, version: int, answers: Sequence[Evaluated]) -> None:
        """Take an evaluation, of which only the samples are embedded."""
        sampled: dict[int, list[str]] = {}
        for answer in answers:
            if not answer.completion.greedy:
                texts = sampled.setdefault(answer.completion.prompt_index, [])
                texts.append(answer.item.text)
        every = list(itertools.chain.from_iterable(sampled.values()))
        sizes = [len(texts) for texts in sampled.values()]
        self._evaluations.append(_Evaluation(version, every, sizes, []))

    def poll(self) -> list[tuple[int, Metrics]]:
        """Embed a few texts."""
        if not self._evaluations:
            return []
        oldest = self._evaluations[0]
        first = oldest.num_embedded
        texts = oldest.texts[first : first + TEXTS_A_CALL]
        if texts:
            assert self._embedder is not None, "it was started"
            oldest.vectors.append(self._embedder.embed(texts))
            oldest.num_embedded += len(texts)
        if oldest.num_embedded < len(oldest.texts):
            return []
        self._evaluations.popleft()
        return [(oldest.version, self._metrics(oldest))]

    def close(self) -> None:
        """Drop the evaluations."""
        self._evaluations.clear()

    def _metrics(self, evaluation: _Evaluation) -> Metrics:
        """Return for each set the mean over prompts of the mean distance of two completions."""
        vectors_NE = torch.cat(evaluation.vectors)
        of_prompts = vectors_NE.split(evaluation.sizes)
        distances = [mean_pairwise_distance(own) for own in of_prompts]
        metrics: dict[str, float] = {}
        rest = iter(distances)
        for one in self._sets:
            own = list(itertools.islice(rest, one.count))
            metrics |= one.columns({"eval/diversity": math.fsum(own) / len(own)})
        return metrics
