"""A run on two hosts computes what it does on one, and listens only where the other host is."""

import functools
import re
from pathlib import Path

import pytest

from llamarl.checkpoint.checkpointer import verify
from tests.build.job import finished_job
from tests.launching import SMALL, STEPS, Job, untimed
from tests.two_hosts import SPARE, WIRE, agents, run

SYNCHRONOUS = (*SMALL, "max_lag=0")
MIXED = ("placement.trainer=[0,2]", "placement.generator=[1,3]", "placement.reward=[3]")

pytestmark = pytest.mark.slow


def weights_of(checkpoint: Path) -> dict[str, bytes]:
    """File -> contents, of all that a checkpoint has in tensors."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {file.relative_to(checkpoint).as_posix(): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory):
    """on_one_host(ranks, *overrides): the finished run of so many ranks on one host."""

    @functools.cache
    def job(ranks: int, *overrides: str) -> Job:
        run_dir = tmp_path_factory.mktemp("one") / "run"
        given = (*SYNCHRONOUS, *overrides, "threads=1")
        return finished_job(*given, run_dir=run_dir, ranks=ranks, kind=Job)

    return job


@pytest.mark.parametrize("rate", ["unlimited", "1gbit"])
@pytest.mark.parametrize(
    "ranks, overrides",
    [(1, ()), (2, MIXED)],
    ids=["trainer here, generator there", "mixed, FSDP across"],
)
def test_two_hosts_compute_what_one_does_at_any_speed_of_the_wire(
    hosts, on_one_host, tmp_path, ranks, overrides, rate
):
    if rate != "unlimited":
        hosts.limit(rate)
    with agents(hosts, *SYNCHRONOUS, *overrides, run_dir=tmp_path / "run", ranks=ranks) as (a, b):
        assert (a.wait(), b.wait()) == (0, 0), f"{a.output}\n{b.output}"
    assert "network  host-a wire (10.77.0.1), host-b wire (10.77.0.2)" in a.output
    one = on_one_host(2 * ranks, *overrides)
    assert untimed(a.rows) == untimed(one.rows) and len(a.rows) == STEPS + 1
    mine = weights_of(a.checkpoint)
    assert mine == weights_of(one.checkpoint) and verify(a.checkpoint) == []
    of_model = len(mine["hf/model.safetensors"])
    assert hosts.b.received_bytes() > STEPS * of_model, "weights go over the wire"
    if rate != "unlimited":
        shown = run("tc", "-n", hosts.a.namespace, "-s", "qdisc", "show", "dev", WIRE)
        held = re.search(r"overlimits (\d+)", shown)
        assert held and int(held[1]) > 0, shown


def test_an_asynchronous_run_on_two_hosts_keeps_its_bound(hosts, tmp_path):
    with agents(hosts, *SMALL, "max_lag=1", run_dir=tmp_path / "run") as (a, b):
        assert (a.wait(), b.wait()) == (0, 0), f"{a.output}\n{b.output}"
    assert len(a.rows) == STEPS + 1 and max(row["lag/max"] for row in a.rows[1:]) <= 1


# --- where it listens ---


ENDLESS = (*SMALL, "max_lag=1", "max_steps=100000", "checkpoint.every=0", "eval.every=0")


def check_listening(hosts, run_dir, on_a, on_b, **where):
    """Check where both hosts listen in a run that makes steps. Return the first one's job."""
    with agents(hosts, *ENDLESS, run_dir=run_dir, **where) as (a, b):
        a.until_rows(2)
        assert hosts.a.listening() == on_a and hosts.b.listening() == on_b
        listeners = run(*hosts.a.entered("ss", "-Hltnp")).splitlines()
    (own,) = on_a - {"*"}
    everywhere = [line for line in listeners if own not in line]
    assert bool(everywhere) == ("*" in on_a)
    assert all(f"pid={a.process.pid}," in line for line in everywhere), "torchrun alone"
    return a


def test_ranks_listen_where_the_hosts_are_joined_and_torchrun_everywhere(hosts, tmp_path):
    check_listening(hosts, tmp_path / "run", {hosts.a.address, "*"}, {hosts.b.address})


def test_with_a_file_as_torchruns_store_nothing_listens_everywhere(hosts, tmp_path):
    """The ranks' own store is then held by rank 0, on the address that the others are given."""
    store = ("--rdzv-conf=store_type=file", f"--rdzv-endpoint={tmp_path / 'rendezvous'}")
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    where = {"rendezvous": store, "env_a": env, "env_b": env}
    check_listening(hosts, tmp_path / "run", {hosts.a.address}, {hosts.b.address}, **where)


def test_a_host_whose_name_is_its_loopback_finds_the_way_to_the_others(hosts, tmp_path):
    names = (hosts.a.name, hosts.b.name)
    on_a = {hosts.a.address, "*"}
    check_listening(hosts, tmp_path / "run", on_a, {hosts.b.address}, names=names)


def test_a_given_interface_is_used_and_not_that_of_the_store(hosts, tmp_path):
    hosts.join_by_a_spare_wire()
    env = {"GLOO_SOCKET_IFNAME": SPARE}
    where = {"env_a": env, "env_b": env}
    a = check_listening(hosts, tmp_path / "run", {"10.78.0.1", "*"}, {"10.78.0.2"}, **where)
    assert "network  host-a spare (10.78.0.1), host-b spare (10.78.0.2)" in a.output
