"""What the frame alone costs: completions a second through tickets, channels, ledger, weights and
loop, with fakes for executors.

    torchrun --standalone --nproc-per-node=2 benchmarks/machinery.py [--steps 40] [--json]
    python benchmarks/machinery.py --ranks 2,8,32,64 [--steps 40] [--json]

The generator makes 16-token completions out of nothing, the reward gives each 1, the trainer takes
its batch and publishes a "model" of a few KB. Bound to beat: 2,000 completions/s on 2 cores.

With --ranks the program starts ranks itself, so many at a time, placed as a job's are by default:
trainers first (each with the whole model), then generators, and the reward on the last rank. A step
has 512 completions for any number of ranks, so that what grows is the frame's. The ranks are forked
from one process that has imported everything: their memory is what a rank has for itself.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch
import torch.distributed as dist

from llamarl import controller as controller_module
from llamarl.comm.channel import Gather, Scatter
from llamarl.comm.control import Control
from llamarl.comm.groups import init_world
from llamarl.controller import ExecutorController, RunLimits
from llamarl.ddma.channel import Weights
from llamarl.executor import Executor
from llamarl.models.config import ModelConfig
from llamarl.models.sharding import parameter_shapes
from llamarl.observe import RowWriter
from llamarl.tickets.ledger import TicketLedger
from llamarl.types import Completion, Group, Outcome, Policy

GROUPS = 64  # a step
SIZE = 8  # completions a group
LENGTH = 16  # tokens a completion
BOUND = 2000.0  # completions/s to beat
TIMEOUT_S = 200.0

SMALL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    attention_bias=False,
)


def model() -> torch.nn.ParameterDict:
    """Weights of a few KB, under Hugging Face names."""
    held = {
        n.replace(".", "/"): torch.nn.Parameter(torch.zeros(s), requires_grad=False)
        for n, s in parameter_shapes(SMALL).items()
    }
    return torch.nn.ParameterDict(held)


def named(held: torch.nn.ParameterDict) -> list[tuple[str, torch.nn.Parameter]]:
    return [(n.replace("/", "."), p) for n, p in held.items()]


class FakeGenerator(Executor):
    name = "generator"

    def __init__(self, room=GROUPS):
        self.room = room  # groups that it asks for at once

    def setup(self):
        self.model = model()
        self.inputs.of(Policy).bind(SMALL, named(self.model))
        self.version, self.sampled = -1, 0
        self.share = self.group.data_index

    def step(self):
        if taken := self.inputs.of(Policy).swap():
            self.version = taken.version
        if self.version < 0 or not self.outputs.of(Completion).has_room():
            return False
        tickets = self.tickets.ask(self.share, self.room, self.version)
        ids = torch.arange(LENGTH)
        for ticket in tickets:
            for i in range(SIZE):
                fresh = Completion(
                    ticket=ticket.index,
                    sample_index=i,
                    prompt_ids=ids[:4],
                    token_ids=ids,
                    generator_logprobs=torch.zeros(LENGTH),
                    policy_versions=torch.full((LENGTH,), self.version),
                    finish_reason="stop",
                )
                self.outputs.of(Completion).put(fresh)
        return bool(tickets)


class FakeReward(Executor):
    name = "reward"

    def setup(self):
        self.begun: dict[int, list[Outcome]] = {}

    def step(self):
        completions = self.inputs.of(Completion).take()
        for c in completions:
            group = self.begun.setdefault(c.ticket, [])
            group.append((c, Outcome.score(1.0)))
            if len(group) == SIZE:
                self.outputs.of(Group).put(Group.of(self.begun.pop(c.ticket)))
        return bool(completions)


class FakeTrainer(Executor):
    name = "trainer"
    leads = True

    def __init__(self, steps, replicate=1):
        self.version = 0
        self.steps = steps
        self.replicate = replicate
        self.done = False
        self.groups: dict[int, Group] = {}
        self.began = 0.0
        self.began_cpu_s = 0.0

    def setup(self):
        self.model = model()
        self.weights = self.outputs.of(Policy)
        self.weights.bind(SMALL, named(self.model))
        self.weights.publish(0, evaluate=False, must_differ=False)

    def step(self):
        groups = self.inputs.of(Group).take()
        self.groups |= {g.ticket: g for g in groups}
        if groups:
            self.tickets.finish([g.ticket for g in groups])
        if self.version == self.steps:
            self.done = True
            return False
        taken = self.tickets.take(self.version, waited=not groups)
        if taken is None:
            return bool(groups)
        if not self.began:
            self.began = time.monotonic()
            self.began_cpu_s = time.process_time()
        for ticket in taken:
            assert self.groups.pop(ticket).lengths.numel() == SIZE
        self.version += 1
        with torch.no_grad():
            torch._foreach_add_(list(self.model.values()), 1.0)
        self.weights.publish(self.version, evaluate=False, must_differ=True)
        if self.group.index == 0:
            self.metrics.report(self.version, {"loss/value": 0.0, "policy_version": self.version})
        self.ended = time.monotonic()
        self.ended_cpu_s = time.process_time()
        return True


@dataclass(frozen=True)
class Measured:
    """What a rank measured. Seconds and completions of the leader alone: from its first step to its
    last; 0 on other ranks.
    """

    start_s: float  # from the first line of its program to its first turn
    start_cpu_s: float  # of its processor, from there to there
    sockets: int  # open at its first turn: gloo's to other ranks, and those to the store
    cpu_s: float  # of its processor, from its first turn to its end
    messages: int  # control messages to other ranks
    memory_bytes: int  # that no other process shares
    threads: int
    completions_per_s: float
    cpu_share: float  # of a core, of the leader's process


class Counted(Control):
    """A control that counts what it sends to other ranks."""

    sent = 0

    def post(self, rank, topic, payload):
        Counted.sent += rank != self.rank
        super().post(rank, topic, payload)


def private_bytes() -> int:
    """Bytes of this process's memory that no other shares."""
    found = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_"):
            found += int(line.split()[1]) * 1024
    return found


