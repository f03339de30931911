"""Executor: the base class of every executor, and the group of ranks that runs it.

    class Echo(Executor):
        name = "echo"
        consumes = (Group,)
        produces = (Group,)

        def step(self):
            groups = self.inputs.of(Group).take()
            for group in groups:
                self.outputs.of(Group).put(group)
            return bool(groups)

An executor says which records it consumes and produces, and asks for its channels' ends by record.
It knows no other executor: the recipe decides which two a channel connects (llamarl.launch).

Life: __init__(plain settings; every rank builds every executor, so nothing heavy) -> begin (on its
ranks only: processes that start) -> setup (models, pools) -> step* -> teardown. A `step` is one
bounded piece of work (a decode chunk, a batch of scores, an optimizer step). It never blocks on a
channel. If there is nothing to do it returns False and says in `waiting_for` what it needs. So the
controller can serve stop and checkpoint requests between steps, and end every wait after timeout_s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

POLL_S = 0.05

State = Mapping[str, object]  # tensors, and what JSON holds
Sample = Mapping[str, object]  # what JSON holds (llamarl/observe/samples.py)


Record = TypeVar("Record")
ConsumedRecord = TypeVar("ConsumedRecord", contravariant=True)
End = TypeVar("End")


class RecordReceiver(Protocol[Record]):
    """The end of a channel that an executor reads."""

    def take(self, limit: int | None = None) -> list[Record]:
        """Return up to `limit` records that have come, oldest first. Does not wait."""


class RecordSender(Protocol[ConsumedRecord]):
    """The end of a channel that an executor writes. Ask `has_room` before the work; `put` never
    waits.
    """

    @property
    def name(self) -> str:
        """The channel's name, for messages."""

    def has_room(self) -> bool:
        """Whether another record may be put."""

    def put(self, record: ConsumedRecord) -> None:
        """Send a record. It arrives after all that was put before."""


class Ends(Generic[End]):
    """This rank's ends of an executor's channels. by_record: each with the type of record that it
    carries, in the order of the channels.
    """

    side = "end"  # the word for an end in messages

    def __init__(self, executor: str, ends: Iterable[tuple[type, End]]):
        self.executor = executor
        self.by_record = list(ends)

    def __iter__(self) -> Iterator[End]:
        return (end for _, end in self.by_record)

    def all_of(self, record: type) -> list[End]:
        """Return every end that carries this type of record."""
        return [end for carried, end in self.by_record if carried is record]

    def _only_one_of(self, record: type) -> End:
        found = self.all_of(record)
        if len(found) == 1:
            return found[0]
        here = ", ".join(carried.__name__ for carried, _ in self.by_record) or "none"
        raise ValueError(
            f"{self.executor} has {len(found)} {self.side}s that carry {record.__name__}, but "
            f"needs exactly one; it has {here}. Connect one such channel in the recipe"
        )


class Inputs(Ends[RecordReceiver]):
    """The ends that an executor reads."""

    side = "input"

    def of(self, record: type[Record]) -> RecordReceiver[Record]:
        """Return the one end that brings this type of record. ValueError if there is none, or
        several.
        """
        return self._only_one_of(record)


class Outputs(Ends[RecordSender]):
    """The ends that an executor writes."""

    side = "output"

    def of(self, record: type[Record]) -> RecordSender[Record]:
        """Return the one end that takes this type of record. ValueError if there is none, or
        several.
        """
        return self._only_one_of(record)


@dataclass(frozen=True, slots=True)
class WeightsForm:
    """The form in which an executor takes weights, and the transport.

    dtype: the executor's own, in which weights travel. quantize: the form in which projections
    travel, "fp8" or "int8"; "none": in dtype. exclude: parts of the names of projections that stay
    in dtype. transport: "auto", or one of words.choices.TRANSPORTS.
    """

    dtype: str = "float32"
    quantize: str = "none"
    exclude: tuple[str, ...] = ()
    transport: str = "auto"


