"""Process groups: of the world, of each executor's ranks, and of the links between executors.

All ranks create all groups, in one order.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from llamarl.comm.interface import choose_interface, this_network
from llamarl.comm.meeting import launcher_store, meet, reaching
from llamarl.errors import TimedOut
from llamarl.executor import ExecutorGroup
from llamarl.machine.allocator import keep_freed_memory
from llamarl.machine.device import choose_device, num_cores
from llamarl.machine.precision import use_float32_products
from llamarl.words.choices import DeviceName
from llamarl.words.texts import first_of

SHOWN_HOSTS = 4  # that a message names
LOOK_S = 0.05  # between two looks at whether this rank still waits
_LINK_TIMEOUT = timedelta(days=7)  # a channel may be silent for long; its users are less patient
_LAZY = "TORCH_GLOO_LAZY_INIT"


@dataclasses.dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank's description of itself, made before any link."""

    rank: int
    host: str  # equal on ranks that can map each other's memory
    gpu: str | None  # the GPU's uuid, None on a CPU
    nccl: bool = False
    num_cores: int = 1  # that this process may use


def this_rank_info(rank: int, device: torch.device) -> RankInfo:
    """Return what this process says of itself. device: where its executors compute."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    boot_id = boot.read_text().strip() if boot.exists() else ""
    # Shared memory is found by its owner's process number, which means something within a pid
    # namespace alone.
    processes = Path("/proc/self/ns/pid")
    namespace = os.readlink(processes) if processes.is_symlink() else ""
    if not hasattr(os, "memfd_create"):  # macOS, where processes cannot share memory without a name
        namespace = str(os.getpid())
    on_gpu = device.type == "cuda"
    return RankInfo(
        rank=rank,
        host=f"{socket.gethostname()}/{boot_id}/{namespace}",
        gpu=str(torch.cuda.get_device_properties(device).uuid) if on_gpu else None,
        nccl=on_gpu and dist.is_nccl_available(),
        num_cores=num_cores(),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """This process among all that the launcher started."""

    rank: int
    size: int
    device: torch.device
    infos: tuple[RankInfo, ...] = ()  # what every rank says of itself; empty where no link is made
    products: str = "highest"  # how this process multiplies float32
    # The launcher's store, which outlives restarted workers; None without a launcher.
    launcher: dist.Store | None = None
    network: tuple[str, ...] = ()  # where gloo listens on each host, for people; () on one host
    is_imagined: bool = False  # for a dry run: the other ranks were never started

    def imagined(self, size: int) -> World:
        """Return a world of `size` ranks in which this process is the first and the others are not
        there.
        """
        return dataclasses.replace(self, size=size, is_imagined=True)

    def shares_memory(self, rank: int) -> bool:
        """Whether a rank computes in the memory that this one does: the host's, or the GPU's."""
        if not self.infos:
            return rank == self.rank
        mine = self.infos[self.rank]
        its = self.infos[rank]
        return (mine.host, mine.gpu) == (its.host, its.gpu)

    def store(self) -> dist.Store | None:
        """Return the control plane's own corner of the c10d Store; None in a world of one."""
        if self.size == 1:
            return None
        return dist.PrefixStore("llamarl", dist.distributed_c10d._get_default_store())


