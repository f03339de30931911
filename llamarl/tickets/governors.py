"""Governors: how many groups may be started beyond one batch, while a run learns how many it needs.

    overcommit   more groups                                  fewer groups
    auto         at a take that had to wait                   at a take that leaves half a batch
                                                              finished
    oppo         the reward rose over a window     (eq. 4)    it did not
    window       the reward fell between windows   (alg. 1)   it rose

Pure.

The ledger tells its governor of every take and of every trained step's mean reward, and reads
`value`. `oppo` and `window` are the two rules of OPPO (arXiv 2509.25762) as published there; they
answer a rising reward in opposite ways.
"""

from __future__ import annotations

import math
from statistics import fmean

from llamarl.words.fields import Count, Natural, settings_dataclass


@settings_dataclass
class GovernorSettings:
    """The numbers that the rules leave open: the section `governor`.

    OPPO's names: start, least, most are Delta, Delta_min, Delta_max; window is w or W; increase and
    decrease are delta_inc and delta_dec.
    """

    start: Natural | None
    """Groups of overcommit to start with; null: half a batch."""
    least: Natural
    """Groups of overcommit at least."""
    most: Natural | None
    """Groups of overcommit at most; null: max_lag batches."""
    window: Count
    """Steps that oppo and window look back. window compares two such windows."""
    increase: Natural
    """Groups that oppo adds at a step after a rise of the reward."""
    decrease: Natural
    """Groups that oppo takes off at any other step."""


# As conf/config.yaml has them.
DEFAULTS = GovernorSettings(start=None, least=0, most=None, window=10, increase=1, decrease=1)


class Governor:
    """A number of groups between least and most. Each rule is a subclass.

    `value` and `rewards` are all its state, and any rule can go on from another's.
    """

    def __init__(self, groups_per_step: int, max_lag: int, settings: GovernorSettings = DEFAULTS):
        self.settings = settings
        self.groups_per_step = groups_per_step
        self.half_a_batch = max(1, groups_per_step // 2)
        self.most = max_lag * groups_per_step  # more changes nothing (docs/asynchrony.md)
        if settings.most is not None:
            self.most = min(settings.most, self.most)
        self.least = min(settings.least, self.most)
        # Mean rewards of the newest steps, as far as the rule needs them.
        self.rewards: list[float] = []
        self._set(self.half_a_batch if settings.start is None else settings.start)

    def _set(self, value: int) -> None:
        self.value = max(self.least, min(self.most, value))  # groups

    def taken(self, *, waited: bool, num_finished: int) -> None:
        """Note that a step was taken, at once or after a wait, and how many finished groups stay
        behind.
        """

    def trained(self, reward: float) -> None:
        """Note that a step was trained on completions of this mean reward; NaN if none had one."""

    def resume(self, value: int, rewards: list[float]) -> None:
        """Go on from a checkpoint."""
        self._set(value)
        self.rewards = list(rewards)


class AutoGovernor(Governor):
    """Adjusts the number at each take.

    One that had to wait adds an eighth of a batch; one that leaves half a batch finished takes as
    much away.
    """

    def taken(self, *, waited: bool, num_finished: int) -> None:
        """Add an eighth of a batch after a wait; take as much away if half a batch stays
        finished.
        """
        eighth = max(1, self.groups_per_step // 8)
        if num_finished >= self.half_a_batch:
            self._set(self.value - eighth)
        elif waited:
            self._set(self.value + eighth)


class OppoGovernor(Governor):
    """Allows more groups while the reward rises, fewer while it does not (OPPO eq. 4).

    s_t = 1/w sum_{i=t-w+1..t} (R_i - R_{i-1})
    Delta + delta_inc if s_t > 0, else Delta - delta_dec

    R_t = the mean reward of step t. Held until w + 1 rewards are known.
    """

    def trained(self, reward: float) -> None:
        """Adjust the number by the slope of the last w rewards."""
        if math.isnan(reward):
            return
        w = self.settings.window
        self.rewards = [*self.rewards, reward][-w - 1 :]
        if len(self.rewards) <= w:
            return
        change = self.rewards[-1] - self.rewards[0]  # the sum telescopes
        if change > 0:
            self._set(self.value + self.settings.increase)
        else:
            self._set(self.value - self.settings.decrease)


class WindowGovernor(Governor):
    """Allows fewer groups when the reward rose between windows, more when it fell (OPPO alg. 1,
    22-28).

    d = mean(R of the last W steps) - mean(R of the W before)
    Delta - sign(d) max(1, floor(Delta / 4))

    At every W-th step, from step 2W on.
    """

    def trained(self, reward: float) -> None:
        """Adjust the number at the end of each window of W steps."""
        if math.isnan(reward):
            return
        w = self.settings.window
        self.rewards = [*self.rewards, reward]
        if len(self.rewards) < 2 * w:
            return
        before = fmean(self.rewards[-2 * w : -w])
        last = fmean(self.rewards[-w:])
        quarter = max(1, self.value // 4)
        if last > before:
            self._set(self.value - quarter)
        elif last < before:
            self._set(self.value + quarter)
        self.rewards = self.rewards[-w:]


GOVERNORS = {"auto": AutoGovernor, "oppo": OppoGovernor, "window": WindowGovernor}
