"""Counters summed over ranks -> the rates of a row, idle shares by cause, and the knob that would
shorten them.

Counters read here (all only grow; seconds are summed over the ranks of an executor):

    generator/tokens          tokens sampled
    weights/swap_stall_s      decode time lost to exchanging weights
    X/busy_s, X/idle_s        for every executor X: time inside steps that did work, and the rest
    X/idle_s/CAUSE            the part of X/idle_s spent waiting for CAUSE: the first word of X.waiting_for() (data, weights,
                              tickets, room, ...), or "no work" when nothing was owed to X
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 1.0
MEAN = "mean/"  # counters mean/NAME/sum and mean/NAME/count become column NAME
ALWAYS = (
    "generator",
    "trainer",
)  # executors whose idle share every row has, null where nothing was counted

# What to turn when an executor waits for a cause for long. Names are config keys.
KNOBS = {
    (
        "trainer",
        "data",
    ): "raise overcommit (then max_lag), or move ranks from placement.trainer to placement.generator",
    ("trainer", "weights"): "the generator takes weights late: lower generator.chunk_tokens",
    (
        "trainer",
        "no work",
    ): "its process works for other executors meanwhile: start more ranks (torchrun --nproc-per-node)",
    (
        "generator",
        "tickets",
    ): "the trainer is the slow side: raise overcommit (then max_lag), or move ranks to placement.trainer",
    (
        "generator",
        "room",
    ): "what follows the generator is slow: raise reward.num_workers or move ranks to placement.trainer",
    ("generator", "weights"): "set generator.in_flight_updates=true and max_lag of at least 1",
    (
        "generator",
        "no work",
    ): "its process works for other executors meanwhile: start more ranks (torchrun --nproc-per-node)",
    ("reward", "scores"): "raise reward.num_workers",
    ("reward", "room"): "the trainer is the slow side: move ranks to placement.trainer",
    ("reference", "room"): "the trainer is the slow side: move ranks to placement.trainer",
}


@dataclass(frozen=True, slots=True)
class Idle:
    """How idle one executor was, as shares (0..1) of its time; `causes` is sorted, largest first."""

    executor: str
    share: float
    causes: tuple[tuple[str, float], ...]

    @property
    def knob(self) -> str:
        """What to turn for the largest cause; empty when there is nothing to say."""
        return KNOBS.get((self.executor, self.causes[0][0]), "") if self.causes else ""


def idle_shares(counters: dict[str, float]) -> list[Idle]:
    """Idle share of every executor that has counted any time; a difference of two counter readings
    works as well.
    """
    shares = []
    for executor in sorted(
        {name.split("/")[0] for name in counters if name.endswith(("/idle_s", "/busy_s"))}
    ):
        total = counters.get(f"{executor}/idle_s", 0) + counters.get(f"{executor}/busy_s", 0)
        if total <= 0:
            continue
        prefix = f"{executor}/idle_s/"
        causes = [
            (name[len(prefix) :], value / total)
            for name, value in counters.items()
            if name.startswith(prefix)
        ]
        causes.sort(key=lambda cause: (-cause[1], cause[0]))
        shares.append(Idle(executor, counters.get(f"{executor}/idle_s", 0) / total, tuple(causes)))
    return shares


class RateMeter:
    """Differences of counter readings taken at every row.

    Rates are over the time since the previous row, or over the last WINDOW_S where rows come
    faster: other ranks' counters are up to a tenth of a second old, which would show as noise in
    rows of that length.
    """

    def __init__(self, *, wall_s: float, counters: dict[str, float]):
        self._readings: deque[tuple[float, dict[str, float]]] = deque([(wall_s, dict(counters))])

    def read(self, wall_s: float, counters: dict[str, float]) -> dict[str, float | None]:
        """The derived values of the row that ends now; null where no time or no work was counted."""
        readings = self._readings
        while len(readings) > 1 and readings[1][0] <= wall_s - WINDOW_S:
            readings.popleft()
        (start_s, start), previous = readings[0], readings[-1][1]
        readings.append((wall_s, dict(counters)))

        change = {name: value - start.get(name, 0) for name, value in counters.items()}
        elapsed = wall_s - start_s
        tokens = change.get("generator/tokens")
        swap_stall = "weights/swap_stall_s"
        values = {
            "generator/tokens_per_s": tokens / elapsed
            if tokens is not None and elapsed > 0
            else None,
            swap_stall: counters.get(swap_stall, 0) - previous.get(swap_stall, 0),
        }
        for name in counters:
            if name.startswith(MEAN) and name.endswith("/count"):
                kind = name.removesuffix("count")
                count, total = (
                    counters[kind + part] - previous.get(kind + part, 0)
                    for part in ("count", "sum")
                )
                values[kind.removeprefix(MEAN)[:-1]] = total / count if count else None
        values.update({f"{executor}/idle_fraction": None for executor in ALWAYS})
        for idle in idle_shares(change):
            values[f"{idle.executor}/idle_fraction"] = idle.share
            values.update(
                {f"{idle.executor}/idle_fraction/{cause}": share for cause, share in idle.causes}
            )
        return values
