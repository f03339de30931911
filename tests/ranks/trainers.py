"""Trainers of several ranks on made-up groups, and what they leave in files for a test to read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from executors.trainer import FSDPTrainer
from llamarl.comm.channel import dp_rank_of
from llamarl.executor import ExecutorGroup
from llamarl.models.fsdp import local
from llamarl.types import Group, Policy
from tests.build.group import build_group
from tests.executors.fakes import FakeReceiver

GROUPS = 4  # a step: one for each data-parallel rank at most
MODEL = {  # 23 rows of embeddings and 20 of the feed-forward's: no even split over four ranks
    "vocab_size": 23,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": 64,
}


def group_of(ticket: int) -> Group:
    """A step old, so that parity with made-up logprobs is not asked for."""
    draw = torch.Generator().manual_seed(ticket)
    lengths = torch.randint(1, 9, (4,), generator=draw).tolist()
    rewards = [1.0, 0.0, 0.5, math.nan]
    return build_group(ticket, lengths, rewards, vocab_size=23, version=ticket // GROUPS - 1)


class Peers:
    """Stands for the weights channel, metrics, control and tickets. Holds what generators would
    have been sent, and what was reported.
    """

    stopping = ending = False
    bytes_per_sync = overcommit = 0

    def __init__(self):
        self.rows = []
        self.canaries = []
        self.published = {}

    def bind(self, config, parameters, tensor_group) -> None:
        self.config, self.parameters = config, parameters

    def publish(self, version, *, canary, **_) -> float:
        self.canaries.append(canary()["logprobs"])
        self.published = {name: local(p).clone() for name, p in self.parameters}
        return 0.0

    def report(self, step, row) -> None:
        timings = ("time/", "weights/")
        self.rows.append({name: row[name] for name in row if not name.startswith(timings)})

    def reconcile(self, buffered) -> set[int]:
        return set(buffered)

    def trained(self, reward) -> None: ...

    def finish(self, *_) -> None: ...

    def given_back(self) -> list[int]:
        return []

    def yield_row(self) -> dict:
        return {}


def attached(trainer: FSDPTrainer, group: ExecutorGroup) -> Peers:
    """Set a trainer up among peers; returns them."""
    peers = Peers()
    trainer.attach(group, [(Group, FakeReceiver())], [(Policy, peers)], *[peers] * 4)
    trainer.setup()
    return peers


def tickets_of(trainer: FSDPTrainer, step: int) -> list[int]:
    """This rank's share of a step."""
    group = trainer.group
    tickets = range(step * GROUPS, (step + 1) * GROUPS)
    return [t for t in tickets if dp_rank_of(t, group.data_size) == group.data_index]


def learn(trainer: FSDPTrainer, step: int) -> None:
    tickets = tickets_of(trainer, step)
    trainer.buffer.put([group_of(ticket) for ticket in tickets])
    trainer._train(tickets)


def leave(tensors: dict[str, torch.Tensor], stem: Path | str, **values) -> None:
    """Write tensors, and JSON beside them."""
    copies = {name: value.clone().contiguous() for name, value in tensors.items()}
    save_file(copies, f"{stem}.safetensors")
    Path(f"{stem}.json").write_text(json.dumps(values))


def save_state(trainer: FSDPTrainer, stem: Path) -> None:
    state = trainer.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    leave(tensors, stem, **{name: state[name] for name in state.keys() - tensors.keys()})


def load_states(folder: Path, name: str, ranks: int) -> list[dict]:
    states = []
    for rank in range(ranks):
        stem = folder / f"{name}.state.rank{rank}"
        values = json.loads(Path(f"{stem}.json").read_text())
        states.append(values | load_file(f"{stem}.safetensors"))
    return states
