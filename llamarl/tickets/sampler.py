"""Chooses a ticket's prompt by how often the prompt was solved: tickets.sampler=difficulty.

A group of G completions teaches if they do not all have the same outcome. What is known of prompt i
are its solved and failed completions s_i and f_i, of which those of long ago count less. With the
share m of all that was solved, its pass rate p is taken to be distributed as

    p ~ Beta(a, b),   a = m + s_i,   b = 1 - m + f_i,

that is, all that is known of other prompts counts as one completion. Then

    P(i teaches) = 1 - E[p^G] - E[(1 - p)^G]
                 = 1 - prod_{j<G} (a + j) / (a + b + j) - prod_{j<G} (b + j) / (a + b + j),

and a ticket's prompt is drawn in proportion to it, among those that no other ticket has at the
moment. All unseen prompts are equally likely, and more so than one that was never solved. Counts
are halved after `half_life` groups for each prompt, so that one that nobody solved is tried again.

Each group moves m and the clock by which counts fade, and so the chance of every prompt. With many
prompts that is milliseconds for each group, so m and the clock move every `refresh` groups. In
between only the prompt of a group is computed again. The counts, their times and the m of the last
refresh decide all chances, so a resumed sampler chooses as the first would have.

Beta counts that fade, for prompts whose pass rate moves, are those of arXiv 2507.04632. The prior
from all other prompts, and the weight, are ours.

Pure.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from llamarl.types import Verdict

# Groups from one refresh of all chances to the next: one for each so many prompts, and at most.
PROMPTS_PER_REFRESH = 64
MOST_REFRESH = 64
EVERY = slice(None)


class PromptSampler(Protocol):
    """Chooses prompts by number, and learns what came of them. All that it does is a function of
    its seed and of the calls.
    """

    num_prompts: int

    def choose(self, ticket: int, busy: Collection[int]) -> int:
        """Return the number of a ticket's prompt, not one of `busy` if there are others."""

    def learn(self, prompt: int, verdict: Verdict) -> None:
        """Note what the outcomes of a group of this prompt said."""

    def state_dict(self) -> dict:
        """Return all that it has learned, as JSON values."""

    def load_state_dict(self, state: Mapping) -> None:
        """Go on from what was learned."""


