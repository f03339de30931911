"""What grows with the number of ranks, and how: the frame, a mesh, the ledger.

    python benchmarks/growth.py [--steps 40] [--json benchmarks/results/growth.json]
    python benchmarks/growth.py --page benchmarks/results/growth.json

    frame     benchmarks/machinery.py with 2, 8, 32 and 64 ranks of fakes: completions/s, control
              messages, CPU, memory, and what their start takes
    mesh      placement, process groups, plan and FSDP2 of one rank of up to 1,024, on torch's
              `fake` backend: what is computed for so many ranks, without them
    ledger    the real ledger behind its service, asked by up to 1,000 simulated generators:
              decisions/s, where a decision is an answer to an ask, a group noted as finished, or a
              batch taken

The second form writes growth.md and growth.png beside a file of results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from running import ROOT, as_paragraph, machine

RANKS = (2, 8, 32, 64)
MESHES = (8, 64, 512, 1024)
GENERATORS = (10, 100, 1000)
STEPS = 20  # of the ledger
ROOM = 4  # groups that a generator asks for at once
MESH_RANK = 3


# --- The frame ---


def frame(num_ranks: int, steps: int) -> dict:
    """Return a row of benchmarks/machinery.py, which forks its ranks: in a process of its own."""
    words = ["benchmarks/machinery.py", "--ranks", num_ranks, "--steps", steps, "--json"]
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# --- A mesh ---


def mesh(size: int) -> dict:
    """Return the seconds that one rank of so many takes for what depends on their number."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from llamarl.comm.groups import RankInfo, World, executor_group
    from llamarl.config.command_line import RL, compose_config
    from llamarl.config.placement import placement_of
    from llamarl.ddma.layout import Destination, Source, parameters_to_send
    from llamarl.ddma.plan import make_plan
    from llamarl.models.config import read_config, tiny_directory
    from llamarl.models.loading import training_decoder

    new_group = c10d.new_group

    def fake_group(ranks=None, timeout=None, backend=None, **more):
        return new_group(ranks, timeout, backend="fake", **more)

    cpu = torch.device("cpu")
    path = tiny_directory()
    overrides = ["+dry_run=true", f"+ranks={size}", f"groups_per_step={size}"]
    config = compose_config(overrides, RL)
    c10d.new_group = dist.new_group = fake_group
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=MESH_RANK, world_size=size)
        infos = tuple(RankInfo(rank=rank, host="here", gpu=None) for rank in range(size))
        world = World(rank=MESH_RANK, size=size, device=cpu, infos=infos)
        began = time.monotonic()
        placement = placement_of(config, size)
        group = executor_group("trainer", placement["trainer"], world, timeout_s=1.0)
        of_groups = time.monotonic()
        training_decoder(path, mesh=group.data_mesh(), device=cpu, compute_dtype=torch.float32)
        of_fsdp = time.monotonic()
        model = read_config(path)
        source = Source(len(placement["trainer"]))
        destination = Destination(replicas=len(placement["generator"]))
        plan = make_plan(model, parameters_to_send(model, torch.float32), source, destination)
        for part in range(destination.parts):
            plan.regions(MESH_RANK, part)
        plan.feeders(MESH_RANK)
        of_plan = time.monotonic()
        dist.destroy_process_group()
    finally:
        c10d.new_group = dist.new_group = new_group
    return {
        "ranks": size,
        "groups_s": round(of_groups - began, 4),
        "fsdp_s": round(of_fsdp - of_groups, 4),
        "plan_s": round(of_plan - of_fsdp, 4),
    }


# --- The ledger ---


def ledger(num_generators: int) -> dict:
    """Return the decisions a second of the ledger for so many generators, each of which holds the
    newest weights and has room for ROOM groups at every turn, and for a trainer rank with a pool of
    its own for every two of them.
    """
    sys.path.insert(0, str(ROOT))
    from llamarl.tickets.ledger import TicketLedger
    from llamarl.tickets.service import TicketService
    from tests.simulated_mail import SimulatedMail

    groups = ROOM * num_generators
    num_trainers = num_generators // 2
    the_ledger = TicketLedger(
        groups_per_step=groups,
        max_lag=2,
        overcommit=groups,
        num_pools=num_trainers,
        num_generators=num_generators,
    )
    world: list[SimulatedMail] = []
    for rank in range(num_trainers + num_generators):
        world.append(SimulatedMail(rank, world, lambda: None))
    ranks = tuple(range(num_trainers))
    services = []
    for mail in world:
        services.append(TicketService(the_ledger, mail, trainer_ranks=ranks, timeout_s=60.0))
    trainers = services[:num_trainers]
    decisions = 0
    began = time.process_time()
    for step in range(STEPS):
        started: list[int] = []
        for generator, service in enumerate(services[num_trainers:]):
            tickets = service.ask(generator, ROOM, step)
            decisions += 1
            started += [ticket.index for ticket in tickets]
        for ticket in started:
            trainers[ticket % num_trainers].finish([ticket])
            decisions += 1
        taken = [trainer.take(step) for trainer in trainers]
        decisions += 1
        assert sum(map(len, taken)) == groups, "all that a step needs has finished"
    seconds = time.process_time() - began
    return {
        "generators": num_generators,
        "trainers": num_trainers,
        "groups_per_step": groups,
        "decisions_per_s": round(decisions / seconds),
        "us_per_decision": round(1e6 * seconds / decisions, 1),
    }


