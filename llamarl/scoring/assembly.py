"""What lies between completions and scorers: items for a scorer, whole batches, groups of scored
completions, and the rate of errors.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from statistics import pstdev
from typing import Generic, TypeVar

import torch

from llamarl.errors import RewardError
from llamarl.scoring.scorer import Item
from llamarl.types import Completion, EvalCompletion, Group, Outcome, Prompt

ERROR_WINDOW = 256  # outcomes over which the error rate is taken
WINDOW_PROMPTS = 32  # if these have more outcomes than ERROR_WINDOW, the rate is taken over them
MIN_OUTCOMES = 64  # fewer do not make a rate
MIN_BAD_PROMPTS = 4  # errors of fewer do not make a rate: one bad row may fill MIN_OUTCOMES
UNLIKELY = 2e-6  # how seldom a rate at its limit gives so many prompts of errors alone
LOGGED_REASONS = 20  # distinct ones that are logged; all are counted
# Groups hold rewards in float32. Rounding by more than this share of what the rewards of a group
# differ by is warned of; rewards that differ by less than LEAST_SPREAD count as equal.
MOST_ROUNDED = 0.01
LEAST_SPREAD = 1e-6

log = logging.getLogger(__name__)

Scorable = Completion | EvalCompletion


def item_of(
    completion: Scorable,
    prompt: Prompt,
    decode: Callable[[list[int]], str],
    decode_raw: Callable[[list[int]], str] | None = None,
) -> Item:
    """Return a completion as the scorer's item; the text of a dialogue is that of its last turn.
    decode: gives the text of token ids without special tokens; decode_raw: with them, None if there
    are none.
    """
    sample = None
    if isinstance(completion, Completion):
        sample = (completion.ticket, completion.sample_index)
    return Item(
        prompt=prompt,
        token_ids=completion.token_ids,
        text=decode(completion.last_turn.tolist()),
        has_ended=completion.finish_reason == "stop",
        is_held_out=isinstance(completion, EvalCompletion),
        ending=completion.ending,
        sample=sample,
        decode_raw=decode_raw,
    )


def outcome_at_source(completion: Scorable) -> Outcome | None:
    """Return the outcome of an aborted completion or a broken dialogue; None: its score decides."""
    if completion.finish_reason == "aborted":
        return Outcome.abstain("the completion was aborted")
    ending = completion.ending
    if ending.error:
        return Outcome.error(f"the environment: {ending.reason}: {ending.error}")
    return None


Entry = TypeVar("Entry")  # a completion, or its key
Place = int | tuple[int, ...]  # in a batch: a number, or several


class Batches(Generic[Entry]):
    """Completions that came, by batch, until their batch is whole."""

    def __init__(self, size: int):
        self._size = size
        # The entries of each batch by place; None for one that is not scored.
        self.begun: dict[int, dict[Place, Entry | None]] = {}

    def add(self, batch: int, place: Place, key: Entry | None) -> list[Entry]:
        """Enter one completion. Return the entries of its batch, in the order of their places, if
        this makes the batch whole; otherwise none.
        """
        come = self.begun.setdefault(batch, {})
        come[place] = key
        if len(come) < self._size:
            return []
        del self.begun[batch]
        in_order = [come[place] for place in sorted(come)]
        return [entry for entry in in_order if entry is not None]

    def missing(self, batch: int) -> int:
        """Return how many completions a batch that was begun still lacks."""
        return self._size - len(self.begun[batch])


class Groups:
    """Joins the scored completions of a ticket to a group. source: the reward's name."""

    def __init__(self, source: str, *, group_size: int):
        self._source = source
        self._group_size = group_size
        # By ticket: the scored completions of groups that are not whole.
        self._begun: dict[int, list[tuple[Completion, Outcome]]] = {}
        self._has_warned = False  # of rounded rewards

    def add(self, completion: Completion, outcome: Outcome) -> Group | None:
        """Take a completion's outcome. Return its group if this makes it whole."""
        scored = self._begun.setdefault(completion.ticket, [])
        scored.append((completion, outcome))
        if len(scored) < self._group_size:
            return None
        del self._begun[completion.ticket]
        self._warn_of_rounding(completion.ticket, [one for _, one in scored])
        return Group.of(scored)

    def _warn_of_rounding(self, ticket: int, outcomes: Sequence[Outcome]) -> None:
        """Warn once if float32 does not tell the rewards of a group apart as they were given."""
        if self._has_warned:
            return
        scores = [one.value for one in outcomes if one.kind == "score"]
        if not scores:
            return
        rewards = torch.tensor(scores, dtype=torch.float64)
        lowest, highest = map(float, rewards.aminmax())
        spread = highest - lowest
        rounded = float((rewards - rewards.float()).abs().max())
        if spread > LEAST_SPREAD and rounded > MOST_ROUNDED * spread:
            self._has_warned = True
            log.warning(
                "reward %s: the rewards of ticket %d are from %.17g to %.17g, but float32, in "
                "which they are trained on, rounds them by up to %.2g: completions may count as "
                "equal that are not. Subtract a constant in the reward, so that its numbers are "
                "not much larger than what they differ by (said once)",
                self._source,
                ticket,
                lowest,
                highest,
                rounded,
            )


