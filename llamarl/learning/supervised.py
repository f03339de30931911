"""Supervised training of a decoder over ranks: packed microbatches, one update a step.

    examples of step v     a function of (seed, v) alone, whatever the number of ranks
      -> this rank's share, collated into microbatches of whole examples
      -> forward, backward   the loss is divided by what the whole batch holds
      -> clip, check, AdamW

What an example is, how examples become a batch and what is learned of it is the Objective's
(llamarl.learning.preference). So a step's only state is the weights, the optimizer's moments and
the step's number: a run that goes on from them is the uninterrupted one.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.comm.together import TrainerRanks
from llamarl.errors import NotFinite
from llamarl.learning.collation import collate
from llamarl.learning.optim import clip_grad_norm, lr_at, set_lr
from llamarl.models.attention import PackedAttention
from llamarl.models.build import Decoder
from llamarl.models.fsdp import next_backward
from llamarl.tasks.files import read_jsonl
from llamarl.tasks.list_task import hold_out_prompts
from llamarl.tasks.special import Spelled

Example = TypeVar("Example")
Given = TypeVar("Given", contravariant=True)  # an example, to what is learned
Batch = TypeVar("Batch")

log = logging.getLogger(__name__)

Sums = dict[str, Tensor]  # [] each, over the targets of a microbatch


class RowsToRead(Protocol):
    """Where the rows are, and how they become tokens."""

    @property
    def path(self) -> str: ...

    @property
    def eval_path(self) -> str | None: ...

    @property
    def num_eval(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def drop_long(self) -> bool: ...

    @property
    def chat(self) -> bool: ...

    @property
    def system_prompt(self) -> str | None: ...


class Objective(Protocol[Given, Batch]):
    """What a supervised job learns: a loss over packed examples.

    Targets are what a loss is the mean over: pairs of answers, or tokens.
    """

    def num_tokens(self, example: Given) -> int:
        """Return how many tokens an example takes of a microbatch."""
        ...

    def num_targets(self, example: Given) -> int:
        """Return how much an example counts in the mean."""
        ...

    def pack(self, examples: Sequence[Given], device: torch.device) -> Batch:
        """Pack a microbatch of whole examples. Without any, it trains nothing: a rank with fewer
        than its FSDP peers uses it, because all must run the same number.
        """
        ...

    def loss(self, decoder: Decoder, batch: Batch) -> tuple[Tensor, Sums, PackedAttention]:
        """Return the sum of the loss over the batch's targets [], the sums of what a step's row
        shows, and the attention that was computed with.
        """
        ...

    def measure(self, decoder: Decoder, batch: Batch) -> Sums:
        """Sums over the targets of held-out examples."""
        ...

    def summary(self, sums: Mapping[str, float], num_targets: float) -> dict[str, float | None]:
        """Return the columns of an evaluation, from what `measure` gave for all held-out
        examples.
        """
        ...


@dataclass(frozen=True, slots=True)
class SupervisedData(Generic[Example]):
    """Examples to train on and held-out ones. fingerprints: texts that are equal only if the data
    are, by name ("training rows").
    """

    train: Sequence[Example]
    held_out: Sequence[Example]
    fingerprints: dict[str, str]


def read_data(
    task: RowsToRead,
    read: Callable[[str], list[Example]],
    *,
    unit: str,
    prompt_of: Callable[[Example], bytes],
    content_of: Callable[[Example], str],
) -> SupervisedData[Example]:
    """Read task.path, and hold out the first num_eval examples of eval_path; without that, examples
    of `path` itself, one for each held-out prompt.

    read: reads a file. unit: what a message calls examples. prompt_of: a key that is equal for
    equal prompts. content_of: all that is trained on, for the fingerprints.
    """
    examples = read(task.path)
    train = examples
    if task.eval_path:
        held_out = read(task.eval_path)[: task.num_eval]
    else:
        split = hold_out_prompts(map(prompt_of, examples), task.num_eval)
        if task.num_eval:
            split.warn(task.path, len(examples))
        train = [examples[i] for i in split.kept(len(examples))]
        held_out = [examples[i] for i in split.held]
    fingerprints = {}
    for name, part in ((f"training {unit}", train), (f"held-out {unit}", held_out)):
        digest = hashlib.sha256()
        for example in part:
            digest.update(content_of(example).encode())
        fingerprints[name] = digest.hexdigest()
    return SupervisedData(
        train=train,
        held_out=held_out,
        fingerprints=fingerprints,
    )


def read_examples(
    path: str | Path,
    to_example: Callable[[dict], Example | None],
    *,
    spelled: Spelled,
    max_tokens: int,
) -> list[Example]:
    """Read the examples of a file of JSON lines; to_example returns None for a row that is left out
    because it has more than max_tokens. spelled: what the rows' texts were noted in.

    FileNotFoundError, or ValueError naming FILE:LINE of each bad row (the first ten), or if none is
    left.
    """
    examples = read_jsonl(path, to_example)
    spelled.warn(str(path), len(examples))
    kept = [example for example in examples if example is not None]
    if len(kept) < len(examples):
        log.warning(
            "%s: %d of %d rows have more than task.max_tokens=%d tokens and are left out",
            path,
            len(examples) - len(kept),
            len(examples),
            max_tokens,
        )
    if not kept:
        raise ValueError(f"{path}: no row fits task.max_tokens={max_tokens}; raise it")
    return kept


@dataclass(frozen=True, slots=True)
class SupervisedSettings:
    """Plain values of a step."""

    lr: float
    schedule: str
    warmup_steps: int
    max_steps: int
    microbatch_tokens: int
    max_grad_norm: float | None  # None: not clipped


@dataclass(frozen=True, slots=True)
class ExampleOrder:
    """The order of examples: epoch by epoch all of them, in an order drawn anew."""

    num_examples: int
    examples_per_step: int
    epochs: float
    seed: int

    @property
    def num_trained(self) -> int:
        """Examples that all steps together train on, each as often as it is."""
        return max(1, round(self.epochs * self.num_examples))

    @property
    def num_steps(self) -> int:
        """The last one may have fewer examples than the others."""
        return math.ceil(self.num_trained / self.examples_per_step)

    def of_step(self, step: int) -> list[int]:
        """Return the numbers of the examples of a step, from 0."""
        first = step * self.examples_per_step
        end = min(first + self.examples_per_step, self.num_trained)
        numbers = []
        for place in range(first, end):
            epoch, within = divmod(place, self.num_examples)
            numbers.append(_shuffled(self.num_examples, f"{self.seed} {epoch}")[within])
        return numbers


@lru_cache(maxsize=2)
def _shuffled(count: int, seed: str) -> list[int]:
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    return numbers


@dataclass(slots=True)
class _Tally:
    """The sums of a step's microbatches on this rank."""

    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    places: int = 0

    def add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)


