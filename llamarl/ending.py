"""How a run ends. RunEnd: when this rank's loop ends, and what happens before: a stop, a loss, a
reached target. BreakableSteps: steps that the loop can leave. heard_stops: SIGTERM and SIGINT.

A run ends when its last checkpoint is sealed and its last row is written. The leader decides it and
tells all ranks.

Keepers are the ranks of the trainer and of every other executor whose state is not optional. A rank
or an executor that is gone while all keepers live is a loss (llamarl.comm.control). The keepers
then end as at a stop: the trainer ends its step or gives it up, the leader seals a checkpoint
without the lost state, and all ranks end with the error. A restart goes on from that checkpoint.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from llamarl.checkpoint.service import CheckpointService
from llamarl.comm.control import Control
from llamarl.errors import CheckpointError, TimedOut
from llamarl.executor import Executor
from llamarl.observe import Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Where a run writes and how patient it is."""

    run_dir: Path
    resume_from: Path | None
    keep_checkpoints: int
    timeout_s: float
    heartbeat_timeout_s: float
    # From a stop request to the sealed checkpoint, not counting time in which it makes progress.
    stop_s: float
    offload: tuple[str, ...] = ()  # executors that take turns on the device that they share
    eval_target: float | None = None  # end once the evaluation's mean reward reaches it
    trace: bool = True
    truncate: bool = False  # end stragglers at their deadline, rather than wait
    # The log names a ticket that takes this many times the median.
    straggler_factor: float = 5.0
    identity: Mapping[str, object] = field(default_factory=dict)  # see llamarl.launch.identity
    stale_tickets: frozenset[int] = frozenset()  # in resume_from; their prompts have changed


