"""Two hosts on one machine: network namespaces that a veth pair joins, each with a name of its own,
so that ranks on different hosts share no memory.

    host-a  10.77.0.1 ──── wire ──── 10.77.0.2  host-b

As on a Debian host, each name stands for an address of the loopback on the host itself. Each also
has an interface `other`, which leads nowhere. Namespaces carry the number of the process that made
them. They are removed when it leaves the context, and those that a killed process has left are
removed by the next one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tests.launching import Job

WIRE = "wire"
SPARE = "spare"
OTHER = "other"
PORT = 29500  # each pair of hosts has all ports for itself
# A test process that is killed cannot end its agents, nor can they then hold the namespaces.
UNTIL_PARENT_ENDS = ("setpriv", "--pdeathsig", "KILL")
NOTHING: Mapping[str, str] = {}
_NAMED = re.compile(r"llamarl-(\d+)-\w+-[ab]")
# Runs a program under a name of the host's own, and with the given file as /etc/hosts.
_AS_HOST = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


def run(*command: str) -> str:
    """Run a program and return what it says. AssertionError with that if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


@lru_cache
def why_not() -> str:
    """Return why this machine cannot make two hosts; "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = ("ip", "tc", "ss", "unshare", "setpriv", "mount")
    absent = [tool for tool in tools if not shutil.which(tool)]
    if absent:
        return f"needs {', '.join(absent)} (iproute2, util-linux)"
    try:
        with TwoHosts() as hosts:
            run(*hosts.a.entered("true"))
    except (AssertionError, OSError) as error:
        return f"this machine makes no two hosts: {error}"
    return ""


@dataclass(frozen=True)
class Host:
    """One of the two. names: a file that stands for its /etc/hosts."""

    name: str
    namespace: str
    address: str
    names: Path

    def entered(self, *command: str) -> list[str]:
        """Return the command line that runs a program on this host."""
        as_host = ["unshare", "--uts", "--mount", "sh", "-c", _AS_HOST, "sh", self.name]
        return ["ip", "netns", "exec", self.namespace, *as_host, str(self.names), *command]

    def listening(self) -> set[str]:
        """Return the addresses on which a TCP socket listens here, "*" for all, without ports."""
        lines = run(*self.entered("ss", "-Hltn")).splitlines()
        found = {line.split()[3].rpartition(":")[0].partition("%")[0] for line in lines}
        return {"*" if address in ("*", "0.0.0.0", "[::]") else address for address in found}

    def received_bytes(self) -> int:
        """Return how many bytes have come over the wire."""
        file = f"/sys/class/net/{WIRE}/statistics/rx_bytes"
        return int(run("ip", "netns", "exec", self.namespace, "cat", file))


class TwoHosts:
    """A context manager: makes the two hosts, and removes them."""

    def __init__(self):
        _remove_left()
        tag = f"llamarl-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._folder = Path(f"/run/{tag}")
        self.a, self.b = [
            Host(f"host-{side}", f"{tag}-{side}", f"10.77.0.{number}", self._folder / side)
            for number, side in enumerate("ab", start=1)
        ]

    def __enter__(self) -> TwoHosts:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._remove()

    def _make(self) -> None:
        self._folder.mkdir()
        for host, peer in ((self.a, self.b), (self.b, self.a)):
            names = ["127.0.0.1 localhost", f"127.0.1.1 {host.name}", f"{peer.address} {peer.name}"]
            host.names.write_text("\n".join([*names, ""]))
            run("ip", "netns", "add", host.namespace)
        self.join()
        for number, host in enumerate((self.a, self.b), start=1):
            self.up(host, "lo")
            run("ip", "-n", host.namespace, "link", "add", OTHER, "type", "bridge")
            run("ip", "-n", host.namespace, "address", "add", f"10.{number}.9.9/24", "dev", OTHER)
            self.up(host, OTHER)

    def _remove(self) -> None:
        for host in (self.a, self.b):
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def join(self) -> None:
        """Make the wire."""
        self._wire(WIRE)
        for host in (self.a, self.b):
            self.give_address(host)

    def join_by_a_spare_wire(self) -> None:
        """Make a second wire, with the addresses 10.78.0.1 and 10.78.0.2."""
        self._wire(SPARE)
        for number, host in enumerate((self.a, self.b), start=1):
            address = f"10.78.0.{number}/24"
            run("ip", "-n", host.namespace, "address", "add", address, "dev", SPARE)

    def _wire(self, name: str) -> None:
        """Make a wire that has no addresses yet."""
        a, b = self.a.namespace, self.b.namespace
        run("ip", "-n", a, "link", "add", name, "type", "veth", "peer", "name", name, "netns", b)
        for host in (self.a, self.b):
            self.up(host, name)

    def give_address(self, host: Host) -> None:
        """Give one end of the wire its address."""
        run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", WIRE)

    def take_address(self, host: Host) -> None:
        """Take the address from one end of the wire, which stays up."""
        run("ip", "-n", host.namespace, "address", "del", f"{host.address}/24", "dev", WIRE)

    def up(self, host: Host, interface: str = WIRE) -> None:
        run("ip", "-n", host.namespace, "link", "set", interface, "up")

    def cut(self, host: Host) -> None:
        """Take the wire down at one end: nothing passes, and nobody is told."""
        run("ip", "-n", host.namespace, "link", "set", WIRE, "down")

    def take_away(self) -> None:
        """Remove the wire from both hosts."""
        run("ip", "-n", self.b.namespace, "link", "delete", WIRE)

    def limit(self, rate: str) -> None:
        """Let no more than `rate` pass, each way."""
        for host in (self.a, self.b):
            command = ("qdisc", "add", "dev", WIRE, "root", "tbf", "rate", rate)
            run("tc", "-n", host.namespace, *command, "burst", "256kb", "latency", "100ms")


def _remove_left() -> None:
    """Remove the namespaces of processes that are gone."""
    for line in run("ip", "netns", "list").splitlines():
        named = _NAMED.match(line)
        if named and not Path(f"/proc/{named[1]}").exists():
            namespace = named[0]
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
            shutil.rmtree(f"/run/{namespace.rpartition('-')[0]}", ignore_errors=True)


class Agent(Job):
    """A job's part on one host: one agent of torchrun, with `ranks` ranks."""

    def __init__(self, host: Host, *overrides: str, wrap: tuple[str, ...] = (), **settings):
        self._host = host
        self._wrap = wrap
        super().__init__(*overrides, **settings)

    def _command(self, argv, ranks, options) -> list[str]:
        command = super()._command(argv, ranks, options)
        return [*UNTIL_PARENT_ENDS, *self._host.entered(*self._wrap, *command)]

    def until_said(self, text: str, timeout_s: float) -> None:
        """Wait until this host says something. The agent may end meanwhile."""
        self.until(lambda: text in self.output, f"said: {text!r}", timeout_s)

    def until_ranks_gone(self, timeout_s: float) -> str:
        """Wait until no rank of this host is left, and return what it said. The agent may still be
        there.
        """
        self.until_gone(set(self.rank_pids().values()), timeout_s)
        return self.output


