"""What overcommit and its governors buy under a heavy tail: seconds a step and mean lag.

    python benchmarks/overcommit.py [--steps 60] [--max-lag 4] [--sigma 1] [--lag-sim FILE]
                                    [--learn 40] [--only 0,auto] [--json FILE]

Tickets, channels and loop are the real ones; executors are fakes on two ranks. A group keeps one of
16 slots busy for a log-normal time (mean 1.6 x a training step), a training step sleeps for
--train-s. A batch is 8 groups, so an ideal step takes as long as training alone, and 16 slots could
make a batch in 0.8 of that. The reward that oppo and window follow is made up: it rises and levels
off, with noise. --only: these values of overcommit, of those measured. --lag-sim: a file with
`simulate(max_lag, overcommit, ...)`, whose prediction is printed beside what was measured: the
median of SEEDS runs as long as the measured one, for a governor at the overcommit that it chose in
the mean. --learn: main jobs of so many steps, one a setting and each on two ranks, for the reward
that the default model reaches (0: none).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch
from running import machine, run_job

from llamarl.comm.channel import Gather, Scatter
from llamarl.comm.groups import init_world
from llamarl.comm.wire import register
from llamarl.controller import ExecutorController, RunLimits
from llamarl.executor import Executor
from llamarl.observe import RowWriter
from llamarl.tickets.governors import Constants
from llamarl.tickets.ledger import TicketLedger
from llamarl.types import Completion, Group, ScoredCompletion

B = 8  # groups a step
SLOTS = 16  # groups at once
MEAN = 1.6  # training steps that a group takes in the mean
WARMUP = 5  # steps left out
SEEDS = 33  # of the prediction: one straggler moves the mean of 60 steps by a tenth
LEARNED = ("0", "8", "auto", "oppo", "window")
HEAD = "overcommit  deadline      step       lag   max    groups     cut  sim step   sim lag"
SETTINGS = [
    (overcommit, False)
    for overcommit in ("0", f"{B // 2}", f"{B}", f"{2 * B}", "auto", "oppo", "window")
]
SETTINGS += [(f"{B // 2}", True), (f"{B}", True)]  # with on_deadline=truncate


@register
@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """Weights without weight."""

    number: torch.Tensor  # [1]


class FakeGenerator(Executor):
    """A ticket keeps a slot busy for its time, which is a function of the ticket, and makes one
    token.
    """

    name, poll_s = "generator", 0.002

    def __init__(self, mean_s: float, sigma: float):
        self.mean_s = mean_s
        self.sigma = sigma
        self.version = -1
        self.waiting: deque[int] = deque()  # granted, without a slot
        self.ends: dict[
            int, tuple[float, int]
        ] = {}  # ticket -> when it ends, the version that began it

    def step(self) -> bool:
        arrived = self.inputs.of(Version).take()
        self.version = max([self.version, *(int(v.number) for v in arrived)])
        if self.version < 0:
            return False
        ordered = set(self.tickets.to_truncate())
        room = SLOTS - len(self.ends) - len(self.waiting)
        granted = self.tickets.ask(0, room, self.version) if room > 0 else self.tickets.granted()
        self.waiting += [ticket.index for ticket in granted]
        now = time.monotonic()
        while self.waiting and len(self.ends) < SLOTS:
            ticket = self.waiting.popleft()
            seconds = self.mean_s * random.Random(ticket).lognormvariate(
                -(self.sigma**2) / 2, self.sigma
            )
            self.ends[ticket] = now + seconds, self.version
        done = [t for t, (end, _) in self.ends.items() if end <= now or t in ordered]
        for ticket in done:
            end, version = self.ends.pop(ticket)
            self.outputs.of(Group).put(group(ticket, version, "stop" if end <= now else "aborted"))
        return bool(done or granted or arrived)


def group(ticket: int, version: int, reason: str) -> Group:
    one = torch.ones(1, dtype=torch.int64)
    sampled = Completion(
        ticket=ticket,
        sample_index=0,
        prompt_ids=one,
        token_ids=one,
        generator_logprobs=torch.zeros(1),
        policy_versions=one * version,
        finish_reason=reason,
    )
    return Group.of([ScoredCompletion(sampled, "score", 1.0, "")])


class FakeTrainer(Executor):
    """Sleeps through its steps and notes when each began, and how old what it trained on was."""

    name = "trainer"
    leads = True
    poll_s = 0.002

    def __init__(self, steps: int, train_s: float):
        self.version = 0
        self.steps = steps
        self.train_s = train_s
        self.done = False
        self.groups: dict[int, Group] = {}
        self.rewards, self.waits_since = random.Random(0), time.monotonic()
        self.began: list[float] = []
        self.lags: list[list[int]] = []
        self.cut: list[int] = []
        self.overcommit: list[int] = []

    def setup(self) -> None:
        self.publish()

    def publish(self) -> None:
        self.outputs.of(Version).put(Version(torch.tensor([self.version])))

    def step(self) -> bool:
        arrived = self.inputs.of(Group).take()
        self.groups |= {g.ticket: g for g in arrived}
        if arrived:
            self.tickets.finish([g.ticket for g in arrived])
        if self.version == self.steps:
            self.done = True
            return False
        taken = self.tickets.take(
            self.version, waited=time.monotonic() - self.waits_since > 0.1 * self.train_s
        )
        if taken is None:
            return bool(arrived)
        batch = [self.groups.pop(ticket) for ticket in taken]
        self.began.append(time.monotonic())
        self.lags.append([self.version - g.oldest_version for g in batch])
        self.cut.append(sum(g.finish_reasons == ("aborted",) for g in batch))
        time.sleep(self.train_s)
        self.version += 1
        self.tickets.trained(
            1 - math.exp(-3 * self.version / self.steps) + self.rewards.gauss(0, 0.02)
        )
        self.overcommit.append(self.tickets.overcommit)
        self.publish()
        self.metrics.report(self.version, {"loss/value": 0.0, "policy_version": self.version})
        self.waits_since = time.monotonic()
        return True


def run_one(args: argparse.Namespace) -> None:
    """On each of two ranks: one setting; the trainer's rank writes what it measured to --json."""
    world = init_world(threads=1, timeout_s=120, reproducible=True)
    generator, trainer = (
        FakeGenerator(MEAN * args.train_s, args.sigma),
        FakeTrainer(args.steps, args.train_s),
    )
    overcommit = int(args.one) if args.one.isdigit() else args.one
    with tempfile.TemporaryDirectory() as folder:
        ExecutorController(
            executors=[generator, trainer],
            channels=[
                Scatter(generator, trainer, carries=Group),
                Gather(trainer, generator, carries=Version),
            ],
            placement={"trainer": (0,), "generator": (world.size - 1,)},
            ledger=TicketLedger(
                groups_per_step=B,
                max_lag=args.max_lag,
                overcommit=overcommit,
                constants=Constants(window=args.window),
            ),
            world=world,
            settings=RunLimits(
                run_dir=Path(folder),
                resume_from=None,
                keep_checkpoints=1,
                timeout_s=120.0,
                heartbeat_timeout_s=30.0,
                stop_s=10.0,
                truncate=args.truncate,
                straggler_factor=1e9,
            ),
            make_writer=lambda: RowWriter(folder, [], eval_due=lambda step: False, first_step=1),
        ).run()
    if world.rank == 0:
        lags = list(itertools.chain.from_iterable(trainer.lags[WARMUP:]))
        measured = {
            "step_s": (trainer.began[-1] - trainer.began[WARMUP])
            / (len(trainer.began) - 1 - WARMUP),
            "lag_mean": statistics.fmean(lags),
            "lag_max": max(lags),
            "cut_fraction": sum(trainer.cut[WARMUP:]) / len(lags),
            "overcommit_mean": statistics.fmean(trainer.overcommit[WARMUP:]),
            "overcommit_last": trainer.overcommit[-1],
        }
        args.json.write_text(json.dumps(measured))


