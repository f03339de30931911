"""Perplexity: how likely the completions of an evaluation are under a language model.

    greedy answers --a microbatch a rank--> base --logprobs--> Likelihood --> eval/perplexity

It measures how far a policy is from the model that it started from. The model lies over the ranks
of its site, as a reference does. A call reads only one microbatch on each rank, so that completions
of training are not held up for long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from llamarl.comm.together import CollectiveCall, join_shares, own_share
from llamarl.errors import NotFinite
from llamarl.evaluation.judges import Evaluated, FindsBySet, Metrics, greedy_items, spans_of
from llamarl.learning.packing import collate
from llamarl.learning.sft import NextToken, completion_logprobs, pair_of
from llamarl.models.frozen import decoder_over
from llamarl.models.fsdp import local, reshard
from llamarl.scoring.packed import ScoreRequest, from_message, to_message
from llamarl.scoring.scorer import Site
from llamarl.tasks.held_out import EvalSet

# What the ranks read at once: at most one microbatch on each data-parallel rank.
Microbatches = list[list[ScoreRequest]]


@dataclass(frozen=True, slots=True)
class PerplexitySettings:
    """Settings of the model that reads the completions.

    path: its Hugging Face directory; it has the policy's tokens. dtype: a name in torch.
    microbatch_tokens: packed tokens a forward, per rank. sets: the sets whose prompts are
    completed, one after the other.
    """

    path: str
    dtype: str
    microbatch_tokens: int
    sets: tuple[EvalSet, ...]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likely one completion of each of N prompts is under the model."""

    num_tokens_N: np.ndarray  # tokens of the completions, with end tokens
    logprobs_N: np.ndarray  # nats of each whole completion

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability of a completion token. Async RLHF's code
        measures another quantity under this name: it also divides by the prompt's tokens, and takes
        the mean of each sample's exp.
        """
        return float(np.exp(-self.logprobs_N.sum() / self.num_tokens_N.sum()))

    def metrics(self) -> Metrics:
        """Return the column eval/perplexity."""
        return {"eval/perplexity": self.perplexity}


@dataclass(eq=False, repr=False)
class _Evaluation:
    """A version's completions, and their log-probabilities so far."""

    version: int
    answers: list[ScoreRequest]
    unread: deque[list[int]]  # by microbatch: the numbers of completions that are not read yet
    logprobs_N: Tensor


class Perplexity(FindsBySet[Likelihood]):
    """Measures evaluations, in the order in which they came."""

    def __init__(self, settings: PerplexitySettings, site: Site):
        self.sets = settings.sets
        self._settings = settings
        self._site = site
        self._evaluations: deque[_Evaluation] = deque()

    def load(self) -> None:
        """Load this rank's share of the model."""
        dtype = getattr(torch, self._settings.dtype)
        self.decoder = decoder_over(self._site.group, self._settings.path, dtype=dtype)
        self._site.together.add(
            "perplexity", CollectiveCall(self._logprobs, _to_words, _from_words)
        )

    @property
    def is_computing(self) -> bool:
        """Whether the next `poll` computes."""
        return bool(self._evaluations)

    def begin(self, version: int, answers: Sequence[Evaluated]) -> None:
        """Take an evaluation. ValueError for a prompt or a completion without tokens."""
        asked = []
        sizes = []
        for item in greedy_items(answers):
            pair = pair_of(item.prompt.prompt_ids, item.sampled_ids)
            sizes.append(NextToken().num_tokens(pair))
            asked.append(ScoreRequest(item.prompt.prompt_ids, (item.sampled_ids,)))
        evaluation = _Evaluation(
            version=version,
            answers=asked,
            unread=deque(collate(sizes, self._settings.microbatch_tokens)),
            logprobs_N=torch.zeros(len(asked), dtype=torch.float64),
        )
        self._evaluations.append(evaluation)

    def findings(self) -> list[tuple[int, list[Likelihood]]]:
        """Read a microbatch on each rank. NotFinite for a log-probability that is not finite."""
        if not self._evaluations:
            return []
        oldest = self._evaluations[0]
        microbatches: list[list[int]] = []
        while oldest.unread and len(microbatches) < self._site.group.data_size:
            microbatches.append(oldest.unread.popleft())
        asked: Microbatches = []
        for numbers in microbatches:
            asked.append([oldest.answers[number] for number in numbers])
        read = list(chain.from_iterable(microbatches))
        oldest.logprobs_N[read] = self._site.together.call("perplexity", asked)
        if oldest.unread:
            return []
        self._evaluations.popleft()
        return [(oldest.version, self._found(oldest))]

    def tensors(self) -> Iterator[Tensor]:
        """Yield this rank's share of the weights."""
        for parameter in self.decoder.parameters():
            yield local(parameter)

    def close(self) -> None:
        """Drop the evaluations."""
        self._evaluations.clear()

    def _found(self, evaluation: _Evaluation) -> list[Likelihood]:
        logprobs_N = evaluation.logprobs_N.numpy()
        self._check_finite(evaluation.version, logprobs_N)
        sizes = [asked.completions[0].numel() for asked in evaluation.answers]
        num_tokens_N = np.array(sizes)
        found = []
        for begin, end in spans_of(self.sets):
            found.append(Likelihood(num_tokens_N[begin:end], logprobs_N[begin:end]))
        return found

    def _check_finite(self, version: int, logprobs_N: np.ndarray) -> None:
        wrong = np.flatnonzero(~np.isfinite(logprobs_N))
        if wrong.size:
            first = wrong[0]
            raise NotFinite(
                f"eval.base={self._settings.path}: the log-probability of policy version "
                f"{version}'s completion of held-out prompt {first} is {logprobs_N[first]}; try "
                "model.dtype=float32 or another eval.base"
            )

    def _logprobs(self, microbatches: Microbatches) -> Tensor:
        """Collective: return the log-probabilities [N] of the completions, microbatch after
        microbatch: float64, nats, the same on all ranks. Each rank computes its share.
        """
        group = self._site.group
        sizes = [len(asked) for asked in microbatches]
        logprobs_N = torch.zeros(sum(sizes), dtype=torch.float64)
        places = torch.arange(sum(sizes)).split(sizes)
        nothing: tuple[list[ScoreRequest], Tensor] = ([], places[0][:0])
        for asked, own in own_share(list(zip(microbatches, places)), nothing, group):
            pairs = [pair_of(one.prompt_ids, one.completions[0]) for one in asked]
            batch = NextToken().pack(pairs, group.device)
            logprobs_N[own] = completion_logprobs(self.decoder, batch)[: len(pairs)]
        reshard(self.decoder)
        join_shares(logprobs_N, group)
        return logprobs_N


def _to_words(microbatches: Microbatches) -> Tensor:
    """Return microbatches as whole numbers, for other ranks: their count, the size of each, and
    their contents.
    """
    sizes = [len(asked) for asked in microbatches]
    everything = list(chain.from_iterable(microbatches))
    return torch.cat([torch.tensor([len(sizes), *sizes]), to_message(everything)])


def _from_words(words: Tensor) -> Microbatches:
    """Invert _to_words."""
    count = int(words[0])
    everything = iter(from_message(words[1 + count :]))
    sizes = words[1 : 1 + count].tolist()
    return [list(islice(everything, size)) for size in sizes]
