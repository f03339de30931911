"""Predicts the pass rate of prompts that were never seen, from the policy's own states.

    x   the trunk's state at a prompt's last token, [D], before anything is sampled
    y   the share of a group's completions that was solved
    p(x) = mean(y) + k(x)^T (K + lambda I)^-1 (y - mean(y)),   K = X X^T / D, X centred and scaled

that is, a linear value head on the trunk, fitted anew at each step to the newest groups by ridge
regression. It needs no learning rate and no gradient, and the policy is not trained by it. A value
model that says how hard an unseen prompt is: Prompt Curriculum Learning (arXiv 2510.01135), which
trains a whole model for it.

Shapes: N prompts, M kept groups, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.executor import Tickets
from llamarl.learning.reduction import Ranks
from llamarl.models.attention import PackedAttention
from llamarl.models.build import Decoder
from llamarl.types import Prompt

KEPT = 512  # groups that the head is fitted to
RIDGE = 1.0  # lambda
LEAST = 0.02  # the smallest pass rate that is predicted, and its distance from 1


class PromptValues:
    """Fits a head to what came of groups, and predicts. Its state is the groups that it knows."""

    def __init__(self) -> None:
        self._states = torch.zeros(0, 0)  # [M, D] float32
        self._solved = torch.zeros(0)  # [M] float32, shares

    def learn(self, states: Tensor, solved: Sequence[float]) -> None:
        """Add groups: their prompts' states [N, D], and the share of each that was solved."""
        if not len(solved):
            return
        if self._states.shape[1] != states.shape[1]:
            self._states = states[:0]
            self._solved = self._solved[:0]
        self._states = torch.cat([self._states, states])[-KEPT:]
        self._solved = torch.cat([self._solved, torch.tensor(solved)])[-KEPT:]

    def predict(self, states: Tensor) -> list[float]:
        """Return the pass rates of prompts by their states [N, D]; none before two groups are
        known.
        """
        if len(self._solved) < 2:
            return []
        known_MD = self._states.double()
        centre = known_MD.mean(0)
        scale = (known_MD - centre).square().mean().sqrt().clamp(min=1e-12)
        known_MD = (known_MD - centre) / scale
        asked_ND = (states.double() - centre) / scale
        size = states.shape[1]
        mean = self._solved.double().mean()
        kernel_MM = known_MD @ known_MD.T / size
        ridge_MM = RIDGE * torch.eye(len(self._solved), dtype=torch.float64)
        weights_M = torch.linalg.solve(kernel_MM + ridge_MM, self._solved.double() - mean)
        rates = mean + asked_ND @ known_MD.T @ weights_M / size
        return rates.clamp(LEAST, 1 - LEAST).tolist()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the groups that it is fitted to."""
        return {"prompt_values/states": self._states, "prompt_values/solved": self._solved}

    def load_state_dict(self, state: Mapping) -> None:
        """Go on from a state; from none, if it was saved without."""
        if "prompt_values/states" in state:
            self._states = state["prompt_values/states"].clone()
            self._solved = state["prompt_values/solved"].clone()


@dataclass(eq=False)
class UnseenPrompts:
    """Tells the ledger's sampler how often prompts that were never seen would be solved.

    num_candidates: of them, a step. prompt_of(number): a training prompt. budget: tokens that are
    read at a time.
    """

    num_candidates: int
    prompt_of: Callable[[int], Prompt]
    budget: int
    head: PromptValues = field(default_factory=PromptValues)

    def predict(
        self, tickets: Tickets, decoder: Decoder, device: torch.device, ranks: Ranks
    ) -> None:
        """Collective: learn what came of prompts since the last call, and predict others. The
        leader says which, and all ranks read them.
        """
        news = tickets.take_news()
        candidates = tickets.candidates(self.num_candidates)
        asked = _shared_numbers([*(prompt for prompt, _ in news), *candidates], ranks)
        if not asked:
            return
        prompts = [self.prompt_of(number).prompt_ids for number in asked]
        states = prompt_states(decoder, prompts, device, budget=self.budget)
        of = {number: states[place] for place, number in enumerate(asked)}
        known = [(of[prompt], verdict) for prompt, verdict in news if verdict.num_scored]
        if known:
            shares = [verdict.solved / verdict.num_scored for _, verdict in known]
            self.head.learn(torch.stack([state for state, _ in known]), shares)
        if candidates:
            rates = self.head.predict(torch.stack([of[number] for number in candidates]))
            tickets.predicted(dict(zip(candidates, rates)))


def _shared_numbers(numbers: Sequence[int], ranks: Ranks) -> list[int]:
    """Collective: return all numbers that any rank gives, in order."""
    names = ranks.union([str(number) for number in numbers])
    return sorted({int(name) for name in names})


@torch.no_grad()
def prompt_states(
    decoder: Decoder, prompts: Sequence[Tensor], device: torch.device, *, budget: int
) -> Tensor:
    """Collective over the ranks that share the decoder, with equal prompts on all: return the
    states [N, D] at the last tokens of prompts, float32, on the CPU. budget: tokens at a time.
    """
    states = []
    rest = list(prompts)
    while rest:
        count = 1
        while count < len(rest) and sum(p.numel() for p in rest[: count + 1]) <= budget:
            count += 1
        states.append(_states_of(decoder, rest[:count], device))
        rest = rest[count:]
    return torch.cat(states)


def _states_of(decoder: Decoder, prompts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the states at the last tokens of prompts that are read at once."""
    sizes = torch.tensor([prompt.numel() for prompt in prompts])
    ends = sizes.cumsum(0)
    last = (ends - 1).to(device)
    states = decoder(
        torch.cat(list(prompts)).to(device),
        torch.cat([torch.arange(size) for size in sizes.tolist()]).to(device),
        PackedAttention(F.pad(ends, (1, 0)).to(device)),
        lambda h_TD, w_VD: h_TD[last],
    )
    return states.float().cpu()
