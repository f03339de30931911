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

from llamarl.evaluation.ask import HeldOutPrompts
from llamarl.evaluation.metrics import GreedySums
from llamarl.executor import Executor
from llamarl.inference.agreement import check_agreement
from llamarl.learning.supervised import (
    ExampleOrder,
    Objective,
    SupervisedSettings,
    SupervisedUpdate,
)
from llamarl.learning.trained_model import TrainedModel, TrainedModelSettings
from llamarl.models.fsdp import whole_parameters


@dataclass(kw_only=True, eq=False, repr=False)
class SupervisedTrainer(Executor):
    """Version v is the number of updates in the weights.

    order: the order of the examples. held_out: the examples that are measured if
    evaluate_at(version). replicate: copies of the model, each sharded over an equal share of the
    ranks. make_held_out: makes, on each rank, what completes held-out prompts
    at every evaluation; None: nothing does. ends_run: whether a mean reward of these completions
    ends the run; called once at each evaluation, on every rank.
    """

    name = "trainer"
    leads = True

    model_settings: TrainedModelSettings
    replicate: int
    objective: Objective
    examples: Sequence
    held_out: Sequence
    order: ExampleOrder
    settings: SupervisedSettings
    evaluate_at: Callable[[int], bool]
    checkpoint_at: Callable[[int], bool]
    make_held_out: Callable[[], HeldOutPrompts] | None = None
    ends_run: Callable[[float], bool] = lambda reward: False

    def __post_init__(self):
        self.version = 0
        self.done = False
        self._evaluated = -1  # the newest version that was evaluated
        self._completions: HeldOutPrompts | None = None
        self._reward: float | None = None  # completions' mean reward, if it was measured
        self._is_good_enough = False

    def setup(self) -> None:
        """Load the model, and make what trains it. Collective over the ranks."""
        self.model = TrainedModel(self.model_settings, self.group, lr=self.settings.lr)
        check_agreement(
            self.model.decoder,
            self.model_settings.path,
            self.group.device,
            getattr(torch, self.model_settings.compute_dtype),
        )
        self._update = SupervisedUpdate(
            self.model.decoder,
            self.model.optimizer,
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

    def _completed(self, completions: HeldOutPrompts) -> dict[str, float]:
        """Collective: return the columns about held-out completions under this version. Each rank's
        own engine makes a share of them.
        """
        with whole_parameters(self.model.decoder, self.model.named_parameters) as whole:
            completions.take(whole, self.version)
        own = GreedySums.of(completions.ask(self._share(range(len(self.held_out)))))
        total = GreedySums(**self._update.ranks.sum(**dataclasses.asdict(own)))
        columns = total.metrics(is_accuracy=not total.graded)
        self._take_reward(columns["eval/reward"])
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
        """Return this rank's part of the model. The version determines which examples come next."""
        state = {"version": self.version, **self.model.state_dict()}
        if self._reward is not None:
            state["reward"] = self._reward
        return state

    def load_state_dict(self, parts: Iterable[Mapping]) -> None:
        """Load from all saved parts, however many ranks saved them. ValueError if they belong to a
        model of other shapes.
        """
        parts = list(parts)
        self.model.load_state_dict(parts)
        self.version = int(parts[0]["version"])
        reward = parts[0].get("reward")
        self._evaluated = self.version
        if reward is not None and self._completions is not None:
            self._take_reward(float(reward))

    @property
    def export_bytes(self) -> int:
        """Return about how many bytes `export` writes."""
        return self.model.export_bytes

    def export(self, out: str | None) -> None:
        """Collective over the first replica: write the model, see TrainedModel.export."""
        self.model.export(out)
