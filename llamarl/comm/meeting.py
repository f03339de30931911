"""The meeting at a start: how ranks find each other, and what they tell each other before Control
runs.

The launcher's store outlives restarted workers and the jobs of a sweep, so it holds keys of earlier
starts. torchrun gives no number that identifies a start: each agent counts its own restarts
(TORCHELASTIC_RESTART_COUNT), and two agents may count differently. So the processes agree on a name
themselves:

    key            set by   meaning
    hello/R        rank R   the process that is rank R now, by a name that it made up
    call/PROCESS   rank 0   the name of the meeting that this process is called to
    here/NAME/R    rank R   I have heard of meeting NAME
    open/NAME      rank 0   all have: go on under NAME

Rank 0 calls everyone whose hello it sees. A process that has ended does not answer; once its
successor says hello, rank 0 calls everyone to a new meeting. Nobody goes on before each rank has
answered under the same name.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache

import torch.distributed as dist

from llamarl.comm.interface import listening_socket
from llamarl.errors import BadNetwork, PeerDied, TimedOut, cause_of
from llamarl.workers.ranks import STORE_FD

log = logging.getLogger(__name__)

# Pauses between two looks into the store. The first ones last SOON_S times the ranks that look, so
# that many ranks do not ask more than the store can answer. Later ones are this PART of the wait so
# far, so that no wait is much longer than it must be. None lasts longer than LATER_S.
SOON_S = 0.001
PART = 1 / 8
LATER_S = 0.2
MANY = 10  # ranks, where it is not known how many look
_LAUNCHER = ("RANK", "MASTER_ADDR", "MASTER_PORT")  # what it sets beside WORLD_SIZE
RENEW_S = 1.0  # at most so often a rank says that its work goes on


def launcher_store(timeout_s: float) -> dist.Store | None:
    """Return the c10d store that all processes of this launch share. PeerDied if it cannot be
    reached; BadNetwork if this process cannot listen for it, or if some of a launcher's variables
    are missing.

    It is torchrun's own, which outlives restarted workers, else one that rank 0 hosts, on the
    socket that `llamarl.workers.ranks` gives it if that is the launcher. None for a process that no
    launcher started.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if size == 1 and not of_torchrun:
        return None
    missing = [name for name in _LAUNCHER if name not in os.environ]
    if missing:
        raise BadNetwork(
            f"WORLD_SIZE={size} says that a launcher started {size} ranks, but "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; start with "
            "torchrun, or unset WORLD_SIZE for one process"
        )
    rank = int(os.environ["RANK"])
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    hosts_it = rank == 0 and not of_torchrun
    is_one_host = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == size
    timeout = timedelta(seconds=timeout_s)
    with reaching(f"the store at {host}:{port}, by which the ranks of this launch meet", rank=rank):
        store = _connect(host, port, hosts_it, is_one_host, timeout)
    store.set_timeout(timeout)
    return store


@lru_cache(maxsize=1)
def _connect(
    host: str, port: int, hosts_it: bool, is_one_host: bool, timeout: timedelta
) -> dist.Store:
    """Connect to the store once, for all jobs of this process.

    A store that this process hosts must not end between two of them.
    """
    listener: int | None = None
    if STORE_FD in os.environ:
        listener = int(os.environ.pop(STORE_FD))
    elif hosts_it:
        found = listening_socket(host, port, is_one_host=is_one_host)
        if found is not None:
            listener = found.detach()  # the store closes it
        else:
            log.warning(
                "the store at %s:%d listens on all interfaces of this host, for none that others "
                "reach has this address here; give the address of the interface that joins the "
                "hosts as MASTER_ADDR",
                host,
                port,
            )
    return dist.TCPStore(
        host,
        port,
        is_master=hosts_it,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener,
    )


@contextmanager
def reaching(what: str, *, rank: int) -> Iterator[None]:
    """Turn what the store or gloo raises into a PeerDied.

    It names this rank and what it tried to reach.
    """
    try:
        yield
    except PeerDied:
        raise
    except RuntimeError as error:  # gloo raises no type of its own
        cause = cause_of(error)
        raise PeerDied(
            f"rank {rank} could not reach {what} ({type(error).__name__}: {cause}). A rank or its "
            "launcher has ended, or no network leads there: see what each rank said last"
        ) from error


def _looks(ranks: int) -> Iterator[float]:
    """Yield the time, at once and then again and again, with growing pauses between. ranks: how
    many look.
    """
    soon_s = min(LATER_S / 4, ranks * SOON_S)
    began = time.monotonic()
    while True:
        now = time.monotonic()
        yield now
        time.sleep(min(LATER_S, max(soon_s, PART * (now - began))))


def meet(store: dist.Store, *, rank: int, size: int, timeout_s: float) -> str:
    """Agree on a name that no start before had. Collective over the processes that are the ranks.

    TimedOut names the ranks that did not come within timeout_s; PeerDied says that another process
    is this rank now.
    """
    store = dist.PrefixStore("meeting", store)
    me = uuid.uuid4().hex
    store.set(f"hello/{rank}", me)
    until = time.monotonic() + timeout_s
    if rank == 0:
        name = _lead(store, me, size, until)
    else:
        name = _attend(store, me, rank, size, until)
    if name is None:
        missing = _missing(store, rank, size)
        raise TimedOut(
            f"rank {rank} waited {timeout_s:.0f} s at the start for ranks {missing} of {size}. "
            "See what they last said, or raise timeout_s if they are slow to start"
        )
    return name