def open_sockets() -> int:
    """Sockets that this process has open."""
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(file).startswith("socket:")
        except FileNotFoundError:
            pass  # that by which the folder was read
    return found


def run_rank(steps: int) -> Measured:
    """Run this process's rank of a job of fakes, on as many ranks as its launcher started."""
    begun = time.monotonic()
    begun_cpu_s = time.process_time()
    world = init_world(threads=1, timeout_s=TIMEOUT_S, reproducible=True)
    num_trainers = max(1, world.size // 2)
    placement = {
        "trainer": tuple(range(num_trainers)),
        "generator": tuple(range(num_trainers, world.size)) or (0,),
        "reward": (world.size - 1,),
    }
    num_generators = len(placement["generator"])
    generator = FakeGenerator(room=-(-GROUPS // num_generators))
    reward = FakeReward()
    trainer = FakeTrainer(steps, replicate=num_trainers)
    ledger = TicketLedger(
        groups_per_step=GROUPS,
        max_lag=2,
        overcommit=2 * GROUPS,
        num_pools=num_trainers,
        num_generators=num_generators,
    )
    controller_module.Control = Counted
    first_turn: list[float] = []
    sockets: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        controller = ExecutorController(
            executors=[generator, reward, trainer],
            channels=[
                Gather(generator, reward, carries=Completion),
                Scatter(reward, trainer, carries=Group),
                Weights(trainer, generator),
            ],
            placement=placement,
            ledger=ledger,
            world=world,
            settings=RunLimits(
                run_dir=Path(folder),
                resume_from=None,
                keep_checkpoints=1,
                timeout_s=TIMEOUT_S,
                heartbeat_timeout_s=60.0,
                stop_s=10.0,
                trace=False,
            ),
            make_writer=lambda: RowWriter(folder, [], eval_due=lambda step: False, first_step=1),
        )
        connect = controller.connect

        def connect_and_note():
            connect()
            first_turn.extend([time.monotonic(), time.process_time()])
            sockets.append(open_sockets())

        controller.connect = connect_and_note
        controller.run()
    rate = 0.0
    share = 0.0
    if world.rank == 0:
        seconds = trainer.ended - trainer.began
        rate = (steps - 1) * GROUPS * SIZE / seconds
        share = (trainer.ended_cpu_s - trainer.began_cpu_s) / seconds
    return Measured(
        start_s=first_turn[0] - begun,
        start_cpu_s=first_turn[1] - begun_cpu_s,
        sockets=sockets[0],
        cpu_s=time.process_time() - first_turn[1],
        messages=Counted.sent,
        memory_bytes=private_bytes(),
        threads=len(os.listdir("/proc/self/task")),
        completions_per_s=rate,
        cpu_share=share,
    )


# --- Many ranks ---


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def fork(work) -> int:
    """Call work() in a process of its own; its number."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def ask_no_name_server() -> None:
    """Have this process, and those that it forks, find hosts in /etc/hosts alone.

    torch's store asks for the name of both ends of every connection, and a name server that leaves
    a question out of many unanswered holds the whole start up for 5 s: that is no figure of ours.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is None:
        return  # not glibc
    if configure(b"hosts", b"files") != 0:
        raise OSError("glibc does not take hosts from files alone")


def serve_store(port: int, serves: int) -> None:
    """Be the launcher's store, as an agent of torchrun is, until killed. serves: a pipe that is
    written to once it listens.
    """
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    os.write(serves, b".")
    while store is not None:
        signal.pause()


def measure(num_ranks: int, steps: int) -> dict:
    """Run a job of fakes on so many ranks, and return what they measured."""
    ask_no_name_server()
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:

        def work_as(rank: int) -> None:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            measured = run_rank(steps)
            (Path(folder) / str(rank)).write_text(json.dumps(asdict(measured)))

        heard, serves = os.pipe()
        store = fork(lambda: serve_store(port, serves))
        os.read(heard, 1)
        running = [fork(lambda rank=rank: work_as(rank)) for rank in range(num_ranks)]
        failed = 0
        try:
            while running:
                pid, status = os.waitpid(-1, 0)
                running.remove(pid)  # ValueError for the store's, which should not end
                failed += status != 0
        finally:
            for pid in [*running, store]:
                os.kill(pid, signal.SIGKILL)
                usage = os.wait4(pid, 0)[2]  # at last of the store
        if failed:
            raise RuntimeError(f"{num_ranks} ranks: {failed} of them failed, see above")
        found = [json.loads((Path(folder) / str(r)).read_text()) for r in range(num_ranks)]
    leader = found[0]
    return {
        "ranks": num_ranks,
        "completions_per_s": round(leader["completions_per_s"]),
        "messages_per_step": round(sum(one["messages"] for one in found) / steps, 1),
        "leader_messages_per_step": round(leader["messages"] / steps, 1),
        "leader_cpu_share": round(leader["cpu_share"], 3),
        "cpu_s_per_step": round(sum(one["cpu_s"] for one in found) / steps, 4),
        "leader_cpu_s_per_step": round(leader["cpu_s"] / steps, 4),
        "memory_mb": round(sum(one["memory_bytes"] for one in found) / num_ranks / 1e6, 1),
        "leader_memory_mb": round(leader["memory_bytes"] / 1e6, 1),
        "threads": round(sum(one["threads"] for one in found) / num_ranks, 1),
        "store_cpu_s_per_step": round((usage.ru_utime + usage.ru_stime) / steps, 4),
        "start_s": round(max(one["start_s"] for one in found), 2),
        "start_cpu_s": round(sum(one["start_cpu_s"] for one in found), 2),
        "sockets": round(sum(one["sockets"] for one in found) / num_ranks, 1),
    }


def show(row: dict) -> str:
    return (
        f"{row['ranks']:>4} ranks: {row['completions_per_s']:>7,} completions/s, "
        f"{row['messages_per_step']:>6.1f} control messages a step, the leader's share of a core "
        f"{row['leader_cpu_share']:.0%}, {row['cpu_s_per_step']:.3f} s of CPU a step over all "
        f"ranks, {row['memory_mb']:.0f} MB and {row['threads']:.0f} threads a rank, start "
        f"{row['start_s']:.1f} s ({row['start_cpu_s']:.1f} s of CPU over all ranks, "
        f"{row['sockets']:.0f} sockets a rank)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", help="numbers of ranks to start, such as 2,8,32,64")
    args = parser.parse_args()
    if args.ranks:
        for num_ranks in map(int, args.ranks.split(",")):
            row = measure(num_ranks, args.steps)
            print(json.dumps(row) if args.json else show(row), flush=True)
        return
    measured = run_rank(args.steps)
    if int(os.environ.get("RANK", 0)) == 0:
        size = int(os.environ.get("WORLD_SIZE", 1))
        rate = measured.completions_per_s
        result = {
            "benchmark": "machinery",
            "ranks": size,
            "completions_per_s": round(rate),
            "bound": BOUND,
            "ratio": round(rate / BOUND, 2),
            "torch": torch.__version__,
        }
        text = (
            f"{rate:,.0f} completions/s on {size} rank(s), {rate / BOUND:.1f} x the "
            f"bound of {BOUND:,.0f}"
        )
        print(json.dumps(result) if args.json else text)


if __name__ == "__main__":
    main()
