"""FrozenReference: adds the logprobs of the model that training started from. ResettingReference:
of the policy as it was every so many steps.

The ranks of a reference hold its model together, sharded (FSDP2) or split (tensor parallelism), or
several copies of it, and act as one. The first takes all groups and says what all score next; the
others do their share of it.

    loop step    consumes              waits for              unblocked by
    first rank   a staged version      word from the trainer  the same
                 a batch of groups     groups                 the reward
                                       the version they need  the trainer
                                       the others' share      the others
    another      the first's commands  -                      the first rank
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from executors.generator import REFERENCE_STRETCHES
from llamarl.comm.lockstep import Lockstep
from llamarl.ddma.channel import REFERENCE_WEIGHTS, RESET
from llamarl.errors import NotFinite, TimedOut
from llamarl.executor import Executor
from llamarl.learning.asking import broadcast, from_words, to_words
from llamarl.learning.sharded_reference import ShardedReference, asked_of
from llamarl.models.fsdp import held_box, is_split, local
from llamarl.models.hf import named_parameters_hf
from llamarl.models.sharded_state import Shard, box_from, check_complete, check_fits
from llamarl.models.sharding import overlap, parameter_shapes
from llamarl.types import Group


@dataclass(kw_only=True, eq=False, repr=False)
class FrozenReference(Executor):
    """Adds log pi_ref of every completion token, at the temperature that the policy is sampled and
    trained at.

    model_path: a Hugging Face directory. model_dtype: a name in torch, such as "bfloat16".
    replicate: copies of the model, each sharded over an equal share of the ranks. tensor_parallel:
    ranks, one after another, that share each layer. groups_per_batch: the most groups that one step
    scores, per data-parallel rank. reproducible: what a group gets never depends on what came when.
    """

    name = "reference"
    version = 0  # policy version of the weights
    split_vocabulary = False  # a token's logprob needs the whole head
    first_takes = True

    model_path: str
    model_dtype: str
    temperature: float
    microbatch_tokens: int
    replicate: int = 1
    tensor_parallel: int = 1
    groups_per_batch: int = 8
    reproducible: bool = False

    @property
    def follows(self) -> bool:
        return self._lockstep.follows

    @property
    def finishes_on_stop(self) -> bool:
        """A rank takes part to the end in what the first one has begun."""
        return self.follows

    def setup(self) -> None:
        """Load the model, each rank its own part."""
        self._lockstep = Lockstep(self.group, self.control, as_one=True)
        self._commands = {"score": self._score_told}
        self._model = ShardedReference(
            self.model_path,
            dtype=getattr(torch, self.model_dtype),
            temperature=self.temperature,
            microbatch_tokens=self.microbatch_tokens,
            group=self.group,
        )
        self.decoder = self._model.decoder
        (source,) = self.inputs.keys() - {REFERENCE_WEIGHTS, REFERENCE_STRETCHES}
        self._source = self.inputs[source]
        (self._sink,) = self.outputs.values()

    def step(self) -> bool:
        """Score a batch of groups, if there are any and room for them; or, on another rank than the
        first, take part in it. True if there was work.
        """
        return self._follow() if self.follows else self._lead()

    def _lead(self) -> bool:
        if not self._sink.has_room():
            return False
        groups = self._next_groups()
        for group, logprobs in zip(groups, self.score(groups)):
            scored = replace(group, ref_logprobs=logprobs, ref_version=self.version)
            self._sink.put(scored)
        return bool(groups)

    def _next_groups(self) -> list[Group]:
        """The groups that have come and may be scored now."""
        return self._source.take(self.groups_per_batch * self.group.data_size)

    def score(self, groups: list[Group]) -> list[torch.Tensor]:
        """With all ranks: the logprobs [T] of each group's tokens, in their order: float32, nats.
        NotFinite names the group whose are not.
        """
        if not groups:
            return []
        for group in groups:
            self.note_version(newest_version(group))
        asked = [asked_of(group) for group in groups]
        words = to_words(asked)
        self._lockstep.tell("score", size=words.numel(), step=self.step_at)
        self.claim_device()
        broadcast(words, self.group)
        found = self._model.logprobs(asked, together=not self.reproducible)
        for group, logprobs in zip(groups, found):
            self.check_finite(group, logprobs)
        return found

    def check_finite(self, group: Group, logprobs: torch.Tensor) -> None:
        """NotFinite if not all of a group's logprobs [T] are finite."""
        if not logprobs.isfinite().all():
            raise NotFinite(
                f"reference on rank {self.group.rank}, ticket {group.ticket}: its logprobs sum "
                f"to {float(logprobs.sum())}. The weights of version {self.version}, or what "
                f"is computed with them, are not finite; version 0 is {self.model_path}"
            )

    def _follow(self) -> bool:
        command = self._next_command()
        if command is None:
            return False
        with self._lockstep.taking_part():
            self._commands[command.pop("do")](**command)
        return True

    def _next_command(self) -> dict | None:
        """What the first rank has told to do next, once it may be done."""
        return self._lockstep.next()

    def _score_told(self, size: int, step: int) -> None:
        """Take part in `score`."""
        self.note_version(step)
        self.claim_device()
        words = torch.empty(size, dtype=torch.int64)
        broadcast(words, self.group)
        self._model.logprobs(from_words(words), together=not self.reproducible)

    def waiting_for(self) -> str | None:
        """What it waits for, in words; None for groups, which nobody owes it."""
        if self.follows or self._sink.has_room():
            return None
        return f"room: in channel {self._sink.name}, which the trainer empties"

    def offloadable(self) -> list[torch.Tensor]:
        """The tensors that may leave the device while others use it."""
        return [local(parameter) for parameter in self.decoder.parameters()]

    def teardown(self) -> None:
        """Take part in what was begun."""
        if hasattr(self, "_model"):
            self._lockstep.part(self._follow)


