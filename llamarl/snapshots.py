"""One snapshot of every station at a step boundary.

The trainer decides when (its ranks reach a boundary together) and saves itself there; the leader then asks every other
station that has state to save its own, each between two of its steps. When all parts are in, the checkpoint is sealed.

    message     from -> to                handled                     meaning
    snapshot    leader -> every rank      by the loop, between steps  save your stations' parts of step n
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from pathlib import Path

from llamarl.checkpoint import Checkpointer
from llamarl.control import Control, DeadlineExceeded
from llamarl.executor import Executor
from llamarl.ledger import TicketDesk
from llamarl.observe import Metrics

CONTROLLER = "controller"  # the part with the ledger, the metrics cursor and the run's identity


def has_state(executor: Executor) -> bool:
    return type(executor).state_dict is not Executor.state_dict


class Snapshots:
    """A rank's hand in the snapshots. `executors` are those that it hosts.

    identity: what makes the run that run (llamarl.identity). stale_tickets: those whose unfinished completions in the checkpoint
    to restore are of other prompts.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        executors: list[Executor],
        control: Control,
        metrics: Metrics,
        tickets: TicketDesk,
        identity: Mapping[str, object],
        stale_tickets: Set[int] = frozenset(),
    ):
        self._identity, self._stale_tickets = identity, stale_tickets
        self._checkpointer, self._executors, self._control = checkpointer, executors, control
        self._metrics, self._tickets = metrics, tickets
        self._saved = -1

    def save(self, step: int, trainer: Executor) -> None:
        """Called by each trainer rank at the boundary of `step`. Collective over the trainer (the exported model is gathered)."""
        if step == self._saved:
            return
        self._saved = step
        folder = self._checkpointer.begin(step)
        if self._control.is_leader:
            self._metrics.pump()
            state = {"ledger": self._tickets.state_dict(), "metrics": self._metrics.state_dict(step), "identity": self._identity}
            self._checkpointer.save_part(step, CONTROLLER, self._control.rank, state)
            self._control.post_all("snapshot", {"step": step})
        self._checkpointer.save_part(step, trainer.name, trainer.group.index, trainer.state_dict())
        trainer.export(str(folder / "hf"))
        if trainer.group.index == 0:
            # With an average of the weights there is hf_ema beside it.
            self._checkpointer.register_files(step, "hf", sorted(folder.glob("hf*/*")))

    def serve(self) -> bool:
        """Save what the leader asked for, and seal what is whole. Called by the loop between steps; says if it did something."""
        asked = self._control.take("snapshot")
        for _, message in asked:
            for executor in self._executors:
                if has_state(executor) and executor.name != "trainer":
                    executor.before_snapshot(message["step"])
                    self._checkpointer.save_part(message["step"], executor.name, executor.group.index, executor.state_dict())
        self._checkpointer.pump()
        return bool(asked)

    def restore(self, path: Path) -> None:
        """Bring ledger, metrics and this rank's stations to a checkpoint. On every rank, after setup."""
        leader_part = next(iter(self._checkpointer.ranks_of(path, CONTROLLER)))
        state = self._checkpointer.load_part(path, CONTROLLER, leader_part)
        self._tickets.load_state_dict(state["ledger"], self._checkpointer.in_work(path) - self._stale_tickets)
        if self._control.is_leader:
            self._metrics.load_state_dict(state["metrics"])
        for executor in self._executors:
            if has_state(executor):
                ranks = self._checkpointer.ranks_of(path, executor.name)
                executor.load_state_dict(self._checkpointer.load_part(path, executor.name, r) for r in ranks)
        trained = [e for e in self._executors if e.name == "trainer"]
        self._saved = trained[0].version if trained else -1

    def wait_sealed(self, limit: str, deadline_s: float) -> None:
        """On the leader: until the last snapshot is valid on disk. DeadlineExceeded names the parts that are missing.

        limit: the config key that deadline_s is the value of.
        """
        until = time.monotonic() + deadline_s
        while self._saved >= 0 and not self._checkpointer.sealed(self._saved):
            self.serve()
            if time.monotonic() > until:
                missing = self._checkpointer.missing(self._saved)
                raise DeadlineExceeded(
                    f"checkpoint of step {self._saved}: parts {missing} did not come within {deadline_s:.0f} s; the one before it is "
                    f"valid. Raise {limit} if that is slow rather than stuck"
                )
            self._control.wait(0.02)
