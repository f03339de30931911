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
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Constants:
    """What the rules leave open.

    OPPO's names: start, least, most are Delta, Delta_min, Delta_max; window is w or W.
    """

    start: int | None = None  # groups; None: half a batch
    least: int = 0  # groups
    most: int | None = None  # groups; None, or more than max_lag batches: max_lag batches
    window: int = 10  # steps
    increase: int = 1  # groups, oppo's delta_inc
    decrease: int = 1  # groups, oppo's delta_dec


class Governor(Protocol):
    """One rule. `value` and `rewards` are all its state, and any rule can go on from another's."""

    value: int  # groups
    rewards: list[float]  # mean rewards of the newest steps, as far as the rule needs them

    def taken(self, *, waited: bool, num_finished: int) -> None:
        """A step was taken, at once or after a wait; so many groups stay behind, finished."""

    def trained(self, reward: float) -> None:
        """A step was trained on completions of this mean reward; NaN if none had one."""

    def resume(self, value: int, rewards: list[float]) -> None:
        """Go on from a checkpoint."""


class _Bounded:
    """A number of groups between least and most."""

    def __init__(self, groups_per_step: int, max_lag: int, c: Constants):
        room = max_lag * groups_per_step  # more changes nothing (docs/staleness.md)
        self.most = room if c.most is None else min(c.most, room)
        self.least = min(c.least, self.most)
        self.rewards: list[float] = []
        half_a_batch = max(1, groups_per_step // 2)
        self._set(half_a_batch if c.start is None else c.start)

    def _set(self, value: int) -> None:
        self.value = max(self.least, min(self.most, value))

    def taken(self, *, waited: bool, num_finished: int) -> None:
        pass

    def trained(self, reward: float) -> None:
        pass

    def resume(self, value: int, rewards: list[float]) -> None:
        self._set(value)
        self.rewards = list(rewards)


class AutoGovernor(_Bounded):
    """Looks at each take.

    One that had to wait adds an eighth of a batch; one that leaves half a batch finished takes as
    much away.
    """

    def __init__(self, groups_per_step: int, max_lag: int, constants: Constants = Constants()):
        super().__init__(groups_per_step, max_lag, constants)
        self.step = max(1, groups_per_step // 8)
        self._queue_full = max(1, groups_per_step // 2)

    def taken(self, *, waited: bool, num_finished: int) -> None:
        if num_finished >= self._queue_full:
            self._set(self.value - self.step)
        elif waited:
            self._set(self.value + self.step)


class OppoGovernor(_Bounded):
    """More groups while the reward rises, fewer while it does not   (OPPO eq. 4)

    s_t = 1/w sum_{i=t-w+1..t} (R_i - R_{i-1})
    Delta + delta_inc if s_t > 0, else Delta - delta_dec

    R_t = the mean reward of step t. Held until w + 1 rewards are known.
    """

    def __init__(self, groups_per_step: int, max_lag: int, constants: Constants = Constants()):
        super().__init__(groups_per_step, max_lag, constants)
        self._window = constants.window
        self._increase = constants.increase
        self._decrease = constants.decrease

    def trained(self, reward: float) -> None:
        if math.isnan(reward):
            return
        self.rewards = [*self.rewards, reward][-self._window - 1 :]
        if len(self.rewards) <= self._window:
            return
        change = self.rewards[-1] - self.rewards[0]  # the sum telescopes
        if change > 0:
            self._set(self.value + self._increase)
        else:
            self._set(self.value - self._decrease)


class WindowGovernor(_Bounded):
    """Fewer groups when the reward rose between windows, more when it fell   (OPPO alg. 1, 22-28)

    d = mean(R of the last W steps) - mean(R of the W before)
    Delta - sign(d) max(1, floor(Delta / 4))

    At every W-th step, from step 2W on.
    """

    def __init__(self, groups_per_step: int, max_lag: int, constants: Constants = Constants()):
        super().__init__(groups_per_step, max_lag, constants)
        self._window = constants.window

    def trained(self, reward: float) -> None:
        if math.isnan(reward):
            return
        self.rewards = [*self.rewards, reward]
        w = self._window
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
