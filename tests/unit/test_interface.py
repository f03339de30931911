"""The ranks find the interface that joins their hosts, or all hear which of them has none."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch.distributed as dist

from llamarl.comm import interface
from llamarl.comm.interface import (
    address_towards,
    choose_interface,
    interfaces,
    listening_socket,
)
from llamarl.errors import BadNetwork

HERE = "10.77.0.1"
THERE = "10.77.0.2"
HAS = {"lo": ["127.0.0.1", "::1"], "wire": [HERE], "down": []}


def test_interfaces_and_their_addresses_are_those_that_psutil_finds():
    kinds = (socket.AF_INET, socket.AF_INET6)
    expected = {}
    for name, found in psutil.net_if_addrs().items():
        of_name = [one.address.partition("%")[0] for one in found if one.family in kinds]
        expected[name] = sorted(of_name)
    listed = {name: sorted(addresses) for name, addresses in interfaces().items()}
    assert {name: listed[name] for name in expected} == expected
    assert "127.0.0.1" in listed["lo"]


def test_the_way_to_the_loopback_begins_there():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("127.0.1.1").startswith("127.")


@pytest.fixture
def network(monkeypatch):
    """network(**routes): this host has HAS, and reaches each name from the given address."""

    def given(**routes: str) -> None:
        def towards(host: str) -> str:
            if host not in routes:
                raise OSError(101, "Network is unreachable")
            return routes[host]

        monkeypatch.setattr(interface, "interfaces", lambda: HAS)
        monkeypatch.setattr(interface, "address_towards", towards)
        monkeypatch.setattr(interface, "_probe", lambda store, rank, size, places: None)

    monkeypatch.setenv(interface.VARIABLE, "")
    return given


def on_each(count, call):
    """What call(rank) returns on so many ranks at once, or the text of its BadNetwork."""

    def rank(number: int) -> object:
        try:
            return call(number)
        except BadNetwork as error:
            return str(error)

    with ThreadPoolExecutor(count) as ranks:
        return list(ranks.map(rank, range(count)))


def chosen_by(hosts, *, is_one_host=False):
    """What ranks on these hosts choose, or the error of each. They share this one's network."""
    store = dist.HashStore()

    def choose(rank: int) -> list[str]:
        known = {"size": len(hosts), "store_host": "head", "is_one_host": is_one_host}
        return choose_interface(store, rank=rank, host=hosts[rank], **known)

    return on_each(len(hosts), choose)


WIRE = [f"{socket.gethostname()} wire ({HERE})"]


@pytest.mark.parametrize(
    "head, hosts, given, chosen, found",
    [
        (HERE, ["one", "other"], "", "wire", WIRE),  # that of the way to the store
        ("127.0.1.1", ["one", "one"], "", "lo", []),  # two agents on one host
        (None, ["one", "other"], "wire", "wire", WIRE),  # no route is looked up
    ],
)
def test_the_interface_that_is_chosen(network, monkeypatch, head, hosts, given, chosen, found):
    network(**({} if head is None else {"head": head}))
    monkeypatch.setenv(interface.VARIABLE, given)
    assert chosen_by(hosts) == [found] * 2
    assert os.environ[interface.VARIABLE] == chosen


def test_on_one_host_it_is_the_loopback_wherever_the_store_seems_to_be(network):
    network(head=HERE)
    assert chosen_by(["one", "one"], is_one_host=True) == [[], []]
    assert os.environ[interface.VARIABLE] == "lo"


@pytest.mark.parametrize(
    "given, problem",
    [
        ("nonsense", "this host has no interface 'nonsense', only lo, wire, down"),
        ("wire,nonsense", "this host has no interface 'nonsense'"),
        ("down", "down has no address; is it up?"),
        ("lo", "127.0.0.1 is this host alone, and the run is on several"),
    ],
)
def test_an_interface_of_no_use_is_told_to_all_with_all_ranks_that_have_it(
    network, monkeypatch, given, problem
):
    network(head=HERE)
    monkeypatch.setenv(interface.VARIABLE, given)
    told = chosen_by(["one", "other"])
    assert told[0] == told[1] and told[0].startswith("no network joins the ranks:\nranks 0, 1 on ")
    assert f"{interface.VARIABLE}={given}: {problem}" in told[0]


@pytest.mark.parametrize(
    "routes, problem",
    [
        ({}, "no way leads to head: Network is unreachable"),
        ({"head": THERE}, f"{THERE}, from which head is reached, belongs to none of lo, wire"),
        ({"head": "127.0.1.1"}, "head is 127.0.1.1 on every host, which is each host by itself"),
    ],
)
def test_a_store_to_which_no_interface_leads_is_named(network, routes, problem):
    network(**routes)
    told = chosen_by(["one", "other"])
    assert told[0] == told[1] and problem in told[0] and interface.VARIABLE in told[0]


def test_a_host_that_is_the_store_by_its_loopback_takes_the_way_to_another(network):
    """Rank 0's own name is its loopback's there; the other rank tells where it is."""
    network(**{THERE: HERE})
    own = interface.Place(host="one", name="a", interface="lo", address="127.0.1.1")
    other = interface.Place(host="other", name="b", interface="wire", address=THERE)
    assert interface._among_several(own, [own, other], "", "head") == ("wire", HERE)
    assert interface._among_several(other, [own, other], "", "head") == ("wire", THERE)


def probed_by(addresses, monkeypatch):
    """What ranks on hosts of these addresses find, each on a host of its own."""
    monkeypatch.setattr(interface, "PROBE_S", 0.2)
    store = dist.HashStore()
    places = []
    for number, address in enumerate(addresses):
        place = interface.Place(host=address, name=f"host{number}", interface="i", address=address)
        places.append(place)
    return on_each(len(places), lambda rank: interface._probe(store, rank, len(places), places))


def test_hosts_that_reach_each_other_say_nothing(monkeypatch):
    assert probed_by(["127.0.0.1", "127.0.0.2", "127.0.0.2"], monkeypatch) == [None] * 3


def test_a_host_that_is_not_reached_is_told_to_all(monkeypatch):
    usual = interface._unreached

    def from_the_first(mine, other, port):
        closed = port if mine.name != "host0" else 1  # no program listens there
        return usual(mine, other, closed)

    monkeypatch.setattr(interface, "_unreached", from_the_first)
    told = probed_by(["127.0.0.1", "127.0.0.2"], monkeypatch)
    assert told[0] == told[1] and told[0].splitlines()[1] == (
        "rank 0 on host0: host1 is not reached at 127.0.0.2 (i) from 127.0.0.1 (i): "
        "Connection refused"
    )


def test_a_listening_socket_is_on_the_one_address_and_none_where_others_cannot_come(network):
    found = listening_socket("127.0.0.1", 0, is_one_host=True)
    with found:
        assert found.getsockname()[0] == "127.0.0.1"
    assert listening_socket("127.0.0.1", 0, is_one_host=False) is None
    assert listening_socket("192.0.2.77", 0, is_one_host=False) is None, "no address of this host"


def test_a_port_that_is_taken_says_what_to_change():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadNetwork, match=f"127.0.0.1:{port}.*give all ranks another MASTER_P"):
            listening_socket("127.0.0.1", port, is_one_host=True)