class RunEnd:
    """Decides when this rank's loop ends. The loop calls it once a turn.

    keepers: the ranks without which no checkpoint can be made.
    """

    def __init__(
        self,
        trainer: Executor,
        *,
        placement: Mapping[str, Collection[int]],
        keepers: frozenset[int],
        control: Control,
        checkpoints: CheckpointService,
        metrics: Metrics,
        limits: RunLimits,
    ):
        self.reached_target = False  # on the leader
        self._trainer = trainer
        self._placement = placement
        self._keepers = keepers
        self._control = control
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._limits = limits
        self._has_signal = False  # a signal to stop has come; the leader has not been told yet
        self._told_of_loss = False
        self._done_at: float | None = None  # when the leader's trainer had made its last step
        self._stop_until: float | None = None  # when this rank must have ended after a stop request

    def signal(self) -> None:
        """Note a signal to stop. Safe in a signal handler."""
        self._has_signal = True
        self._control.signalled = True  # a long step checks this between two microbatches

    def is_told(self) -> bool:
        """Return whether the leader has ended the run. Raise what went wrong, here or elsewhere."""
        told = self._control.take("end")
        loss = self._control.loss
        if told and loss is not None:
            _, message = told[0]
            if not message["lost"]:
                # The missed rank was told before this one, and has ended.
                return True
            loss.add_note(message["of_checkpoint"])
            raise loss
        self._control.check()
        return bool(told)

    def serve(self) -> None:
        """Pass on losses and requests to stop that this rank has heard of."""
        if self._control.loss is not None and not self._told_of_loss:
            self._told_of_loss = True
            self._tell_of_loss(self._control.loss)
        if self._has_signal and not self._control.stopping:
            # The leader decides after which step the run ends: the same on all trainer ranks.
            self._control.post(self._control.leader, "stop?", {})
            self._has_signal = False
        if self._control.take("stop?"):
            self._control.request_stop()

    def _tell_of_loss(self, loss: Exception) -> None:
        """Tell the others of a loss. On the leader, let the keepers save what there is."""
        self._control.report_loss()
        if not self._control.is_leader:
            return
        log.error("%s\nThe trainer is whole: it saves a checkpoint before this run ends", loss)
        if self._trainer.version > 0:
            self._control.request_stop()
        else:
            self._control.fail_now(loss)

    def lets_step(self, executor: Executor) -> bool:
        """Return whether the executor is still stepped.

        After a stop: if it leads or has to end what was begun. After a loss: the same, but only if
        all its ranks are keepers, since others may be gone.
        """
        ends = executor.leads or executor.finishes_on_stop
        if self._control.loss is not None:
            return ends and self._keepers.issuperset(self._placement[executor.name])
        return ends or not self._control.stopping

    def look(self) -> bool:
        """Return whether this rank, the leader, has just told all ranks to end.

        Until then executors are stepped: another rank may be in a collective. TimedOut, or the
        loss, if the end takes too long after a stop request.
        """
        self._check_target()
        if self._control.is_leader and self._is_over():
            return self._has_told_all()
        if self._control.stopping:
            self._check_stop()
        return False

    def _check_target(self) -> None:
        """On the leader: ask to stop once the evaluation has reached the target."""
        writer = self._metrics.writer  # only the leader has one
        if self._limits.eval_target is None or writer is None or self._control.stopping:
            return
        if writer.evaluated is not None and writer.evaluated >= self._limits.eval_target:
            self.reached_target = True
            self._control.request_stop()

    def _is_over(self) -> bool:
        """On the leader: return whether the last checkpoint is made and no row can still come."""
        trainer = self._trainer
        if not trainer.done:
            return False
        if self._done_at is None:
            self._done_at = time.monotonic()
        writer = self._metrics.writer
        if self._control.stopping or writer is None or writer.is_complete(trainer.version):
            return True
        timeout_s = self._limits.timeout_s
        if time.monotonic() - self._done_at > timeout_s:
            raise TimedOut(
                f"trainer on rank {self._control.rank} is done with step {trainer.version}, but "
                "its evaluation did not come from the generator and the reward within "
                f"{timeout_s:.0f} s. The checkpoint is whole; raise timeout_s for a longer "
                "evaluation"
            )
        return False

    def _has_told_all(self) -> bool:
        """On the leader: tell all ranks to end, if the last checkpoint is sealed or never will be.
        Return whether it did.

        Raise CheckpointError or TimedOut if no other error ends the run.
        """
        lost = self._control.loss is not None
        step = self._trainer.version
        said = f"A checkpoint of step {step} was sealed after that; go on with resume=auto."
        try:
            if not self._checkpoints.is_sealed(self._patience_s):
                return False
        except (CheckpointError, TimedOut) as error:
            if not lost:
                raise
            said = f"No checkpoint could be sealed after that: {error}"
        self._control.post_all("end", {"of_checkpoint": said, "lost": lost})
        return True

    def _check_stop(self) -> None:
        """Raise TimedOut, or the loss, if the end takes too long after a stop request."""
        now = time.monotonic()
        if self._stop_until is None:
            self._stop_until = now + self._patience_s
        # A rank whose checkpoint makes progress is not late.
        if now <= max(self._stop_until, self._control.progressed_at + self._patience_s):
            return
        control = self._control
        if control.is_leader:
            remedy = "raise stop_s"
        else:
            remedy = f"rank {control.leader} has not confirmed it; see what it printed last"
        who = f"rank {control.rank} ({control.names[control.rank]})"
        within = f"within {self._patience_s:.0f} s of the stop request"
        late = TimedOut(f"{who} could not end {within}: {remedy}")
        raise control.loss or late

    @property
    def _patience_s(self) -> float:
        """How long the run may take to end after a stop request.

        The others wait for the leader, which may be writing: it decides what is too slow.
        """
        if self._control.stopping and self._control.is_leader:
            return self._limits.stop_s
        return self._limits.timeout_s


# --- Steps that the loop can leave ---

# A collective with a hung rank (a stopped process, a host without network) ends only with its
# group's timeout, because gloo cannot abort one from outside. A rank that must save a checkpoint
# after such a loss cannot wait so long. So if an executor shares ranks with others than keepers, it
# makes its steps in a thread of its own, one at a time, and the loop waits for each. After a loss
# the loop leaves a step that does not end.
#
#     thread          consumes                waits for              unblocked by
#     the loop        what a step returned    the step; a loss       the executor's thread; LOOK_S
#     the executor's  a step to make          a step to make         the loop