def measure(args: argparse.Namespace, overcommit: str, truncate: bool, out: Path) -> dict:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        __file__,
        "--one",
        overcommit,
        "--steps",
        str(args.steps),
        "--train-s",
        str(args.train_s),
        "--sigma",
        str(args.sigma),
        "--max-lag",
        str(args.max_lag),
        "--window",
        str(args.window),
        "--json",
        str(out),
        *["--truncate"] * truncate,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"overcommit={overcommit} failed:\n"
            + "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        )
    return json.loads(out.read_text())


def learn(args: argparse.Namespace, overcommit: str, folder: Path) -> dict:
    """A main job of the default model: the reward of its last ten steps, and what that cost."""
    settings = [
        f"max_steps={args.learn}",
        f"max_lag={args.max_lag}",
        f"overcommit={overcommit}",
        f"governor.window={args.window}",
    ]
    rows = run_job(
        folder / overcommit, [*settings, f"eval.every={args.learn}", "checkpoint.every=0", "seed=0"]
    )
    steps = [row for row in rows if row["step"] > 0]
    return {
        "overcommit": overcommit,
        "reward_last": statistics.fmean(row["reward/mean"] for row in steps[-10:]),
        "accuracy": steps[-1]["eval/accuracy"],
        "step_s": statistics.median(row["time/step_s"] for row in steps[WARMUP:]),
        "lag_mean": statistics.fmean(row["lag/mean"] for row in steps[WARMUP:]),
        "overcommit_mean": statistics.fmean(row["tickets/overcommit"] for row in steps[WARMUP:]),
    }


