"""Executor: the base class of every executor, and the group of ranks that runs it.

    class Echo(Executor):
        def step(self):
            for group in self.inputs["scored"].take():
                self.outputs["echoed"].put(group)
            ...

Life: __init__(plain settings; every rank builds every executor, so nothing heavy) -> setup (on its
ranks only: models, pools) -> step* -> teardown. A `step` is one bounded piece of work (a decode
chunk, a batch of scores, an optimizer step). It never blocks on a channel: it returns False when
there was nothing to do, and says in `waiting_for` what it needs, so that the controller can serve
stop and checkpoint requests and hold every wait to its deadline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from llamarl.checkpoint.service import CheckpointService
    from llamarl.comm.channel import Receiver, Sender
    from llamarl.comm.control import Control
    from llamarl.models.offload import DeviceSharing
    from llamarl.observe.metrics import Metrics
    from llamarl.tickets.service import TicketService


POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ExecutorGroup:
    """The ranks that run one executor, and this process's place among them: index = (replica *
    shards + shard) * tensor_parallel + t.
    """

    name: str
    ranks: tuple[int, ...]  # global ranks, in executor order
    rank: int  # this process's global rank
    device: torch.device
    process_group: ProcessGroup | None = None  # over `ranks`; for collectives among them
    replicate: int = 1
    tensor_parallel: int = 1
    replica_group: ProcessGroup | None = (
        None  # the ranks that hold the same shard; None without replicas
    )
    shard_group: ProcessGroup | None = (
        None  # the ranks that together hold this one's part of one replica
    )
    tensor_group: ProcessGroup | None = (
        None  # the ranks that share a copy of the model; None without tensor parallelism
    )

    @property
    def index(self) -> int:
        """This process's place in `ranks`. ValueError elsewhere."""
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def data_index(self) -> int:
        """This process's place among the data-parallel ranks; tensor-parallel peers share one."""
        return self.index // self.tensor_parallel

    @property
    def data_size(self) -> int:
        return self.size // self.tensor_parallel

    @property
    def tensor_index(self) -> int:
        return self.index % self.tensor_parallel

    @property
    def replica(self) -> int:
        return self.index // (self.size // self.replicate)

    def data_mesh(self) -> DeviceMesh | None:
        """[replicate, shard], or [shard] without replicas: the ranks that hold this one's
        tensor-parallel part. None without groups.
        """
        if self.shard_group is None:
            return None
        from torch.distributed.device_mesh import DeviceMesh

        if self.replicate == 1:
            return DeviceMesh.from_group(self.shard_group, self.device.type)
        mesh = torch.tensor(self.ranks).view(self.replicate, -1, self.tensor_parallel)[
            ..., self.tensor_index
        ]
        groups = [self.replica_group, self.shard_group]
        return DeviceMesh.from_group(
            groups, self.device.type, mesh=mesh, mesh_dim_names=("replicate", "shard")
        )


class Executor:
    """One executor of the graph. Subclasses give `name` and `step`, and what else they need."""

    name: str = "executor"
    tensor_parallel: int = 1  # ranks, one after another, that share one copy of its model
    replicate: int = (
        1  # copies of the model that its ranks hold together, each sharded over the others
    )
    turns: DeviceSharing | None = (
        None  # where it shares its device and leaves it to others between steps
    )
    state_is_optional: bool = (
        False  # a run can go on without what `state_dict` holds: that work starts again
    )
    # this rank only does what another began: a stop must not keep it from taking part to the end
    follows: bool = False
    # how long the loop may rest when no executor of a rank has work; less where none wakes it
    poll_s: float = POLL_S

    def attach(
        self,
        group: ExecutorGroup,
        inputs: dict[str, Receiver],
        outputs: dict[str, Sender],
        control: Control,
        metrics: Metrics,
        tickets: TicketService | None = None,
        checkpoints: CheckpointService | None = None,
    ) -> None:
        """Called once by the controller, on the executor's own ranks, before `setup`."""
        self.group, self.inputs, self.outputs, self.control, self.metrics = (
            group,
            inputs,
            outputs,
            control,
            metrics,
        )
        self.tickets, self.checkpoints = tickets, checkpoints

    def setup(self) -> None:
        """Build what is heavy. Collective over the executor's ranks."""

    def step(self) -> bool:
        """Do one bounded piece of work. Returns False if there was none; then `waiting_for` says
        why.
        """
        raise NotImplementedError

    def waiting_for(self) -> str | None:
        """ "CAUSE: what, from whom" that the next step needs, or None when idleness is no fault
        (nothing is owed here).

        The cause (data, weights, tickets, room, ...) names the idle time in metrics; a wait past
        timeout_s ends the run.
        """
        return None

    def offloadable(self) -> Iterable[torch.Tensor]:
        """Tensors on the device that may wait in host memory while another executor has its turn."""
        return ()

    def claim_device(self) -> None:
        """Call before computing: waits until this executor's tensors are back on a device that it
        shares.
        """
        if self.turns is not None:
            self.turns.claim(self.name)

    def before_checkpoint(self, step: int) -> None:
        """The trainer is past this step; `state_dict` follows, and must hold nothing that was made
        after it.
        """

    def state_dict(self) -> dict[str, torch.Tensor | int | float | str | list]:
        """What a checkpoint must hold to go on after this executor's last step. Tensors and JSON
        values.
        """
        return {}

    def load_state_dict(self, parts: Iterable[dict]) -> None:
        """The inverse, after `setup`: what every rank of this executor had saved, in rank order,
        read one at a time.
        """

    def teardown(self) -> None:
        """Release processes, files and threads. Must not fail when `setup` did not finish."""