def init_world(
    *,
    threads: int | None,
    timeout_s: float,
    reproducible: bool,
    device: torch.device | None = None,
) -> World:
    """Join the processes that torchrun started, or be alone.

    device: where this rank computes; None: as this_device("auto"). timeout_s bounds every
    collective. gloo carries everything on CPUs and all that is not a device collective.
    reproducible: nothing that decides about results asks a clock (use_float32_products). TimedOut
    names the ranks that do not come; PeerDied says what could not be reached; BadNetwork, which
    network interface cannot be used.
    """
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if threads:
        torch.set_num_threads(threads)
    device = device or this_device("auto")
    products = use_float32_products(reproducible=reproducible, device=device)
    keep_freed_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    launcher = launcher_store(timeout_s)
    store: dist.Store = dist.HashStore()
    network: list[str] = []
    with reaching("the other ranks at the start", rank=rank):
        if size > 1:
            assert launcher is not None, "several ranks have a launcher"
            # No start may read what an earlier one left in the launcher's store.
            name = meet(launcher, rank=rank, size=size, timeout_s=timeout_s)
            store = dist.PrefixStore(f"start-{name}", launcher)
            network = choose_interface(
                store,
                rank=rank,
                size=size,
                host=this_network(),
                store_host=os.environ["MASTER_ADDR"],
                is_one_host=local_size == size,
            )
    over = f" over {', '.join(first_of(network, SHOWN_HOSTS))}" if network else ""
    with reaching(f"the other ranks at the start{over}", rank=rank):
        with _joining_at_first_use():
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timeout
            )
        mine = dataclasses.asdict(this_rank_info(rank, device))
        store.set(f"rank/{rank}", json.dumps(mine))
        # One question for all, since every rank asks of every other at the same time.
        answers = store.multi_get([f"rank/{other}" for other in range(size)])
        said = [json.loads(answer) for answer in answers]
    return World(
        rank=rank,
        size=size,
        device=device,
        infos=tuple(RankInfo(**values) for values in said),
        products=products,
        launcher=launcher,
        network=tuple(network),
    )


def this_device(wanted: DeviceName) -> torch.device:
    """Return the device of this rank (choose_device). BadInput if there is none such."""
    return choose_device(wanted, local_rank=int(os.environ.get("LOCAL_RANK", 0)))


@contextmanager
def _joining_at_first_use() -> Iterator[None]:
    """Have the gloo groups that are made here connect two ranks when these first exchange
    something. By default gloo connects every rank of a group with every other.

    That is for groups in which few pairs of ranks exchange anything. Where all compute together,
    each has to notice at once that another has ended, and only a connection says so.
    TORCH_GLOO_LAZY_INIT in the environment of a run is left as it is.
    """
    if _LAZY in os.environ:
        yield
        return
    os.environ[_LAZY] = "1"  # torch reads it for each group that it makes
    try:
        yield
    finally:
        del os.environ[_LAZY]


def have_a_gpu_each(infos: Iterable[RankInfo]) -> bool:
    """Whether each of these ranks has a GPU of its own: NCCL refuses ranks that share one."""
    gpus = [info.gpu for info in infos]
    return None not in gpus and 0 < len(set(gpus)) == len(gpus)


def executor_group(
    name: str,
    ranks: tuple[int, ...],
    world: World,
    timeout_s: float,
    *,
    replicate: int = 1,
    tensor_parallel: int = 1,
) -> ExecutorGroup | None:
    """Make the groups for one executor's own collectives. Collective over the world.

    Returns None on ranks that do not host it.
    """
    # NCCL between GPUs, and gloo for what is in host memory.
    own = [info for info in world.infos if info.rank in ranks]
    by_nccl = have_a_gpu_each(own) and all(info.nccl for info in own)
    backend = "cpu:gloo,cuda:nccl" if by_nccl else "gloo"
    timeout = timedelta(seconds=timeout_s)
    mesh = torch.tensor(ranks).view(replicate, -1, tensor_parallel)

    def along(axis: int) -> dist.ProcessGroup | None:
        """Make a group for each line of ranks of the mesh along an axis, and return this rank's."""
        lines = mesh.movedim(axis, -1).flatten(0, 1).tolist()
        if lines == [list(ranks)]:
            return everyone  # another group of the same ranks would connect them all again
        return dist.new_subgroups_by_enumeration(lines, timeout, backend)[0]

    everyone = dist.new_group(list(ranks), timeout, backend)
    replicas = along(0) if replicate > 1 else None
    shards = along(1)
    tensor = along(2) if tensor_parallel > 1 else None
    if world.rank not in ranks:
        return None
    return ExecutorGroup(
        name=name,
        ranks=ranks,
        rank=world.rank,
        device=world.device,
        process_group=everyone,
        replicate=replicate,
        tensor_parallel=tensor_parallel,
        replica_group=replicas,
        shard_group=shards,
        tensor_group=tensor,
    )