def predictor(file: Path | None):
    """simulate() of a file; None, saying so, if there is none."""
    if file is None or not file.is_file():
        reason = f"{file} does not exist" if file else "none was asked for (--lag-sim FILE)"
        print(
            f"no prediction: {reason}",
            file=sys.stderr,
        )
        return None
    spec = importlib.util.spec_from_file_location("lag_sim", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.simulate


def show(row: dict, train_s: float) -> str:
    predicted = (
        f"{row['predicted_step']:9.2f} {row['predicted_lag']:9.2f}"
        if "predicted_step" in row
        else f"{'-':>9} {'-':>9}"
    )
    return (
        f"{row['overcommit']:>10} {'truncate' if row['truncate'] else 'wait':>9} "
        f"{row['step_s'] / train_s:9.2f} {row['lag_mean']:9.2f} {row['lag_max']:5d} "
        f"{row['overcommit_mean']:9.1f} {row['cut_fraction']:7.1%} {predicted}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--train-s", type=float, default=0.1)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log of a group's time")
    parser.add_argument("--max-lag", type=int, default=4)
    parser.add_argument("--window", type=int, default=5, help="governor.window, steps")
    parser.add_argument("--lag-sim", type=Path)
    parser.add_argument(
        "--learn", type=int, default=40, help="steps of a main job, one a setting; 0: none"
    )
    parser.add_argument("--only", help="values of overcommit, in place of all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--truncate", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(args)
        return
    settings = SETTINGS
    if args.only:
        wanted = args.only.split(",")
        known = list(dict.fromkeys(overcommit for overcommit, _ in SETTINGS))
        if unknown := set(wanted) - set(known):
            parser.error(f"--only {','.join(sorted(unknown))}: need some of {', '.join(known)}")
        settings = [setting for setting in SETTINGS if setting[0] in wanted]
    simulate, rows = predictor(args.lag_sim), []
    print(
        f"B {B}, max_lag {args.max_lag}, sigma {args.sigma:g}, {args.steps} steps; "
        f"step: in training steps of {args.train_s:g} s"
    )
    print(HEAD)
    with tempfile.TemporaryDirectory() as folder:
        for overcommit, truncate in settings:
            measured = measure(args, overcommit, truncate, Path(folder) / "measured.json")
            row = {"overcommit": overcommit, "truncate": truncate, **measured}
            if simulate and not truncate:
                sizes = {
                    "B": B,
                    "slots": SLOTS,
                    "mean_s": MEAN,
                    "sigma": args.sigma,
                    "steps": args.steps,
                }
                groups = round(row["overcommit_mean"])
                runs = [simulate(args.max_lag, groups, **sizes, seed=seed) for seed in range(SEEDS)]
                steps = sorted(step for step, *_ in runs)
                row |= {
                    "predicted_step": statistics.median(steps),
                    "predicted_step_range": [steps[SEEDS // 10], steps[-SEEDS // 10]],
                }
                row["predicted_lag"] = statistics.median(lag for _, lag, _ in runs)
            rows.append(row)
            print(show(row, args.train_s), flush=True)
        learned = [
            learn(args, overcommit, Path(folder)) for overcommit in (LEARNED if args.learn else ())
        ]
    for row in learned:
        print(
            "main job, overcommit {overcommit:>6}: reward {reward_last:.3f}, "
            "held out {accuracy:.3f}, {step_s:.3f} s a step, "
            "lag {lag_mean:.2f}, groups {overcommit_mean:.1f}".format(**row)
        )
    print(f"machine {machine()}")
    if args.json:
        values = {
            name: getattr(args, name) for name in ("max_lag", "sigma", "steps", "train_s", "window")
        }
        result = {
            "benchmark": "overcommit",
            **values,
            "rows": rows,
            "learned_steps": args.learn,
            "learned": learned,
            "machine": machine(),
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
