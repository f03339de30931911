"""Sinks that warn when a run has nothing to learn from, does not learn, or learns the wrong thing,
instead of printing zeros for hours.
"""

from __future__ import annotations

import logging

from llamarl.observe.rates import Row, number_of, step_of

FIRST_STEPS = 3  # that bring nothing before it is said
MANY_CUT = 0.5  # share of completions that end at the token limit, from which that may be why

log = logging.getLogger(__name__)


class SignalWatch:
    """Warns, once, where the first steps of a run bring no signal (a sink): all completions got the
    same reward, so that no one is better than another.
    """

    def __init__(self):
        self._num_flat = 0  # of the run's first steps; a resumed run is past them

    def write(self, row: Row) -> None:
        """Look at a row of the first steps."""
        if step_of(row) > FIRST_STEPS or row.get("reward/std") != 0.0:
            return
        self._num_flat += 1
        if self._num_flat == FIRST_STEPS:
            log.warning("%s", no_signal(row))

    def close(self) -> None:
        """Release nothing: there is nothing to release."""


class LearningWatch:
    """Warns, once each, of a reward that does not move and of an entropy that grows with it (a
    sink). It looks every WINDOW steps, at a run that it has seen from its first steps on: a
    resumed one is judged by the report, which has all rows.
    """

    COLUMNS = ("reward/mean", "reward/std", "entropy", "eval/reward", "lr")

    def __init__(self):
        self._rows: dict[str, list[float]] = {name: [] for name in self.COLUMNS}
        self._first: int | None = None
        self._said: set[str] = set()

    def write(self, row: Row) -> None:
        """Look at a row."""
        # Here: a process that writes no row needs no numpy.
        import numpy as np

        from llamarl.observe.alarms import WINDOW, alarms_of_learning

        step = step_of(row)
        if self._first is None:
            self._first = step
        if self._first > WINDOW:
            return
        for name, values in self._rows.items():
            number = number_of(row, name)
            values.append(np.nan if number is None else number)
        if step == 0 or step % WINDOW:
            return
        columns = {name: np.asarray(values, float) for name, values in self._rows.items()}
        for alarm in alarms_of_learning(columns):
            kind = alarm.title.partition(" in ")[0]
            if kind not in self._said:
                self._said.add(kind)
                log.warning("%s: %s. %s", alarm.title, alarm.figure, alarm.remedy)

    def close(self) -> None:
        """Release nothing: there is nothing to release."""


def no_signal(row: Row) -> str:
    """Return the warning in a line or two, and then what to try, in the order of what it costs."""
    lines = [
        f"the first {FIRST_STEPS} steps brought no signal: every completion got the reward "
        f"{row['reward/mean']:g},",
        "so nothing is learned from them. recipes/evaluate.py shows what the model answers. Try",
    ]
    cut = number_of(row, "completion/truncated_fraction") or 0.0
    if cut >= MANY_CUT:
        lines.append(f"  - a larger max_new_tokens ({cut:.0%} of completions are cut off)")
    lines += [
        "  - another reward.fn (exact_match gives 0 to an answer within a sentence,",
        "    llamarl.tasks.rewards:numeric_match reads the number)",
        "  - an easier task (task.options.*)",
        "  - a larger group_size",
        "  - a warm start (recipes/sft.py)",
    ]
    return "\n".join(lines)
