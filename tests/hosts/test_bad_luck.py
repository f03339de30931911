"""What hosts can have wrong about each other ends in an error that names it, or does not matter."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from tests.launching import RECIPE, SMALL, STEPS, environment, untimed
from tests.two_hosts import OTHER, WIRE, agents

BAD_INPUT = 2
WAIT_S = 120.0  # a start on a busy machine is part of it

pytestmark = pytest.mark.slow


# --- an interface that is named wrong ---

ON_B = "rank 1 on host-b: GLOO_SOCKET_IFNAME="


@pytest.mark.parametrize(
    "given, problem",
    [
        ("nonsense", f"{ON_B}nonsense: this host has no interface 'nonsense', only lo, "),
        ("lo", f"{ON_B}lo: 127.0.0.1 is this host alone, and the run is on several"),
        (f"{WIRE},nonsense", f"{ON_B}{WIRE},nonsense: this host has no interface 'nonsense', only"),
        (
            OTHER,
            "rank 0 on host-a: host-b is not reached at 10.2.9.9 (other) from 10.77.0.1 (wire)",
        ),
    ],
)
def test_an_interface_that_cannot_be_used_is_named_on_both_hosts(hosts, tmp_path, given, problem):
    env = {"GLOO_SOCKET_IFNAME": given}
    with agents(hosts, *SMALL, run_dir=tmp_path / "run", env_b=env) as (a, b):
        for agent in (a, b):
            agent.until_said("no network joins the ranks", WAIT_S)
            assert problem in agent.output
            assert "Set GLOO_SOCKET_IFNAME there to" in agent.output
            agent.until_ranks_gone(WAIT_S)


# --- a port that is taken ---


def test_a_port_that_is_taken_is_named_by_the_rank_that_is_to_listen_there(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = subprocess.run(
            [sys.executable, str(RECIPE), *SMALL, f"run_dir={tmp_path / 'run'}"],
            env=environment(**rank, **where),
            capture_output=True,
            text=True,
        )
    assert done.returncode == BAD_INPUT
    assert f"llamarl: rank 0 cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "give all ranks another MASTER_PORT" in done.stderr


# --- clocks that differ ---

OTHER_CLOCKS = """
import time
_time = time.time
_monotonic = time.monotonic
time.time = lambda: _time() + {seconds}
time.monotonic = lambda: _monotonic() + abs({seconds})
"""


@pytest.mark.parametrize("seconds", [-86400.0, 86400.0])
def test_clocks_that_differ_between_hosts_change_nothing(hosts, synchronous_run, tmp_path, seconds):
    """Wall clocks differ, and what the monotonic ones count from, as on hosts that were booted at
    different times.
    """
    (tmp_path / "sitecustomize.py").write_text(OTHER_CLOCKS.format(seconds=seconds))
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])}
    with agents(hosts, *SMALL, "max_lag=0", run_dir=tmp_path / "run", env_b=env) as (a, b):
        assert (a.wait(), b.wait()) == (0, 0), f"{a.output}\n{b.output}"
    assert untimed(a.rows) == untimed(synchronous_run.rows) and len(a.rows) == STEPS + 1
    began = []
    for rank in (0, 1):
        trace = json.loads((tmp_path / "run" / f"trace.rank{rank}.json").read_text())
        began.append(min(event["ts"] for event in trace["traceEvents"] if "ts" in event) / 1e6)
    assert abs(began[1] - began[0] - seconds) < 3600, "the second host's clock was another"


# --- a file system that lags ---


@pytest.fixture
def lagging(tmp_path, synchronous_run):
    """(a run's directory with a checkpoint, what the second host sees in the checkpoint's place at
    first, the command that makes it see that).
    """
    run_dir = tmp_path / "run"
    shutil.copytree(synchronous_run.run_dir, run_dir)
    newest = run_dir / "checkpoints" / f"step_{STEPS}"
    seen = tmp_path / "seen"
    seen.mkdir()
    over = 'mount --bind "$0" "$1" && shift && exec "$@"'
    return run_dir, seen, ("sh", "-c", over, str(seen), str(newest))


def test_a_checkpoint_that_the_other_host_sees_late_is_waited_for(hosts, lagging):
    run_dir, seen, wrap = lagging
    newest = run_dir / "checkpoints" / f"step_{STEPS}"
    given = (*SMALL, "max_lag=0", f"max_steps={STEPS + 2}", "resume=auto")
    with agents(hosts, *given, run_dir=run_dir, wrap_b=wrap) as (a, b):
        b.until(lambda: "is not all seen on this host yet (manifest.json)" in b.output, "a wait")
        files = [file for file in newest.rglob("*") if file.is_file()]
        for file in sorted(files, key=lambda file: file.name != "manifest.json"):
            copy = seen / file.relative_to(newest)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
        assert (a.wait(), b.wait()) == (0, 0), f"{a.output}\n{b.output}"
    assert f"resumed from step_{STEPS}" in a.output
    assert [row["step"] for row in a.rows] == list(range(STEPS + 3))


def test_a_checkpoint_that_the_other_host_never_sees_is_named_on_both(hosts, lagging):
    """The older one is not taken in its place."""
    run_dir, _, wrap = lagging
    given = (*SMALL, "max_lag=0", f"max_steps={STEPS + 2}", "resume=auto", "timeout_s=5")
    with agents(hosts, *given, run_dir=run_dir, wrap_b=wrap) as (a, b):
        for agent in (a, b):
            agent.until_said("is whole where rank 0 runs", WAIT_S)
            assert f"step_{STEPS} is whole where rank 0 runs, but after 5 s" in agent.output
            assert "rank 1 on host-b does not see manifest.json" in agent.output
            agent.until_ranks_gone(WAIT_S)
