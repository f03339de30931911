"""FrozenReference: adds the logprobs of the model that training started from. ResettingReference:
of the policy as it was every so many steps.

loop step    consumes            waits for              unblocked by      produces
weights      a staged version    word from the trainer  the same          -
score        a batch of groups   groups                 the reward        the same groups with ref_logprobs
                                 the version they need  the trainer
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable

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


class FrozenReference(Executor):
    """log pi_ref of every completion token, at the temperature that the policy is sampled and
    trained at.
    """

    name = "reference"
    version = 0  # policy version of the weights

    def __init__(
        self,
        *,
        model_path: str,
        model_dtype: str,
        temperature: float,
        microbatch_tokens: int,
        groups_per_batch: int = 8,
    ):
        self.model_path, self.model_dtype, self.temperature = model_path, model_dtype, temperature
        self.microbatch_tokens, self.groups_per_batch = microbatch_tokens, groups_per_batch

    def setup(self) -> None:
        dtype = getattr(torch, self.model_dtype)
        decoder = build_decoder(read_config(self.model_path), dtype=dtype)
        self.decoder = (
            load_weights(decoder, self.model_path, device=self.group.device)
            .eval()
            .requires_grad_(False)
        )
        (self._source,) = (
            channel for name, channel in self.inputs.items() if name != REFERENCE_WEIGHTS
        )
        (self._sink,) = self.outputs.values()

    def step(self) -> bool:
        if not self._sink.has_room():
            return False
        groups = self._source.take(self.groups_per_batch)
        if groups:
            self.claim_device()
        for group in groups:
            self._sink.put(
                dataclasses.replace(group, ref_logprobs=self.score(group), ref_version=self.version)
            )
        return bool(groups)

    def waiting_for(self) -> str | None:
        return (
            None
            if self._sink.has_room()
            else f"room: in channel {self._sink.name}, which the trainer empties"
        )

    def offloadable(self) -> list[torch.Tensor]:
        return list(self.decoder.parameters())

    @torch.inference_mode()
    def score(self, group: Group) -> torch.Tensor:
        """[T] float32 nats, in the order of the group's tokens."""
        alike = dataclasses.replace(
            group,
            rewards=torch.ones(group.lengths.numel()),
            finish_reasons=("stop",) * group.lengths.numel(),
        )
        targets = [Targets.of(alike, alike.rewards)]
        packing = pack(
            [alike], targets, budget_tokens=self.microbatch_tokens, drop_zero_advantage=False
        )
        starts = (group.lengths.cumsum(0) - group.lengths).tolist()
        out = torch.empty(group.token_ids.numel())
        for batch, completions in zip(packing.microbatches, packing.completions):
            batch = to_device(batch, self.group.device)
            attention = PackedAttention(batch.cu_seqlens, batch.parents)
            head = make_head(batch.labels, batch.rows, temperature=self.temperature)
            logprobs, _ = self.decoder(batch.input_ids, batch.positions, attention, head)
            sizes = [int(group.lengths[c]) for c in completions]
            for c, part in zip(completions, logprobs.float().cpu().split(sizes)):
                out[starts[c] : starts[c] + len(part)] = part
        return out


class ResettingReference(FrozenReference):
    """TBA's reference, reset to the policy every rho steps (section 6, appendix D): at versions
    reset_every, 2 * reset_every, ...

    A group whose newest token is of policy version g is scored by the reference of version g - g %
    reset_every or later: until that one has come, it waits. So with max_lag=0 which version scores
    a group does not depend on timing.
    """

    def __init__(self, *, reset_every: int, timeout_s: float, **settings):
        super().__init__(**settings)
        self.reset_every, self.timeout_s = reset_every, timeout_s
        self._due: list[int] = []  # versions that the trainer says it has sent, oldest first
        self._early: list[Group] = []  # that need a later version

    def setup(self) -> None:
        super().setup()
        self.weights = self.inputs[REFERENCE_WEIGHTS]
        self.weights.bind(self.decoder.config, list(named_parameters_hf(self.decoder)))

    def step(self) -> bool:
        # A checkpoint that was asked for before this version was made must not hold it.
        swapped = not self.control.has("save") and self._swap()
        if not self._sink.has_room():
            return swapped
        groups = self._early + (self._source.take(self.groups_per_batch) if not self._early else [])
        ready = [group for group in groups if self.needs(group) <= self.version]
        self._early = [group for group in groups if self.needs(group) > self.version]
        if ready:
            self.claim_device()
        for group in ready:
            self._sink.put(
                dataclasses.replace(group, ref_logprobs=self.score(group), ref_version=self.version)
            )
        return swapped or bool(ready)

    def needs(self, group: Group) -> int:
        """The first version of the reference that may score a group."""
        newest = int(group.policy_versions.max()) if group.policy_versions.numel() else 0
        return newest - newest % self.reset_every

    def waiting_for(self) -> str | None:
        if self._early:
            return f"weights: version {self.needs(self._early[0])} from the trainer, to score ticket {self._early[0].ticket} with"
        return super().waiting_for()

    def _swap(self, newest: float = math.inf) -> bool:
        """Take in the next version that the trainer has told of, up to `newest`, if it has come."""
        self._due += [message["version"] for _, message in self.control.take(RESET)]
        if not self._due or self._due[0] > newest or self.weights.staged is None:
            return False
        self.claim_device()
        self.version = self.weights.swap().version
        self._due.remove(self.version)
        return True

    def offloadable(self) -> list[torch.Tensor]:
        # On a CPU the parameters are views of the weights' buffers, which other threads write.
        return super().offloadable() if self.group.device.type == "cuda" else []

    def teardown(self) -> None:
        if hasattr(self, "weights"):
            self.weights.close()

    # -- checkpoints
    # ----------------------------------------------------------------------------------------------------

    def before_checkpoint(self, step: int) -> None:
        """Take in what was sent up to that step and is still on its way. TimedOut."""
        until = time.monotonic() + self.timeout_s
        while self._swap(step) or (self._due and self._due[0] <= step):
            self.control.check()
            self.control.wait(0.005)
            if time.monotonic() > until:
                raise TimedOut(
                    f"reference on rank {self.group.rank} waited {self.timeout_s:.0f} s for version {self._due[0]} "
                    "from the trainer"
                )

    def state_dict(self) -> dict:
        """The version and, from the first rank and once it is not the one that training started
        from, its weights.
        """
        held = named_parameters_hf(self.decoder) if self.version and self.group.index == 0 else ()
        return {
            "version": self.version,
            **{f"model/{name}": p.detach().contiguous() for name, p in held},
        }

    @torch.no_grad()
    def load_state_dict(self, parts: Iterable[dict]) -> None:
        """Every rank takes what the first one saved."""
        part = next(iter(parts))
        self.version = int(part["version"])
        for name, p in named_parameters_hf(self.decoder) if self.version else ():
            p.copy_(part[f"model/{name}"])
