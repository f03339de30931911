"""Weights between real processes: any trainer topology to any generators, over shared memory and
gloo, bit for bit.

Each rank of the pool takes part in scenario after scenario.
"""

import json
import os
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llamarl.comm.groups import link_group, this_rank_info
from llamarl.ddma import route as routes
from llamarl.ddma.layout import Destination, Parameter, Source
from llamarl.ddma.links import Header, HeaderKind, RankLink
from llamarl.ddma.receiver import Staged, WeightsReceiver
from llamarl.ddma.sender import WeightsSender
from llamarl.errors import WeightsError
from llamarl.models.build import build_decoder
from llamarl.models.hf import named_parameters_hf
from llamarl.models.quantize import quantize_rows
from llamarl.models.sharding import SCALE, Box, parameter_shapes
from tests.build.model_config import model_config
from tests.build.routes import route_of
from tests.pool import Pool

RANKS, VERSIONS = 4, 3
SCENARIO_S = 120  # most seconds for a scenario: a busy machine is slow
WAIT_S = 60  # of a rank for a version
SHM = Path("/dev/shm")
HEADERS = [64, (16 << 10) - 8, (16 << 10) - 7, 100_000]  # bytes, of JSON; a frame has 16 KiB

# name -> trainer ranks, generator ranks, (fsdp, replicate, tp), (tp, replicas)
TOPOLOGIES = {
    "one process": ((0,), (0,), (1, 1, 1), (1, 1)),
    "one to one": ((0,), (1,), (1, 1, 1), (1, 1)),
    "a rank on both sides": ((0, 1), (1, 2), (2, 1, 1), (1, 2)),
    "hsdp to two, one replica each": ((0, 1, 2, 3), (2, 3), (2, 2, 1), (1, 2)),
    "copies to three": ((0, 1), (1, 2, 3), (1, 2, 1), (1, 3)),
    "three uneven shards to two parts": ((0, 1, 2), (2, 3), (3, 1, 1), (2, 1)),
    "two parts of two shards to three parts": ((0, 1, 2, 3), (0, 1, 2), (2, 1, 2), (3, 1)),
    "one to two replicas of two parts": ((0,), (0, 1, 2, 3), (1, 1, 1), (2, 2)),
    "one to three replicas": ((0,), (1, 2, 3), (1, 1, 1), (1, 3)),
}
CHAINED = {  # over gloo: generator ranks that others hand their weights on to
    "copies to three": [1],
    "one to two replicas of two parts": [0, 1],
    "one to three replicas": [1, 2],
}


def scenario_of(sources, destinations, source, destination, transport, **more) -> dict:
    ends = {"sources": sources, "destinations": destinations}
    return {**ends, "source": source, "destination": destination, "transport": transport, **more}


@pytest.fixture
def run(pool):
    """run(*topology, transport, **more): every rank's answer."""

    def run(*topology, **more):
        call = {"ranks": RANKS, "timeout_s": SCENARIO_S}
        return pool.call(__file__, "exchange", scenario=scenario_of(*topology, **more), **call)

    return run


def left_in_shared_memory(pids: list[int]) -> list[Path]:
    """Of these processes: named files, and descriptors that keep memory which all have mapped."""
    named: list[Path] = []
    for pid in pids:
        named += SHM.glob(f"llamarl-{pid}-*")
    folders = [folder for pid in pids if (folder := Path(f"/proc/{pid}/fd")).exists()]
    opened = []
    for folder in folders:
        opened += [file for file in folder.iterdir() if file.is_symlink()]
    return named + [file for file in opened if "memfd:llamarl" in os.readlink(file)]


def ways() -> list:
    """Parameters (name, transport): chains are of gloo, and one process has a link of its own."""
    out = []
    for name in TOPOLOGIES:
        out += [(name, "gloo")] if name in CHAINED else [(name, "shm")]
    return [*out, ("one to one", "gloo"), ("two parts of two shards to three parts", "gloo")]


@pytest.mark.parametrize("name, transport", ways())
def test_every_replica_holds_what_the_trainer_holds(pool, run, name, transport):
    _, destinations, *_ = TOPOLOGIES[name]
    answers = run(*TOPOLOGIES[name], transport)
    wanted = [VERSIONS * (rank in destinations) for rank in range(RANKS)]
    assert [a["checked"] for a in answers] == wanted
    handing_on = [rank for rank, a in enumerate(answers) if a["forwards"]]
    assert handing_on == CHAINED.get(name, [])
    assert left_in_shared_memory(pool.pids) == []


