"""ExecutorController: places executors, connects channels, runs this rank's loop, holds every wait
to its deadline, ends the run.

Every rank that the launcher started runs this same code on the same graph:

                tickets                completions              scored
    ledger ───────────────▶ Generator ─────────────▶ Reward ─────────────▶ (Reference ──▶) Trainer
      ▲                         ▲                                                             │
      │ finished, taken         └───────────────── policy weights (DDMA) ◀────────────────────┤
      └───────────────────────────────────────────────────────────────────────────────────────┘

    loop (each rank)   turns over its executors: serve requests, step each once, send metrics
      waits for        news (a record, a grant, new weights, a message), at most POLL_S at a time
      unblocked by     Control.wake(), called by every channel's and the control's thread
    ledger             answers on the leader's listener thread while executors compute (llamarl.tickets.service)
    channels           one sender or receiver thread a link (llamarl.comm.channel)
    weights            one thread an end (llamarl.ddma.protocol)
    control            a listener and a heartbeat thread (llamarl.comm.control)

The leader is the first trainer rank. A run ends when the trainer has made its last checkpoint and
the last row is written; the leader then tells all ranks to close. In one process the same loop
steps the executors in turn.

A loss (llamarl.comm.control) is a rank or an executor that is gone while all keepers live: the ranks
of the trainer, and of every other executor whose state is not optional. The keepers then do what
they do at a stop: the trainer ends its step, or gives it up, the leader seals a checkpoint without
what is lost, and all end with the error. So a restart goes on from there.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from llamarl.checkpoint.checkpointer import Checkpointer
from llamarl.checkpoint.service import CONTROLLER, CheckpointService, has_state
from llamarl.comm.channel import Channel, ChannelEnd, ConnectContext
from llamarl.comm.control import Control
from llamarl.comm.groups import RankInfo, World, executor_group, this_rank_info
from llamarl.comm.meeting import reaching
from llamarl.errors import CheckpointError, PeerDied, TimedOut
from llamarl.executor import POLL_S, Executor
from llamarl.models.offload import DeviceSharing
from llamarl.native.copying import copy_kernels_version
from llamarl.native.disk import free_bytes
from llamarl.observe import Metrics, MetricsError, RowWriter, Trace
from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.service import TicketService

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Where a run writes and how patient it is."""

    run_dir: Path
    resume_from: Path | None
    keep_checkpoints: int
    timeout_s: float
    heartbeat_timeout_s: float
    stop_s: float  # from a stop request to the sealed checkpoint
    offload: tuple[str, ...] = ()  # executors that take turns on the device that they share
    eval_target: float | None = None  # end once the evaluation's mean reward reaches it
    trace: bool = True
    truncate: bool = False  # end stragglers at their deadline, rather than wait
    straggler_factor: float = (
        5.0  # a ticket that takes so many times the median is named in the log
    )
    identity: Mapping[str, object] = field(
        default_factory=dict
    )  # what every checkpoint says of its run (llamarl.launch.identity)
    stale_tickets: frozenset[int] = (
        frozenset()
    )  # of resume_from: their unfinished completions are of other prompts


def _is_kept(executor: Executor) -> bool:
    """Whether no checkpoint can be without this executor's state."""
    return executor.name == "trainer" or (has_state(executor) and not executor.state_is_optional)


class _Clock:
    """An executor's busy and idle time, and since when it waits for what."""

    def __init__(self, now: float):
        self.idle_since = now
        self.reason: str | None = None
        self.reason_since = now


