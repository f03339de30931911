"""Weight sync against this machine's limits and against what others do, all in one run.

    python benchmarks/weight_sync.py [--models smollm2-bf16,smollm2-fp32,1b] [--repeats 7] [--json
    FILE]

For each model, topology and transport: seconds from the trainers' publish to the last generator's
swap, what it held the trainer and the generator for, and, measured by the same processes on the
same bytes:

    memcpy       the trainers copy their shards, then the generators theirs: the two copies of
                 shared memory
    raw gloo     plain send and recv of the same bytes between the same ranks, in turns with ours:
                 one of each, again and again
    broadcast    every tensor gathered whole on rank 0, then broadcast, then loaded (TRL's way);
                 over gloo
    disk         gathered over gloo, written by rank 0 as safetensors, read by every generator

A row of transport gloo is like for like with broadcast; shared memory is beside memcpy.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch
import torch.distributed as dist
from running import machine
from torch import Tensor

from llamarl.comm.control import Control
from llamarl.comm.groups import (
    RankInfo,
    device_link_group,
    init_world,
    link_group,
    this_rank_info,
)
from llamarl.ddma.layout import Destination, Source
from llamarl.ddma.protocol import lower_priority
from llamarl.ddma.receiver import WeightsReceiver
from llamarl.ddma.route import WeightsRoute
from llamarl.ddma.sender import WeightsSender
from llamarl.models.config import ModelConfig
from llamarl.models.sharding import Box, parameter_shapes, tensor_parallel_box

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    rope_scaling=None,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    attention_bias=False,
)
TINY = replace(
    SMOLLM2,
    vocab_size=52,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=48,
)
ONE_B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=64000,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=15,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    rope_scaling=None,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    attention_bias=False,
)
EIGHT_B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    rope_scaling=None,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    attention_bias=False,
)
# name -> (config, dtype of the generator, dtype of the trainer's own weights, quantised)
MODELS = {
    "tiny": (TINY, torch.float32, torch.float32, "none"),
    "smollm2-bf16": (SMOLLM2, torch.bfloat16, torch.float32, "none"),
    "smollm2-fp32": (SMOLLM2, torch.float32, torch.float32, "none"),
    "1b": (ONE_B, torch.bfloat16, torch.bfloat16, "none"),
    "8b": (EIGHT_B, torch.bfloat16, torch.bfloat16, "none"),
    "8b-fp8": (EIGHT_B, torch.bfloat16, torch.bfloat16, "fp8"),
}
TOPOLOGIES = {
    "1 -> 1": (Source(), Destination()),
    "fsdp 2 -> tp 2": (Source(fsdp=2), Destination(tp=2)),
    "fsdp 2 -> 2 replicas": (Source(fsdp=2), Destination(replicas=2)),
}
WARM_UP, CHUNK = 2, 16 << 20


class Rank:
    """One process of a case: a trainer or a generator rank, and what it measures."""

    def __init__(self, model: str, topology: str, repeats: int):
        self.config, self.dtype, self.held_dtype, self.quantize = MODELS[model]
        self.source, self.destination = TOPOLOGIES[topology]
        self.repeats, self.timeout_s = repeats, 600.0
        self.world = init_world(threads=1, timeout_s=self.timeout_s, reproducible=True)
        self.device, self.store = self.world.device, self.world.store()
        n = self.source.num_ranks
        self.trainers = tuple(range(n))
        self.generators = tuple(range(n, n + self.destination.num_ranks))
        self.trains = self.world.rank in self.trainers
        names = [f"rank {r}" for r in range(self.world.size)]
        self.control = Control(
            self.store, rank=self.world.rank, world_size=self.world.size, leader=0, names=names
        )
        self.groups = [
            link_group(self.trainers, self.generators, behind=behind)
            for behind in (lower_priority, lower_priority, None)
        ]
        self.device_group = device_link_group(
            self.trainers, self.generators, list(self.world.infos)
        )
        self.shapes = parameter_shapes(self.config)
        self._flat: Tensor | None = None  # what raw_gloo sends
        self.control.start()

    def together(self) -> float:
        dist.barrier()
        return time.monotonic()

    def latest(self, value: float) -> float:
        """The largest value over ranks."""
        whole = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(whole, dist.ReduceOp.MAX)
        return float(whole)

    # -- llamarl

    def sync(self, transport: str) -> dict:
        store = self.store
        rank = self.world.rank
        mine = this_rank_info(rank, self.device)
        store.set(f"{transport}/end/{rank}", json.dumps(asdict(mine)))
        ranks = [
            RankInfo(**json.loads(store.get(f"{transport}/end/{r}")))
            for r in range(self.world.size)
        ]
        route = WeightsRoute(
            "policy",
            sources=self.trainers,
            destinations=self.generators,
            source=self.source,
            destination=self.destination,
            dtype=self.dtype,
            quantize=self.quantize,
            exclude=(),
            transport=transport,
            ranks=ranks,
            group=self.groups[transport == "gloo"],
            device_group=self.device_group,
            control=self.control,
            timeout_s=self.timeout_s,
        )
        end = WeightsSender(route) if self.trains else WeightsReceiver(route)
        plan = route.plan(self.config)
        if self.trains:
            me = self.world.rank
            end.bind(
                self.config,
                [(n, self._shard(s, self._source_box(n, s, me))) for n, s in self.shapes.items()],
            )
        else:
            t = (self.world.rank - len(self.trainers)) % self.destination.tp
            held = [
                (p.name, self.destination.box(self.config, p, t).lengths, p.dtype)
                for p in plan.parameters
            ]
            end.bind(self.config, [(n, self._zeros(s, d)) for n, s, d in held])
        seconds, stalls = [], []
        raws = []
        for version in range(WARM_UP + self.repeats):
            if transport == "gloo":
                raws.append(self.raw_gloo(plan))
            began = self.together()
            if self.trains:
                stall = end.publish(version, evaluate=True, must_differ=False)
            else:
                while end.staged is None:
                    self.control.check()
                    self.control.wait(0.5)
                swap = time.monotonic()
                end.swap()
                stall = time.monotonic() - swap
            done = self.latest(time.monotonic() if not self.trains else 0.0)
            # From the last trainer's call: how far apart a barrier lets them go is not the sync's
            # doing.
            seconds.append(done - self.latest(began if self.trains else 0.0))
            stalls.append(stall)
        end.close()
        counted = seconds[WARM_UP:]
        result = {"seconds": median(seconds), "range": [min(counted), max(counted)]}
        result |= {"bytes": plan.num_bytes, "shard_bytes": self._shard_bytes(plan)}
        if raws:
            result["raw_gloo_s"] = median(raws)
            pairs = zip(raws[WARM_UP:], counted)
            result["of_raw_gloo"] = statistics.median(raw / ours for raw, ours in pairs)
        result["trainer_stall_s"] = self.latest(median(stalls) if self.trains else 0.0)
        result["generator_stall_s"] = self.latest(0.0 if self.trains else median(stalls))
        return result

    def _source_box(self, name: str, shape: tuple[int, ...], rank: int) -> Box:
        rows = -(-shape[0] // self.source.fsdp)
        first = min(rank * rows, shape[0])
        return Box.whole(shape).cut(0, first, min(rows, shape[0] - first))

    def _shard(self, shape: tuple[int, ...], box: Box) -> torch.nn.Parameter:
        return torch.nn.Parameter(
            torch.randn(box.lengths, dtype=self.held_dtype, device=self.device) * 0.02,
            requires_grad=False,
        )

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.nn.Parameter:
        return torch.nn.Parameter(
            torch.zeros(shape, dtype=dtype, device=self.device), requires_grad=False
        )

    def _shard_bytes(self, plan) -> int:
        """Of this rank: what a trainer holds, or a generator."""
        if self.trains:
            boxes = [self._source_box(n, s, self.world.rank) for n, s in self.shapes.items()]
            return sum(box.numel for box in boxes) * self.held_dtype.itemsize
        return int(plan.shard_bytes[(self.world.rank - len(self.trainers)) % self.destination.tp])

    # -- limits

    def memcpy(self, shard_bytes: int) -> dict:
        """Trainers at once, then generators at once, each copying its own shard's bytes."""
        source, target = (
            torch.ones(shard_bytes, dtype=torch.uint8, device=self.device) for _ in range(2)
        )
        times: dict[str, list[float]] = {"trainer": [], "generator": []}
        for _ in range(WARM_UP + self.repeats):
            for side in times:
                began = self.together()
                if self.trains == (side == "trainer"):
                    target.copy_(source)
                    if self.device.type == "cuda":
                        torch.cuda.synchronize()
                times[side].append(self.latest(time.monotonic() - began))
                if self.trains != (side == "trainer"):
                    times[side][-1] = self.latest(0.0) or times[side][-1]
                else:
                    self.latest(times[side][-1])
        return {f"{side}_memcpy_s": median(t) for side, t in times.items()}

    def raw_gloo(self, plan) -> float:
        """Seconds for the plan's bytes by plain send and recv, a chunk at a time."""
        group = self.groups[2]
        tp = self.destination.tp
        if self._flat is None:
            # As large as what travels: no cache holds it.
            self._flat = torch.ones(int(plan.bytes_to.sum()), dtype=torch.uint8)
        began = self.together()
        for r in range(self.destination.num_ranks):
            for s in self.trainers:
                size = int(plan.bytes_to[s, r % tp])
                for at in range(0, size, CHUNK):
                    part = self._flat[at : at + min(CHUNK, size - at)]
                    if self.world.rank == s:
                        dist.send(part, self.generators[r], group=group, tag=100)
                    elif self.world.rank == self.generators[r]:
                        dist.recv(part, s, group=group, tag=100)
        return self.latest(time.monotonic() - began)

    # -- what others do

    def _gather(
        self, shards: dict[str, Tensor], name: str, shape: tuple[int, ...]
    ) -> Tensor | None:
        """The whole tensor on rank 0, in the generator's dtype."""
        mine = shards[name].to(self.dtype)
        if len(self.trainers) == 1:
            return mine
        rows = -(-shape[0] // self.source.fsdp)
        padded = torch.nn.functional.pad(
            mine, (0, 0) * (mine.dim() - 1) + (0, rows - mine.shape[0])
        )
        parts = [torch.empty_like(padded) for _ in self.trainers] if self.world.rank == 0 else None
        dist.gather(padded, parts, dst=0, group=self.trainer_group)
        return torch.cat(parts)[: shape[0]] if parts else None

    def baselines(self, folder: Path) -> dict:
        from safetensors.torch import load_file, save_file

        self.trainer_group = dist.new_group(self.trainers)
        spread = dist.new_group([0, *self.generators])
        shards, live = {}, {}
        if self.trains:
            shards = {
                n: self._shard(s, self._source_box(n, s, self.world.rank)).data
                for n, s in self.shapes.items()
            }
        else:
            t = (self.world.rank - len(self.trainers)) % self.destination.tp
            boxes = {
                n: tensor_parallel_box(self.config, n, s, t, self.destination.tp)
                for n, s in self.shapes.items()
            }
            live = {n: torch.zeros(b.lengths, dtype=self.dtype) for n, b in boxes.items()}
        broadcast, disk = [], []
        for _ in range(1 + min(self.repeats, 3)):
            began = self.together()
            for name, shape in self.shapes.items():
                whole = (
                    self._gather(shards, name, shape)
                    if self.trains
                    else torch.empty(shape, dtype=self.dtype)
                )
                if self.world.rank == 0 or not self.trains:
                    dist.broadcast(whole, 0, group=spread)
                if not self.trains:
                    live[name].copy_(whole[boxes[name].within(Box.whole(shape))])
            broadcast.append(self.latest(time.monotonic() - began))
            file, began = folder / "model.safetensors", self.together()
            if self.trains:
                whole = {
                    name: self._gather(shards, name, shape) for name, shape in self.shapes.items()
                }
                if self.world.rank == 0:
                    save_file({n: w.contiguous() for n, w in whole.items()}, file)
                    with file.open("rb") as written:
                        os.fsync(written.fileno())
            dist.barrier()
            if not self.trains:
                for name, whole in load_file(file).items():
                    live[name].copy_(whole[boxes[name].within(Box.whole(whole.shape))])
            disk.append(self.latest(time.monotonic() - began))
        return {"broadcast_s": median(broadcast[1:]), "disk_s": median(disk[1:])}


def median(values: list[float]) -> float:
    return statistics.median(values[WARM_UP:] if len(values) > WARM_UP + 1 else values)


def run_rank(model: str, topology: str, transports: list[str], repeats: int, folder: Path) -> None:
    rank = Rank(model, topology, repeats)
    on_gpu = rank.device.type == "cuda"
    results = {t: rank.sync(t) for t in transports}
    first = results[transports[0]]
    limits = rank.memcpy(first["shard_bytes"])
    if not on_gpu:
        limits |= rank.baselines(folder)
    if rank.world.rank == 0:
        (folder / "result.json").write_text(json.dumps({"transports": results, "limits": limits}))
    dist.barrier()
    rank.control.close()


def run_case(model: str, topology: str, transports: list[str], repeats: int) -> dict:
    """Start the ranks of one case and return what they measured. RuntimeError with the output of
    one that failed.
    """
    source, destination = TOPOLOGIES[topology]
    size = source.num_ranks + destination.num_ranks
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        env = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(size),
            "OMP_NUM_THREADS": "1",
        }
        env |= {"LOCAL_WORLD_SIZE": str(size)}
        command = [
            sys.executable,
            __file__,
            "--rank-of",
            model,
            topology,
            ",".join(transports),
            str(repeats),
            folder,
        ]
        ranks = [
            subprocess.Popen(
                command,
                env={**env, "RANK": str(r), "LOCAL_RANK": str(r)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for r in range(size)
        ]
        outputs = [p.communicate(timeout=1200)[0].decode() for p in ranks]
        if any(p.returncode for p in ranks):
            raise RuntimeError("\n".join(outputs))
        return json.loads((Path(folder) / "result.json").read_text())


def report(model: str, topology: str, case: dict) -> list[dict]:
    limits, rows = case["limits"], []
    two_copies = limits["trainer_memcpy_s"] + limits["generator_memcpy_s"]
    for transport, r in case["transports"].items():
        of_limit = r.get("of_raw_gloo", two_copies / r["seconds"])
        row = {
            "model": model,
            "topology": topology,
            "transport": transport,
            "seconds": r["seconds"],
            "gb_per_s": r["bytes"] / r["seconds"] / 1e9,
            "of_limit": of_limit,
            "trainer_stall": r["trainer_stall_s"] / limits["trainer_memcpy_s"],
            "generator_stall": r["generator_stall_s"] / limits["generator_memcpy_s"],
        }
        if "disk_s" in limits:
            row |= {
                "x_broadcast": limits["broadcast_s"] / r["seconds"],
                "x_disk": limits["disk_s"] / r["seconds"],
            }
        rows.append(row)
        text = (
            f"{model:<13} {topology:<21} {transport:<9} {r['seconds'] * 1e3:8.1f} ms "
            f"{row['gb_per_s']:6.2f} GB/s  {row['of_limit']:5.0%} of limit  "
            f"stalls {row['trainer_stall']:4.2f} / {row['generator_stall']:4.2f} memcpy"
        )
        if "disk_s" in limits:
            text += f"  {row['x_broadcast']:5.1f}x broadcast  {row['x_disk']:5.1f}x disk"
        print(text, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--models", default="8b,8b-fp8" if cuda else "smollm2-bf16,smollm2-fp32,1b")
    parser.add_argument(
        "--topologies", default="1 -> 1" if cuda else "1 -> 1,fsdp 2 -> tp 2,fsdp 2 -> 2 replicas"
    )
    parser.add_argument("--transports", default="cuda_ipc" if cuda else "shm,gloo")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--rank-of", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        model, topology, transports, repeats, folder = given.rank_of
        run_rank(model, topology, transports.split(","), int(repeats), Path(folder))
        return
    rows = []
    cases = {}
    on = machine()
    print(f"{on}")
    for model in given.models.split(","):
        for topology in given.topologies.split(","):
            case = run_case(model, topology, given.transports.split(","), given.repeats)
            cases[f"{model}, {topology}"] = case
            rows += report(model, topology, case)
    if given.json:
        result = {"machine": on, "repeats": given.repeats, "rows": rows, "cases": cases}
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
