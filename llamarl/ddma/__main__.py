"""Print how weights would travel: bytes per rank and per link, against the floor.

    python -m llamarl.ddma plan --model DIR_OR_CONFIG --source fsdp=4,replicate=1,tp=1
                                --destination tp=2,replicas=2

Needs a config.json, no weights and no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

import torch
from rich.console import Console
from rich.table import Table

from llamarl.ddma.layout import Destination, Source, parameters_to_send
from llamarl.ddma.plan import TransferPlan, make_plan
from llamarl.models.config import ModelConfig, read_config
from llamarl.models.sharding import num_parameters

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
MOST_ROWS = 16  # of a printed table


def sizes_of(known: tuple[str, ...], text: str) -> dict[str, int]:
    """Returns {"fsdp": 4, "replicate": 1, "tp": 2} of "fsdp=4,tp=2". ValueError names what is
    wrong.
    """
    values = dict.fromkeys(known, 1)
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in known or not value.isdigit() or int(value) < 1:
            wanted = ",".join(f"{name}=N" for name in known)
            raise ValueError(f"{part!r}: need {wanted}, each N at least 1 (left out: 1)")
        values[key] = int(value)
    return values


def report(plan: TransferPlan) -> dict:
    """Return a plan's bytes by rank and link, and the least that any plan could do with, as JSON
    values.

    source_floor: each root's bytes once, spread evenly over the trainer's ranks. receive_floor: the
    largest shard, once. links: those that carry something, {"from", "to", "bytes"}.
    """
    num_sources = plan.source.num_ranks
    tp = plan.destination.tp
    shards = plan.shard_bytes.tolist()
    sent = [0] * num_sources
    forwarded = [0] * plan.destination.num_ranks
    links = []
    for s in range(num_sources):
        for replica in plan.feeds(s):
            first = replica * tp
            for d, num_bytes in enumerate(plan.bytes_to[s].tolist(), first):
                sent[s] += num_bytes
                if num_bytes:
                    links.append(_link(f"trainer {s}", d, num_bytes))
    for d in range(plan.destination.num_ranks):
        after = plan.follower(d)
        if after is not None:
            forwarded[d] = shards[d % tp]
            links.append(_link(f"generator {d}", after, forwarded[d]))
    received = shards * plan.destination.replicas
    of_roots = sum(shards) * plan.roots
    source_floor = -(-of_roots // num_sources)
    receive_floor = max(shards)
    floor = max(source_floor, receive_floor)
    busiest = max(sent + received + forwarded)
    return {
        "source": dataclasses.asdict(plan.source),
        "destination": dataclasses.asdict(plan.destination),
        "bytes_per_sync": plan.num_bytes,
        "roots": plan.roots,
        "feed": why(plan),
        "floor": floor,
        "source_floor": source_floor,
        "receive_floor": receive_floor,
        "busiest": busiest,
        "ratio": busiest / floor,
        "sent": sent,
        "forwarded": forwarded,
        "received": received,
        "links": links,
    }


def why(plan: TransferPlan) -> str:
    """Return who feeds the replicas, and the reason."""
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


def _link(sender: str, generator: int, num_bytes: int) -> dict[str, object]:
    return {"from": sender, "to": f"generator {generator}", "bytes": num_bytes}


def show(found: dict, config: ModelConfig) -> None:
    """Print a report for people."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160
    of_sync = found["bytes_per_sync"]
    ranks = Table("ranks", "bytes each", "all", "floor", "ratio", box=None, pad_edge=False)
    sides = {
        "trainer, sends": (found["sent"], found["source_floor"]),
        "generator, receives": (found["received"], found["receive_floor"]),
        "generator, forwards": ([n for n in found["forwarded"] if n], found["receive_floor"]),
    }
    for side, (num_bytes, floor) in sides.items():
        if num_bytes:
            name = f"{side} ({len(num_bytes)})"
            total = f"{sum(num_bytes):,}"
            ratio = f"{max(num_bytes) / floor:.3f}"
            ranks.add_row(name, _spread(num_bytes), total, f"{floor:,}", ratio)
    links = Table("link", "bytes", box=None, pad_edge=False)
    if len(found["links"]) > MOST_ROWS:
        spread = _spread([link["bytes"] for link in found["links"]])
        links.add_row(f"{len(found['links'])} links (--json lists them)", spread)
    else:
        for link in found["links"]:
            ends = f"{link['from']} -> {link['to']}"
            links.add_row(ends, f"{link['bytes']:,}")
    console.print(
        f"{num_parameters(config):,} parameters, "
        f"{of_sync // found['destination']['replicas']:,} bytes a replica, "
        f"{of_sync:,} bytes a sync"
    )
    source = _words(found["source"])
    destination = _words(found["destination"])
    console.print(f"trainer {source} -> generator {destination}")
    console.print(found["feed"])
    console.print(ranks)
    console.print(links)
    console.print(
        f"busiest rank {found['busiest']:,} bytes, floor {found['floor']:,}, "
        f"ratio {found['ratio']:.3f}"
    )


def _words(topology: dict[str, int]) -> str:
    return " x ".join(f"{key} {value}" for key, value in topology.items())


def _spread(values: list[int]) -> str:
    low = min(values)
    high = max(values)
    if low == high:
        return f"{high:,}"
    return f"{low:,} .. {high:,}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
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
    dtype = DTYPES[given.dtype]
    quantized = None
    if dtype.itemsize == 1:
        quantized = dtype
        dtype = torch.bfloat16
    try:
        config = read_config(given.model)
        source = Source(**sizes_of(("fsdp", "replicate", "tp"), given.source))
        held = sizes_of(("tp", "replicas", "fsdp"), given.destination)
        destination = Destination(tp=held["tp"], replicas=held["replicas"], fsdp=held["fsdp"])
        parameters = parameters_to_send(config, dtype, quantized)
        plan = make_plan(config, parameters, source, destination, feed=given.feed)
    except (FileNotFoundError, ValueError) as error:
        print(f"llamarl.ddma: {error}", file=sys.stderr)
        return 2
    found = report(plan)
    if given.json:
        print(json.dumps({"dtype": given.dtype} | found))
    else:
        show(found, config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