class Messages(Protocol):
    """The part of the control that an executor sees: messages between ranks, and whether the run is
    to end.
    """

    failure: Exception | None  # the error that ends this rank
    stopping: bool  # every rank has been asked to end

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides for the run: the first rank of the executor that leads."""

    @property
    def ending(self) -> bool:
        """Whether a running step should be given up, because the run ends after it."""

    def post(self, rank: int, topic: str, payload: dict) -> None:
        """Send a JSON message to a rank. Does not wait; messages of one sender keep their order."""

    def take(self, topic: str) -> list[tuple[int, dict]]:
        """Return all messages of a topic that have come, as (sender, payload). Does not wait."""

    def has(self, topic: str) -> bool:
        """Whether a message of a topic has come and was not taken."""

    def wake(self) -> None:
        """End a running `wait`, because something has come for this rank."""

    def wait(self, timeout_s: float) -> None:
        """Wait until something comes for this rank, at most timeout_s."""

    def check(self) -> None:
        """Raise the error of another rank, if there is one."""


class Meter(Protocol):
    """The part of the metrics that an executor sees (llamarl.observe.metrics)."""

    def add(self, counter: str, amount: float) -> None:
        """Let a counter grow by `amount`."""

    def add_mean(self, name: str, value: float) -> None:
        """Add an observation to a column that holds the mean of all ranks since the last row. Only
        for what depends on the clock: what belongs to a completion is among its `columns`.
        """

    def add_sum(self, name: str, value: float) -> None:
        """Add to a column that holds the sum of all ranks since the last row, as `add_mean`."""

    def report(self, step: int, values: dict) -> None:
        """Give the row of `step` these values."""

    def span(self, track: str, name: str, start_s: float, end_s: float) -> None:
        """Put a bar into the trace; times are `time.monotonic()`."""

    def keep_sample(self, step: int, make: Callable[[], Sample]) -> None:
        """Keep what `make` returns for people to look at, on the leader. It is called only if the
        step is one of those that are kept.
        """


class Tickets(Protocol):
    """The part of the tickets that a generator or a trainer sees (llamarl.tickets.service)."""

    @property
    def synchronous(self) -> bool:
        """Whether asks wait for their answers: with max_lag 0."""

    @property
    def resumed_step(self) -> int:
        """The step of the checkpoint that was loaded."""

    @property
    def overcommit(self) -> int:
        """How many groups beyond one batch may be started."""

    @property
    def is_refused(self) -> bool:
        """Whether the newest ask was granted less than it asked for, and no room is known of."""

    @property
    def has_batch(self) -> bool:
        """Whether this rank's trainer was told of a batch that it has not begun."""

    def ask(self, generator: int, count: int, version: int, *, is_idle: bool = False) -> list:
        """Ask for up to `count` more groups to start under weights of `version`. Return the tickets
        that were granted since the last call. is_idle: there is nothing to do until some are.
        """

    def granted(self) -> list:
        """Return the tickets that were granted since the last call."""

    def go_on(self, tickets: list[int]) -> None:
        """Note, after a resume, that this generator goes on with these tickets."""

    def to_truncate(self) -> list[int]:
        """Return the tickets that must end where they are, told since the last call."""

    def resumed_choices(self) -> dict[int, int]:
        """Return, after a resume, the prompts of tickets, where a sampler chose."""

    def in_work(self) -> set[int]:
        """Return, after a resume, the tickets whose completions must go on."""

    def yield_row(self) -> dict[str, float | None]:
        """Return columns of what came of the groups that the last take was made of."""

    def finish(self, tickets: list[int], verdicts: Mapping) -> None:
        """Note that these groups have reached this trainer rank, and what is known of them."""

    def given_back(self) -> list[int]:
        """Return the tickets whose groups are not wanted, told since the last call."""

    def take(self, step: int, waited: bool = False) -> list[int] | None:
        """Return the tickets that this rank trains on in `step`; None if it must still wait."""

    def untake(self, step: int) -> None:
        """Give up the step that was just taken."""

    def trained(self, reward: float) -> None:
        """Note that the step taken last was trained on, at this mean reward (NaN: none)."""

    def waits_for(self) -> str:
        """Return which tickets hold up the next step, for messages."""

    def ungranted(self, version: int) -> str:
        """Return what makes room for another ticket, for messages: first the cause."""

    def reconcile(self, buffered: list[int]) -> set[int]:
        """Return those of the groups in a checkpoint that the ledger counts as finished."""


class Checkpoints(Protocol):
    """The part of the checkpoints that a trainer sees (llamarl.checkpoint.service)."""

    def save(self, step: int, trainer: Executor, *, is_last: bool = False) -> None:
        """Save the checkpoint of `step`. Collective over the trainer. is_last: it is the run's
        last, and waits for room on a full disk.
        """

    def may_begin(self, step: int, trainer: Executor) -> bool:
        """Whether no trainer rank has begun anything that needs another one, so that a step may
        begin whose batch each of them has.
        """

    def may_end(self, step: int, trainer: Executor) -> bool:
        """Whether all trainer ranks have come to the end of the run, so that the last save may
        begin.
        """