LOOK_S = 0.05  # between two looks at whether a step is still wanted
LAST_S = 2.0  # a step that is no longer wanted has so long to end by itself


class BreakableSteps:
    """Makes the steps of one executor.

    is_over: whether the run ends, so that a step that is under way is no longer wanted. device:
    what the executor computes on.
    """

    def __init__(self, name: str, *, device: torch.device, is_over: Callable[[], bool]):
        self.left = False  # a step was left: it may stand in a collective until this process ends
        self._device = device
        self._num_threads = torch.get_num_threads()
        self._is_over = is_over
        self._asked: queue.SimpleQueue[tuple[Callable[[], bool], Future]] = queue.SimpleQueue()
        # A daemon: one that is stuck must not keep the process from its end.
        self._thread = threading.Thread(target=self._run, name=f"step-{name}", daemon=True)

    def make(self, step: Callable[[], bool]) -> bool:
        """Make one step, and return what it returns or raise what it raises.

        Returns False once the step was left (`left`). Make no other then.
        """
        assert not self.left, "a step was left before"
        if not self._thread.is_alive():
            self._thread.start()
        made: Future[bool] = Future()
        self._asked.put((step, made))
        unwanted_since: float | None = None
        while not wait([made], LOOK_S).done:
            now = time.monotonic()
            if not self._is_over():
                continue
            if unwanted_since is None:
                unwanted_since = now
            if now - unwanted_since > LAST_S:
                self.left = True
                return False
        return made.result()

    def _run(self) -> None:
        # OpenMP keeps this number for each thread, and sums depend on it.
        torch.set_num_threads(self._num_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has its own
        while True:
            step, made = self._asked.get()
            try:
                made.set_result(step())
            except BaseException as error:  # raised in the loop, which waits for it
                made.set_exception(error)


# --- Requests to stop ---

# SIGTERM and SIGINT are heard by the loop of a run, and remembered before it:
#
#     launch      the run has a directory: remembered_stops
#       recipe    builds executors
#         loop    heard_stops: each signal, and one that came before

_Handlers = Mapping[signal.Signals, Any]  # as signal.signal gives and takes them

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Memory:
    """A handler that remembers which signals came. The same one again goes to the handler before
    it: whoever presses Ctrl-C twice does not wait for a model to load. torchrun sends one of each.
    """

    def __init__(self):
        self.come: set[int] = set()
        self.is_before_loop = True
        self.earlier = _install(self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number in self.come:
            _restore(self.earlier)
            os.kill(os.getpid(), number)
            return
        self.come.add(number)
        if self.is_before_loop:
            # A print may be what the signal came into.
            os.write(2, b"llamarl: the run stops before its first step\n")


@contextmanager
def remembered_stops() -> Iterator[None]:
    """Remember the signals of the body for heard_stops, up to the end of that. Without this they
    would kill a run that has a directory, and its outcome.json would be absent.
    """
    memory = _Memory()
    try:
        yield
    finally:
        _restore(memory.earlier)


@contextmanager
def heard_stops(hear: Callable[[], None]) -> Iterator[None]:
    """Call `hear` at each signal in the body, and now if one is remembered.

    After a body that ends well, a signal ends the process. After an error SIGTERM does not until
    `remembered_stops` ends: torchrun sends it to the ranks beside a dead one, and each of them has
    yet to print why it ends.
    """
    earlier = _install(lambda number, frame: hear())
    memory = earlier[signal.SIGTERM]
    if not isinstance(memory, _Memory):
        memory = None
    elif memory.come:
        hear()
    ends_well = False
    try:
        yield
        ends_well = True
    finally:
        if memory is not None:
            memory.is_before_loop = False
            memory.come.clear()
            earlier = dict(memory.earlier)
            if not ends_well:
                earlier[signal.SIGTERM] = memory
        _restore(earlier)


def _install(handler: Callable[[int, FrameType | None], None]) -> _Handlers:
    return {number: signal.signal(number, handler) for number in _SIGNALS}


def _restore(handlers: _Handlers) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