class ExecutorController:
    """Runs a graph of executors.

    executors in flow order; channels between them; placement: executor name -> ranks. make_writer
    is called on the leader.
    """

    def __init__(
        self,
        *,
        executors: list[Executor],
        channels: list[Channel],
        placement: dict[str, tuple[int, ...]],
        ledger: TicketLedger,
        world: World,
        settings: RunSettings,
        make_writer: Callable[[], RowWriter],
    ):
        names = [e.name for e in executors]
        if len(set(names)) != len(names):
            raise ValueError(f"executors need distinct names, got {names}")
        unplaced = [n for n in names if not placement.get(n)]
        if unplaced:
            raise ValueError(f"placement names no rank for {unplaced}")
        self.executors, self.channels, self.placement, self.settings, self.world = (
            executors,
            channels,
            placement,
            settings,
            world,
        )
        self.leader = placement["trainer"][0]
        hosted = [
            ", ".join(n for n in names if r in placement[n]) or "idle" for r in range(world.size)
        ]
        self.control = Control(
            world.store(),
            rank=world.rank,
            world_size=world.size,
            leader=self.leader,
            names=hosted,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
        )
        self.local = [e for e in executors if world.rank in placement[e.name]]
        peers = next(e for e in executors if e.name == "trainer").tensor_parallel
        self.tickets = TicketService(
            ledger,
            self.control,
            trainer_ranks=placement["trainer"],
            timeout_s=settings.timeout_s,
            tensor_parallel=peers,
            truncate=settings.truncate,
            straggler_factor=settings.straggler_factor,
        )
        writer: RowWriter | None = make_writer() if self.control.is_leader else None
        self.metrics = Metrics(
            rank=world.rank,
            leader=self.leader,
            control=self.control,
            writer=writer,
            trace=Trace(world.rank),
        )
        expected = [
            (e.name, i) for e in executors if has_state(e) for i in range(len(placement[e.name]))
        ]
        checkpointer = Checkpointer(
            settings.run_dir,
            keep=settings.keep_checkpoints,
            control=self.control,
            expected=[*expected, (CONTROLLER, self.leader)],
            extra_parts=("hf",),
            optional=[e.name for e in executors if e.state_is_optional],
        )
        self.checkpoints = CheckpointService(
            checkpointer,
            self.local,
            self.control,
            self.metrics,
            self.tickets,
            identity=settings.identity,
            stale_tickets=settings.stale_tickets,
        )
        self._keepers = {r for e in executors if _is_kept(e) for r in placement[e.name]}
        self._told_of_loss = False
        self._current: Executor | None = None  # that makes a step
        self._signal: int | None = None
        self._done_at: float | None = None  # when the leader's trainer had made its last step
        self._ends: list[ChannelEnd] = []

    # -- connecting
    # -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Collective over the world: groups and channel ends, in the order of the recipe, then
        attach and set up.
        """
        self.control.start()
        self._meet("start")
        context = ConnectContext(
            control=self.control,
            placement=self.placement,
            ranks=self._exchange_rank_infos(),
            timeout_s=self.settings.timeout_s,
            on_host=bool(self.settings.offload),
        )
        inputs: dict[str, dict] = {e.name: {} for e in self.executors}
        outputs: dict[str, dict] = {e.name: {} for e in self.executors}
        for channel in self.channels:
            self._meet(
                f"channel {channel.name} from {channel.source.name} to {channel.destination.name}"
            )
            sender, receiver = channel.connect(context)
            self._ends += [end for end in (sender, receiver) if end is not None]
            outputs[channel.source.name][channel.name] = sender
            inputs[channel.destination.name][channel.name] = receiver
        for executor in self.executors:
            self._meet(f"executor {executor.name}")
            ranks = self.placement[executor.name]
            with reaching(f"the ranks of executor {executor.name}", rank=self.world.rank):
                group = executor_group(
                    executor.name,
                    ranks,
                    self.world,
                    self.settings.timeout_s,
                    replicate=executor.replicate,
                    tensor_parallel=executor.tensor_parallel,
                )
            if group is None:
                continue
            executor.attach(
                group,
                inputs[executor.name],
                outputs[executor.name],
                self.control,
                self.metrics,
                self.tickets,
                self.checkpoints,
            )
        turns = DeviceSharing(self.settings.offload)
        for executor in self.local:
            executor.setup()
            if executor.name in turns.names:
                executor.turns = turns
                turns.join(executor.name, executor.offloadable)
        if self.settings.resume_from:
            self.checkpoints.restore(self.settings.resume_from)

    def _meet(self, place: str) -> None:
        """Wait for all ranks, for what they make together next waits without end. TimedOut names
        those that are not here.
        """
        store, until = self.world.store(), time.monotonic() + self.settings.timeout_s
        if store is None:
            return
        keys = [f"met/{place}/{rank}" for rank in range(self.world.size)]
        store.set(keys[self.world.rank], "")
        while not store.check(keys):
            self.control.check()
            if time.monotonic() > until:
                absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
                names = ", ".join(f"{rank} ({self.control.names[rank]})" for rank in absent)
                raise TimedOut(
                    f"rank {self.world.rank} waited {self.settings.timeout_s:.0f} s at the start for ranks {names}, to make {place} "
                    "with them. See what they last said, or raise timeout_s"
                )
            time.sleep(0.01)

    def _exchange_rank_infos(self) -> list[RankInfo]:
        """What every rank of the world says of its host and GPU."""
        rank, device, store = self.world.rank, self.world.device, self.world.store()
        if any(getattr(executor, "cpu_offload", False) for executor in self.local):
            device = torch.device("cpu")  # where its weights are
        mine = this_rank_info(rank, device, kernel=copy_kernels_version())
        if store is None:
            return [mine]
        store.set(f"rank/{rank}", json.dumps(dataclasses.asdict(mine)))
        said = [json.loads(store.get(f"rank/{other}")) for other in range(self.world.size)]
        return [RankInfo(**values) for values in said]

    # -- running
    # --------------------------------------------------------------------------------------------------

    def run(self) -> RowWriter | None:
        """Until the trainer is done, a stop request, or an error. Returns the leader's writer, None
        elsewhere.
        """
        handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        error: BaseException | None = None
        try:
            self.connect()
            self._loop()
        except BaseException as raised:
            error = self.control.explained(raised, self._doing)
            self._report(error)
            if error is raised:
                raise
            raise error from raised
        finally:
            self._close(ended_well=error is None)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self.metrics.writer

    def _loop(self) -> None:
        clocks = {e.name: _Clock(time.monotonic()) for e in self.local}
        stop_at: float | None = None
        self.control.keep(self._keepers, self.settings.stop_s)
        while True:
            ends = self.control.take("end")
            if ends and self.control.loss is not None:
                self.control.loss.add_note(ends[0][1]["of_checkpoint"])
                raise self.control.loss
            self.control.check()
            if ends:
                return
            if self.control.loss is not None:
                self._hear_of_loss()
            if self._signal is not None and not self.control.stopping:
                self._ask_to_stop()
            for _, message in self.control.take("stop?"):
                self.control.request_stop(message["reason"])
            worked = self.checkpoints.serve()
            for executor in self.local:
                if self._goes_on(executor):
                    worked |= self._step_or_lose(executor, clocks[executor.name])
            self.metrics.pump()
            self._check_target()
            if self.control.is_leader and self._is_over():
                self.control.post_all("end", {"of_checkpoint": self._seal_last()})
                continue
            if self.control.stopping:
                stop_at = stop_at or time.monotonic() + self._patience_s
                if time.monotonic() > stop_at:
                    why = (
                        "raise stop_s"
                        if self.control.is_leader
                        else f"rank {self.leader} has not said so: see what it said last"
                    )
                    late = TimedOut(
                        f"rank {self.world.rank} ({self.control.names[self.world.rank]}) could not end within {self._patience_s:.0f} s "
                        f"of the stop request: {why}"
                    )
                    raise self.control.loss or late
            if not worked:
                self.control.wait(min(e.poll_s for e in self.local) if self.local else POLL_S)

    def _goes_on(self, executor: Executor) -> bool:
        """A stop ends all work but the trainer's, which has its last checkpoint to make, and what
        others have begun; a loss that too.
        """
        if self.control.loss is not None:
            return executor.name == "trainer"
        return not self.control.stopping or executor.name == "trainer" or executor.follows

    def _step_or_lose(self, executor: Executor, clock: _Clock) -> bool:
        """One step. What fails in an executor without state that must be kept is a loss, as on any
        other rank.
        """
        if _is_kept(executor):
            return self._step(executor, clock)
        try:
            return self._step(executor, clock)
        except Exception as error:  # whatever it is, the trainer is whole
            self.control.lose(error)
            return False

    def _hear_of_loss(self) -> None:
        """Once: tell the others, and on the leader have the keepers make a checkpoint, if there is
        anything to save.
        """
        if self._told_of_loss:
            return
        self._told_of_loss = True
        self.control.report_loss()
        if self.control.is_leader:
            log.error(
                "%s\nThe trainer is whole: it saves a checkpoint before this run ends",
                self.control.loss,
            )
            if self._trainer.version > 0:
                self.control.request_stop(f"a loss: {self.control.loss}")
            else:
                self.control.fail_now(self.control.loss)

    def _seal_last(self) -> str:
        """On the leader: wait for the last checkpoint. What came of it, for people; an error where
        nothing else ends the run.
        """
        try:
            self.checkpoints.wait_sealed(
                "stop_s" if self.control.stopping else "timeout_s", self._patience_s
            )
        except (CheckpointError, TimedOut) as error:
            if self.control.loss is None:
                raise
            return f"No checkpoint could be sealed after that: {error}"
        return f"A checkpoint of step {self._trainer.version} was sealed after that: resume=auto goes on from there."

    @property
    def _trainer(self) -> Executor:
        """On its ranks."""
        return next(e for e in self.local if e.name == "trainer")

    @property
    def _patience_s(self) -> float:
        """For an end that was asked for. The others wait for the leader, which may be writing: it
        alone says what is too slow.
        """
        stops = self.control.stopping and self.control.is_leader
        return self.settings.stop_s if stops else self.settings.timeout_s

    def _step(self, executor: Executor, clock: _Clock) -> bool:
        began = time.monotonic()
        self._current = executor
        worked = executor.step()
        now = time.monotonic()
        if worked:
            cause = (clock.reason or "no work: ").split(":")[0]
            self.metrics.add(f"{executor.name}/idle_s", began - clock.idle_since)
            self.metrics.add(f"{executor.name}/idle_s/{cause}", began - clock.idle_since)
            self.metrics.add(f"{executor.name}/busy_s", now - began)
            self.metrics.span(executor.name, "step", began, now)
            clock.idle_since, clock.reason = now, None
            return True
        reason = executor.waiting_for()
        if reason is None or clock.reason is None:
            clock.reason_since = now
        clock.reason = reason
        if reason and now - clock.reason_since > self.settings.timeout_s:
            why = (
                f"{executor.name} on rank {self.world.rank} waited {now - clock.reason_since:.0f} s for {reason}. "
                "Raise timeout_s if that is slow rather than stuck; each rank's output says what it last did"
            )
            self.control.lose(TimedOut(why))  # between two steps everything is whole
        return False

    def _check_target(self) -> None:
        """On the leader: ask to stop once the evaluation has reached the target."""
        target = self.settings.eval_target
        if target is None or not self.control.is_leader or self.control.stopping:
            return
        reward = self.metrics.writer.evaluated
        if reward is not None and reward >= target:
            self.control.request_stop(f"eval/reward {reward:.4g} reached eval.target")

    def _is_over(self) -> bool:
        """On the leader: the trainer has made its last checkpoint, and no row is awaited that can
        still come.
        """
        trainer = self._trainer
        if not trainer.done:
            return False
        self._done_at = self._done_at or time.monotonic()
        if self.control.stopping or self.metrics.writer.is_complete(trainer.version):
            return True
        if time.monotonic() - self._done_at > self.settings.timeout_s:
            raise TimedOut(
                f"trainer on rank {self.world.rank} is done with step {trainer.version}, but its evaluation did not come from the generator "
                f"and the reward within {self.settings.timeout_s:.0f} s. The checkpoint is whole; raise timeout_s for a longer evaluation"
            )
        return False

    # -- ending
    # ---------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        self.control.signalled = True  # a long step looks at it between two microbatches

    def _ask_to_stop(self) -> None:
        """The leader decides where between two steps the run ends, so that all trainer ranks end at
        the same one.
        """
        name = signal.Signals(self._signal).name
        self._signal = None
        self.control.post(self.leader, "stop?", {"reason": f"{name} on rank {self.world.rank}"})

    @property
    def _doing(self) -> str:
        executor = self._current
        if executor is None:
            return "while connecting"
        return f"in {executor.name}, step {getattr(executor, 'version', '?')}, among ranks {list(executor.group.ranks)}"

    def _report(self, error: BaseException) -> None:
        if error is self.control.loss and self.control.failure is None:
            return  # all know of it
        try:
            self.control.report_failure(error)
        except PeerDied:
            pass  # the launcher is gone; there is nobody to tell

    def _close(self, ended_well: bool) -> None:
        """Release everything. What the disk refuses then is an error of its own only where there is
        no earlier one.
        """
        closing = [executor.teardown for executor in reversed(self.local)]
        closing += [end.close for end in self._ends]
        closing += [self.metrics.close, self._dump_trace]
        try:
            for close in closing:
                try:
                    close()
                except (OSError, MetricsError) as error:
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
        except OSError as error:  # nothing depends on it
            log.warning("%s: not written (%s, %s bytes free)", path, error, f"{free_bytes(path):,}")
