"""What the frame alone costs: completions a second through tickets, channels, ledger, weights and
loop, with fakes for executors.

    torchrun --standalone --nproc-per-node=2 benchmarks/machinery.py [--steps 40] [--json]

The generator makes 16-token completions out of nothing, the reward gives each 1, the trainer takes
its batch and publishes a "model" of a few KB. Bound to beat: 2,000 completions/s on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch

from llamarl.comm.channel import Gather, Scatter
from llamarl.comm.groups import init_world
from llamarl.controller import ExecutorController, RunSettings
from llamarl.ddma.channel import Weights
from llamarl.executor import Executor
from llamarl.models.config import ModelConfig
from llamarl.models.sharding import parameter_shapes
from llamarl.observe import RowWriter
from llamarl.tickets.ledger import TicketLedger
from llamarl.types import Completion, Group, Policy, ScoredCompletion

GROUPS = 64  # a step
SIZE = 8  # completions a group
LENGTH = 16  # tokens a completion
BOUND = 2000.0  # completions/s to beat

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

    def setup(self):
        self.model = model()
        self.inputs.of(Policy).bind(SMALL, named(self.model))
        self.version, self.sampled = -1, 0

    def step(self):
        if taken := self.inputs.of(Policy).swap():
            self.version = taken.version
        if self.version < 0 or not self.outputs.of(Completion).has_room():
            return False
        tickets = self.tickets.ask(0, GROUPS, self.version)
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
        self.begun: dict[int, list[ScoredCompletion]] = {}

    def step(self):
        completions = self.inputs.of(Completion).take()
        for c in completions:
            group = self.begun.setdefault(c.ticket, [])
            group.append(ScoredCompletion(c, "score", 1.0, ""))
            if len(group) == SIZE:
                self.outputs.of(Group).put(Group.of(self.begun.pop(c.ticket)))
        return bool(completions)


class FakeTrainer(Executor):
    name = "trainer"
    leads = True

    def __init__(self, steps):
        self.version = 0
        self.steps = steps
        self.done = False
        self.groups: dict[int, Group] = {}
        self.began = 0.0

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
        self.began = self.began or time.monotonic()
        for ticket in taken:
            assert self.groups.pop(ticket).lengths.numel() == SIZE
        self.version += 1
        with torch.no_grad():
            torch._foreach_add_(list(self.model.values()), 1.0)
        self.weights.publish(self.version, evaluate=False, must_differ=True)
        self.metrics.report(self.version, {"loss/value": 0.0, "policy_version": self.version})
        self.ended = time.monotonic()
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    world = init_world(threads=1, timeout_s=60, reproducible=True)
    generator = FakeGenerator()
    reward = FakeReward()
    trainer = FakeTrainer(args.steps)
    last = world.size - 1
    with tempfile.TemporaryDirectory() as folder:
        ExecutorController(
            executors=[generator, reward, trainer],
            channels=[
                Gather(generator, reward, carries=Completion),
                Scatter(reward, trainer, carries=Group),
                Weights(trainer, generator),
            ],
            placement={"trainer": (0,), "generator": (last,), "reward": (last,)},
            ledger=TicketLedger(groups_per_step=GROUPS, max_lag=2, overcommit=2 * GROUPS),
            world=world,
            settings=RunSettings(
                run_dir=Path(folder),
                resume_from=None,
                keep_checkpoints=1,
                timeout_s=60.0,
                heartbeat_timeout_s=30.0,
                stop_s=10.0,
            ),
            make_writer=lambda: RowWriter(folder, [], eval_due=lambda step: False, first_step=1),
        ).run()
        if world.rank == 0:
            rate = (args.steps - 1) * GROUPS * SIZE / (trainer.ended - trainer.began)
            result = {
                "benchmark": "machinery",
                "ranks": world.size,
                "completions_per_s": round(rate),
                "bound": BOUND,
                "ratio": round(rate / BOUND, 2),
                "torch": torch.__version__,
            }
            text = (
                f"{rate:,.0f} completions/s on {world.size} rank(s), {rate / BOUND:.1f} x the "
                f"bound of {BOUND:,.0f}"
            )
            print(json.dumps(result) if args.json else text)


if __name__ == "__main__":
    main()
