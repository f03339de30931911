"""FrozenReference: adds the logprobs of the model that training started from.

loop step    consumes            waits for    unblocked by    produces
score        a batch of groups   groups       the reward      the same groups with ref_logprobs
"""

from __future__ import annotations

import dataclasses

import torch

from llamarl.executor import Executor
from llamarl.learning.logprobs import make_head
from llamarl.learning.packing import Targets, pack, to_device
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, read_config
from llamarl.models.hf import load_weights
from llamarl.types import Group


class FrozenReference(Executor):
    """log pi_ref of every completion token, at the temperature that the policy is sampled and trained at."""

    name = "reference"

    def __init__(
        self, *, model_path: str, model_dtype: str, temperature: float, microbatch_tokens: int, groups_per_batch: int = 8
    ):
        self.model_path, self.model_dtype, self.temperature = model_path, model_dtype, temperature
        self.microbatch_tokens, self.groups_per_batch = microbatch_tokens, groups_per_batch

    def setup(self) -> None:
        dtype = getattr(torch, self.model_dtype)
        decoder = build_decoder(read_config(self.model_path), dtype=dtype)
        self.decoder = load_weights(decoder, self.model_path, device=self.group.device).eval().requires_grad_(False)
        (self._source,) = self.inputs.values()
        (self._sink,) = self.outputs.values()

    def step(self) -> bool:
        if not self._sink.has_room():
            return False
        groups = self._source.take(self.groups_per_batch)
        if groups:
            self.claim_device()
        for group in groups:
            self._sink.put(dataclasses.replace(group, ref_logprobs=self.score(group)))
        return bool(groups)

    def waiting_for(self) -> str | None:
        return None if self._sink.has_room() else f"room: in channel {self._sink.name}, which the trainer empties"

    def offloadable(self) -> list[torch.Tensor]:
        return list(self.decoder.parameters())

    @torch.inference_mode()
    def score(self, group: Group) -> torch.Tensor:
        """[T] float32 nats, in the order of the group's tokens."""
        alike = dataclasses.replace(
            group, rewards=torch.ones(group.lengths.numel()), finish_reasons=("stop",) * group.lengths.numel()
        )
        targets = [Targets.of(alike, alike.rewards)]
        packing = pack([alike], targets, budget_tokens=self.microbatch_tokens, drop_zero_advantage=False)
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