class DifficultySampler:
    """Draws prompts in proportion to the chance that a group of theirs teaches.

    half_life: groups for each prompt after which a count is worth half.
    """

    def __init__(self, *, num_prompts: int, group_size: int, seed: int, half_life: float):
        self.num_prompts = num_prompts
        self._group_size = group_size
        self._seed = seed
        self._half_life = half_life * num_prompts  # in groups
        self._refresh = min(max(1, num_prompts // PROMPTS_PER_REFRESH), MOST_REFRESH)
        self._clock = 0  # groups that were learned from
        self._mean = 0.5  # m, at the last refresh
        self._solved = torch.zeros(num_prompts, dtype=torch.float64)
        self._failed = torch.zeros(num_prompts, dtype=torch.float64)
        self._learned_at = torch.zeros(num_prompts, dtype=torch.float64)  # by the clock
        self._weights: Tensor | None = None  # until the next refresh
        self._has_warned = False

    def choose(self, ticket: int, busy: Collection[int]) -> int:
        """Return the number of a ticket's prompt."""
        weights = self.chances().clone()
        if len(busy) < weights.numel():
            weights[list(busy)] = 0
        until = weights.cumsum(0)
        if not until[-1] > 0:  # nothing that is free can teach
            weights = torch.ones_like(weights)
            if len(busy) < weights.numel():
                weights[list(busy)] = 0
            until = weights.cumsum(0)
        place = torch.searchsorted(until, until[-1] * uniform(self._seed, ticket), right=True)
        return int(place)

    def chances(self) -> Tensor:
        """Return [N] float64: the chance that a group of each prompt teaches."""
        if self._weights is None:
            self._weights = self._chances_of(EVERY)
        return self._weights

    def _chances_of(self, prompts: Tensor | slice) -> Tensor:
        """Return the chances of M prompts. What is known of all others counts as one completion."""
        solved, failed = self._counts(prompts)
        a = self._mean + solved
        b = (1 - self._mean) + failed
        return chance_of_teaching(a, b, self._group_size)

    def learn(self, prompt: int, verdict: Verdict) -> None:
        """Add a group's completions to what is known of its prompt. Warns once if their outcomes
        are not between 0 and 1.
        """
        if verdict.total != verdict.solved and not self._has_warned:
            self._has_warned = True
            warnings.warn(_beyond(verdict), stacklevel=2)
        fade = 0.5 ** ((self._clock - self._learned_at[prompt]) / self._half_life)
        failed = verdict.num_scored - verdict.solved
        self._solved[prompt] = self._solved[prompt] * fade + verdict.solved
        self._failed[prompt] = self._failed[prompt] * fade + failed
        self._learned_at[prompt] = self._clock
        self._clock += 1
        if self._clock % self._refresh == 0:
            self._mean = self._share_solved()
            self._weights = None
        elif self._weights is not None:
            one = torch.tensor([prompt])
            self._weights[one] = self._chances_of(one)

    def _counts(self, prompts: Tensor | slice = EVERY) -> tuple[Tensor, Tensor]:
        """Return the solved and the failed completions [M] of prompts, as they counted at the last
        refresh; those of later groups count in full.
        """
        refreshed_at = self._clock - self._clock % self._refresh
        age = (refreshed_at - self._learned_at[prompts]).clamp(min=0)
        fade = 0.5 ** (age / self._half_life)
        return self._solved[prompts] * fade, self._failed[prompts] * fade

    def _share_solved(self) -> float:
        """Return m: the share of all completions that was solved, as they count by now."""
        solved, failed = self._counts()
        total = float(solved.sum() + failed.sum())
        return (0.5 + float(solved.sum())) / (1 + total)

    def state_dict(self) -> dict:
        """Return the clock, m, and the counts of the prompts that were seen."""
        seen = (self._solved + self._failed).nonzero().flatten()
        counts = torch.stack([self._solved, self._failed, self._learned_at])[:, seen]
        return {
            "num_prompts": self.num_prompts,
            "clock": self._clock,
            "mean": self._mean,
            "prompts": seen.tolist(),
            "counts": counts.tolist(),
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Go on from a state of as many prompts."""
        seen = torch.tensor(state["prompts"], dtype=torch.int64)
        counts = torch.tensor(state["counts"], dtype=torch.float64)
        for known, column in zip((self._solved, self._failed, self._learned_at), counts):
            known.zero_()
            known[seen] = column
        self._clock = state["clock"]
        self._mean = state["mean"]
        self._weights = None


def _beyond(verdict: Verdict) -> str:
    """Say that outcomes are not between 0 and 1, and what to do."""
    return (
        f"tickets.sampler counts an outcome of 0 or less as failed and one of 1 or more as solved, "
        f"but {verdict.num_scored} outcomes of a group add up to {verdict.total:g}, where "
        f"{verdict.solved:g} would be solved. If that is not what they mean, have the reward "
        "return numbers from 0 to 1, such as (reward - lowest) / (highest - lowest), name the "
        "parts that do in reward.outcomes, or set tickets.sampler=uniform"
    )


def chance_of_teaching(a: Tensor, b: Tensor, group_size: int) -> Tensor:
    """Return [N]: P(G outcomes differ) for a pass rate that is distributed as Beta(a, b), [N] each.

    By products: gamma functions of large counts cancel each other to few digits.
    """
    all_solved = torch.ones_like(a)
    all_failed = torch.ones_like(a)
    for j in range(group_size):
        all_solved = all_solved * ((a + j) / (a + b + j))
        all_failed = all_failed * ((b + j) / (a + b + j))
    return (1 - all_solved - all_failed).clamp(min=0)


def uniform(seed: int, ticket: int) -> float:
    """Return a number in [0, 1) of 53 bits, drawn for a ticket."""
    digest = hashlib.blake2b(f"choice {seed} {ticket}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53
