"""What chance decides of a ticket, as a function of the seed and the ticket alone."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from llamarl.planner.simulation_settings import SimulationSettings


@dataclass(frozen=True, slots=True)
class Drawn:
    """A ticket's completions, by sample."""

    lengths: tuple[int, ...]  # [G] tokens
    score_times: tuple[float, ...]  # [G] how often the usual seconds each score takes


def draw(settings: SimulationSettings, ticket: int) -> Drawn:
    """Return how long a ticket's completions are, and how slow their scores."""
    rng = random.Random(f"{settings.seed} {ticket}")
    lengths = []
    score_times = []
    for _ in range(settings.group_size):
        length = _length(settings, rng)
        if rng.random() < settings.straggler_share:
            length = math.ceil(length * settings.straggler_times)
        lengths.append(max(1, min(length, settings.max_new_tokens)))
        is_slow = rng.random() < settings.slow_score_share
        score_times.append(settings.slow_score_times if is_slow else 1.0)
    return Drawn(lengths=tuple(lengths), score_times=tuple(score_times))


def reward_of(settings: SimulationSettings, step: int) -> float:
    """Return a made-up mean reward of a step: it rises, levels off, and is noisy."""
    rng = random.Random(f"{settings.seed} reward {step}")
    risen = 1.0 - math.exp(-step / settings.reward_rise_steps)
    return risen + rng.gauss(0.0, settings.reward_noise)


def waited_of(settings: SimulationSettings, what: str, number: int) -> float:
    """Return how long something waits over its mean wait, whose distribution is exponential."""
    rng = random.Random(f"{settings.seed} {what} {number}")
    return rng.expovariate(1.0)


def _length(settings: SimulationSettings, rng: random.Random) -> int:
    if settings.lengths:
        return rng.choice(settings.lengths)
    sigma = settings.length_sigma
    # The mean of exp(N(mu, sigma)) is exp(mu + sigma^2 / 2).
    mu = math.log(settings.length_mean) - sigma**2 / 2
    return math.ceil(rng.lognormvariate(mu, sigma))
