"""What a study's runs come to: the interval of each question's difference, its verdict, and that of
the study.

The rules are in study_terms.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from study_terms import (
    HELD,
    NOT_ANSWERED,
    NOT_RUN,
    OPPOSITE,
    SMALLER,
    Question,
    Runs,
    Study,
)

# Student's t, two-sided 95 %, of 2 to 20 pairs; more pairs are given the last.
T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a question came to. differences: one a seed, None where a value could not be read."""

    verdict: str
    differences: tuple[float | None, ...]
    mean: float | None = None
    half: float | None = None  # of the 95 % interval

    @property
    def interval(self) -> tuple[float, float] | None:
        if self.mean is None or self.half is None:
            return None
        return self.mean - self.half, self.mean + self.half


def half_interval(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of the mean of at least two values."""
    t = T95[min(len(values) - 2, len(T95) - 1)]
    return t * statistics.stdev(values) / math.sqrt(len(values))


def judge(expect: str, margin: float, low: float, high: float) -> str:
    """Return the verdict of an interval of a difference."""
    if expect == "less":
        low, high = -high, -low
    if expect == "same":
        if -margin < low and high < margin:
            return HELD
        return OPPOSITE if low > margin or high < -margin else NOT_ANSWERED
    if low > margin:
        return HELD
    if high < min(margin, 0):
        return OPPOSITE
    return SMALLER if high < margin else NOT_ANSWERED


def answer(question: Question, seeds: Sequence[Runs]) -> Answer:
    """Return what a question comes to; not answered if some seed's difference cannot be read."""
    differences: list[float | None] = []
    for runs in seeds:
        left = question.left(runs)
        right = question.right(runs)
        is_known = left is not None and right is not None
        differences.append(question.times * (left - right) if is_known else None)
    known = [difference for difference in differences if difference is not None]
    if len(known) < 2 or len(known) < len(differences):
        return Answer(NOT_ANSWERED, tuple(differences))
    mean = statistics.mean(known)
    half = half_interval(known)
    verdict = judge(question.expect, question.margin, mean - half, mean + half)
    return Answer(verdict, tuple(differences), mean, half)


def all_hold(verdicts: Sequence[str]) -> str:
    """Return held if all questions hold. Opposite or else smaller if one is. Else not answered."""
    for verdict in (OPPOSITE, SMALLER):
        if verdict in verdicts:
            return verdict
    return HELD if set(verdicts) == {HELD} else NOT_ANSWERED


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a study came to. answers: of all that is asked. failed_checks: each with the seeds that
    were not in its state.
    """

    verdict: str
    answers: tuple[Answer, ...]
    failed_checks: tuple[str, ...]


def outcome(study: Study, by_seed: Mapping[int, Runs]) -> Outcome:
    """Return the verdict over all seeds that have all arms. It is not tested yet while seeds that
    were announced are missing.
    """
    whole = {seed: runs for seed, runs in by_seed.items() if len(runs) == len(study.arms)}
    seeds = [whole[seed] for seed in study.seeds if seed in whole]
    answers = tuple(answer(question, seeds) for question in study.asked)
    failed = []
    for check in study.all_checks:
        bad = [str(seed) for seed in study.seeds if seed in whole and not check.holds(whole[seed])]
        if bad:
            failed.append(f"{check.said}: not of seed {', '.join(bad)}")
    for arm in study.arms:
        bad = [str(seed) for seed in study.seeds if seed in whole and whole[seed][arm.name].failed]
        if bad:
            failed.append(f"no run diverges: [{arm.name}] did, of seed {', '.join(bad)}")
    if len(seeds) < len(study.seeds):
        return Outcome(NOT_RUN, answers, tuple(failed))
    deciding = []
    for question, found in zip(study.asked, answers):
        if study.decides(question):
            deciding.append(found.verdict)
    is_open = bool(failed) or bool(study.review and study.review.questions)
    verdict = NOT_ANSWERED if is_open else all_hold(deciding)
    return Outcome(verdict, answers, tuple(failed))
