"""CheckpointService: makes one checkpoint of every executor at a step boundary.

The executor that leads, the trainer, decides when (its ranks reach a boundary together) and saves
itself there. The leader then asks every other executor that has state to save its own, each between
two of its steps. When all parts are in, the checkpoint is sealed. Once a rank is lost
(llamarl.comm.control) it is sealed without the parts of executors whose state is optional.

    message   from -> to             handled                      meaning
    save      leader -> every rank   by the loop, between steps   save your executors' parts of
                                                                  step n
    at        trainer rank ->        by its save, which waits;    I have come to this place of
              leader                 by its trainer's step        step n
    at        leader -> the other    so too                       all have
              trainer ranks

A save may take as long as it needs while it gets on (Control.saving). The trainer's ranks wait for
each other by messages before and after what is collective in it, because a collective's own
patience is timeout_s.

The last save of a run belongs to no step that the leader has begun: each rank comes to the end by
itself, while another may still wait for it in a collective of an executor that both share. So a
rank that has come to the end goes on with its other executors until all trainer ranks have come
(`may_end`). By the same messages the leader then begins the save. Where trainer and replicas of the
generator take turns on shared ranks, they come to the begin of a step so too (`may_begin`).

Nobody waits in a save for what another executor does: an executor that is not ready for it is asked
again between the steps (`Executor.may_checkpoint`), and so is the leader's last checkpoint.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Set
from itertools import chain
from pathlib import Path
from typing import Protocol

from llamarl.checkpoint.checkpointer import Checkpointer
from llamarl.checkpoint.parts import in_work, load_part, load_parts, ranks_of
from llamarl.comm.control import Control
from llamarl.errors import CheckpointError, TimedOut
from llamarl.executor import Executor
from llamarl.tickets.service import TicketService

_AT = "at"
_BEGIN = "the begin"  # the place that trainer ranks come to before a step
_END = "the end"  # and before the last save
LEADER_S = 10.0  # the leader, which knows who is late, says so before the others give up
CONTROLLER = "controller"  # the part with the ledger, the metrics cursor and the run's identity


class MetricsState(Protocol):
    """The part of the metrics that a checkpoint needs (llamarl.observe.metrics)."""

    def pump(self) -> None: ...

    def state_dict(self, step: int) -> dict: ...

    def load_state_dict(self, state: dict) -> None: ...


class CheckpointService:
    """Saves and restores the executors of one rank.

    identity: of the run (llamarl.launch.identity). stale_tickets: tickets of the checkpoint to
    restore whose unfinished completions belong to other prompts. timeout_s: how long a trainer rank
    waits for another one whose part of a save does not advance.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        executors: list[Executor],
        control: Control,
        metrics: MetricsState,
        tickets: TicketService,
        identity: Mapping[str, object],
        stale_tickets: Set[int] = frozenset(),
        timeout_s: float = 600.0,
    ):
        self._checkpointer = checkpointer
        self._executors = list(executors)
        self._control = control
        self._metrics = metrics
        self._tickets = tickets
        self._identity = identity
        self._stale_tickets = stale_tickets
        self._timeout_s = timeout_s
        # (step, place in its save) -> the other trainer ranks that have come to it.
        self._at: defaultdict[tuple[int, str], set[int]] = defaultdict(set)
        self._told: set[tuple[int, str]] = set()  # places that the leader knows this rank to be at
        self._saved = -1  # the newest step that this rank's trainer has saved; -1: none
        # Saves that were asked for: of a step, of an executor that was not ready yet.
        self._to_save: list[tuple[int, Executor]] = []
        # Since when the leader waits for the last seal, and whether a stop had been asked for then.
        self._sealing: tuple[float, bool] | None = None
        self._unsealable: CheckpointError | None = None  # why no checkpoint can follow a loss

    def save(self, step: int, trainer: Executor, *, is_last: bool = False) -> None:
        """Save the checkpoint of `step`. Called by each trainer rank, at the boundary of the step.

        Collective over the trainer: the exported model is gathered. is_last: it is the run's last,
        and waits timeout_s for room where the disk is full.
        """
        if step == self._saved:
            return
        self._saved = step
        if is_last:
            self._checkpointer.room.wait_for(step, self._timeout_s)
        with self._control.saving(self._checkpointer.progress):
            self._save(step, trainer, is_last)

    def _save(self, step: int, trainer: Executor, is_last: bool) -> None:
        if self._control.is_leader:
            self._metrics.pump()
            state = {
                "ledger": self._tickets.state_dict(),
                "metrics": self._metrics.state_dict(step),
                "identity": self._identity,
            }
            self._checkpointer.save_part(step, CONTROLLER, self._control.rank, state)
            self._control.post_all("save", {"step": step, "is_last": is_last})
        self._checkpointer.save_part(step, trainer.name, trainer.group.index, trainer.state_dict())
        self._meet(step, "before the room of the export", trainer)
        folder = None
        if trainer.group.index == 0:
            # Once the others' parts have their room, and before they wait in a collective.
            folder = self._checkpointer.place_for(step, "hf", trainer.export_bytes)
        self._meet(step, "before the export", trainer)
        self._export(step, trainer, folder)
        self._meet(step, "after the export", trainer)

    def may_begin(self, step: int, trainer: Executor) -> bool:
        """Whether all trainer ranks may begin what `step` needs of them together. Called by each,
        once it has its part of the batch, between its other executors' steps until it may.
        """
        return self._are_free(step, _BEGIN, trainer)

    def may_end(self, step: int, trainer: Executor) -> bool:
        """Whether the last save may begin, at `step`. Called by each trainer rank between its other
        executors' steps, until it may.
        """
        return self._are_free(step, _END, trainer)

    def _are_free(self, step: int, place: str, trainer: Executor) -> bool:
        """Come to a place once nothing begins here any more that needs another trainer rank. Return
        whether all have come.

        After a stop request that is so at once, because executors that begin something are stepped
        no more.
        """
        if not self._control.stopping:
            needed = chain.from_iterable(e.partners(step) for e in self._executors)
            if not set(needed).isdisjoint(trainer.group.ranks):
                return False
        return self._has_met(step, place, trainer)

    def _meet(self, step: int, place: str, trainer: Executor) -> None:
        """Wait until all trainer ranks have come to a place in the save of `step`.

        TimedOut names those whose part does not get on.
        """
        patience_s = self._timeout_s + (0 if self._control.is_leader else LEADER_S)
        began = time.monotonic()
        while not self._has_met(step, place, trainer):
            self._control.check()
            if time.monotonic() > max(began, self._control.progressed_at) + patience_s:
                late = sorted(self._awaited(trainer) - self._at[step, place])
                raise TimedOut(
                    f"trainer on rank {self._control.rank} waited {patience_s:.0f} s in the "
                    f"checkpoint of step {step}, {place}, for ranks {late}, which wrote nothing "
                    "meanwhile. Raise timeout_s if their disk is slow rather than stuck"
                )
            self._control.wait(0.02)

    def _has_met(self, step: int, place: str, trainer: Executor) -> bool:
        """Come to a place, if this rank has not yet. Return whether all trainer ranks are there.

        By way of the leader: from each rank to each would be the square of so many messages.
        """
        leader = self._control.leader
        if not self._control.is_leader and (step, place) not in self._told:
            self._told.add((step, place))
            self._control.post(leader, _AT, {"step": step, "place": place})
        for sender, message in self._control.take(_AT):
            self._at[message["step"], message["place"]].add(sender)
        if not self._awaited(trainer) <= self._at[step, place]:
            return False
        del self._at[step, place]
        self._told.discard((step, place))
        if self._control.is_leader:
            for rank in self._awaited(trainer):
                self._control.post(rank, _AT, {"step": step, "place": place})
        return True

    def _awaited(self, trainer: Executor) -> set[int]:
        """Return the ranks that this one hears from: all others on the leader, else the leader."""
        if self._control.is_leader:
            return set(trainer.group.ranks) - {self._control.rank}
        return {self._control.leader}

    def _export(self, step: int, trainer: Executor, folder: Path | None) -> None:
        """Write a directory that transformers loads into a folder; None: there was no room.

        Collective over the trainer; its first rank writes.
        """
        if trainer.group.index > 0:
            trainer.export(None)
            return
        with self._checkpointer.writing(step, "hf", trainer.export_bytes):
            trainer.export(None if folder is None else str(folder / "hf"))
            if folder is not None:
                # With an average of the weights there is hf_ema beside it, with adapters adapter.
                files = [*folder.glob("hf*/*"), *folder.glob("adapter*/*")]
                self._checkpointer.register_files(step, "hf", sorted(files))

    def serve(self) -> bool:
        """Save what the leader asked for, and seal what is whole. Returns whether it did something.

        Called by the loop, between two steps.
        """
        for _, message in self._control.take("save"):
            if message["is_last"] and not self._control.is_leader:
                self._checkpointer.room.wait_for(message["step"], self._timeout_s)
            for executor in self._executors:
                # The one that leads has saved itself.
                if executor.has_state() and not executor.leads:
                    self._to_save.append((message["step"], executor))
        waiting: list[tuple[int, Executor]] = []
        has_saved = False
        for step, executor in self._to_save:
            is_behind = any(executor is other for _, other in waiting)
            if is_behind or not executor.may_checkpoint(step):
                waiting.append((step, executor))
                continue
            with self._control.saving(self._checkpointer.progress):
                state = executor.state_dict()
                self._checkpointer.save_part(step, executor.name, executor.group.index, state)
            has_saved = True
        self._to_save = waiting
        try:
            self._checkpointer.pump()
        except CheckpointError as error:
            if self._control.loss is None:
                raise
            self._unsealable = error  # the loss is what ends the run
        return has_saved

    def leave_out(self, executor: Executor) -> None:
        """Stop saving an executor: it is lost, and its state may be torn."""
        self._executors.remove(executor)
        self._to_save = [save for save in self._to_save if save[1] is not executor]

    @property
    def sealed_step(self) -> int | None:
        """On the leader: the newest step that this process has sealed a checkpoint of."""
        return self._checkpointer.newest_sealed

    def restore(self, path: Path) -> None:
        """Bring ledger, metrics and this rank's executors to a checkpoint.

        On every rank, after setup. CheckpointError names an executor that cannot go on from it.
        """
        state = load_part(path, CONTROLLER, ranks_of(path, CONTROLLER)[0])
        saved_tickets = in_work(path) - self._stale_tickets
        self._tickets.load_state_dict(state["ledger"], saved_tickets)
        if self._control.is_leader:
            self._metrics.load_state_dict(state["metrics"])
        for executor in self._executors:
            if executor.has_state():
                may_be_absent = executor.state_may_be_absent
                parts = load_parts(path, executor.name, may_be_absent=may_be_absent)
                try:
                    executor.load_state_dict(parts)
                except ValueError as error:
                    raise CheckpointError(f"{path}: {executor.name}: {error}") from error
            # A checkpoint of another run's directory is not in this one's.
            if executor.leads and self._checkpointer.sealed(executor.version):
                self._saved = executor.version

    def is_sealed(self, timeout_s: float) -> bool:
        """On the leader: whether the last checkpoint is valid on disk. Asked between two steps,
        until it is.

        That may take as long as it needs while a rank gets on with its part. timeout_s: stop_s
        after a stop request, else timeout_s of the config. TimedOut names the parts that are
        missing; CheckpointError says why it could not be written.
        """
        if self._saved < 0 or self._checkpointer.sealed(self._saved):
            return True
        if self._saved in self._checkpointer.failed:
            raise CheckpointError(self._checkpointer.failed[self._saved])
        if self._unsealable is not None:
            raise self._unsealable
        now = time.monotonic()
        stopping = self._control.stopping
        # A stop has its own patience, from where it was asked for.
        if self._sealing is None or self._sealing[1] != stopping:
            self._sealing = (now, stopping)
        if now > max(self._sealing[0], self._control.progressed_at) + timeout_s:
            late = self._checkpointer.missing(self._saved)
            what = f"parts {late} did not come"
            if not late:
                absent = self._checkpointer.unseen(self._saved)
                what = f"files {absent} of other hosts were not seen here"
            limit = "stop_s" if stopping else "timeout_s"
            raise TimedOut(
                f"checkpoint of step {self._saved}: {what} within "
                f"{timeout_s:.0f} s; the one before it is valid. Raise {limit} if that is slow "
                "rather than stuck"
            )
        return False
