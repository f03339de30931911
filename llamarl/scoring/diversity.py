"""Diversity: how far apart the answers of an evaluation are.

    sampled answers of each prompt --embed--> mean pairwise cosine distance --> eval/diversity

TBA's measure of red-teaming (arXiv 2503.18929, 5.2, figure 5) is that of 1024 attacks, which all
answer one prompt; of several prompts it is the mean, each prompt by itself. Answers are embedded a
few at a call, so that training's completions are not held up by more.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.scoring.embedding import (
    Embedder,
    EmbedderSettings,
    load_embedder,
    mean_pairwise_distance,
)
from llamarl.tasks.held_out import EvalSet

TEXTS_A_CALL = 32


@dataclass(eq=False, repr=False)
class _Evaluation:
    """A version's answers, and the vectors of those that are embedded."""

    version: int
    texts: list[str]
    sizes: list[int]  # answers of each prompt
    vectors: list[Tensor]
    num_embedded: int = 0


class Diversity:
    """Measures evaluations, in the order in which they came; on one rank alone. sets: of whose
    prompts the answers are, by number.
    """

    def __init__(self, settings: EmbedderSettings, sets: Sequence[EvalSet], device: torch.device):
        self._settings = settings
        self._sets = sets
        self._device = device
        self._evaluations: deque[_Evaluation] = deque()
        self._embedder: Embedder | None = None

    def start(self) -> None:
        """Load the model. ValueError or OSError for what cannot be used."""
        self._embedder = load_embedder(self._settings, self._device)

    @property
    def is_computing(self) -> bool:
        """Whether there is work, so that the next `poll` does some."""
        return bool(self._evaluations)

    def tensors(self) -> list[Tensor]:
        """The model's weights."""
        return [] if self._embedder is None else self._embedder.tensors()

    def begin(self, version: int, answers: Sequence[Sequence[str]]) -> None:
        """Take an evaluation: the texts of each held-out prompt's sampled answers."""
        texts: list[str] = []
        for of_prompt in answers:
            texts += of_prompt
        sizes = [len(of_prompt) for of_prompt in answers]
        self._evaluations.append(_Evaluation(version, texts, sizes, []))

    def poll(self) -> list[tuple[int, dict[str, float]]]:
        """Embed a few texts; (version, metrics) of the evaluation that is done with it."""
        if not self._evaluations:
            return []
        oldest = self._evaluations[0]
        first = oldest.num_embedded
        texts = oldest.texts[first : first + TEXTS_A_CALL]
        if texts:
            oldest.vectors.append(self._embedder.embed(texts))
            oldest.num_embedded += len(texts)
        if oldest.num_embedded < len(oldest.texts):
            return []
        self._evaluations.popleft()
        return [(oldest.version, self._metrics(oldest))]

    def close(self) -> None:
        """Drop what is pending."""
        self._evaluations.clear()

    def _metrics(self, evaluation: _Evaluation) -> dict[str, float]:
        """Of each set the mean over prompts of the mean distance of two of a prompt's answers."""
        vectors_NE = torch.cat(evaluation.vectors)
        of_prompts = vectors_NE.split(evaluation.sizes)
        distances = [mean_pairwise_distance(own) for own in of_prompts]
        metrics = {}
        rest = iter(distances)
        for one in self._sets:
            own = list(itertools.islice(rest, one.count))
            metrics |= one.columns({"eval/diversity": math.fsum(own) / len(own)})
        return metrics
