"""The network interface that gloo uses: the one that joins the hosts, and no other.

gloo listens on one address of each rank. By default it takes the address of the host's name, which
is often a loopback address or one of another network. So the ranks choose the interface, from what
they tell each other through the launcher's store:

    word         from -> to     meaning
    interface/R  rank R -> all  the interface that GLOO_SOCKET_IFNAME names, else the one from which
                                this host reaches the store's host; or what is wrong with it
    route/R      rank R -> all  on several hosts, where the store's address is rank R's own and of
                                its loopback: the interface from which it reaches another host
    port/R       rank R -> all  on several hosts: where it listens to be tried, as the first rank of
                                its host
    probe/R      rank R -> all  whether it has reached the first rank of every other host

An error on one rank ends the start on all ranks, with the same message.
"""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import torch.distributed as dist

from llamarl.errors import BadNetwork

VARIABLE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "lo"
PROBE_S = 5.0  # a host that is reached at all answers within so long
_DISCARD_PORT = 9  # nothing is sent there: the kernel only looks up its routes


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A rank's place on the network. problem: why it has none; "" where it has."""

    host: str  # equal on ranks that have the same interfaces
    name: str  # of the host, for people
    interface: str = ""
    address: str = ""
    problem: str = ""

    @property
    def is_own_alone(self) -> bool:
        """Whether other hosts cannot reach the address."""
        return bool(self.address) and ipaddress.ip_address(self.address).is_loopback


def interfaces() -> dict[str, list[str]]:
    """Return the names of this host's interfaces, with the IP addresses of each."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                # A link-local address of IPv6 ends with its interface, as in fe80::1%eth0.
                address = one.address.partition("%")[0]
                found.setdefault(name, []).append(address)
    return found


def address_towards(host: str) -> str:
    """Return the address of this host from which it reaches another one; nothing is sent.

    OSError if no address has that name, or no route leads there.
    """
    family, kind, protocol, _, there = socket.getaddrinfo(
        host, _DISCARD_PORT, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)
        return probe.getsockname()[0]


def this_network() -> str:
    """Return a name that is equal on processes which have the same interfaces: those of one host,
    but for containers with a network of their own.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    if boot.exists() and network.is_symlink():
        return f"{boot.read_text().strip()}/{os.readlink(network)}"
    return socket.gethostname()


def choose_interface(
    store: dist.Store, *, rank: int, size: int, host: str, store_host: str, is_one_host: bool
) -> list[str]:
    """Choose the interface that gloo uses on this rank, and return those of all hosts for people;
    of one host nothing. Collective over all ranks of a start.

    store: this start's part of the launcher's store, which lies on store_host. host: that of
    `this_network`. is_one_host: the launcher has started all ranks here. BadNetwork, on every rank,
    names the ranks that have no interface to use.
    """
    own = Place(host=host, name=socket.gethostname())
    given = os.environ.get(VARIABLE, "")
    mine = _placed(own, lambda: _given(given) if given else _towards(store_host, is_one_host))
    places = _agreed(store, "interface", rank, size, mine)
    several = len({place.host for place in places}) > 1
    if several and any(place.is_own_alone for place in places):
        mine = _placed(own, lambda: _among_several(mine, places, given, store_host))
        places = _agreed(store, "route", rank, size, mine)
    os.environ[VARIABLE] = mine.interface
    if not several:
        return []
    _probe(store, rank, size, places)
    shown = [f"{place.name} {place.interface} ({place.address})" for place in places]
    return list(dict.fromkeys(shown))


def _placed(own: Place, find: Callable[[], tuple[str, str]]) -> Place:
    """Return `own` with the interface and address that are found, or with the problem."""
    try:
        interface, address = find()
    except (OSError, BadNetwork) as error:
        return dataclasses.replace(own, problem=str(error))
    return dataclasses.replace(own, interface=interface, address=address)


def _given(given: str) -> tuple[str, str]:
    """Return the interface that the user names, and its address. BadNetwork if it has none."""
    there = interfaces()
    for name in given.split(","):
        if name not in there:
            raise BadNetwork(
                f"{VARIABLE}={given}: this host has no interface {name!r}, only {', '.join(there)}"
            )
        if not there[name]:
            raise BadNetwork(f"{VARIABLE}={given}: {name} has no address; is it up?")
    return given, there[given.split(",")[0]][0]