@dataclass(frozen=True, slots=True)
class ExecutorGroup:
    """The ranks that run one executor, and this process's place among them.

    index = (replica * shards + shard) * tensor_parallel + t
    """

    name: str
    ranks: tuple[int, ...]  # global ranks, in executor order
    rank: int  # this process's global rank
    device: torch.device
    process_group: ProcessGroup | None = None  # for collectives over `ranks`
    replicate: int = 1
    tensor_parallel: int = 1
    # The ranks that hold the same shard; None without replicas.
    replica_group: ProcessGroup | None = None
    # The ranks whose shards together make this rank's replica, or its part of one.
    shard_group: ProcessGroup | None = None
    # The ranks that share a copy of the model; None without tensor parallelism.
    tensor_group: ProcessGroup | None = None

    @property
    def index(self) -> int:
        """This process's place in `ranks`. ValueError elsewhere."""
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        """The number of its ranks."""
        return len(self.ranks)

    @property
    def data_index(self) -> int:
        """This process's place among the data-parallel ranks; tensor-parallel peers share one."""
        return self.index // self.tensor_parallel

    @property
    def data_size(self) -> int:
        """The number of its data-parallel ranks."""
        return self.size // self.tensor_parallel

    @property
    def tensor_index(self) -> int:
        """This process's place among the ranks that share a copy of the model."""
        return self.index % self.tensor_parallel

    @property
    def replica(self) -> int:
        """The copy of the model that this process holds a part of."""
        return self.index // (self.size // self.replicate)

    def data_mesh(self) -> DeviceMesh | None:
        """Return the mesh of the ranks that hold this one's tensor-parallel part; None without
        groups.

        Its axes are [replicate, shard], or [shard] without replicas.
        """
        if self.shard_group is None:
            return None
        from torch.distributed.device_mesh import DeviceMesh

        if self.replicate == 1:
            return DeviceMesh.from_group(self.shard_group, self.device.type)
        assert self.replica_group is not None, "replicas have a group of the ranks of one shard"
        all_ranks = torch.tensor(self.ranks).view(self.replicate, -1, self.tensor_parallel)
        return DeviceMesh.from_group(
            [self.replica_group, self.shard_group],
            self.device.type,
            mesh=all_ranks[..., self.tensor_index],
            mesh_dim_names=("replicate", "shard"),
        )


