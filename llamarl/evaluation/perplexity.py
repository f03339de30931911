"""Perplexity: how likely the completions of an evaluation are under a language model.

    greedy answers --a microbatch a rank--> base --logprobs--> Likelihood --> eval/perplexity

It measures how far a policy is from the model that it started from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from llamarl.comm.together import CollectiveCall, join_shares, own_share
from llamarl.config.schema import Config
from llamarl.errors import NotFinite
from llamarl.evaluation.ask import Answers
from llamarl.evaluation.judges import EvalJudge, JudgeWork, greedy_items, spans_of
from llamarl.evaluation.metrics import Metrics
from llamarl.learning.collation import collate
from llamarl.learning.sft import NextToken, SFTPair, completion_logprobs, pair_of
from llamarl.models.fsdp import local, reshard
from llamarl.models.loading import decoder_over
from llamarl.scoring.scorer import Site
from llamarl.scoring.sharded import ScoreRequest, from_message, to_message


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


class Perplexity(EvalJudge[Likelihood]):
    """Reads the greedy answers of evaluations. The model lies over the ranks of the site, as a
    reference does.

    path: its Hugging Face directory; it has the policy's tokens. dtype: a name in torch.
    microbatch_tokens: packed tokens a forward, per rank.
    """

    is_computing = True  # a piece of work is a forward

    def __init__(self, site: Site, *, path: str, dtype: str, microbatch_tokens: int):
        self._site = site
        self._path = path
        self._dtype = getattr(torch, dtype)
        self._microbatch_tokens = microbatch_tokens

    def load(self) -> None:
        """Load this rank's share of the model."""
        self.decoder = decoder_over(self._site.group, self._path, dtype=self._dtype)
        self._site.together.add(
            "perplexity", CollectiveCall(self._logprobs, to_message, from_message)
        )

    def judge(self, version: int, answers: Answers) -> JudgeWork[Likelihood]:
        """Read a microbatch on each rank a piece. ValueError for a prompt or a completion without
        tokens, NotFinite for a log-probability that is not finite.
        """
        items = greedy_items(answers)
        requests = []
        for item in chain.from_iterable(items.values()):
            requests.append(ScoreRequest(item.prompt.prompt_ids, (item.sampled_ids,)))
        logprobs = torch.zeros(len(requests), dtype=torch.float64)
        microbatches = self._microbatches(requests)
        a_piece = self._site.group.data_size
        for begin in range(0, len(microbatches), a_piece):
            yield
            numbers = list(chain.from_iterable(microbatches[begin : begin + a_piece]))
            asked = [requests[number] for number in numbers]
            logprobs[numbers] = self._site.together.call("perplexity", asked)
        logprobs_N = logprobs.numpy()
        self._check_finite(version, logprobs_N)
        num_tokens_N = np.array([request.completions[0].numel() for request in requests])
        found = {}
        for one, span in spans_of(items).items():
            found[one] = Likelihood(num_tokens_N[span], logprobs_N[span])
        return found

    def tensors(self) -> Iterator[Tensor]:
        """Yield this rank's share of the weights."""
        for parameter in self.decoder.parameters():
            yield local(parameter)

    def _check_finite(self, version: int, logprobs_N: np.ndarray) -> None:
        wrong = np.flatnonzero(~np.isfinite(logprobs_N))
        if wrong.size:
            first = wrong[0]
            raise NotFinite(
                f"eval.base={self._path}: the log-probability of policy version "
                f"{version}'s completion of held-out prompt {first} is {logprobs_N[first]}; try "
                "model.dtype=float32 or another eval.base"
            )

    def _microbatches(self, requests: Sequence[ScoreRequest]) -> list[list[int]]:
        """Return the numbers of the requests by microbatch."""
        sizes = [NextToken().num_tokens(_pair(request)) for request in requests]
        return collate(sizes, self._microbatch_tokens)

    def _logprobs(self, requests: Sequence[ScoreRequest]) -> Tensor:
        """Collective: return the log-probabilities [N] of the completions: float64, nats, the same
        on all ranks. Each rank computes its share.
        """
        group = self._site.group
        logprobs_N = torch.zeros(len(requests), dtype=torch.float64)
        # Some of the microbatches of `judge` are collated to the same ones again, because `collate`
        # puts each sequence into the first one with room.
        for numbers in own_share(self._microbatches(requests), [], group):
            pairs = [_pair(requests[number]) for number in numbers]
            batch = NextToken().pack(pairs, group.device)
            logprobs_N[numbers] = completion_logprobs(self.decoder, batch)[: len(pairs)]
        reshard(self.decoder)
        join_shares(logprobs_N, group)
        return logprobs_N


def _pair(request: ScoreRequest) -> SFTPair:
    return pair_of(request.prompt_ids, request.completions[0])


def make_perplexity(config: Config) -> Callable[[Site], Perplexity]:
    """Return a function that makes the judge of eval.base."""
    assert config.eval.base is not None, "called only if eval.base is set"
    return partial(
        Perplexity,
        path=config.eval.base,
        dtype=config.model.dtype,
        microbatch_tokens=config.trainer.microbatch_tokens,
    )
