"""How many threads a rank computes with, tried while it runs.

    trial = ThreadTrial((1, 2))
    trial.threads                       # for the next step
    trial.step_took(0.02)               # after each step: its seconds, a token

Two ranks on two cores have a thread each. Where one of them is busy and the other often waits, a
second thread of the busy one can use the other's core. It takes half of every product, which pays
if these are large, since the threads wait for each other at the end of each: it saves a
12.6 M-parameter model a fifth of a step, and costs one of 1.6 M a half. So each number is tried,
and only what is measured to be faster than the first stays.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field

import torch

STEPS = 4  # that a number of threads is tried for; the first is not counted
ROUNDS = 2  # of trying each number: both must say the same
GAIN = 0.05  # the share of a step that another number than the first must save
REST = 100  # steps until all are tried again; twice as many each time that nothing was gained


@dataclass(slots=True)
class ThreadTrial:
    """Tries numbers of threads in turn, then keeps the fastest for some steps.

    Another than the first is kept only if every round saw it save GAIN of a step. One that cannot
    do that any more is not tried on, so that a slow one costs few steps. With a single number there
    is nothing to try.
    """

    numbers: tuple[int, ...]
    threads: int = field(init=False)
    _rest: int = field(default=STEPS, init=False)  # steps without a trial: the first ones are slow
    _next_rest: int = field(default=REST, init=False)
    _left: list[int] = field(default_factory=list, init=False)  # of this round, after `threads`
    _rounds: int = field(default=0, init=False)  # that are complete
    # The others that can still be kept, with their seconds of all rounds.
    _others: dict[int, float] = field(default_factory=dict, init=False)
    _first_s: float = field(default=0.0, init=False)  # a step with the first, in this round
    _taken: list[float] = field(default_factory=list, init=False)  # with `threads`, in this round

    def __post_init__(self):
        if not self.numbers or min(self.numbers) < 1:
            raise ValueError(f"numbers={self.numbers}: need at least one, each at least 1")
        self.threads = self.numbers[0]

    def step_took(self, seconds: float) -> None:
        """Say how long a step took, a token, and choose the threads of the next."""
        if len(self.numbers) == 1:
            return
        if self._rest:
            self._rest -= 1
            if not self._rest:
                self._rounds = 0
                self._others = dict.fromkeys(self.numbers[1:], 0.0)
                self._begin_round()
            return
        self._taken.append(seconds)
        counted = self._taken[1:]
        is_first = self.threads == self.numbers[0]
        if not is_first and self._cannot_win(counted):
            del self._others[self.threads]
        elif len(self._taken) < STEPS:
            return
        elif is_first:
            self._first_s = statistics.median(counted)
        else:
            self._others[self.threads] += statistics.median(counted)
        self._go_on()

    def _cannot_win(self, counted: list[float]) -> bool:
        """Whether the median of STEPS - 1 steps will not be GAIN below the first's."""
        slow = [seconds for seconds in counted if seconds >= (1 - GAIN) * self._first_s]
        return len(slow) > (STEPS - 1) // 2

    def _begin_round(self) -> None:
        self._left = list(self._others)
        self._begin(self.numbers[0])

    def _begin(self, threads: int) -> None:
        self.threads = threads
        self._taken = []

    def _go_on(self) -> None:
        """Try the next number, begin the next round, or decide."""
        if self._left:
            self._begin(self._left.pop(0))
            return
        self._rounds += 1
        if self._others and self._rounds < ROUNDS:
            self._begin_round()
            return
        fastest = min(self._others, key=lambda n: self._others[n], default=self.numbers[0])
        self._rest = self._next_rest
        self._next_rest = REST if self._others else 2 * self._next_rest
        self._begin(fastest)


def trial_of_threads() -> ThreadTrial:
    """Return a trial of PyTorch's present number of threads and of the machine's cores, if these
    are more.
    """
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    return ThreadTrial((threads, cores) if threads < cores else (threads,))