class Executor:
    """One executor of the graph. Subclasses give `name`, what they consume and produce, `step`, and
    what else they need.
    """

    name: str = "executor"
    # The form in which weights come, if it consumes a Policy.
    weights_form: WeightsForm = WeightsForm()
    # Each record belongs to a ticket, and each ticket to one of its data-parallel ranks.
    takes_by_rank: bool = False
    takes_all: bool = False  # each of its ranks gets every record
    tensor_parallel: int = 1  # consecutive ranks that share one copy of its model
    # Whether those ranks split embedding and head too; otherwise each holds them whole.
    split_vocabulary: bool = True
    # Copies of the model, each sharded over an equal share of its ranks.
    replicate: int = 1
    # Set if it shares its device and leaves it to others between steps: gives the device to the
    # executor of that name (llamarl.machine.offload).
    take_turn: Callable[[str], object] | None = None

    # One executor of a graph leads. Its first rank is the leader, its steps are the run's, and the
    # run ends when it is `done`. That one has `version`, `done` and `export` too.
    leads: bool = False
    version: int = 0  # policy version of its weights, if it has any
    done: bool = False
    # Whether what it sends lies in host memory, even if it computes on a GPU.
    stages_on_host: bool = False
    # Losing what `state_dict` holds only repeats work.
    state_is_optional: bool = False
    # A checkpoint may lack its state, because the run was begun with other settings of it.
    state_may_be_absent: bool = False
    # The newest policy version that it has worked on (`note_version`).
    newest_version: int = 0

    tickets: Tickets  # of an executor that is attached with them
    checkpoints: Checkpoints

    @property
    def consumes(self) -> tuple[type, ...]:
        """The types of records that it needs, each from one other executor."""
        return ()

    @property
    def produces(self) -> tuple[type, ...]:
        """The types of records that it sends, each of which another executor must take."""
        return ()

    @property
    def offers(self) -> tuple[type, ...]:
        """The types of records that it sends to every executor that consumes them, if any does."""
        return ()

    @property
    def first_takes(self) -> bool:
        """Whether only its first rank reads the channels, and tells the other ranks what to do."""
        return False

    @property
    def follows(self) -> bool:
        """Whether on this rank it only does its share of what another of its ranks begins."""
        return False

    @property
    def finishes_on_stop(self) -> bool:
        """Whether it is still stepped after a stop request: a rank that follows takes part to the
        end in what was begun. An executor that has to save something overrides this.
        """
        return self.follows

    def partners(self, version: int) -> Sequence[int]:
        """Return the other ranks that must take part in what this rank may still begin with policy
        version `version`, if none comes after it. The trainer does not end before them, nor does a
        step begin for which it meets (`Checkpoints.may_begin`).

        None need be named where the executor's first rank is the trainer's too: both then do all in
        that rank's order.
        """
        return ()

    def attach(
        self,
        group: ExecutorGroup,
        inputs: Iterable[tuple[type, RecordReceiver]],
        outputs: Iterable[tuple[type, RecordSender]],
        control: Messages,
        metrics: Meter,
        tickets: Tickets | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """Take what the controller gives: once, on the executor's own ranks, before `setup`.

        inputs, outputs: this rank's ends of the channels, each with what it carries. A channel of
        weights has ends of its own kind (llamarl.ddma.channel).
        """
        self.group = group
        self.inputs = Inputs(self.name, inputs)
        self.outputs = Outputs(self.name, outputs)
        self.control = control
        self.metrics = metrics
        if tickets is not None:
            self.tickets = tickets
        if checkpoints is not None:
            self.checkpoints = checkpoints

    def setup(self) -> None:
        """Build what is heavy. Collective over the executor's ranks."""

    def step(self) -> bool:
        """Do one bounded piece of work. Return False if there was none; `waiting_for` then says
        why.
        """
        raise NotImplementedError

    def note_version(self, version: int) -> None:
        """Note a policy version that it works on. Error messages name the newest as the step."""
        self.newest_version = max(self.newest_version, version)

    @property
    def step_at(self) -> int:
        """The step that it is at, for messages: its own version, or the newest that it has worked
        on.
        """
        return max(self.newest_version, self.version)

    def waiting_for(self) -> str | None:
        """Return what the next step needs, as "CAUSE: what, from whom"; None if it may be idle.

        The cause (data, weights, tickets, room, ...) names the idle time in metrics. A wait past
        timeout_s ends the run. While records that it took are still worked on, as by a thread of
        its own, it must not return None: the run would take them for dropped.
        """
        return None

    def lacks_of_evaluation(self) -> int | None:
        """Return the oldest version whose evaluation lacks records here; None if none does."""
        return None

    def offloadable(self) -> Iterable[torch.Tensor]:
        """Tensors that may wait in host memory while another executor has the device."""
        return ()

    def claim_device(self) -> None:
        """Wait until this executor's tensors are on the shared device. Call it before computing."""
        if self.take_turn is not None:
            self.take_turn(self.name)

    def may_checkpoint(self, step: int) -> bool:
        """Whether `state_dict` may be called for the checkpoint of a step, which the leading
        executor has made. Asked between two steps until it may; must not wait.

        `state_dict` must then hold nothing that was made after that step.
        """
        return True

    def state_dict(self) -> State:
        """Return what a checkpoint needs to go on after the last step: tensors and JSON values."""
        return {}

    def has_state(self) -> bool:
        """Whether checkpoints hold state of this executor."""
        return type(self).state_dict is not Executor.state_dict

    def load_state_dict(self, parts: Iterable[Mapping]) -> None:
        """Go on from a checkpoint. Called after `setup`.

        parts: what every rank of this executor had saved, in rank order, read one at a time.
        """

    @property
    def export_bytes(self) -> int:
        """Return how many bytes `export` writes. Called only on the executor that leads."""
        raise NotImplementedError(f"{type(self).__name__} leads no graph: it exports nothing")

    def export(self, out: str | None) -> None:
        """Write a directory that transformers loads. None: write nothing, only take part.
        Collective over the executor that leads; called on no other.
        """
        raise NotImplementedError(f"{type(self).__name__} leads no graph: it exports nothing")

    def teardown(self) -> None:
        """Release processes, files and threads. Must not fail if `setup` did not finish, or was not
        called.
        """