def _lead(store: dist.Store, me: str, size: int, until: float) -> str | None:
    """Return, on rank 0, the name under which all have answered, or None if they do not in time."""
    hellos = [f"hello/{rank}" for rank in range(size)]
    called: list[bytes] = []
    name = ""
    for now in _looks(size):
        if now > until:
            return None
        if not store.check(hellos):
            continue
        processes = store.multi_get(hellos)
        _check_place(processes[0], me, 0)
        if processes != called:
            called = processes
            name = uuid.uuid4().hex
            for process in processes[1:]:
                store.set(f"call/{process.decode()}", name)
        answers = [f"here/{name}/{rank}" for rank in range(1, size)]
        if store.check(answers):
            store.set(f"open/{name}", "")
            return name
    raise AssertionError("looking does not end")


def _attend(store: dist.Store, me: str, rank: int, size: int, until: float) -> str | None:
    """Return, on the other ranks, the name under which rank 0 goes on, or None if it does not in
    time.
    """
    answered = ""
    for now in _looks(size):
        if now > until:
            return None
        _check_place(store.get(f"hello/{rank}"), me, rank)
        if not store.check([f"call/{me}"]):
            continue
        name = store.get(f"call/{me}").decode()
        if name != answered:
            store.set(f"here/{name}/{rank}", "")
            answered = name
        if store.check([f"open/{name}"]):
            return name
    raise AssertionError("looking does not end")


def _check_place(process: bytes, me: str, rank: int) -> None:
    if process.decode() != me:
        raise PeerDied(
            f"rank {rank}: another process has taken its place; the launcher has restarted it, "
            "and this one ends"
        )


def _missing(store: dist.Store, rank: int, size: int) -> str:
    """Return the ranks that hold up the meeting, as far as `rank` can see."""
    absent = [r for r in range(size) if not store.check([f"hello/{r}"])]
    if not absent:
        process = store.get(f"hello/{rank or 1}").decode()
        call = f"call/{process}"
        if not store.check([call]):
            return "0"
        name = store.get(call).decode()
        absent = [r for r in range(1, size) if not store.check([f"here/{name}/{r}"])]
    return ", ".join(str(r) for r in absent or [0])


class Exchange:
    """Lets the ranks of one start tell each other things, each once.

    Every wait is for one rank and ends when that rank has shown no progress for timeout_s: whoever
    is at long work calls `progress`, and whoever waits passes on what progress it sees.
    """

    def __init__(self, store: dist.Store, *, rank: int, timeout_s: float):
        self.rank = rank
        self._store = store
        self._timeout_s = timeout_s
        self._count = 0  # of calls of `progress` that were passed on
        self._renewed_at = 0.0

    def tell(self, key: str, value: dict) -> None:
        """Publish a JSON object under `key`, for whoever waits for it."""
        self._store.set(f"word/{key}", json.dumps(value))

    def progress(self) -> None:
        """Note that this rank's work goes on. Cheap: may be called at any rate."""
        now = time.monotonic()
        if now - self._renewed_at >= RENEW_S:
            self._count += 1
            self._renewed_at = now
            self._store.set(f"progress/{self.rank}", str(self._count))

    def hear(self, key: str, *, source: int, what: str) -> dict:
        """Wait for what rank `source` tells under `key`.

        TimedOut names that rank and `what` it was to tell.
        """
        progress = f"progress/{source}"
        last = b""
        since = time.monotonic()
        for now in _looks(MANY):
            if self._store.check([f"word/{key}"]):
                return json.loads(self._store.get(f"word/{key}"))
            seen = self._store.get(progress) if self._store.check([progress]) else b""
            if seen != last:
                last = seen
                since = now
                self.progress()
            if now - since > self._timeout_s:
                raise TimedOut(
                    f"rank {self.rank} waited {self._timeout_s:.0f} s at the start for rank "
                    f"{source} to say {what}, and that rank showed no progress. See what it last "
                    "said, or raise timeout_s"
                )
        raise AssertionError("looking does not end")


def wait_for_all(
    store: dist.Store,
    rank: int,
    names: Sequence[str],
    place: str,
    *,
    timeout_s: float,
    check: Callable[[], None],
) -> None:
    """Wait at a place for all ranks. TimedOut names those that are not here.

    names: what each rank hosts, for people. check: called between two looks, and may raise.
    """
    until = time.monotonic() + timeout_s
    keys = [f"met/{place}/{one}" for one in range(len(names))]
    store.set(keys[rank], "")
    # Each look is for one key: if every rank looked for every other, what the launcher's store has
    # to do would grow with the square of the ranks.
    all_met = f"met/{place}/all"
    if store.add(f"met/{place}/count", 1) == len(names):
        store.set(all_met, "")
    for now in _looks(len(names)):
        if store.check([all_met]):
            return
        check()
        if now > until:
            absent = [one for one, key in enumerate(keys) if not store.check([key])]
            shown = ", ".join(f"{one} ({names[one]})" for one in absent)
            raise TimedOut(
                f"rank {rank} waited {timeout_s:.0f} s at the start for ranks {shown}, which must "
                f"join {place}. See what they last printed, or raise timeout_s"
            )
