"""ModelReward: rewards of models that score, alone or weighed with other sources.

    completions --> source   --Outcome--> weighted sum --> GroupAssembler --> "scored"
                --> a batch is whole --> model, on all ranks

A reward is the sum of weight times score over its parts; what one part cannot score has none. The
first rank takes all completions, runs the sources and says what the models score next. The others
do nothing but their share of that: a model is sharded over them (FSDP2, tensor parallelism), or
each has a copy.

    loop step    consumes              waits for               unblocked by
    first rank   completions           sources; room           the sources; the trainer
                 a batch of tokens     the others' share       the others
    another      the first's commands  -                       the first rank
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from executors.novelty import NoveltySettings
from executors.reward import Reward
from executors.weighted import ModelQueue, Part, WeightedParts, models_of
from llamarl.comm.lockstep import Lockstep
from llamarl.executor import State
from llamarl.learning.asking import broadcast, from_words, to_words
from llamarl.learning.scoring import Asked
from llamarl.learning.sharded_scorer import ScorerSettings, ShardedScorer
from llamarl.models.fsdp import local


@dataclass(kw_only=True, eq=False, repr=False)
class ModelReward(Reward):
    """The weighted sum of what models, and sources beside them, say of a completion.

    replicate: copies of each model, each sharded over an equal share of the ranks.
    tensor_parallel: ranks, one after another, that share each layer. reproducible: what is computed
    together never depends on what came when.
    """

    # What novelty remembers; without that its history begins anew.
    state_is_optional = True
    state_may_be_absent = True

    parts: Sequence[Part]
    replicate: int = 1
    tensor_parallel: int = 1
    reproducible: bool = False

    @property
    def first_takes(self) -> bool:
        """With a model all ranks act as one; and novelty is one history's."""
        return any(isinstance(part.what, ScorerSettings | NoveltySettings) for part in self.parts)

    @property
    def follows(self) -> bool:
        return self.first_takes and self._lockstep.follows

    @property
    def finishes_on_stop(self) -> bool:
        """A rank takes part to the end in what the first one has begun."""
        return self.follows

    def setup(self) -> None:
        """Load the models, each rank its own part, and start the sources."""
        self._lockstep = Lockstep(self.group, self.control, as_one=self.first_takes)
        self._models = self.load_models()
        if not self.follows:
            super().setup()

    def load_models(self) -> list[ShardedScorer]:
        """The models among the parts, each rank its own share."""
        return models_of(self.parts, self.group)

    def make_scoring(self) -> WeightedParts:
        """All parts, on the first rank."""
        self._weighted = WeightedParts(
            self.parts,
            queues=[self.make_queue(number) for number in range(len(self._models))],
            metrics=self.metrics,
            device=self.group.device,
            on_result=self.control.wake,
        )
        return self._weighted

    def make_queue(self, number: int) -> ModelQueue:
        """What waits for the model of this number, on the first rank."""
        run = partial(self._run, number)
        return ModelQueue(self._models[number], run, reproducible=self.reproducible)

    def step(self) -> bool:
        """Score; or, on another rank than the first, take part in it."""
        return self._follow() if self.follows else super().step()

    def waiting_for(self) -> str | None:
        """What it waits for, in words; the first rank alone is owed anything."""
        return None if self.follows else super().waiting_for()

    def offloadable(self) -> list[Tensor]:
        """The tensors that may leave the device while others use it."""
        tensors = list(super().offloadable())
        for model in self._models:
            tensors += [local(parameter) for parameter in model.decoder.parameters()]
        return tensors

    def state_dict(self) -> State:
        """What novelty remembers; the first rank's."""
        state: State = {}
        if self.first_takes and not self.follows:
            for name, novelty in self._weighted.novelties.items():
                for key, values in novelty.state_dict().items():
                    state[f"novelty/{name}/{key}"] = values
        return state

    def load_state_dict(self, parts: Iterable[Mapping]) -> None:
        """Remember what the first rank did."""
        if self.follows or not self._weighted.novelties:
            return
        states: dict[str, dict[str, Tensor | str]] = {}
        for part in parts:
            for key in part:
                if key.startswith("novelty/"):
                    name, _, field = key.removeprefix("novelty/").rpartition("/")
                    states.setdefault(name, {})[field] = part[key]
        for name, state in states.items():
            if name in self._weighted.novelties:
                self._weighted.novelties[name].load_state_dict(state)

    def teardown(self) -> None:
        """Take part in what was begun, then close the sources."""
        if hasattr(self, "_models"):
            self._lockstep.part(self._follow)
        super().teardown()

    def _run(self, number: int, asked: Sequence[Asked]) -> Tensor:
        """The scores [N] of what is asked of a model, with all ranks."""
        self.ask("score", number, to_words(asked))
        return self._models[number].scores(asked)

    def ask(self, do: str, number: int, words: Tensor) -> None:
        """Have the other ranks do their share of what a model is asked, in words [n]."""
        self._lockstep.tell(do, model=number, size=words.numel(), step=self.step_at)
        self.claim_device()
        broadcast(words, self.group)

    def _follow(self) -> bool:
        command = self._lockstep.next()
        if command is None:
            return False
        with self._lockstep.taking_part():
            self.note_version(command["step"])
            self.claim_device()
            words = torch.empty(command["size"], dtype=torch.int64)
            broadcast(words, self.group)
            self.take_part(command["do"], command["model"], words)
        return True

    def take_part(self, do: str, number: int, words: Tensor) -> None:
        """On another rank than the first: this rank's share of what a model is asked."""
        assert do == "score", do
        self._models[number].scores(from_words(words))
