"""Timings from a few numbers: seconds that are straight lines of sizes."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.planner.timings import Timings


@dataclass(frozen=True, slots=True)
class StraightTimings:
    """Seconds of a run's pieces, as a command line gives them. ValueError for one below 0."""

    decode_s: float = 0.02  # a decode step, whatever its rows
    decode_row_s: float = 0.0  # more for each live row
    decode_context_s: float = 0.0  # more for each token that the rows attend to
    prefill_token_s: float = 0.0  # a prompt token
    update_s: float = 1.0  # a step, on each data-parallel rank
    update_token_s: float = 0.0  # more for each token that it trains on
    score_s: float = 0.0  # of a worker, for what it scores together
    score_completion_s: float = 0.0  # more for each completion of these
    publish_s: float = 0.0
    transfer_s: float = 0.0
    swap_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: need at least 0 seconds")

    def timings(self) -> Timings:
        """Return them as functions."""
        return Timings(
            decode_s=self._decode_s,
            prefill_s=lambda num_tokens: self.prefill_token_s * num_tokens,
            update_s=lambda count, num_tokens: self.update_s + self.update_token_s * num_tokens,
            score_s=lambda count: self.score_s + self.score_completion_s * count,
            publish_s=self.publish_s,
            transfer_s=self.transfer_s,
            swap_s=self.swap_s,
        )

    def _decode_s(self, num_rows: int, context_tokens: int) -> float:
        of_rows = self.decode_row_s * num_rows
        return self.decode_s + of_rows + self.decode_context_s * context_tokens
