"""A Slurm cluster of a test's own on this machine: munged, slurmctld and two slurmds, with their
configuration, key, state and ports. Leaving it ends exactly these, and the processes of its jobs.

The nodes are named 127.0.0.1 and 127.0.0.2, names that resolve everywhere on Linux.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil

from tests.launching import POLL_S

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
NODES = ("127.0.0.1", "127.0.0.2")
START_S = 60  # longer than daemons take to find each other
END_S = 30
_MARK = "LLAMARL_TEST_CLUSTER"

CONFIG = """
ClusterName=llamarl
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge},cred_expire=5
CredType=cred/munge
SlurmctldPort={controller_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
"""


def absent() -> str | None:
    """Return why there can be no cluster here; None if there can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)} (slurm-wlm and munge)" if missing else None


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Cluster:
    """Two nodes with a partition. A context manager; its commands raise AssertionError."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            _MARK: self._mark,
        }
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._end()

    def _start(self) -> None:
        folder = self.folder
        (folder / "state").mkdir(parents=True)
        munge = folder / "munge.socket"
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        ports = free_ports(1 + len(NODES))
        lines = CONFIG.format(
            host=socket.gethostname(), munge=munge, controller_port=ports[0], folder=folder
        )
        for node, port in zip(NODES, ports[1:]):
            lines += f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr={node} "
            lines += f"Port={port} CPUs=1 RealMemory=1\n"
        lines += "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        (folder / "slurm.conf").write_text(lines)
        files = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *files, socket=munge)
        self.until(munge.exists, "munged listens")
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        self.until(lambda: self._nodes().count("State=IDLE") == len(NODES), "both nodes are idle")

    def _daemon(self, *command: str, socket: Path | None = None) -> None:
        words = [*command, *([f"--socket={socket}"] if socket else [])]
        log = self.folder / f"{len(self._daemons)}.{command[0]}.out"
        with log.open("wb") as out:
            started = subprocess.Popen(
                words,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        self._daemons.append(started)

    def _nodes(self) -> str:
        """Return what is known of the nodes; nothing while nobody answers."""
        asked = ["scontrol", "--oneliner", "show", "nodes"]
        return subprocess.run(asked, env=self.environment, capture_output=True, text=True).stdout

    def _end(self) -> None:
        """End the daemons in order, then kill what is left of the jobs: it has this mark."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(END_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get(_MARK) == self._mark:
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    pass  # it ended meanwhile

    def until(self, holds: Callable[[], object], what: str, timeout_s: float = START_S) -> None:
        """Poll until holds(). AssertionError with the daemons' logs if it does not in time, or one
        has ended.
        """
        deadline = time.monotonic() + timeout_s
        while not holds():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"{what}: not so; {ended} ended\n{self._logs()}")
            time.sleep(POLL_S)

    def _logs(self) -> str:
        files = sorted({*self.folder.glob("*.log"), *self.folder.glob("*.out")})
        return "\n".join(f"-- {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def command(self, *words: str, cwd: Path | None = None, **more: str) -> str:
        """Return what one of Slurm's commands prints."""
        done = subprocess.run(
            words, cwd=cwd, env=self.environment | more, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm says of a job, by its own names: JobState, ExitCode, Restarts, ..."""
        said = self.command("scontrol", "--oneliner", "show", "job", number)
        return dict(re.findall(r"(\S+?)=(\S*)", said))
