"""How a version of the weights crosses a link: what sender and receiver say to each other.

    WeightsSender (trainer rank)                   WeightsReceiver (generator rank)
    publish(v): copy own shard into a free slot,
    which is the only stall
      thread:                                        a thread a link:
        BEGIN v, slot                       ----->     claim the idle buffer for v
        the bytes, where they are sent      ----->     copy or receive them as they are staged,
        digest them too                                digest what arrived
        END, digests, canary                ----->     compare
                                            <-----     VERDICT: what is wrong (BEGIN again, with it)
      all links agree:                               all links whole:
        v is committed there, the slot free            v is staged, and swapped between two chunks

    thread       consumes           waits for                       unblocked by
    publisher    queued versions    each link's verdict             the link reader; its death
    link reader  headers            the last staged version's swap  swap(); skip(), where it must
                                                                    not be overtaken
    forwarder    a claimed version  the next bucket, the last END   the link readers
    generator    a staged version   one that the trainer on its     the link readers
                                    rank has published; no other

The sender has two slots. The receiver has one idle buffer beside the live weights. A swap exchanges
them on a CPU; on a GPU it copies the idle buffer over the live one. A reader never sees a
half-written version.

In a chain (TransferPlan) a replica forwards each bucket as soon as it arrives, and sends END once
all buckets are right. If a bucket was damaged before it was forwarded, the next replica's digest
fails too, and the bucket is sent again.

gloo and queues keep headers in order and lose none. Digests check the bytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from llamarl.comm.control import Control
from llamarl.ddma.links import Header, HeaderKind, LocalLink
from llamarl.ddma.payload import Bucket, BucketProgress, Copier
from llamarl.errors import WeightsError

MAX_RETRIES = 3
NICENESS = 10  # of threads that work behind the model: a tenth of a core that both want


@dataclass(frozen=True, slots=True)
class LinkContext:
    """Settings that all links of a channel share."""

    name: str  # the channel's
    control: Control
    timeout_s: float  # for what must come, or be taken
    copier: Copier

    def __str__(self) -> str:
        return f"weights {self.name!r}"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A link as its sender sees it, and which of the sender's buckets it carries.

    Links to several replicas may carry the same ones.
    """

    link: LocalLink
    first_bucket: int  # the number of this link's first bucket among the sender's
    buckets: tuple[Bucket, ...]


@dataclass(slots=True)
class QueuedVersion:
    """A version that is to be sent, and where it lies.

    It may be queued before its bytes are there. `progress` says how many of its buckets are,
    `staged` that all are, and `seal` gives the canary, which is sent last.
    """

    version: int
    must_load: bool  # no newer version may take its place before the receiver has loaded it
    evaluate: bool  # the receiver evaluates it
    slot: int
    data: Tensor  # [bytes] uint8: the slot's content
    progress: BucketProgress
    must_differ: bool = False  # from the version before: else the optimizer's step was lost
    was_repaired: bool = False  # buckets changed after they were there, and before it was sealed
    staged: threading.Event = field(default_factory=threading.Event)
    canary: Future[dict] = field(default_factory=Future)

    def seal(self, canary: dict | None) -> None:
        """Let the version end with this canary; None gives it up. Only the first call counts."""
        if self.canary.done():
            return
        if canary is None:
            self.canary.set_exception(self._given_up())
        else:
            self.canary.set_result(canary)

    def wait_for_bucket(self, number: int) -> None:
        """Wait until the bucket is there. WeightsError if it never will be."""
        if not self.progress.wait(number):
            raise self._given_up()

    def _given_up(self) -> WeightsError:
        return WeightsError(f"version {self.version} was given up: its sender is closing")


# A link, and those of its buckets that its receiver still needs.
_Wanted = list[tuple[Outgoing, list[int]]]


def send_version(
    links: list[Outgoing], queued: QueuedVersion, copier: Copier, *, while_staging: bool = False
) -> dict[int, int]:
    """Send a version as it becomes whole, until every receiver has it.

    while_staging: receivers that read this memory begin before all is staged, as its counter goes
    up. Else they begin when all is whole. Bytes that are sent go bucket by bucket either way.
    Returns bucket number -> digest. WeightsError after MAX_RETRIES damaged deliveries.

    A receiver may first have to swap in the version before, and that waits for an evaluation: so a
    verdict has no deadline here. Who publishes has one, for the slot that the version stays in.
    """
    digests: dict[int, int] = {}
    wanted: _Wanted = []
    for out in links:
        wanted.append((out, list(range(len(out.buckets)))))
    is_read_here = not all(out.link.streams for out in links)
    if is_read_here and not while_staging:
        for out in links:
            queued.wait_for_bucket(out.first_bucket + len(out.buckets) - 1)
    for attempt in range(MAX_RETRIES):
        for out, indices in wanted:
            more = {
                "slot": queued.slot,
                "must_load": queued.must_load,
                "evaluate": queued.evaluate,
                "staging": while_staging and attempt == 0,
                "buckets": indices,
                "first": out.first_bucket,
            }
            out.link.send(Header(HeaderKind.BEGIN, queued.version, more))
        if is_read_here and while_staging:
            queued.staged.wait()  # the digests would share the core with the staging
        on_their_way = _send_buckets(wanted, queued, digests, copier)
        canary = queued.canary.result()
        for out, indices in wanted:
            of_link = []
            for index in indices:
                number = out.first_bucket + index
                if queued.was_repaired:
                    digests[number] = out.buckets[index].digest(queued.data, copier)
                of_link.append(digests[number])
            more = {"digests": of_link, "canary": canary}
            # Before the last bytes have gone, so that it is there when they are.
            out.link.send(Header(HeaderKind.END, queued.version, more))
        for wait_until_gone in on_their_way:
            wait_until_gone()
        again: _Wanted = []
        for out, _ in wanted:
            verdict = out.link.recv(at_receiver=False)
            if verdict.more["wrong"]:
                again.append((out, verdict.more["wrong"]))
        wanted = again
        if not wanted:
            return digests
    damaged = " and ".join(str(indices) for _, indices in wanted)
    raise WeightsError(
        f"buckets {damaged} of version {queued.version} were absent or damaged {MAX_RETRIES} times"
    )


def _send_buckets(
    wanted: _Wanted, queued: QueuedVersion, digests: dict[int, int], copier: Copier
) -> list[Callable[[], None]]:
    """Send buckets in turns over all links, so that none waits for another's last one.

    Each is sent once it is staged, and digested while it travels.
    Returns what is to be called before their memory may change: each call waits for one bucket.
    """
    sent: list[Callable[[], None]] = []
    in_turns = zip_longest(*(indices for _, indices in wanted))
    for turn in in_turns:
        for (out, _), index in zip(wanted, turn):
            if index is None:
                continue
            number = out.first_bucket + index
            bucket = out.buckets[index]
            queued.wait_for_bucket(number)
            if out.link.streams:
                flat = queued.data[bucket.start : bucket.end]
                sent.append(out.link.send_bytes(flat))
            if number not in digests:
                digests[number] = bucket.digest(queued.data, copier)
    return sent


def lower_priority() -> None:
    """Let this thread, and those that it starts, run behind the model's where cores are few."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    except (OSError, AttributeError):
        pass  # no such thing on this system: all threads are equal


def work_behind_the_model(device: torch.device) -> None:
    """Lower this thread's priority, and keep its copies out of the queue of the model's kernels."""
    lower_priority()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
