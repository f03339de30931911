"""python -m llamarl.ddma plan --model DIR_OR_CONFIG --source fsdp=4,replicate=1,tp=1 --destination
tp=2,replicas=2

Prints how weights would travel: bytes per rank and per link, against the floor. Needs a
config.json, no weights and no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from llamarl.ddma.layout import Destination, Parameter, Source, parameters_to_send
from llamarl.ddma.plan import Plan, make_plan
from llamarl.models.config import ModelConfig, read_config
from llamarl.models.sharding import num_parameters

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
MOST_ROWS = 16  # of a printed table


def topology(kind: type, text: str) -> Source | Destination:
    """Source(fsdp=4, tp=2) of "fsdp=4,tp=2". ValueError names what is wrong."""
    known = [f.name for f in dataclasses.fields(kind)]
    values = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in known or not value.isdigit() or int(value) < 1:
            wanted = ",".join(f"{name}=N" for name in known)
            raise ValueError(f"{part!r}: need {wanted}, each N at least 1 (left out: 1)")
        values[key] = int(value)
    return kind(**values)


@dataclasses.dataclass(frozen=True)
class Account:
    """Bytes of one sync: what each rank sends and receives, against the floor."""

    sent: np.ndarray  # [sources], by trainer ranks
    forwarded: np.ndarray  # [destinations], by generator ranks to the replica after them
    received: np.ndarray  # [destinations]
    source_floor: int  # each root's bytes once, spread evenly over the trainer's ranks
    receive_floor: int  # the largest shard, once

    @property
    def busiest(self) -> int:
        return int(max(self.sent.max(), self.received.max(), self.forwarded.max()))

    @property
    def floor(self) -> int:
        return max(self.source_floor, self.receive_floor)

    @property
    def ratio(self) -> float:
        return self.busiest / self.floor


def account(plan: Plan) -> Account:
    """Count a plan's bytes rank by rank."""
    fed = np.array([len(plan.feeds(s)) for s in range(plan.source.num_ranks)])
    received = np.tile(plan.shard_bytes, plan.destination.replicas)
    forwards = [plan.follower(d) is not None for d in range(plan.destination.num_ranks)]
    total = int(plan.shard_bytes.sum()) * plan.roots
    return Account(
        sent=plan.bytes_to.sum(1) * fed,
        forwarded=np.where(forwards, received, 0),
        received=received,
        source_floor=-(-total // plan.source.num_ranks),
        receive_floor=int(plan.shard_bytes.max()),
    )


def why(plan: Plan) -> str:
    """Who feeds the replicas, and the reason."""
    replicas = plan.destination.replicas
    tp = plan.destination.tp
    ranks = plan.source.num_ranks
    if plan.roots < replicas:
        return (
            f"chain: {plan.roots} of {replicas} replicas pull from the trainer and forward each "
            "bucket to the next. All pulling would have each trainer rank send "
            f"{replicas * tp / ranks:.1f} shards' worth; in a chain no link carries more than one "
            "shard, and a tree's inner ranks would send two"
        )
    if replicas * tp <= ranks or replicas == 1:
        return (
            f"direct: all {replicas} replica(s) pull from the trainer, whose {ranks} rank(s) then "
            f"send no more each than one of their {tp} rank(s) takes in"
        )
    return f"direct: all {replicas} replicas pull from the trainer, as asked"


def links(plan: Plan) -> list[dict[str, object]]:
    """Every link that carries something: {"from": "trainer 0", "to": "generator 3", "bytes": n}."""
    out = []
    tp = plan.destination.tp
    for s in range(plan.source.num_ranks):
        for replica in plan.feeds(s):
            for t, num_bytes in enumerate(plan.bytes_to[s].tolist()):
                if num_bytes:
                    out.append(_link(f"trainer {s}", replica * tp + t, num_bytes))
    for d in range(plan.destination.num_ranks):
        after = plan.follower(d)
        if after is not None:
            out.append(_link(f"generator {d}", after, int(plan.shard_bytes[d % tp])))
    return out


def _link(sender: str, generator: int, num_bytes: int) -> dict[str, object]:
    return {"from": sender, "to": f"generator {generator}", "bytes": num_bytes}


def show(plan: Plan, config: ModelConfig) -> None:
    """Print a plan for people."""
    counted = account(plan)
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160
    console.print(
        f"{num_parameters(config):,} parameters, "
        f"{plan.num_bytes // plan.destination.replicas:,} bytes a replica, "
        f"{plan.num_bytes:,} bytes a sync"
    )
    console.print(f"{_words(plan.source)} -> {_words(plan.destination)}")
    console.print(why(plan))
    console.print(_table_of_ranks(counted))
    console.print(_table_of_links(links(plan)))
    console.print(
        f"busiest rank {counted.busiest:,} bytes, floor {counted.floor:,}, "
        f"ratio {counted.ratio:.3f}"
    )


def _table_of_ranks(counted: Account) -> Table:
    forwarding = counted.forwarded[counted.forwarded > 0]
    rows = [
        ("trainer, sends", counted.sent, counted.source_floor),
        ("generator, receives", counted.received, counted.receive_floor),
        ("generator, forwards", forwarding, counted.receive_floor),
    ]
    table = Table("ranks", "bytes each", "all", "floor", "ratio", box=None, pad_edge=False)
    for does, values, floor in rows:
        if len(values):
            ratio = f"{values.max() / floor:.3f}"
            name = f"{does} ({len(values)})"
            table.add_row(name, _spread(values), f"{values.sum():,}", f"{floor:,}", ratio)
    return table


def _table_of_links(all_links: list[dict[str, object]]) -> Table:
    table = Table("link", "bytes", box=None, pad_edge=False)
    if len(all_links) > MOST_ROWS:
        spread = _spread(np.array([link["bytes"] for link in all_links]))
        table.add_row(f"{len(all_links)} links (--json lists them)", spread)
        return table
    for link in all_links:
        table.add_row(f"{link['from']} -> {link['to']}", f"{link['bytes']:,}")
    return table


def _words(topology: Source | Destination) -> str:
    side = "trainer" if isinstance(topology, Source) else "generator"
    parts = [f"{key} {value}" for key, value in dataclasses.asdict(topology).items()]
    return f"{side} {' x '.join(parts)}"


def _spread(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{high:,}" if low == high else f"{low:,} .. {high:,}"


def _parameters(config: ModelConfig, dtype: str) -> list[Parameter]:
    if DTYPES[dtype].itemsize == 1:
        return parameters_to_send(config, torch.bfloat16, DTYPES[dtype])
    return parameters_to_send(config, DTYPES[dtype])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m llamarl.ddma",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("plan", help="print how weights would travel")
    p.add_argument("--model", required=True, help="a Hugging Face directory, or its config.json")
    p.add_argument("--source", default="fsdp=1", help="fsdp=N,replicate=R,tp=T")
    p.add_argument("--destination", default="tp=1", help="tp=M,replicas=K")
    p.add_argument(
        "--dtype",
        default="bfloat16",
        choices=DTYPES,
        help="float8 and int8: of the projections, the rest in bfloat16",
    )
    p.add_argument(
        "--feed", default="auto", choices=("auto", "direct", "chain"), help="who feeds the replicas"
    )
    p.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        config = read_config(given.model)
        source = topology(Source, given.source)
        destination = topology(Destination, given.destination)
        plan = make_plan(
            config, _parameters(config, given.dtype), source, destination, feed=given.feed
        )
    except (FileNotFoundError, ValueError) as error:
        print(f"llamarl.ddma: {error}", file=sys.stderr)
        return 2
    if not given.json:
        show(plan, config)
        return 0
    counted = account(plan)
    report = {
        "source": dataclasses.asdict(source),
        "destination": dataclasses.asdict(destination),
        "dtype": given.dtype,
        "bytes_per_sync": plan.num_bytes,
        "roots": plan.roots,
        "feed": why(plan),
        "floor": counted.floor,
        "busiest": counted.busiest,
        "ratio": counted.ratio,
        "sent": counted.sent.tolist(),
        "forwarded": counted.forwarded.tolist(),
        "received": counted.received.tolist(),
        "links": links(plan),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