@contextmanager
def agents(
    hosts: TwoHosts,
    *overrides: str,
    run_dir: Path,
    ranks: int = 1,
    rendezvous: tuple[str, ...] = (),
    names: tuple[str, str] | None = None,
    env_a: Mapping[str, str] = NOTHING,
    env_b: Mapping[str, str] = NOTHING,
    wrap_b: tuple[str, ...] = (),
) -> Iterator[tuple[Agent, Agent]]:
    """Start a job on both hosts, with so many ranks on each; afterwards end what is left of it.

    rendezvous: options of torchrun in place of a store on the first host. names: what the hosts
    call themselves to each other, by default their addresses. wrap_b: what starts the agent of the
    second host.
    """
    started = []
    with ExitStack() as ending:
        for number, (host, env) in enumerate(((hosts.a, env_a), (hosts.b, env_b))):
            is_host = int(host is hosts.a)
            own = names[number] if names else host.address
            store = (f"--rdzv-endpoint={hosts.a.address}:{PORT}", f"--rdzv-conf=is_host={is_host}")
            of_both = ("--nnodes=2", "--rdzv-id=two", f"--local-addr={own}")
            where = {
                "rendezvous": "--rdzv-backend=c10d",
                "torchrun": of_both + (rendezvous or store),
                "wrap": wrap_b if host is hosts.b else (),
            }
            given = (*overrides, "threads=1")
            agent = Agent(host, *given, run_dir=run_dir, ranks=ranks, env=env, **where)
            started.append(ending.enter_context(agent))
        yield started[0], started[1]
