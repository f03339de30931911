"""The size of pieces that makes steps fastest, found while training goes on (OPPO, Yan et al. 2025,
3.1: every so many steps a few candidates are tried in turn, and the best is kept until the next
search).

    search = ChunkSearch([32, 64, 128])
    search.step(seconds)         # a step was made with pieces of search.piece_tokens
"""

from __future__ import annotations

from collections.abc import Sequence

EVERY = 50  # steps from one search to the next
TRIAL = 3  # steps that each candidate is tried for; the first is not counted: others share it


class ChunkSearch:
    """Tries candidates for TRIAL steps each, then keeps the one with the fastest step until `every`
    steps have passed since the search began.

    ValueError without candidates, and for too few steps to try them all.
    """

    def __init__(self, candidates: Sequence[int], *, every: int = EVERY):
        self._candidates = sorted(set(candidates))
        if not self._candidates or self._candidates[0] < 1:
            raise ValueError(f"candidates {list(candidates)}: need whole numbers of at least 1")
        if every <= TRIAL * len(self._candidates):
            raise ValueError(
                f"every={every}: {len(self._candidates)} candidates are tried for {TRIAL} steps "
                f"each; need more than {TRIAL * len(self._candidates)}"
            )
        self._every = every
        self._best = self._candidates[0]
        self._num_steps = 0  # since the search began
        self._fastest: list[float] = []  # seconds, for each candidate that was tried

    @property
    def piece_tokens(self) -> int:
        """The size that the next step is to be made with."""
        trial = self._num_steps // TRIAL
        return self._candidates[trial] if trial < len(self._candidates) else self._best

    def step(self, seconds: float) -> None:
        """Note how long a step with the present piece_tokens has taken."""
        trial, number = divmod(self._num_steps, TRIAL)
        if trial < len(self._candidates):
            if number == 1:
                self._fastest.append(seconds)
            elif number > 1:
                self._fastest[trial] = min(self._fastest[trial], seconds)
        self._num_steps += 1
        if self._num_steps == TRIAL * len(self._candidates):
            fastest = min(range(len(self._fastest)), key=self._fastest.__getitem__)
            self._best = self._candidates[fastest]
        if self._num_steps >= self._every:
            self._num_steps = 0
            self._fastest = []

    def state_dict(self) -> dict:
        """Return JSON values for a checkpoint."""
        return {
            "candidates": self._candidates,
            "best": self._best,
            "num_steps": self._num_steps,
            "fastest": self._fastest,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from a checkpoint; a search among other candidates begins anew."""
        if list(state["candidates"]) != self._candidates:
            return
        self._best = state["best"]
        self._num_steps = state["num_steps"]
        self._fastest = list(state["fastest"])