@pytest.mark.parametrize("quantize, transport", [("int8", "shm"), ("fp8", "gloo")])
def test_what_travels_has_the_generators_dtype(run, quantize, transport):
    how = {"quantize": quantize, "exclude": ["layers.0.mlp.down_proj"], "dtype": "bfloat16"}
    run(*TOPOLOGIES["three uneven shards to two parts"], transport, **how)


@pytest.mark.parametrize(
    "topology, transport",
    [
        (((0, 1, 2), (3,), (3, 1, 1), (1, 1)), "shm"),
        (TOPOLOGIES["hsdp to two, one replica each"], "gloo"),
    ],
    ids=["three shards", "hsdp"],
)
def test_parameters_that_fsdp2_has_sharded_arrive_whole(run, topology, transport):
    answers = run(*topology, transport, fsdp2=True)
    assert all(answers[rank]["dtensors"] for rank in topology[0])


def test_a_topology_that_is_not_the_trainers_is_refused(pool, run):
    other = {"fsdp2": True, "mesh": (2, 1, 1), "refused": True}
    answers = run((0, 1), (2,), (1, 2, 1), (1, 1), "shm", **other)
    for rank, rows in ((0, 12), (1, 11)):
        text = f"rank {rank} holds ({rows}, 10), the topology says (23, 10)"
        assert text in answers[rank]["refused"]
    assert left_in_shared_memory(pool.pids) == []


def test_headers_of_any_length_cross_in_order(pool):
    """The last byte that fits into a frame, the first that does not, and many frames."""
    answers = pool.call(__file__, "tell_headers", ranks=2, timeout_s=SCENARIO_S)
    assert answers == [[], HEADERS]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_hundreds_of_syncs_leave_nothing_behind(transport):
    """Between two processes: memory, shared memory and open files are flat after the
    first fifty.
    """
    many = {"versions": 500, "sample_at": [50, 499], "scale": 8, "bucket_bytes": 1 << 16}
    scenario = scenario_of(*TOPOLOGIES["one to one"], transport, **many)
    pool = Pool(2)  # of their own: what these leave behind is counted
    try:
        for answer in pool.call(__file__, "exchange", ranks=2, timeout_s=600, scenario=scenario):
            early, late = answer["samples"]
            # A leak of one version's bytes a sync would be hundreds of MiB, one of a header's
            # tensors a few.
            assert late["rss"] - early["rss"] < 4 << 20, (early, late)
            # Shared memory: no more than the mappings themselves hold open.
            assert all(late[what] == early[what] for what in ("fds", "threads", "shm"))
        assert left_in_shared_memory(pool.pids) == []
    finally:
        pids = pool.pids
        pool.close()
    assert left_in_shared_memory(pids) == []


# --- what a rank runs ---


def tell_headers(rank: int) -> list[int]:
    """Send headers from rank 0 to rank 1. Returns the bytes of those that came as they were."""
    link = RankLink(1 - rank, link_group((0,), (1,)), "gloo")
    empty = len(json.dumps([HeaderKind.END, 1, {"said": ""}]))
    came = []
    for num_bytes in HEADERS:
        header = Header(HeaderKind.END, 1, {"said": "x" * (num_bytes - empty)})
        if rank == 0:
            link.send(header)
        elif link.recv(timeout_s=WAIT_S) == header:
            came.append(num_bytes)
    return came


def config_of(scale: int):
    # Neither two nor three divide all of these, and the heads of three generator ranks overlap.
    return model_config(
        vocab_size=23 * scale,
        hidden_size=10 * scale,
        intermediate_size=14 * scale,
        num_attention_heads=6,
        attention_bias=True,
    )


def weights_of(config, version: int) -> dict:
    """Every number of a version is another, and another than in the versions before."""
    at, out = version * 4_099, {}
    for name, shape in parameter_shapes(config).items():
        count = torch.Size(shape).numel()
        out[name] = (torch.arange(at, at + count, dtype=torch.float32) - 2_000).view(shape)
        at += count
    return out


def trainer_parameters(scenario, config, source, index: int, mesh):
    """[(name, parameter, its part of the whole)]"""
    out = []
    if not mesh:
        for name, shape in parameter_shapes(config).items():
            box = source.box(config, Parameter(name, shape, torch.float32), index)
            parameter = torch.nn.Parameter(torch.zeros(box.lengths))
            out.append((name, parameter, box.within(Box.whole(shape))))
        return out
    decoder = build_decoder(config, device="cpu")
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    for name, p in named_parameters_hf(decoder):
        lengths, offsets = compute_local_shape_and_global_offset(
            p.shape, p.device_mesh, p.placements
        )
        out.append((name, p, tuple(slice(a, a + n) for a, n in zip(offsets, lengths))))
    return out


