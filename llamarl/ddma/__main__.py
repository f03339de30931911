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

from llamarl.ddma.layout import Destination, Source, parameters_to_send
from llamarl.ddma.plan import Plan, make_plan
from llamarl.models.config import ModelConfig, read_config

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
MOST_ROWS = 16  # of a printed table


def topology(kind: type, text: str) -> Source | Destination:
    """ "fsdp=4,tp=2" -> Source(fsdp=4, tp=2). ValueError that names what is wrong."""
    known = [f.name for f in dataclasses.fields(kind)]
    values = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in known or not value.isdigit() or int(value) < 1:
            raise ValueError(
                f"{part!r}: need {','.join(f'{k}=N' for k in known)}, each N at least 1 (left out: 1)"
            )
        values[key] = int(value)
    return kind(**values)


@dataclasses.dataclass(frozen=True)
class Account:
    """Bytes of one sync: what each rank sends and receives, against the floor."""

    sent: np.ndarray  # [sources], by trainer ranks
    handed_on: np.ndarray  # [destinations], by generator ranks to the replica after them
    received: np.ndarray  # [destinations]
    source_floor: int  # each root's bytes once, spread evenly over the trainer's ranks
    receive_floor: int  # the largest shard, once

    @property
    def busiest(self) -> int:
        return int(max(self.sent.max(), self.received.max(), self.handed_on.max()))

    @property
    def floor(self) -> int:
        return max(self.source_floor, self.receive_floor)

    @property
    def ratio(self) -> float:
        return self.busiest / self.floor


def account(plan: Plan) -> Account:
    """Count a plan's bytes rank by rank."""
    tp, ranks = plan.destination.tp, plan.destination.num_ranks
    fed = np.array([len(plan.feeds(s)) for s in range(plan.source.num_ranks)])
    received = np.tile(plan.shard_bytes, plan.destination.replicas)
    handed_on = np.array([received[d] if plan.follower(d) is not None else 0 for d in range(ranks)])
    total = int(plan.shard_bytes.sum()) * plan.roots
    return Account(
        plan.bytes_to.sum(1) * fed,
        handed_on,
        received,
        -(-total // plan.source.num_ranks),
        int(plan.shard_bytes[:tp].max()),
    )


def why(plan: Plan) -> str:
    """Who feeds the replicas, and the reason."""
    replicas, ranks, tp = plan.destination.replicas, plan.source.num_ranks, plan.destination.tp
    if plan.roots == replicas:
        return (
            f"direct: all {replicas} replica(s) pull from the trainer, whose {ranks} rank(s) then send no more each than one of their "
            f"{tp} rank(s) takes in"
            if replicas * tp <= ranks or replicas == 1
            else f"direct: all {replicas} replicas pull from the trainer, as asked"
        )
    direct = replicas * tp / ranks
    return (
        f"chain: {plan.roots} of {replicas} replicas pull from the trainer and hand each bucket on to the next. All pulling would have "
        f"each trainer rank send {direct:.1f} shards' worth; in a chain no link carries more than one shard, and a tree's inner ranks "
        "would send two"
    )


def links(plan: Plan) -> list[dict[str, object]]:
    """Every link that carries something: {"from": "trainer 0", "to": "generator 3", "bytes": n}."""
    tp, out = plan.destination.tp, []
    for s in range(plan.source.num_ranks):
        row = plan.bytes_to[s].tolist()
        for replica in plan.feeds(s):
            out += [
                {"from": f"trainer {s}", "to": f"generator {replica * tp + t}", "bytes": n}
                for t, n in enumerate(row)
                if n
            ]
    for d in range(plan.destination.num_ranks):
        if (after := plan.follower(d)) is not None:
            out.append(
                {
                    "from": f"generator {d}",
                    "to": f"generator {after}",
                    "bytes": int(plan.shard_bytes[d % tp]),
                }
            )
    return out


def show(plan: Plan, config: ModelConfig) -> None:
    counted, console = account(plan), Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160
    console.print(
        f"{config.num_parameters:,} parameters, {plan.num_bytes // plan.destination.replicas:,} bytes a replica, "
        f"{plan.num_bytes:,} bytes a sync"
    )
    console.print(f"{_words(plan.source)} -> {_words(plan.destination)}")
    console.print(why(plan))
    table = Table("ranks", "bytes each", "all", "floor", "ratio", box=None, pad_edge=False)
    for name, values, floor in (
        (f"trainer, sends ({len(counted.sent)})", counted.sent, counted.source_floor),
        (f"generator, receives ({len(counted.received)})", counted.received, counted.receive_floor),
        (
            f"generator, hands on ({int((counted.handed_on > 0).sum())})",
            counted.handed_on[counted.handed_on > 0],
            counted.receive_floor,
        ),
    ):
        if len(values):
            table.add_row(
                name,
                _spread(values),
                f"{values.sum():,}",
                f"{floor:,}",
                f"{values.max() / floor:.3f}",
            )
    console.print(table)
    all_links = links(plan)
    table = Table("link", "bytes", box=None, pad_edge=False)
    if len(all_links) <= MOST_ROWS:
        for link in all_links:
            table.add_row(f"{link['from']} -> {link['to']}", f"{link['bytes']:,}")
    else:
        table.add_row(
            f"{len(all_links)} links (--json lists them)",
            _spread(np.array([link["bytes"] for link in all_links])),
        )
    console.print(table)
    console.print(
        f"busiest rank {counted.busiest:,} bytes, floor {counted.floor:,}, ratio {counted.ratio:.3f}"
    )


def _words(topology: Source | Destination) -> str:
    return f"{'trainer' if isinstance(topology, Source) else 'generator'} " + " x ".join(
        f"{key} {value}" for key, value in dataclasses.asdict(topology).items()
    )


def _spread(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{high:,}" if low == high else f"{low:,} .. {high:,}"


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
        config, dtype = read_config(given.model), DTYPES[given.dtype]
        source, destination = (
            topology(Source, given.source),
            topology(Destination, given.destination),
        )
        parameters = (
            parameters_to_send(config, torch.bfloat16, dtype)
            if dtype.itemsize == 1
            else parameters_to_send(config, dtype)
        )
        plan = make_plan(config, parameters, source, destination, feed=given.feed)
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
        "handed_on": counted.handed_on.tolist(),
        "received": counted.received.tolist(),
        "links": links(plan),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