def link_group(
    sources: tuple[int, ...],
    destinations: tuple[int, ...],
    *,
    behind: Callable[[], None] | None = None,
) -> dist.ProcessGroup | None:
    """Make a gloo group for one channel's p2p. Collective over the world.

    Returns None when both sides are one and the same rank. Two of its ranks are connected by
    `connect_peers`, or when they first exchange something. behind: called in the thread that makes
    the group, whose priority the group's own thread takes over.
    """
    ranks = sorted({*sources, *destinations})
    if len(ranks) == 1:
        return None
    with ThreadPoolExecutor(1, initializer=behind) as maker, _joining_at_first_use():
        return maker.submit(dist.new_group, ranks, backend="gloo", timeout=_LINK_TIMEOUT).result()


def connect_peers(
    peers: Iterable[int],
    group: dist.ProcessGroup,
    *,
    timeout_s: float,
    check: Callable[[], None],
) -> None:
    """Connect this rank with others of a link group, each of which does the same with it.

    Without it a rank that waits for the first message of a peer may not notice that the peer has
    ended. check raises what ends this rank meanwhile. TimedOut after timeout_s.
    """
    rank = dist.get_rank()
    names = sorted(peers)
    connected: Future[None] = Future()

    def connect() -> None:
        try:
            _exchange_tokens(names, group)
        except BaseException as error:  # raised below, in the thread that waits
            connected.set_exception(error)
        else:
            connected.set_result(None)

    # A daemon: nothing from outside ends gloo's own wait for a peer that does not come.
    threading.Thread(target=connect, name="connect-peers", daemon=True).start()
    until = time.monotonic() + timeout_s
    while not wait([connected], LOOK_S).done:
        check()
        if time.monotonic() > until:
            shown = ", ".join(first_of([str(name) for name in names], SHOWN_HOSTS))
            raise TimedOut(
                f"rank {rank} waited {timeout_s:.0f} s for a connection with ranks {shown}. One "
                "hangs, or no network leads there: see what each rank said last"
            )
    connected.result()


def _exchange_tokens(peers: Iterable[int], group: dist.ProcessGroup) -> None:
    """Send or receive one number, which has gloo connect this rank with each of these."""
    rank = dist.get_rank()
    begun: list[tuple[dist.Work | None, torch.Tensor]] = []
    for peer in peers:
        begin = dist.isend if rank < peer else dist.irecv
        token = torch.zeros(1)
        begun.append((begin(token, peer, group=group), token))
    # Only when all have begun: a peer sends or receives its own after it has begun with others.
    for work, _ in begun:
        assert work is not None, "both ranks of a link are in its group"
        work.wait()


def device_link_group(
    sources: tuple[int, ...], destinations: tuple[int, ...], infos: list[RankInfo]
) -> dist.ProcessGroup | None:
    """Make an NCCL group for p2p between the GPUs of both sides. Collective over the world.

    Returns None where NCCL cannot join them all.
    """
    ranks = sorted({*sources, *destinations})
    joined = [infos[rank] for rank in ranks]
    if len(ranks) < 2 or not have_a_gpu_each(joined) or not all(info.nccl for info in joined):
        return None
    return dist.new_group(ranks, backend="nccl", timeout=_LINK_TIMEOUT)


def _wanted_threads() -> int | None:
    """Return what OMP_NUM_THREADS asks for; None if nobody has set it.

    torchrun sets 1 for several ranks where the user has set nothing, so that 1 says nothing there.
    """
    said = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number a nesting level
    if not said.isdecimal() or int(said) < 1:
        return None
    is_torchruns = said == "1" and _ranks_on_this_host() > 1
    return None if is_torchruns else int(said)


def _ranks_on_this_host() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def threads_per_rank(threads: int | None, *, synchronous: bool, device: torch.device) -> int | None:
    """Return how many threads a rank should use; None: as many as torch would.

    Synchronous runs use one on CPU unless told by the config: results depend on the count, and
    should not depend on the environment, nor on how many ranks share the machine. Other runs honour
    OMP_NUM_THREADS.
    """
    if threads or device.type != "cpu":
        return threads
    if synchronous:
        return 1
    wanted = _wanted_threads()
    if wanted is not None:
        return wanted
    return max(1, num_cores() // _ranks_on_this_host())