def newest_version(group: Group) -> int:
    """Returns the newest policy version that sampled a token of a group; 0 if it has no tokens."""
    return int(group.policy_versions.max()) if group.policy_versions.numel() else 0


@dataclass(kw_only=True, eq=False, repr=False)
class ResettingReference(FrozenReference):
    """TBA's reference, reset to the policy every rho steps (section 6, appendix D): at versions
    reset_every, 2 * reset_every, ...

    A group whose newest token is of policy version g is scored by the reference of version g - g %
    reset_every or later: until that one has come, it waits. So with max_lag=0 which version scores
    a group does not depend on timing. Each rank gets its own shard of a version, and all swap it
    between the same two batches.

    reset_every: steps (TBA's rho). timeout_s: how long a checkpoint waits for a version.
    """

    reset_every: int
    timeout_s: float

    def __post_init__(self):
        self._due: list[int] = []  # versions that the trainer says it has sent, oldest first
        self._early: list[Group] = []  # that need a later version
        self._told: dict | None = None  # a command that may not be done yet
        self._newest = math.inf  # no version beyond this may be swapped in now

    def setup(self) -> None:
        """Load the model, and let the trainer's weights flow into it."""
        super().setup()
        self._commands["swap"] = self._swap
        named = list(named_parameters_hf(self.decoder))
        self._shards = [Shard(name, p, held_box(self.decoder, name, p)) for name, p in named]
        self.weights = self.inputs[REFERENCE_WEIGHTS]
        self.weights.bind(self.decoder.config, named)

    def step(self) -> bool:
        """Take in a version that has come, then score the groups that need none that is newer."""
        # A checkpoint that was asked for before this version was made must not hold it.
        self._newest = -1 if self.control.has("save") else math.inf
        if self.follows:
            return self._follow()
        has_swapped = self._swap_next()
        has_scored = self._lead()
        return has_swapped or has_scored

    def _next_groups(self) -> list[Group]:
        groups = self._early or super()._next_groups()
        self._early = [group for group in groups if self.needs(group) > self.version]
        return [group for group in groups if self.needs(group) <= self.version]

    def needs(self, group: Group) -> int:
        """The first version of the reference that may score a group."""
        newest = newest_version(group)
        return newest - newest % self.reset_every

    def waiting_for(self) -> str | None:
        """What it waits for, in words: the version that its oldest group needs, or room."""
        if self._early:
            first = self._early[0]
            version = f"version {self.needs(first)} from the trainer"
            return f"weights: {version}, to score ticket {first.ticket} with"
        return super().waiting_for()

    def _may_swap(self) -> bool:
        """Whether the trainer has told of a version, and no checkpoint forbids it."""
        self._due += [message["version"] for _, message in self.control.take(RESET)]
        return bool(self._due) and self._due[0] <= self._newest

    def _swap_next(self) -> bool:
        """The first rank: have all swap the next version that the trainer has told of, if it has
        come to all. True if it had.
        """
        if not self._may_swap() or self._lockstep.agreed(self.weights.staged) is None:
            return False
        self._lockstep.tell("swap", version=self._due[0])
        self._swap(self._due[0])
        return True

    def _next_command(self) -> dict | None:
        # In the order of the trainer's own words: a checkpoint is before the version it was made
        # before, though the first rank may be past it already.
        self._lockstep.report(self.weights.staged)
        command = self._told or super()._next_command()
        waits = command is not None and command["do"] == "swap" and not self._may_swap()
        self._told = command if waits else None
        return None if waits else command

    def _swap(self, version: int) -> None:
        self.claim_device()
        self.version = self.weights.swap().version
        assert self.version == version, f"version {self.version} came, not {version}"
        self._due.remove(version)

    def offloadable(self) -> list[torch.Tensor]:
        """The tensors that may leave a GPU while others use it."""
        if self.group.device.type != "cuda":
            # The parameters are views of the weights' buffers, which other threads write.
            return []
        return super().offloadable()

    def teardown(self) -> None:
        """Take part in what was begun, then close the weights' channel, if it was opened."""
        super().teardown()
        if hasattr(self, "weights"):
            self.weights.close()

    # --- checkpoints ---

    def before_checkpoint(self, step: int) -> None:
        """Take in what was sent up to that step and is still on its way. TimedOut if it does not
        come.
        """
        self._newest = step
        until = time.monotonic() + self.timeout_s
        while self._may_swap():
            has_worked = self._follow() if self.follows else self._swap_next()
            if has_worked:
                continue
            self.control.check()
            self.control.wait(0.005)
            if time.monotonic() > until:
                raise TimedOut(
                    f"reference on rank {self.group.rank} waited {self.timeout_s:.0f} s "
                    f"for version {self._due[0]} from the trainer"
                )

    def state_dict(self) -> dict:
        """The version and, of the first copy and once it is not the one that training started from,
        this rank's shard of the weights. What tensor-parallel ranks all hold is stored by the first
        of them alone.
        """
        state: dict = {"version": self.version, "boxes": {}}
        if not self.version or self.group.replica > 0:
            return state
        is_first_peer = self.group.tensor_index == 0
        for shard in self._shards:
            if not is_first_peer and not is_split(self.decoder, shard.name):
                continue
            state["boxes"][shard.name] = [shard.box.offsets, shard.box.lengths]
            state[f"model/{shard.name}"] = local(shard.parameter).contiguous()
        return state

    @torch.no_grad()
    def load_state_dict(self, parts: Iterable[dict]) -> None:
        """From all ranks' parts, whatever their number was: each rank takes its own rows.

        ValueError if it is of a model of other shapes, or of a llamarl that kept it otherwise.
        """
        missing = {shard.name: shard.box.numel for shard in self._shards}  # elements
        shapes = parameter_shapes(self.decoder.config)
        for part in parts:
            if "boxes" not in part:
                raise ValueError(
                    "the checkpoint's reference was kept by another version of llamarl, which "
                    "did not say what part of the model it is; go on with that version, or start a "
                    "new run from the checkpoint's hf/"
                )
            check_fits(part["boxes"], shapes)
            self.version = int(part["version"])
            for shard in self._shards:
                if shard.name not in part["boxes"]:
                    continue
                theirs = box_from(part["boxes"][shard.name])
                shard.copy_overlap(shard.parameter, part, f"model/{shard.name}", theirs)
                missing[shard.name] -= overlap(shard.box, theirs).numel
        if self.version:
            check_complete(missing)