def _towards(host: str, is_own: bool) -> tuple[str, str]:
    """Return the interface from which this host reaches another one, and its address. BadNetwork if
    there is none.

    is_own: that is this host.
    """
    there = interfaces()
    if is_own and _LOOPBACK in there and there[_LOOPBACK]:
        return _LOOPBACK, there[_LOOPBACK][0]
    try:
        address = address_towards(host)
    except OSError as error:
        raise BadNetwork(f"no way leads to {host}: {error.strerror or error}") from error
    if ipaddress.ip_address(address).is_loopback and _LOOPBACK in there:
        return _LOOPBACK, address  # all of 127.0.0.0/8 is there, though it lists but one
    for name, addresses in there.items():
        if address in addresses:
            return name, address
    raise BadNetwork(
        f"{address}, from which {host} is reached, belongs to none of {', '.join(there)}; name "
        f"the interface that joins the hosts by {VARIABLE}"
    )


def _among_several(
    mine: Place, places: list[Place], given: str, store_host: str
) -> tuple[str, str]:
    """Return interface and address of a rank on several hosts, one of which is placed on its own
    loopback. BadNetwork if this rank can use none.
    """
    if not mine.is_own_alone:
        return mine.interface, mine.address
    if given:
        raise BadNetwork(
            f"{VARIABLE}={given}: {mine.address} is this host alone, and the run is on several"
        )
    for place in places:
        if place.host != mine.host and not place.is_own_alone:
            return _towards(place.address, False)
    raise BadNetwork(
        f"{store_host} is {mine.address} on every host, which is each host by itself; name the "
        f"interface that joins them by {VARIABLE}"
    )


def _agreed(store: dist.Store, word: str, rank: int, size: int, mine: Place) -> list[Place]:
    """Tell all ranks this one's place, and return that of each. BadNetwork if one has none."""
    store.set(f"{word}/{rank}", json.dumps(dataclasses.asdict(mine)))
    words = [f"{word}/{other}" for other in range(size)]
    store.wait(words)
    places = [Place(**json.loads(said)) for said in store.multi_get(words)]
    problems: dict[str, list[int]] = {}
    for other, place in enumerate(places):
        if place.problem:
            problems.setdefault(f"on {place.name}: {place.problem}", []).append(other)
    if problems:
        lines = []
        for problem, ranks in problems.items():
            who = "rank" if len(ranks) == 1 else "ranks"
            lines.append(f"{who} {', '.join(map(str, ranks))} {problem}")
        remedy = f"Set {VARIABLE} there to the interface that joins the hosts, or leave it unset"
        raise BadNetwork("\n".join(["no network joins the ranks:", *lines, remedy]))
    return places


def _probe(store: dist.Store, rank: int, size: int, places: list[Place]) -> None:
    """Try whether the hosts reach each other where the ranks will listen. Collective over them.

    BadNetwork, on every rank, names those that do not. Otherwise gloo finds out, after its timeout
    and on some of the ranks alone.
    """
    firsts: dict[str, int] = {}
    for other, place in enumerate(places):
        firsts.setdefault(place.host, other)
    mine = places[rank]
    if firsts[mine.host] != rank:
        _agreed(store, "probe", rank, size, mine)
        return
    family = socket.getaddrinfo(mine.address, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family) as listener:
        listener.bind((mine.address, 0))
        listener.listen(socket.SOMAXCONN)  # the kernel accepts: nobody has to
        store.set(f"port/{rank}", str(listener.getsockname()[1]))
        for other in firsts.values():
            if other == rank:
                continue
            port = int(store.get(f"port/{other}"))
            problem = _unreached(mine, places[other], port)
            if problem:
                mine = dataclasses.replace(mine, problem=problem)
                break
        _agreed(store, "probe", rank, size, mine)


def _unreached(mine: Place, other: Place, port: int) -> str:
    """Return why a place where a rank listens is not reached from this one; "" if it is."""
    try:
        socket.create_connection((other.address, port), PROBE_S, (mine.address, 0)).close()
    except OSError as error:
        why = error.strerror or str(error)
        return (
            f"{other.name} is not reached at {other.address} ({other.interface}) from "
            f"{mine.address} ({mine.interface}): {why}"
        )
    return ""


def listening_socket(host: str, port: int, *, is_one_host: bool) -> socket.socket | None:
    """Return a socket that listens on the address of `host` alone, for the store that this process
    is to hold there; None if other hosts would not reach it, or no interface here has the address.

    BadNetwork if the port is taken.
    """
    family, kind, protocol, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(there[0]).is_loopback and not is_one_host:
        return None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(there)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise BadNetwork(
            f"rank 0 cannot listen on {host}:{port}, where the ranks of this launch are to meet "
            f"({error.strerror}): another program or an earlier run may have the port. End that, "
            "or give all ranks another MASTER_PORT"
        ) from error
    return listener
