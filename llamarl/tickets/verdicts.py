"""What the outcomes of finished groups say: which groups teach, and how a step's groups came about.

A group teaches if two of its completions have different outcomes: then one can be told from the
other. Outcomes are what a completion achieved (`Group.achieved`), before any shaping: a length
penalty, a KL or novelty makes rewards differ where nothing was solved, and a policy that is trained
on such differences alone comes to nothing.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.types import Verdict


@dataclass(frozen=True, slots=True)
class Yield:
    """What came of the groups that were finished for a step: its batch, and those given back."""

    given_back: int  # groups
    kept_equal: int  # groups of the batch that do not teach
    teaching: int  # groups of the batch that do, or of which nothing is known
    mean_outcome: float  # of all scored completions of both; NaN: there is none

    @property
    def teaching_fraction(self) -> float:
        """The share of all these groups that teaches."""
        return self.teaching / max(1, self.given_back + self.kept_equal + self.teaching)

    def row(self, *, refills: bool) -> dict[str, float | None]:
        """Return the columns of a step's row. refills: whether groups may be given back."""
        row: dict[str, float | None] = {"groups/teaching_fraction": self.teaching_fraction}
        if refills:
            has_outcomes = not math.isnan(self.mean_outcome)
            row["tickets/given_back"] = self.given_back
            row["groups/kept_equal"] = self.kept_equal
            row["reward/all_mean"] = self.mean_outcome if has_outcomes else None
        return row

    @classmethod
    def of(cls, batch: Sequence[Verdict | None], given_back: Sequence[Verdict]) -> Yield:
        """Return what these verdicts add up to. None: nothing is known of a group."""
        teaching = sum(one is None or one.teaches for one in batch)
        known = [*(one for one in batch if one is not None), *given_back]
        num_scored = sum(one.num_scored for one in known)
        total = math.fsum(one.total for one in known)  # of any order
        return cls(
            given_back=len(given_back),
            kept_equal=len(batch) - teaching,
            teaching=teaching,
            mean_outcome=total / num_scored if num_scored else math.nan,
        )
