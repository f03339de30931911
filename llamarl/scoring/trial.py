"""Tries a scorer on a few items before a run starts, and reports failures in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from llamarl.errors import RewardError
from llamarl.scoring.scorer import Item, Scorer, score_all
from llamarl.types import Outcome


def try_scorer(
    scorer: Scorer,
    items: Sequence[Item],
    *,
    given: str,
    remedy: str = "correct what scores",
    must_score: bool = True,
    wait_longer: Callable[[], bool] = lambda: True,
) -> list[Outcome]:
    """Return the outcomes of items by a scorer that is started and closed for them alone.
    ValueError if it cannot be used, or if it fails on all of them in the same way. given: the key
    and value that name it. remedy: what to do then. must_score: raise if it fails on all; otherwise
    the caller sees that in the outcomes. wait_longer: as score_all's.
    """
    try:
        scorer.start()
        outcomes = score_all(scorer, items, wait_longer=wait_longer)
    except RewardError as error:  # the user can correct it, and nothing has started yet
        raise ValueError(str(error)) from error
    finally:
        scorer.close()
    kinds = {failure_of(outcome) for outcome in outcomes}
    if must_score and outcomes and None not in kinds and len(kinds) == 1:
        what = f"failed on all {len(outcomes)} samples: {outcomes[0].reason}"
        raise ValueError(f"{given}: {what}\n{remedy}")
    return outcomes


def failure_of(outcome: Outcome) -> str | None:
    """Return how an item failed: the first word of the reason, such as an exception's type. None
    unless it is an error.
    """
    if outcome.kind != "error":
        return None
    word, _, _ = outcome.reason.partition(" ")
    return word


def commonest(reasons: Sequence[str]) -> str:
    """Return the most frequent reason; among equals the one that came first."""
    ((reason, _),) = Counter(reasons).most_common(1)
    return reason
