"""One checkpoint of every executor at a step boundary.

The trainer decides when (its ranks reach a boundary together) and saves itself there; the leader
then asks every other executor that has state to save its own, each between two of its steps. When
all parts are in, the checkpoint is sealed. Once a rank is lost (llamarl.comm.control) it is sealed
without the parts of executors whose state is optional.

    message     from -> to                handled                     meaning
    save        leader -> every rank      by the loop, between steps  save your executors' parts of step n
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from pathlib import Path

from llamarl.checkpoint.checkpointer import Checkpointer
from llamarl.comm.control import Control
from llamarl.errors import CheckpointError, TimedOut
from llamarl.executor import Executor
from llamarl.observe import Metrics
from llamarl.tickets.service import TicketService

CONTROLLER = "controller"  # the part with the ledger, the metrics cursor and the run's identity


def has_state(executor: Executor) -> bool:
    return type(executor).state_dict is not Executor.state_dict


class CheckpointService:
    """A rank's hand in the checkpoints. `executors` are those that it hosts.

    identity: what makes the run that run (llamarl.launch.identity). stale_tickets: those whose
    unfinished completions in the checkpoint to restore are of other prompts.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        executors: list[Executor],
        control: Control,
        metrics: Metrics,
        tickets: TicketService,
        identity: Mapping[str, object],
        stale_tickets: Set[int] = frozenset(),
    ):
        self._identity, self._stale_tickets = identity, stale_tickets
        self._checkpointer, self._executors, self._control = checkpointer, executors, control
        self._metrics, self._tickets = metrics, tickets
        self._saved = -1

    def save(self, step: int, trainer: Executor) -> None:
        """Called by each trainer rank at the boundary of `step`. Collective over the trainer (the
        exported model is gathered).
        """
        if step == self._saved:
            return
        self._saved = step
        if self._control.is_leader:
            self._metrics.pump()
            state = {
                "ledger": self._tickets.state_dict(),
                "metrics": self._metrics.state_dict(step),
                "identity": self._identity,
            }
            self._checkpointer.save_part(step, CONTROLLER, self._control.rank, state)
            self._control.post_all("save", {"step": step})
        self._checkpointer.save_part(step, trainer.name, trainer.group.index, trainer.state_dict())
        self._export(step, trainer)

    def _export(self, step: int, trainer: Executor) -> None:
        """Collective over the trainer, of which the first rank writes, where there is room."""
        if trainer.group.index > 0:
            trainer.export(None)
            return
        num_bytes = trainer.export_bytes
        folder = self._checkpointer.place_for(step, "hf", num_bytes)
        with self._checkpointer.writing(step, "hf", num_bytes):
            trainer.export(None if folder is None else str(folder / "hf"))
            if folder is not None:
                # With an average of the weights there is hf_ema beside it.
                self._checkpointer.register_files(step, "hf", sorted(folder.glob("hf*/*")))

    def serve(self) -> bool:
        """Save what the leader asked for, and seal what is whole. Called by the loop between steps;
        says if it did something.
        """
        asked = self._control.take("save")
        for _, message in asked:
            for executor in self._executors:
                if has_state(executor) and executor.name != "trainer":
                    executor.before_checkpoint(message["step"])
                    self._checkpointer.save_part(
                        message["step"], executor.name, executor.group.index, executor.state_dict()
                    )
        if self._control.loss is not None:
            self._checkpointer.waive()
        self._checkpointer.pump()
        return bool(asked)

    def restore(self, path: Path) -> None:
        """Bring ledger, metrics and this rank's executors to a checkpoint. On every rank, after
        setup.
        """
        leader_part = next(iter(self._checkpointer.ranks_of(path, CONTROLLER)))
        state = self._checkpointer.load_part(path, CONTROLLER, leader_part)
        self._tickets.load_state_dict(
            state["ledger"], self._checkpointer.in_work(path) - self._stale_tickets
        )
        if self._control.is_leader:
            self._metrics.load_state_dict(state["metrics"])
        for executor in self._executors:
            if has_state(executor):
                ranks = self._checkpointer.ranks_of(path, executor.name)
                executor.load_state_dict(
                    self._checkpointer.load_part(path, executor.name, r) for r in ranks
                )
        trained = [e for e in self._executors if e.name == "trainer"]
        # One of another run's directory is not in this one's.
        self._saved = (
            trained[0].version if trained and self._checkpointer.sealed(trained[0].version) else -1
        )

    def wait_sealed(self, limit: str, timeout_s: float) -> None:
        """On the leader: until the last checkpoint is valid on disk. TimedOut names the parts that
        are missing; CheckpointError says why it could not be written.

        limit: the config key that timeout_s is the value of.
        """
        until = time.monotonic() + timeout_s
        while self._saved >= 0 and not self._checkpointer.sealed(self._saved):
            self.serve()
            if why := self._checkpointer.failed(self._saved):
                raise CheckpointError(why)
            if time.monotonic() > until:
                missing = self._checkpointer.missing(self._saved)
                raise TimedOut(
                    f"checkpoint of step {self._saved}: parts {missing} did not come within {timeout_s:.0f} s; the one before it is "
                    f"valid. Raise {limit} if that is slow rather than stuck"
                )
            self._control.wait(0.02)
