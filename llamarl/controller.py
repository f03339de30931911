"""ExecutorController: places executors on ranks, connects their channels, runs this rank's loop.

                tickets                completions              scored
    ledger ───────────────▶ Generator ─────────────▶ Reward ─────────────▶ (Reference ──▶) Trainer
      ▲                         ▲                                                             │
      │ finished, taken         └───────────────── policy weights (DDMA) ◀────────────────────┤
      └───────────────────────────────────────────────────────────────────────────────────────┘

The algorithm is these lines. tests/executors/test_loop.py runs them, as they are, with fakes:

    finished = {}  # ticket -> scored group that no step has taken
    while trainer.version < max_steps:
        # Admission: these tickets can be trained on by step generator.version + max_lag.
        for ticket in ledger.start(generator.num_free_groups, generator.version):
            generator.add(ticket, prompts[ticket.index])
        # One chunk of tokens for each running completion. Returns those that have ended.
        for completion in generator.step():
            reward.add(completion)
        # Groups whose completions are all scored.
        for group in reward.step():
            ledger.finish([group.ticket])
            finished[group.ticket] = group
        # groups_per_step groups, the earliest deadline first. None: the step must wait.
        batch = ledger.take(trainer.version)
        if batch is not None:
            policy = trainer.step([finished.pop(ticket) for ticket in batch])
            generator.load(policy)  # between two chunks; running completions go on

Every rank runs the same recipe, and turns over its own executors as these lines do: serve requests,
step each executor once, send metrics. Each call between two executors is a channel, so that they
compute at the same time. In one process the same loop steps them in turn.

    loop (each rank)   waits for news (a record, a grant, new weights, a message), POLL_S at a time
      unblocked by     Control.wake(), called by every channel's and the control's thread
    ledger             answers on the leader's listener thread while executors compute
                       (llamarl.tickets.service)
    channels           one sender or receiver thread a link (llamarl.comm.channel)
    weights            one thread an end (llamarl.ddma.protocol)
    control            a listener and a heartbeat thread (llamarl.comm.control)

The leader is the first rank of the executor that leads: the trainer. llamarl/ending.py says when a
run ends, and what becomes of it if a rank dies. Every wait ends after timeout_s in an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from llamarl.checkpoint.checkpointer import Checkpointer
from llamarl.checkpoint.service import CONTROLLER, CheckpointService
from llamarl.comm.channel import Channel, ChannelEnd, ConnectContext
from llamarl.comm.control import Control
from llamarl.comm.dropped import Clock, DroppedRecords
from llamarl.comm.groups import RankInfo, World, executor_group
from llamarl.comm.meeting import reaching, wait_for_all
from llamarl.disk.space import shown_free
from llamarl.ending import BreakableSteps, RunEnd, RunLimits, heard_stops
from llamarl.errors import PeerDied, TimedOut
from llamarl.executor import POLL_S, Executor, ExecutorGroup
from llamarl.machine.offload import DeviceSharing
from llamarl.observe import Metrics, MetricsError, RowWriter, Trace
from llamarl.observe.console import CheckpointProgress
from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.service import TicketService

log = logging.getLogger(__name__)


def _is_kept(executor: Executor) -> bool:
    """Whether every checkpoint needs this executor's state."""
    return executor.leads or (executor.has_state() and not executor.state_is_optional)


