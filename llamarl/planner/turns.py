"""Cores that what computes shares, and ranks whose executors take turns, on the simulation's clock.

    cores = Cores(clock, count=2, crowding=0.1)
    rank = Rank(cores)
    rank.join(turn)
    rank.work(1.0, ended)     # ended() in 1 s, or later where more works than there are cores

Nobody is interrupted: an executor keeps its rank until its step has ended, as in a run's loop. The
cores share what is under way evenly, as a kernel does; and each piece takes 1 + crowding times as
long while all other cores are busy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from llamarl.planner.clock import VirtualClock

_NOTHING_S = 1e-12  # of work: less is rounding

Turn = Callable[[], None]
Placed = Mapping[str, Sequence[int]]  # executor -> its ranks


@dataclass(frozen=True, slots=True)
class SharedRanks:
    """Which ranks each executor has, of a machine with so many cores; 0: each rank has what it
    computes on to itself. A generator's or a trainer's replica has one rank.
    """

    trainer: tuple[int, ...]
    generator: tuple[int, ...]
    reward: tuple[int, ...]
    cores: int = 0
    crowding: float = 0.0

    def feeds_itself(self, generator: int) -> bool:
        """Whether all weights of this generator come from the trainer on its own rank: generators
        are dealt to trainers where that comes out even, and else take a part from each
        (llamarl.ddma.plan).
        """
        if len(self.generator) % len(self.trainer):
            return False
        return self.trainer[generator % len(self.trainer)] == self.generator[generator]

    def waits_for_others(self, generator: int) -> bool:
        """Whether the trainer on this generator's rank has a part of its weights, and others have
        the rest. Its next turn then waits until all has come (llamarl.ddma.receiver).
        """
        is_dealt = len(self.generator) % len(self.trainer) == 0
        return not is_dealt and self.generator[generator] in self.trainer


@dataclass(slots=True)
class _Piece:
    """What is being computed. left_s: on a core to itself."""

    left_s: float
    then: Callable[[], None]


class Cores:
    """So many cores; 0: as many as there is work."""

    def __init__(self, clock: VirtualClock, *, count: int = 0, crowding: float = 0.0):
        self._clock = clock
        self._count = count
        self._crowding = crowding
        self._pieces: list[_Piece] = []
        self._since_s = clock.now
        self._num_plans = 0

    def work(self, seconds: float, then: Callable[[], None]) -> None:
        """Compute for so many seconds of a core to itself, and then do something."""
        if not self._count:
            self._clock.after(seconds, then)
            return
        self._settle()
        self._pieces.append(_Piece(seconds, then))
        self._plan()

    def _speed(self) -> float:
        """Return the seconds of work that each piece gets in a second."""
        number = len(self._pieces)
        beside = 0.0
        if self._count > 1:
            beside = min(1.0, (number - 1) / (self._count - 1))
        return min(1.0, self._count / number) / (1 + self._crowding * beside)

    def _settle(self) -> None:
        """Take off what was computed up to now."""
        now = self._clock.now
        if self._pieces:
            done_s = (now - self._since_s) * self._speed()
            for piece in self._pieces:
                piece.left_s -= done_s
        self._since_s = now

    def _plan(self) -> None:
        """Set the event of the piece that ends next."""
        self._num_plans += 1
        if self._pieces:
            least_s = max(0.0, min(piece.left_s for piece in self._pieces))
            self._clock.after(least_s / self._speed(), partial(self._end, self._num_plans))

    def _end(self, plan: int) -> None:
        """End what is done, unless other work has come or gone since this was planned."""
        if plan != self._num_plans:
            return
        self._settle()
        least_s = min(piece.left_s for piece in self._pieces)
        ended = [piece for piece in self._pieces if piece.left_s <= least_s + _NOTHING_S]
        self._pieces = [piece for piece in self._pieces if piece.left_s > least_s + _NOTHING_S]
        self._plan()
        for piece in ended:
            piece.then()


class Rank:
    """A process, whose executors take turns."""

    def __init__(self, cores: Cores):
        self.is_free = True
        self._cores = cores
        self._turns: list[Turn] = []

    def join(self, turn: Turn) -> None:
        """Take in an executor. turn: has it look for something to do; called while it is free."""
        self._turns.append(turn)

    def work(self, seconds: float, then: Callable[[], None]) -> None:
        """Have whose turn it is compute for so long. It keeps the rank until it leaves."""
        self.is_free = False
        self._cores.work(seconds, then)

    def leave(self, turn: Turn) -> None:
        """Be free: the others of this rank have their turns, and then the one that leaves."""
        self.is_free = True
        self.pass_on(turn)
        if self.is_free:
            turn()

    def pass_on(self, turn: Turn) -> None:
        """Give the others their turns, in the order behind this one, until one of them works."""
        first = self._turns.index(turn) + 1
        for other in [*self._turns[first:], *self._turns[: first - 1]]:
            if self.is_free:
                other()


def stretch(ranks: int, cores: int, crowding: float) -> float:
    """Return how many times as long a part takes that so many ranks do at the same time. cores: 0:
    each rank has what it computes on to itself.
    """
    if ranks == 1 or cores == 0:
        return 1.0
    busy = min(1.0, (ranks - 1) / max(1, cores - 1))  # of the other cores
    return max(1.0, ranks / cores) * (1 + crowding * busy)