class SupervisedUpdate(Generic[Example, Batch]):
    """Makes steps. Collective over `group` (the trainer's ranks), None for a single rank."""

    def __init__(
        self,
        decoder: Decoder,
        optimizer: torch.optim.Optimizer,
        objective: Objective[Example, Batch],
        settings: SupervisedSettings,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ):
        self.decoder = decoder
        self.optimizer = optimizer
        self.objective = objective
        self.settings = settings
        self.ranks = TrainerRanks(group, device, None)
        self._device = device

    def run(self, examples: Sequence[Example], step: int) -> dict[str, float]:
        """Step `step` on this rank's examples, which may be none. Returns the row's columns.

        NotFinite, before anything has changed.
        """
        self.optimizer.zero_grad()
        num_targets = self._num_targets(examples)
        microbatches = self._microbatches(examples)
        tally = _Tally()
        for i, microbatch in enumerate(microbatches, start=1):
            next_backward(self.decoder, last=i == len(microbatches))
            batch = self.objective.pack(microbatch, self._device)
            loss, sums, attention = self.objective.loss(self.decoder, batch)
            # FSDP averages gradients over ranks; the denominator is global already.
            (loss * (self.ranks.size / num_targets)).backward()
            tally.loss += float(loss.detach())
            tally.add(sums)
            tally.tokens += sum(map(self.objective.num_tokens, microbatch))
            tally.places += attention.padded_tokens if microbatch else 0
        norm = float(clip_grad_norm(self.decoder.parameters(), self.settings.max_grad_norm))
        total = self.ranks.sum(
            loss=tally.loss,
            tokens=tally.tokens,
            places=tally.places,
        )
        if not (math.isfinite(total["loss"]) and math.isfinite(norm)):
            self.optimizer.zero_grad()
            raise NotFinite(
                f"trainer, step {step}: loss {total['loss']}, gradient norm {norm}; nothing was "
                "changed. Lower lr, or look at the rows of this step"
            )
        s = self.settings
        lr = lr_at(
            step,
            lr=s.lr,
            schedule=s.schedule,
            warmup_steps=s.warmup_steps,
            max_steps=s.max_steps,
        )
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        means = self.ranks.sum(**tally.sums)
        return {
            "loss/value": total["loss"] / num_targets,
            "grad_norm": norm,
            **{name: value / num_targets for name, value in means.items()},
            "tokens/trained": total["tokens"],
            "packing/padding_fraction": 1 - total["tokens"] / max(1.0, total["places"]),
            "targets/trained": num_targets,
            "lr": lr,
        }

    @torch.no_grad()
    def evaluate(self, examples: Sequence[Example]) -> dict[str, float | None]:
        """Collective: the columns of an evaluation of all ranks' held-out examples, of which these
        are this rank's. NotFinite.
        """
        num_targets = self._num_targets(examples)
        next_backward(self.decoder, last=True)
        tally = _Tally()
        for microbatch in self._microbatches(examples):
            batch = self.objective.pack(microbatch, self._device)
            tally.add(self.objective.measure(self.decoder, batch))
        sums = self.ranks.sum(**tally.sums)
        broken = [name for name, value in sums.items() if not math.isfinite(value)]
        if broken:
            raise NotFinite(
                f"trainer, evaluation: {', '.join(broken)} of the held-out rows is not finite; the "
                "weights have diverged. Lower lr and start again"
            )
        return self.objective.summary(sums, num_targets)

    def _num_targets(self, examples: Sequence[Example]) -> float:
        """Collective: of all ranks' examples."""
        own = sum(map(self.objective.num_targets, examples))
        return self.ranks.sum(targets=float(own))["targets"]

    def _microbatches(self, examples: Sequence[Example]) -> list[list[Example]]:
        """Collective: this rank's examples by microbatch, as many on every rank."""
        sizes = [self.objective.num_tokens(example) for example in examples]
        parts = collate(sizes, self.settings.microbatch_tokens)
        most = int(self.ranks.max(parts=float(len(parts)))["parts"])
        parts += [[]] * (most - len(parts))
        microbatches = []
        for part in parts:
            microbatches.append([examples[i] for i in sorted(part)])
        return microbatches