class ErrorRate:
    """The share of errors among the newest ERROR_WINDOW outcomes, and their reasons.

    The outcomes of a prompt may all be errors for one reason, such as a bad row. So a rate needs
    errors of MIN_BAD_PROMPTS prompts, and it is above the limit by two standard errors of a mean
    over prompts. Where all outcomes are errors, prompts are counted. With a limit of 0 any error
    ends the run.
    """

    def __init__(self, source: str, max_error_rate: float):
        self._source = source  # its name
        self._max = max_error_rate
        # By prompt, the oldest first: the reason of each error, None for any other outcome.
        self._newest: dict[Hashable, list[str | None]] = {}
        self._logged: set[str] = set()

    def add(self, outcome: Outcome, prompt: Hashable) -> None:
        """Count an outcome. Log an error whose reason is new. prompt: equal for the outcomes of one
        prompt.
        """
        reason = outcome.reason if outcome.kind == "error" else None
        self._newest.setdefault(prompt, []).append(reason)
        num_outcomes = sum(map(len, self._newest.values()))
        if num_outcomes > ERROR_WINDOW and len(self._newest) > WINDOW_PROMPTS:
            del self._newest[next(iter(self._newest))]
        if reason is None:
            return
        if reason not in self._logged and len(self._logged) < LOGGED_REASONS:
            self._logged.add(reason)
            log.warning("reward %s: error, its completion is masked: %s", self._source, reason)

    def check(self) -> None:
        """Raise RewardError if the rate is above its limit."""
        reasons: Counter[str] = Counter()
        num_outcomes = 0
        shares = []  # of errors, by prompt
        for outcomes in self._newest.values():
            errors = [reason for reason in outcomes if reason is not None]
            reasons.update(errors)
            num_outcomes += len(outcomes)
            shares.append(len(errors) / len(outcomes))
        rate = reasons.total() / max(1, num_outcomes)
        if rate <= self._max:
            return
        num_bad_prompts = sum(share > 0 for share in shares)
        standard_error = pstdev(shares) / math.sqrt(len(shares))
        is_a_rate = (
            num_outcomes >= MIN_OUTCOMES
            and num_bad_prompts >= MIN_BAD_PROMPTS
            and rate - 2 * standard_error > self._max
        )
        all_fail = rate == 1.0 and self._max**num_bad_prompts <= UNLIKELY
        if is_a_rate or all_fail or self._max == 0:
            commonest = reasons.most_common(3)
            examples = "".join(f"\n  {count} x {reason}" for reason, count in commonest)
            raise RewardError(
                f"reward {self._source}: {rate:.0%} of the last {num_outcomes} scores are errors, "
                f"above reward.max_error_rate={self._max:g}; correct the reward, or raise the "
                f"limit:{examples}"
            )
