"""SupervisedTrainer: trains a decoder on examples that it holds. It needs no other executor, so it
is a graph of its own.

loop step   consumes                  waits for
evaluate    the held-out examples     the other trainer ranks
train       the examples of step v    the other trainer ranks
checkpoint  -                         -
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from executors.trainer import AdamSettings
from llamarl.evaluation.greedy import HeldOutCompletions
from llamarl.executor import Executor
from llamarl.learning.optim import build_optimizer, settle_moments
from llamarl.learning.supervised import (
    ExampleOrder,
    Objective,
    SupervisedSettings,
    SupervisedUpdate,
)
from llamarl.models.fsdp import held_box, whole_parameters
from llamarl.models.hf import export, named_parameters_hf
from llamarl.models.scorer import scorer_fields, settle_pad_token
from llamarl.models.sharded_state import (
    Shard,
    load_shards,
    set_steps,
    steps_of,
)
from llamarl.models.sharding import Box, num_parameters, parameter_shapes
from llamarl.models.training import training_decoder

_SAVED_AS = {"weights": "model/", "moments": ""}  # prefixes, see llamarl.models.sharded_state


@dataclass(kw_only=True, eq=False, repr=False)
class SupervisedTrainer(Executor):
    """Version v is the number of updates in the weights.

    order: the order of the examples. held_out: the examples that are measured if
    evaluate_at(version). score_seed: train a scorer, and draw its head from this seed unless the
    model has one; None: train a language model. replicate: copies of the model, each sharded over
    an equal share of the ranks. make_held_out: makes, on each rank, what completes held-out prompts
    at every evaluation; None: nothing does. ends_run: whether a mean reward of these completions
    ends the run; called once at each evaluation, on every rank.
    """

    name = "trainer"
    leads = True

    model_path: str
    model_dtype: str
    compute_dtype: str
    score_seed: int | None
    replicate: int
    activation_checkpointing: bool
    cpu_offload: bool
    objective: Objective
    examples: Sequence
    held_out: Sequence
    order: ExampleOrder
    settings: SupervisedSettings
    adam: AdamSettings
    evaluate_at: Callable[[int], bool]
    checkpoint_at: Callable[[int], bool]
    make_held_out: Callable[[], HeldOutCompletions] | None = None
    ends_run: Callable[[float], bool] = lambda reward: False

    def __post_init__(self):
        self.version = 0
        self.done = False
        self._evaluated = -1  # the newest version that was evaluated
        self._completions: HeldOutCompletions | None = None
        self._reward: float | None = None  # completions' mean reward, if it was measured
        self._is_good_enough = False

    def setup(self) -> None:
        """Load the decoder, and make what trains it. Collective over the ranks."""
        self.decoder = training_decoder(
            self.model_path,
            mesh=self.group.data_mesh(),
            device=self.group.device,
            compute_dtype=getattr(torch, self.compute_dtype),
            activation_checkpointing=self.activation_checkpointing,
            cpu_offload=self.cpu_offload,
            score_seed=self.score_seed,
        )
        # Listed now, because after a forward FSDP shows its root's gathered parameters.
        self._parameters = list(named_parameters_hf(self.decoder))
        self._shards = [
            Shard(name, p, held_box(self.decoder, name, p)) for name, p in self._parameters
        ]
        self.optimizer = build_optimizer(
            [p for _, p in self._parameters],
            lr=self.settings.lr,
            **dataclasses.asdict(self.adam),
        )
        self._update = SupervisedUpdate(
            self.decoder,
            self.optimizer,
            self.objective,
            self.settings,
            group=self.group.process_group if self.group.size > 1 else None,
            device=self.group.device,
        )
        if self.make_held_out is not None:
            self._completions = self.make_held_out()

    def step(self) -> bool:
        """Evaluate, or make one update on the next examples, or save and end. Return whether
        anything was done.
        """
        if self.done:
            return False
        stopping = self._update.ranks.any(self.control.stopping)
        if not stopping and self._is_to_evaluate():
            self._report(self._evaluation())
        is_last = self.version >= self.settings.max_steps or self._is_good_enough
        if stopping or is_last:
            self.checkpoints.save(self.version, self, is_last=True)
            self.done = True
            return True
        self._train()
        return True

    def waiting_for(self) -> str | None:
        """Return None, because it holds its examples."""
        return None  # it holds its examples, so it never waits

    def _is_to_evaluate(self) -> bool:
        """Whether to evaluate before the first step. Later versions are evaluated with the step
        that made them.
        """
        return self.version == 0 and self._evaluated < 0 and self.evaluate_at(0)

    def _evaluation(self) -> dict[str, float | None]:
        """Collective: return the columns about held-out examples under this version."""
        self._evaluated = self.version
        columns = self._update.evaluate(self._share(self.held_out))
        if self._completions is not None:
            columns |= self._completed(self._completions)
        return columns

    def _completed(self, completions: HeldOutCompletions) -> dict[str, float | None]:
        """Collective: return the columns about held-out completions under this version. Each rank's
        own engine makes a share of them.
        """
        with whole_parameters(self.decoder, self._parameters) as whole:
            completions.take(whole, self.version)
        own = completions.ask(self._share(range(len(self.held_out))))
        total = self._update.ranks.sum(**dataclasses.asdict(own))
        reward = total["score"] / total["scored"]
        self._take_reward(reward)
        columns: dict[str, float | None] = {
            "eval/reward": reward,
            "eval/length_mean": total["tokens"] / total["prompts"],
        }
        if not total["graded"]:
            columns["eval/accuracy"] = reward
        if total["scored"] < total["prompts"]:
            columns["eval/left_out"] = total["prompts"] - total["scored"]
        return columns

    def _take_reward(self, reward: float) -> None:
        self._reward = reward
        self._is_good_enough = self.ends_run(reward)

    def teardown(self) -> None:
        """Close what completes held-out prompts, if there is anything."""
        if self._completions is not None:
            self._completions.close()

    def _train(self) -> None:
        began = time.monotonic()
        numbers = self.order.of_step(self.version)
        examples = [self.examples[number] for number in self._share(numbers)]
        row = self._update.run(examples, self.version)
        trained = time.monotonic()
        self.version += 1
        self._reward = None
        columns: dict[str, float | None] = {
            **row,
            "examples/trained": len(numbers),
            "time/step_s": trained - began,
            "trainer/tokens_per_s": row["tokens/trained"] / (trained - began),
        }
        if self.evaluate_at(self.version):
            columns |= self._evaluation()
        self._report(columns)
        is_last = self.version >= self.settings.max_steps or self._is_good_enough
        if self.checkpoint_at(self.version) and not is_last:
            self.checkpoints.save(self.version, self)

    def _share(self, items: Sequence) -> Sequence:
        """Return this rank's share of a sequence that all ranks work on."""
        return items[self.group.index :: self.group.size]

    def _report(self, columns: dict[str, float | None]) -> None:
        if self.group.index == 0:
            self.metrics.report(self.version, columns)

    # --- Checkpoints ---

    def state_dict(self) -> dict:
        """Return this rank's shard: weights (float32) and Adam's moments, and which part of the
        model they are. The version determines which examples come next.

        If several ranks hold the same tensor, only the first of them stores it.
        """
        state: dict = {
            "boxes": {},
            "version": self.version,
            "adam_step": steps_of(self.optimizer),
        }
        if self._reward is not None:
            state["reward"] = self._reward
        if self.group.replica > 0:
            return state
        for shard in self._shards:
            state["boxes"][shard.name] = [shard.box.offsets, shard.box.lengths]
            state |= shard.state(self.optimizer, **_SAVED_AS)
        return state

    @torch.no_grad()
    def load_state_dict(self, parts: Iterable[Mapping]) -> None:
        """Load from all saved parts, however many ranks saved them. ValueError if they belong to a
        model of other shapes.
        """
        parts = list(parts)
        steps = 0.0
        reward: float | None = None
        for part in parts:
            self.version = int(part["version"])
            steps = max(steps, float(part["adam_step"]))
            reward = part.get("reward")
        shapes = parameter_shapes(self.decoder.config)
        load_shards(self._shards, parts, shapes=shapes, take=self._load_shard)
        settle_moments(self.optimizer)
        set_steps(self.optimizer, [p for _, p in self._parameters], steps)
        self._evaluated = self.version
        if reward is not None and self._completions is not None:
            self._take_reward(float(reward))

    def _load_shard(self, shard: Shard, part: Mapping, theirs: Box) -> None:
        shard.load(part, theirs, self.optimizer, **_SAVED_AS)

    @property
    def export_bytes(self) -> int:
        """Return about how many bytes `export` writes."""
        element_bytes = getattr(torch, self.model_dtype).itemsize
        return num_parameters(self.decoder.config) * element_bytes

    def export(self, out: str | None) -> None:
        """Collective over the first replica: write the model as a Hugging Face directory. Rank 0
        writes, one whole tensor at a time; nothing if out is None. OSError or SafetensorError from
        the disk, raised once all tensors are gathered.
        """
        if self.group.replica > 0:
            return
        config = self.decoder.config
        with whole_parameters(self.decoder, self._parameters) as whole:
            if out is not None and self.group.index == 0:
                fields = scorer_fields(config, self.model_path) if config.labels else None
                dtype = getattr(torch, self.model_dtype)
                export(whole, self.model_path, out, dtype=dtype, fields=fields)
                if config.labels:
                    settle_pad_token(out)
