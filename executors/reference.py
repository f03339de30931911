"""FrozenReference: adds the logprobs of the model that training started from. ResettingReference:
of the policy as it was every so many steps.

loop step    consumes            waits for              unblocked by      produces
weights      a staged version    word from the trainer  the same          -
score        a batch of groups   groups                 the reward        them with ref_logprobs
                                 the version they need  the trainer
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from llamarl.ddma.channel import REFERENCE_WEIGHTS, RESET
from llamarl.errors import TimedOut
from llamarl.executor import Executor
from llamarl.learning.logprobs import make_head
from llamarl.learning.packing import pack, to_device
from llamarl.learning.targets import Targets
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, read_config
from llamarl.models.hf import load_weights, named_parameters_hf
from llamarl.types import Group


@dataclass(kw_only=True, eq=False, repr=False)
class FrozenReference(Executor):
    """Adds log pi_ref of every completion token, at the temperature that the policy is sampled and
    trained at.

    model_path: a Hugging Face directory. model_dtype: a name in torch, such as "bfloat16".
    groups_per_batch: the most groups that one step scores.
    """

    name = "reference"
    version = 0  # policy version of the weights

    model_path: str
    model_dtype: str
    temperature: float
    microbatch_tokens: int
    groups_per_batch: int = 8

    def setup(self) -> None:
        """Load the model."""
        dtype = getattr(torch, self.model_dtype)
        decoder = build_decoder(read_config(self.model_path), dtype=dtype)
        decoder = load_weights(decoder, self.model_path, device=self.group.device)
        self.decoder = decoder.eval().requires_grad_(False)
        (source,) = self.inputs.keys() - {REFERENCE_WEIGHTS}
        self._source = self.inputs[source]
        (self._sink,) = self.outputs.values()

    def step(self) -> bool:
        """Score a batch of groups if there is room for them. True if there was any."""
        if not self._sink.has_room():
            return False
        groups = self._next_groups()
        if groups:
            self.claim_device()
        for group in groups:
            logprobs = self.score(group)
            scored = replace(group, ref_logprobs=logprobs, ref_version=self.version)
            self._sink.put(scored)
        return bool(groups)

    def _next_groups(self) -> list[Group]:
        """The groups that have come and may be scored now."""
        return self._source.take(self.groups_per_batch)

    def waiting_for(self) -> str | None:
        """What it waits for, in words; None for groups, which nobody owes it."""
        if self._sink.has_room():
            return None
        return f"room: in channel {self._sink.name}, which the trainer empties"

    def offloadable(self) -> list[torch.Tensor]:
        """The tensors that may leave the device while others use it."""
        return list(self.decoder.parameters())

    @torch.inference_mode()
    def score(self, group: Group) -> torch.Tensor:
        """The logprobs [T] of a group's tokens, in their order: float32, nats."""
        # Packed as if every completion were trained on: none must be left out.
        size = group.lengths.numel()
        alike = replace(group, rewards=torch.ones(size), finish_reasons=("stop",) * size)
        targets = [Targets.of(alike, alike.rewards)]
        packing = pack(
            [alike], targets, budget_tokens=self.microbatch_tokens, drop_zero_advantage=False
        )
        out = torch.empty(group.token_ids.numel())
        for microbatch in packing.microbatches:
            batch = to_device(microbatch, self.group.device)
            attention = PackedAttention(batch.cu_seqlens, batch.parents)
            head = make_head(batch.labels, batch.rows, temperature=self.temperature)
            logprobs, _ = self.decoder(batch.input_ids, batch.positions, attention, head)
            out[microbatch.places] = logprobs.float().cpu()
        return out


@dataclass(kw_only=True, eq=False, repr=False)
class ResettingReference(FrozenReference):
    """TBA's reference, reset to the policy every rho steps (section 6, appendix D): at versions
    reset_every, 2 * reset_every, ...

    A group whose newest token is of policy version g is scored by the reference of version g - g %
    reset_every or later: until that one has come, it waits. So with max_lag=0 which version scores
    a group does not depend on timing.

    reset_every: steps (TBA's rho). timeout_s: how long a checkpoint waits for a version.
    """

    reset_every: int
    timeout_s: float

    def __post_init__(self):
        self._due: list[int] = []  # versions that the trainer says it has sent, oldest first
        self._early: list[Group] = []  # that need a later version

    def setup(self) -> None:
        """Load the model, and let the trainer's weights flow into it."""
        super().setup()
        self.weights = self.inputs[REFERENCE_WEIGHTS]
        self.weights.bind(self.decoder.config, list(named_parameters_hf(self.decoder)))

    def step(self) -> bool:
        """Take in a version that has come, then score the groups that need none that is newer."""
        # A checkpoint that was asked for before this version was made must not hold it.
        has_swapped = not self.control.has("save") and self._swap()
        has_scored = super().step()
        return has_swapped or has_scored

    def _next_groups(self) -> list[Group]:
        groups = self._early or super()._next_groups()
        self._early = [group for group in groups if self.needs(group) > self.version]
        return [group for group in groups if self.needs(group) <= self.version]

    def needs(self, group: Group) -> int:
        """The first version of the reference that may score a group."""
        newest = int(group.policy_versions.max()) if group.policy_versions.numel() else 0
        return newest - newest % self.reset_every

    def waiting_for(self) -> str | None:
        """What it waits for, in words: the version that its oldest group needs, or room."""
        if self._early:
            first = self._early[0]
            version = f"version {self.needs(first)} from the trainer"
            return f"weights: {version}, to score ticket {first.ticket} with"
        return super().waiting_for()

    def _swap(self, newest: float = math.inf) -> bool:
        """Take in the next version that the trainer has told of, up to `newest`, if it has come.
        True if it had.
        """
        self._due += [message["version"] for _, message in self.control.take(RESET)]
        if not self._due or self._due[0] > newest or self.weights.staged is None:
            return False
        self.claim_device()
        self.version = self.weights.swap().version
        self._due.remove(self.version)
        return True

    def offloadable(self) -> list[torch.Tensor]:
        """The tensors that may leave a GPU while others use it."""
        if self.group.device.type != "cuda":
            # The parameters are views of the weights' buffers, which other threads write.
            return []
        return super().offloadable()

    def teardown(self) -> None:
        """Close the weights' channel, if it was opened."""
        if hasattr(self, "weights"):
            self.weights.close()

    # --- checkpoints ---

    def before_checkpoint(self, step: int) -> None:
        """Take in what was sent up to that step and is still on its way. TimedOut if it does not
        come.
        """
        until = time.monotonic() + self.timeout_s
        while self._swap(step) or (self._due and self._due[0] <= step):
            self.control.check()
            self.control.wait(0.005)
            if time.monotonic() > until:
                raise TimedOut(
                    f"reference on rank {self.group.rank} waited {self.timeout_s:.0f} s "
                    f"for version {self._due[0]} from the trainer"
                )

    def state_dict(self) -> dict:
        """The version and, from the first rank and once it is not the one that training started
        from, its weights.
        """
        state = {"version": self.version}
        if self.version and self.group.index == 0:
            for name, parameter in named_parameters_hf(self.decoder):
                state[f"model/{name}"] = parameter.detach().contiguous()
        return state

    @torch.no_grad()
    def load_state_dict(self, parts: Iterable[dict]) -> None:
        """Every rank takes what the first one saved."""
        first = next(iter(parts))
        self.version = int(first["version"])
        if not self.version:
            return
        for name, parameter in named_parameters_hf(self.decoder):
            parameter.copy_(first[f"model/{name}"])