def measure_apart(kind: str, number: int) -> dict:
    """Measure in a process of its own, so that none finds what another has kept."""
    done = subprocess.run(
        [sys.executable, __file__, "--only", kind, str(number)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"{kind} {number}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# --- The page ---


def draw(found: dict, file: Path) -> None:
    """Draw how the frame grows: control messages and CPU a step, the start's CPU, and memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = found["frame"]
    ranks = [row["ranks"] for row in rows]
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.6))
    panels = (
        ("control messages a step", "messages_per_step"),
        ("CPU a step over all ranks, s", "cpu_s_per_step"),
        ("CPU of the start over all ranks, s", "start_cpu_s"),
        ("memory of its own a rank, MB", "memory_mb"),
    )
    for axis, (title, key) in zip(axes, panels):
        values = [row[key] for row in rows]
        axis.plot(ranks, values, "o-", label="measured")
        if key != "memory_mb":
            linear = [values[-1] * number / ranks[-1] for number in ranks]
            axis.plot(ranks, linear, "--", color="grey", label="in proportion to ranks")
            axis.set_yscale("log")
            axis.legend(fontsize=8)
        else:
            axis.set_ylim(0, 1.3 * max(values))
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, [str(number) for number in ranks])
        axis.set_xlabel("ranks")
        axis.set_title(title, fontsize=10)
    figure.suptitle(title_of(found))
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def table(rows: list[dict], columns: dict[str, str]) -> str:
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [f"{row[key]:,}" for key in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def growth_of(rows: list[dict], key: str) -> tuple[float, float]:
    """Return how many times more ranks the last row has than the one of 8, and how many times more
    of this.
    """
    first = next(row for row in rows if row["ranks"] == 8)
    last = rows[-1]
    return last["ranks"] / first["ranks"], last[key] / first[key]


def title_of(found: dict) -> str:
    """Return what the figure shows, in a sentence."""
    ranks, messages = growth_of(found["frame"], "messages_per_step")
    _, cpu = growth_of(found["frame"], "cpu_s_per_step")
    leader = found["frame"][-1]["leader_cpu_share"]
    return (
        f"From 8 ranks to {8 * ranks:.0f}, {ranks:.0f} times as many: {messages:.1f} times the "
        f"control messages, {cpu:.1f} times the CPU; the leader takes {leader:.0%} of a core"
    )


PAGE = """# What grows with the number of ranks

{machine}. Made by `benchmarks/growth.py`; `growth.json` has the rows.

![control messages, CPU and memory over the number of ranks](growth.png)

## The frame

{frame_text}

{frame}

## The start

{start_text}

{start}

## A mesh of 512 ranks

{mesh_text}

{mesh}

## The ledger

{ledger_text}

{ledger}
"""


def page(found: dict) -> str:
    on = found["machine"]
    smallest, largest = found["frame"][0], found["frame"][-1]
    ranks, messages = growth_of(found["frame"], "messages_per_step")
    _, cpu = growth_of(found["frame"], "cpu_s_per_step")
    store_ms = 1e3 * largest["store_cpu_s_per_step"]
    each = largest["messages_per_step"] / largest["ranks"]
    frame_text = (
        f"Fakes in place of executors (`benchmarks/machinery.py`), {found['steps']} steps of 512 "
        "completions of 16 tokens for any number of ranks, all on one machine: half the ranks "
        "train, each with the whole model of a few KB, half generate, and the last one scores. So "
        "what grows is the frame's: tickets, channels, weights, control, and processes that share "
        f"{on['cores']} cores. From 8 to {largest['ranks']} ranks, {ranks:.0f} times as many, "
        f"control messages grow {messages:.1f} times ({each:.1f} a rank and step at last) and CPU "
        f"{cpu:.1f} times. The leader takes {largest['leader_cpu_share']:.0%} of a core, and the "
        f"launcher's store {store_ms:.1f} ms of CPU a step. A rank has {largest['memory_mb']:.0f} "
        "MB for itself, beside what it shares with the process that it was forked from; with "
        f"{smallest['ranks']} ranks it is {smallest['memory_mb']:.0f} MB. "
        "Completions/s fall because every rank makes its own step on the same cores."
    )
    _, start_s = growth_of(found["frame"], "start_s")
    _, start_cpu = growth_of(found["frame"], "start_cpu_s")
    _, sockets = growth_of(found["frame"], "sockets")
    start_text = (
        f"From the first line of a rank's program to its first turn, {largest['ranks']} ranks take "
        f"{largest['start_s']:.1f} s, {start_s:.1f} times as long as 8, and "
        f"{largest['start_cpu_s']:.1f} s of CPU over all ranks, {start_cpu:.1f} times as much. "
        "gloo connects the ranks of an executor with each other, those of a channel with whom they "
        "send to, and no others: "
        f"a rank has {largest['sockets']:.0f} sockets, {sockets:.1f} times as many as with 8 "
        "ranks, "
        f"so all together have {ranks * sockets:.0f} times as many. Imports are not in these "
        "figures, since the ranks are forked from a process that has them; ranks that share "
        "cores import one after another. "
        "Nor are questions to a name server: these processes look names of hosts up in files "
        "alone. torch's store asks for the name of the other end at both ends of every connection, "
        "of which a rank makes three. Where many ranks start at once, this machine's name server "
        "leaves some of the questions unanswered, each of which holds the rank, or the one thread "
        "of the store and so all ranks, up for 5 s. `docs/scaling.md` says what helps."
    )
    mesh_text = (
        "One rank of so many in one process, on torch's `fake` backend: the process groups of its "
        "executor, FSDP2 around the tiny model on the trainer's mesh with its weights read, and "
        "the plan of the weights to as many generators as trainers. Seconds. "
        "`tests/unit/test_mesh_of_512.py` checks what each holds."
    )
    busiest = found["ledger"][-1]
    ledger_text = (
        "The real ledger behind its service, in one process: an answer to a generator's ask for "
        f"{ROOM} groups, a group noted as finished, or a batch taken is a decision. With "
        f"{busiest['generators']:,} generators and {busiest['trainers']} trainer ranks with a pool "
        f"each it makes {busiest['decisions_per_s']:,} decisions a second of one core, "
        f"{busiest['us_per_decision']} µs each."
    )
    frame_columns = {
        "ranks": "ranks",
        "completions_per_s": "completions/s",
        "messages_per_step": "messages a step",
        "leader_messages_per_step": "the leader's",
        "leader_cpu_share": "its core",
        "cpu_s_per_step": "CPU s a step",
        "store_cpu_s_per_step": "store's",
        "memory_mb": "MB a rank",
        "threads": "threads",
    }
    start_columns = {
        "ranks": "ranks",
        "start_s": "start, s",
        "start_cpu_s": "CPU s over all ranks",
        "sockets": "sockets a rank",
    }
    mesh_columns = {"ranks": "ranks", "groups_s": "groups", "fsdp_s": "FSDP2", "plan_s": "plan"}
    ledger_columns = {
        "generators": "generators",
        "trainers": "trainer ranks",
        "groups_per_step": "groups a step",
        "decisions_per_s": "decisions/s",
        "us_per_decision": "µs a decision",
    }
    name = f"{on['cpu']}, {on['cores']} cores, Python {on['python']}, torch {on['torch']}"
    return PAGE.format(
        machine=name,
        frame_text=as_paragraph(frame_text),
        frame=table(found["frame"], frame_columns),
        start_text=as_paragraph(start_text),
        start=table(found["frame"], start_columns),
        mesh_text=as_paragraph(mesh_text),
        mesh=table(found["mesh"], mesh_columns),
        ledger_text=as_paragraph(ledger_text),
        ledger=table(found["ledger"], ledger_columns),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--meshes", default=",".join(map(str, MESHES)), help="ranks of each")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="a file of results")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.page:
        found = json.loads(args.page.read_text())
        draw(found, args.page.with_suffix(".png"))
        args.page.with_suffix(".md").write_text(page(found))
        return
    if args.only:
        kind, number = args.only
        print(json.dumps({"mesh": mesh, "ledger": ledger}[kind](int(number))))
        return
    found = {"benchmark": "growth", "machine": machine(), "steps": args.steps}
    found["frame"] = [frame(number, args.steps) for number in map(int, args.ranks.split(","))]
    found["mesh"] = [measure_apart("mesh", number) for number in map(int, args.meshes.split(","))]
    found["ledger"] = [measure_apart("ledger", number) for number in GENERATORS]
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
