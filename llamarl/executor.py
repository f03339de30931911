"""Executor: the base class of every station, and the group of ranks that runs it.

    class Echo(Executor):
        def step(self):
            for group in self.inputs["scored"].take():
                self.outputs["echoed"].put(group)
            ...

Life: __init__(plain settings; every rank builds every executor, so nothing heavy) -> setup (on its ranks only: models,
pools) -> step* -> teardown. A `step` is one bounded piece of work (a decode chunk, a batch of scores, an optimizer
step). It never blocks on a channel: it returns False when there was nothing to do, and says in `waiting_for` what it
needs, so that the controller can serve stop and checkpoint requests and hold every wait to its deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Iterable

import torch

if TYPE_CHECKING:
    from llamarl.channel import Receiver, Sender
    from llamarl.control import Control
    from llamarl.ledger import TicketDesk
    from llamarl.observe.metrics import Metrics
    from llamarl.offload import Turns
    from llamarl.snapshots import Snapshots
    from torch.distributed import ProcessGroup


POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ExecutorGroup:
    """The ranks that run one executor, and this process's place among them."""

    name: str
    ranks: tuple[int, ...]  # global ranks, in executor order
    rank: int  # this process's global rank
    device: torch.device
    process_group: "ProcessGroup | None" = None  # over `ranks`; for collectives among them

    @property
    def index(self) -> int:
        """This process's place in `ranks` (its data-parallel index). ValueError elsewhere."""
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        return len(self.ranks)


class Executor:
    """One station of the graph. Subclasses give `name` and `step`, and what else they need."""

    name: str = "executor"
    tensor_parallel: int = 1  # ranks, one after another, that share one copy of its model
    replicate: int = 1  # copies of the model that its ranks hold together, each sharded over the others
    turns: "Turns | None" = None  # where it shares its device and leaves it to others between steps
    poll_s: float = POLL_S  # how long the loop may rest when no station of a rank has work; less where none wakes it

    def attach(
        self,
        group: ExecutorGroup,
        inputs: "dict[str, Receiver]",
        outputs: "dict[str, Sender]",
        control: "Control",
        metrics: "Metrics",
        tickets: "TicketDesk | None" = None,
        snapshots: "Snapshots | None" = None,
    ) -> None:
        """Called once by the controller, on the executor's own ranks, before `setup`."""
        self.group, self.inputs, self.outputs, self.control, self.metrics = group, inputs, outputs, control, metrics
        self.tickets, self.snapshots = tickets, snapshots

    def setup(self) -> None:
        """Build what is heavy. Collective over the executor's ranks."""

    def step(self) -> bool:
        """Do one bounded piece of work. Returns False if there was none; then `waiting_for` says why."""
        raise NotImplementedError

    def waiting_for(self) -> str | None:
        """ "CAUSE: what, from whom" that the next step needs, or None when idleness is no fault (nothing is owed here).

        The cause (data, weights, tickets, room, ...) names the idle time in metrics; a wait past deadline_s ends the run.
        """
        return None

    def offloadable(self) -> "Iterable[torch.Tensor]":
        """Tensors on the device that may wait in host memory while another executor has its turn."""
        return ()

    def claim_device(self) -> None:
        """Call before computing: waits until this executor's tensors are back on a device that it shares."""
        if self.turns is not None:
            self.turns.claim(self.name)

    def state_dict(self) -> dict[str, torch.Tensor | int | float | str | list]:
        """What a checkpoint must hold to go on after this station's last step. Tensors and JSON values."""
        return {}

    def load_state_dict(self, parts: "Iterable[dict]") -> None:
        """The inverse, after `setup`: what every rank of this station had saved, in rank order, read one at a time."""

    def teardown(self) -> None:
        """Release processes, files and threads. Must not fail when `setup` did not finish."""
