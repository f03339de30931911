"""How many threads a rank computes with, tried while it runs.

    trial = ThreadTrial((Crew(threads=1, has_helper=True), Crew(threads=1), Crew(threads=2)))
    trial.crew                          # for the next step
    trial.step_took(0.02)               # after each step: its seconds, a token

Two ranks on two cores have a thread each. Where one of them is busy and the other often waits, the
busy one can make use of the other's core in two ways. A helper (llamarl.native.helper) takes a part
of backward for which nobody waits, whatever the size of the products. A second thread takes half of
every product, which pays if these are large, since the threads wait for each other at the end of
each: it saves a 12.6 M-parameter model a fifth of a step, and costs one of 1.6 M a half. So each is
tried, and only what is measured to be faster than the first stays.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field

import torch

STEPS = 4  # that a crew is tried for; the first is not counted
ROUNDS = 2  # of trying each crew: both must say the same
GAIN = 0.05  # the share of a step that another crew than the first must save
REST = 100  # steps until all are tried again; twice as many each time that nothing was gained


@dataclass(frozen=True, slots=True)
class Crew:
    """What a rank computes with. threads: of every operation; has_helper: one thread more, beside
    them.
    """

    threads: int
    has_helper: bool = False

    def __post_init__(self):
        if self.threads < 1:
            raise ValueError(f"threads={self.threads}: need at least one")


@dataclass(slots=True)
class ThreadTrial:
    """Tries crews in turn, then keeps the fastest for some steps.

    Another than the first is kept only if every round saw it save GAIN of a step. One that cannot
    do that any more is not tried on, so that a slow one costs few steps. With a single crew there
    is nothing to try.
    """

    crews: tuple[Crew, ...]
    crew: Crew = field(init=False)
    _rest: int = field(default=STEPS, init=False)  # steps without a trial: the first ones are slow
    _next_rest: int = field(default=REST, init=False)
    _left: list[Crew] = field(default_factory=list, init=False)  # of this round, after `crew`
    _rounds: int = field(default=0, init=False)  # that are complete
    # The others that can still be kept, with their seconds of all rounds.
    _others: dict[Crew, float] = field(default_factory=dict, init=False)
    _first_s: float = field(default=0.0, init=False)  # a step of the first crew, in this round
    _taken: list[float] = field(default_factory=list, init=False)  # by `crew`, in this round

    def __post_init__(self):
        if not self.crews:
            raise ValueError("no crews: need at least one")
        self.crew = self.crews[0]

    def step_took(self, seconds: float) -> None:
        """Say how long a step took with `crew`, a token, and choose that of the next."""
        if len(self.crews) == 1:
            return
        if self._rest:
            self._rest -= 1
            if not self._rest:
                self._rounds = 0
                self._others = dict.fromkeys(self.crews[1:], 0.0)
                self._begin_round()
            return
        self._taken.append(seconds)
        counted = self._taken[1:]
        is_first = self.crew == self.crews[0]
        if not is_first and self._cannot_win(counted):
            del self._others[self.crew]
        elif len(self._taken) < STEPS:
            return
        elif is_first:
            self._first_s = statistics.median(counted)
        else:
            self._others[self.crew] += statistics.median(counted)
        self._go_on()

    def _cannot_win(self, counted: list[float]) -> bool:
        """Whether the median of STEPS - 1 steps will not be GAIN below the first crew's."""
        slow = [seconds for seconds in counted if seconds >= (1 - GAIN) * self._first_s]
        return len(slow) > (STEPS - 1) // 2

    def _begin_round(self) -> None:
        self._left = list(self._others)
        self._begin(self.crews[0])

    def _begin(self, crew: Crew) -> None:
        self.crew = crew
        self._taken = []

    def _go_on(self) -> None:
        """Try the next crew, begin the next round, or decide."""
        if self._left:
            self._begin(self._left.pop(0))
            return
        self._rounds += 1
        if self._others and self._rounds < ROUNDS:
            self._begin_round()
            return
        fastest = min(self._others, key=lambda crew: self._others[crew], default=self.crews[0])
        self._rest = self._next_rest
        self._next_rest = REST if self._others else 2 * self._next_rest
        self._begin(fastest)


def is_room_for_helper() -> bool:
    """Whether this process computes with a single thread and there is another core. One thread is
    too slow a helper of many.
    """
    return torch.get_num_threads() == 1 < len(os.sched_getaffinity(0))


def trial_of(*, is_fixed: bool, may_have_helper: bool) -> ThreadTrial:
    """Return the trial of a rank that has PyTorch's present number of threads.

    It begins with a helper, if it may have one and there is room for it. is_fixed: no other number
    of threads is tried, nor to go without the helper.
    """
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    crews = [Crew(threads)]
    if may_have_helper and is_room_for_helper():
        crews.insert(0, Crew(threads, has_helper=True))
    if is_fixed:
        crews = crews[:1]
    elif threads < cores:
        crews.append(Crew(cores))
    return ThreadTrial(tuple(crews))