class ExecutorController:
    """Runs a graph of executors.

    executors: in flow order; one of them leads. placement: executor's name -> its ranks.
    make_writer: called on the leader, makes what writes the metrics.
    """

    def __init__(
        self,
        *,
        executors: list[Executor],
        channels: list[Channel],
        placement: dict[str, tuple[int, ...]],
        ledger: TicketLedger,
        world: World,
        settings: RunLimits,
        make_writer: Callable[[], RowWriter],
    ):
        names = [e.name for e in executors]
        if len(set(names)) != len(names):
            raise ValueError(f"executors need distinct names, got {names}")
        unplaced = [n for n in names if not placement.get(n)]
        if unplaced:
            raise ValueError(f"placement names no rank for {unplaced}")
        leads = [e.name for e in executors if e.leads]
        if len(leads) != 1:
            raise ValueError(
                f"one executor of a graph leads (Executor.leads), here {leads or 'none'}"
            )
        trainer = executors[names.index(leads[0])]
        self.executors = executors
        self.channels = channels
        self.placement = placement
        self.settings = settings
        self.world = world
        self._trainer = trainer
        self.leader = placement[trainer.name][0]
        self.local = [e for e in executors if world.rank in placement[e.name]]
        self.control = Control(
            world.store(),
            rank=world.rank,
            world_size=world.size,
            leader=self.leader,
            names=[self._hosted(rank) for rank in range(world.size)],
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
        )
        self.tickets = TicketService(
            ledger,
            self.control,
            trainer_ranks=placement[trainer.name],
            timeout_s=settings.timeout_s,
            tensor_parallel=trainer.tensor_parallel,
            truncate=settings.truncate,
            straggler_factor=settings.straggler_factor,
        )
        self.metrics = Metrics(
            rank=world.rank,
            leader=self.leader,
            control=self.control,
            writer=make_writer() if self.control.is_leader else None,
            trace=Trace(world.rank),
        )
        self.checkpoints = CheckpointService(
            self._checkpointer(),
            self.local,
            self.control,
            self.metrics,
            self.tickets,
            identity=settings.identity,
            stale_tickets=settings.stale_tickets,
            timeout_s=settings.timeout_s,
        )
        self._dropped = DroppedRecords(executors, self.local, self.control, world.size)
        kept = [placement[e.name] for e in executors if _is_kept(e)]
        self._keepers = frozenset(chain.from_iterable(kept))
        self.end = RunEnd(
            trainer,
            placement=placement,
            keepers=self._keepers,
            control=self.control,
            checkpoints=self.checkpoints,
            metrics=self.metrics,
            limits=settings,
        )
        # By name: the executors of this rank whose steps the loop can leave.
        self._breakable: dict[str, BreakableSteps] = {}
        self._current: Executor | None = None  # the one that is making a step
        self._endpoints: list[ChannelEnd] = []  # this rank's

    @property
    def is_leader(self) -> bool:
        """Whether this rank leads the run."""
        return self.control.is_leader

    @property
    def reached_target(self) -> bool:
        """Whether, on the leader, an evaluation has reached settings.eval_target."""
        return self.end.reached_target

    @property
    def step(self) -> int:
        """The steps made so far, on a rank of the executor that leads."""
        return self._trainer.version

    def _hosted(self, rank: int) -> str:
        """Return what a rank hosts, for people."""
        names = [e.name for e in self.executors if rank in self.placement[e.name]]
        return ", ".join(names) or "idle"

    def _checkpointer(self) -> Checkpointer:
        expected = [(CONTROLLER, self.leader)]
        for executor in self.executors:
            if executor.has_state():
                num_ranks = len(self.placement[executor.name])
                expected += [(executor.name, index) for index in range(num_ranks)]
        return Checkpointer(
            self.settings.run_dir,
            keep=self.settings.keep_checkpoints,
            control=self.control,
            expected=expected,
            extra_parts=("hf",),
            optional=[e.name for e in self.executors if e.state_is_optional],
            timeout_s=self.settings.timeout_s,
            tell=CheckpointProgress(),
        )

    # --- Connecting ---

    def connect(self) -> None:
        """Make groups and channels in the order of the recipe, then attach and set up executors.

        Collective over the world.
        """
        self.control.start()
        self._meet("start")
        context = ConnectContext(
            control=self.control,
            placement=self.placement,
            ranks=[self._info_for_links(info) for info in self.world.infos],
            timeout_s=self.settings.timeout_s,
            on_host=bool(self.settings.offload),
        )
        inputs: dict[str, list] = {e.name: [] for e in self.executors}
        outputs: dict[str, list] = {e.name: [] for e in self.executors}
        for channel in self.channels:
            source = channel.source.name
            destination = channel.destination.name
            self._meet(f"channel {channel.name} from {source} to {destination}")
            sender, receiver = channel.connect(context)
            outputs[source].append((channel.carries, sender))
            inputs[destination].append((channel.carries, receiver))
            self._endpoints += [end for end in (sender, receiver) if end is not None]
        for executor in self.executors:
            group = self._group_of(executor)
            if group is not None:
                executor.attach(
                    group,
                    inputs[executor.name],
                    outputs[executor.name],
                    self.control,
                    self.metrics,
                    self.tickets,
                    self.checkpoints,
                )
        sharing = DeviceSharing(self.settings.offload)
        for executor in self.local:
            executor.setup()
            if executor.name in sharing.names:
                executor.take_turn = sharing.claim
                sharing.join(executor.name, executor.offloadable)
        if self.settings.resume_from:
            self.checkpoints.restore(self.settings.resume_from)

    def _group_of(self, executor: Executor) -> ExecutorGroup | None:
        """Return the executor's group; None on ranks that do not host it. Collective."""
        self._meet(f"executor {executor.name}")
        with reaching(f"the ranks of executor {executor.name}", rank=self.world.rank):
            return executor_group(
                executor.name,
                self.placement[executor.name],
                self.world,
                self.settings.timeout_s,
                replicate=executor.replicate,
                tensor_parallel=executor.tensor_parallel,
            )

    def _meet(self, place: str) -> None:
        """Wait for all ranks, because what they make together next has no deadline of its own.

        TimedOut names the ranks that are not here.
        """
        store = self.world.store()
        if store is None:
            return
        wait_for_all(
            store,
            self.world.rank,
            self.control.names,
            place,
            timeout_s=self.settings.timeout_s,
            check=self.control.check,
        )

    def _info_for_links(self, info: RankInfo) -> RankInfo:
        """Return a rank's description; without its GPU if what it sends lies on the host."""
        for executor in self.executors:
            if executor.stages_on_host and info.rank in self.placement[executor.name]:
                return replace(info, gpu=None, nccl=False)
        return info

    # --- Running ---

    def run(self) -> RowWriter | None:
        """Run until the trainer is done, a stop request, or an error. Return the leader's writer;
        None on other ranks.
        """
        with heard_stops(self.end.signal):
            self._run()
        return self.metrics.writer

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self.connect()
            self._loop()
        except BaseException as raised:
            error = meant = self.control.explained(raised, self._doing)
            try:
                # Every rank has already been told about a loss.
                if meant is not self.control.loss or self.control.failure is not None:
                    self.control.report_failure(meant)
            except PeerDied:
                pass  # the launcher is gone; there is nobody to tell
            if meant is raised:
                raise
            raise meant from raised
        finally:
            self._close(ended_well=error is None)

    def _loop(self) -> None:
        clocks = {e.name: Clock(time.monotonic()) for e in self.local}
        self.control.keep(self._keepers, self.settings.stop_s)
        self._breakable = self._breakable_steps()
        while not self.end.is_told():
            self.end.serve()
            worked = self.checkpoints.serve()
            for executor in self.local:
                if self.end.lets_step(executor):
                    worked |= self._step_or_lose(executor, clocks[executor.name])
            self.metrics.pump()
            self._dropped.look(clocks, self.tickets.holding_up)
            worked |= self.end.look()
            if not worked:
                self.control.wait(POLL_S)

    def _breakable_steps(self) -> dict[str, BreakableSteps]:
        """On a keeper: return breakable steps of the executors that it shares with other ranks.

        Another rank may die in a collective while this one has to save.
        """
        if self.world.rank not in self._keepers:
            return {}
        found = {}
        for executor in self.local:
            if not self._keepers.issuperset(self.placement[executor.name]):
                found[executor.name] = BreakableSteps(
                    executor.name,
                    device=self.world.device,
                    is_over=lambda: bool(self.control.loss or self.control.failure),
                )
        return found

    def _step_or_lose(self, executor: Executor, clock: Clock) -> bool:
        """Make one step. If the executor holds no state that a checkpoint needs, its failure is a
        loss: the trainer saves, and the run ends.
        """
        if _is_kept(executor):
            return self._step(executor, clock)
        try:
            return self._step(executor, clock)
        except Exception as error:  # whatever the error, the trainer's state is whole
            # A collective breaks here because another rank died: blame that rank.
            self.control.lose(self.control.explained(error, self._doing, is_loss=True))
            return False

    def _step(self, executor: Executor, clock: Clock) -> bool:
        began = time.monotonic()
        self._current = executor
        worked = self._make_step(executor)
        now = time.monotonic()
        if worked:
            idle_s = began - clock.idle_since
            cause = (clock.reason or "no work: ").split(":")[0]
            self.metrics.add(f"{executor.name}/idle_s", idle_s)
            self.metrics.add(f"{executor.name}/idle_s/{cause}", idle_s)
            self.metrics.add(f"{executor.name}/busy_s", now - began)
            self.metrics.span(executor.name, "step", began, now)
            clock.idle_since = now
            clock.reason = None
            return True
        if self._was_left(executor):
            return False
        reason = executor.waiting_for()
        if reason is None or clock.reason is None:
            clock.reason_since = now
        clock.reason = reason
        # While a rank's checkpoint makes progress, others may have to wait for it.
        waited_s = now - max(clock.reason_since, self.control.progressed_at)
        if reason and waited_s > self.settings.timeout_s:
            # Between two steps all state is whole, so this is a loss rather than a failure.
            self.control.lose(
                TimedOut(
                    f"{executor.name} on rank {self.world.rank} waited {waited_s:.0f} s for "
                    f"{reason}. Raise timeout_s if that is slow rather than stuck; each rank's "
                    "output says what it did last"
                )
            )
        return False

    def _make_step(self, executor: Executor) -> bool:
        """Make one step, in this thread or in one that the loop can leave."""
        steps = self._breakable.get(executor.name)
        if steps is None:
            return executor.step()
        worked = steps.make(executor.step)
        if steps.left:
            log.error(
                "rank %d leaves a step of %s, which does not end; it is a collective of ranks %s",
                self.world.rank,
                executor.name,
                list(executor.group.ranks),
            )
            self.checkpoints.leave_out(executor)
        return worked

    def _was_left(self, executor: Executor) -> bool:
        """Whether a step of the executor was left: it must then not be called any more."""
        steps = self._breakable.get(executor.name)
        return steps is not None and steps.left

    # --- Ending ---

    @property
    def _doing(self) -> str:
        executor = self._current
        if executor is None:
            return "while connecting"
        return (
            f"in {executor.name}, step {executor.step_at}, among ranks {list(executor.group.ranks)}"
        )

    def _close(self, ended_well: bool) -> None:
        """Release everything. An error of the disk, or a store that is gone, is raised only if
        there is no earlier error.
        """
        self.control.let_go()
        # An executor whose step was left still uses what its teardown would release.
        whole = [executor for executor in self.local if not self._was_left(executor)]
        closing = [executor.teardown for executor in reversed(whole)]
        closing += [endpoint.close for endpoint in self._endpoints]
        closing += [lambda: self.metrics.close(self.checkpoints.sealed_step), self._dump_trace]
        try:
            for close in closing:
                try:
                    close()
                except (OSError, MetricsError, PeerDied) as error:
                    if ended_well:
                        raise
                    log.error("rank %d, while ending: %s", self.world.rank, error)
        finally:
            self.control.close()

    def _dump_trace(self) -> None:
        if not self.settings.trace:
            return
        path = self.settings.run_dir / f"trace.rank{self.world.rank}.json"
        try:
            self.metrics.trace.dump(path)
        except OSError as error:  # nothing depends on this file
            log.warning("%s: not written (%s), and %s", path, error, shown_free(path))