def wanted(route, plan, t: int, full: dict) -> dict:
    """What tensor-parallel rank t of a replica must hold, from the whole tensors."""
    out = {}
    for p in plan.parameters:
        whole = full[p.name.removesuffix(SCALE)]
        if p.dtype.itemsize == 1 or p.name.endswith(SCALE):
            whole = quantize_rows(whole, route.quantize)[p.name.endswith(SCALE)]
        box = route.destination.box(plan.config, p, t)
        out[p.name] = whole.to(p.dtype)[box.within(Box.whole(p.shape))].contiguous()
    return out


def usage() -> dict:
    me = psutil.Process()
    return {
        "rss": me.memory_info().rss,
        "fds": me.num_fds(),
        "threads": me.num_threads(),
        "shm": len(left_in_shared_memory([me.pid])),
    }


def exchange(rank: int, scenario: dict) -> dict:
    """What one rank of the pool runs."""
    size = dist.get_world_size()
    # So small that links have several buckets and matrices are cut.
    routes.BUCKET_BYTES = {"cpu": scenario.get("bucket_bytes", 700)}
    sources, destinations = tuple(scenario["sources"]), tuple(scenario["destinations"])
    config = config_of(scenario.get("scale", 1))
    source = Source(*scenario["source"])
    destination = Destination(*scenario["destination"])
    mesh = None
    if scenario.get("fsdp2"):
        fsdp, replicate, _ = scenario.get("mesh") or scenario["source"]
        grid = torch.tensor(sources).view(replicate, fsdp)
        if replicate > 1:
            mesh = DeviceMesh("cpu", grid, mesh_dim_names=("copies", "shards"))
        else:
            mesh = DeviceMesh("cpu", grid[0])
    route = route_of(
        rank,
        sources=sources,
        destinations=destinations,
        source=source,
        destination=destination,
        dtype=getattr(torch, scenario.get("dtype", "float32")),
        quantize=scenario.get("quantize", "none"),
        exclude=tuple(scenario.get("exclude", ())),
        transport=scenario["transport"],
        ranks=[this_rank_info(r, torch.device("cpu")) for r in range(size)],
        group=link_group(sources, destinations),
        timeout_s=WAIT_S,
    )
    control = route.control
    plan, answer = route.plan(config), {"checked": 0, "forwards": False, "samples": []}
    sender = receiver = None
    if rank in sources:
        mine = trainer_parameters(scenario, config, source, sources.index(rank), mesh)
        answer["dtensors"] = all(isinstance(p, DTensor) for _, p, _ in mine)
        sender = WeightsSender(route)
        try:
            sender.bind(config, [(name, p) for name, p, _ in mine])
        except WeightsError as error:
            answer["refused"] = str(error)
    if scenario.get("refused"):
        return answer
    assert "refused" not in answer, answer["refused"]
    if rank in destinations:
        me = destinations.index(rank)
        answer["forwards"] = plan.follower(me) is not None
        target = {
            n: torch.nn.Parameter(torch.zeros_like(x), requires_grad=False)
            for n, x in wanted(route, plan, me % destination.tp, weights_of(config, 0)).items()
        }
        receiver = WeightsReceiver(route)
        receiver.bind(config, list(target.items()))
    for version in range(scenario.get("versions", VERSIONS)):
        full = weights_of(config, version)
        if sender is not None:
            for name, p, part in mine:
                held = p.detach().to_local() if isinstance(p, DTensor) else p.detach()
                held.copy_(full[name][part])
            # None is overtaken.
            sender.publish(
                version,
                evaluate=True,
                must_differ=version > 0,
                canary=lambda: {"canary of": version},
            )
        if receiver is not None:
            until = time.monotonic() + WAIT_S
            while (staged := receiver.swap()) is None:
                control.check()
                assert time.monotonic() < until, f"version {version} never came"
                control.wait(0.01)
            assert staged == Staged(version, True, True, {"canary of": version}), staged
            for name, want in wanted(route, plan, me % destination.tp, full).items():
                assert torch.equal(target[name].data.view(torch.uint8), want.view(torch.uint8)), (
                    name,
                    version,
                )
            answer["checked"] += 1
        if version in scenario.get("sample_at", ()):
            answer["samples"].append(usage())
    dist.barrier()
    for end in (sender, receiver):
        if end is not None:
            end.close()
    control.check()
    dist.barrier()
    return answer
