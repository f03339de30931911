"""FrozenReference: adds the logprobs of the model that training started from.

    loop step    consumes            waits for    unblocked by    produces
    score        a batch of groups   groups       the reward      the same groups with ref_logprobs
"""

from __future__ import annotations

import dataclasses

import torch

from llamarl.executor import Executor
from llamarl.learning.logprobs import make_head
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, read_config
from llamarl.models.hf import load_weights
from llamarl.types import Group


class FrozenReference(Executor):
    """log pi_ref of every completion token, at the temperature that the policy is sampled and trained at."""

    name = "reference"

    def __init__(self, *, model_path: str, model_dtype: str, temperature: float, microbatch_tokens: int, groups_per_batch: int = 8):
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
        for group in groups:
            self._sink.put(dataclasses.replace(group, ref_logprobs=self.score(group)))
        return bool(groups)

    def waiting_for(self) -> str | None:
        return None if self._sink.has_room() else f"room: in channel {self._sink.name}, which the trainer empties"

    @torch.inference_mode()
    def score(self, group: Group) -> torch.Tensor:
        """[T] float32 nats, in the order of the group's tokens."""
        lengths = [int(n) for n in group.lengths]
        sequences = [torch.cat([group.prompt_ids, ids]) for ids in group.token_ids.split(lengths)]
        out: list[torch.Tensor] = []
        per_batch = max(1, self.microbatch_tokens // max(s.numel() for s in sequences))
        for i in range(0, len(sequences), per_batch):
            out.append(self._score(sequences[i : i + per_batch], group.prompt_ids.numel()))
        return torch.cat(out)

    def _score(self, sequences: list[torch.Tensor], prompt: int) -> torch.Tensor:
        device = self.group.device
        sizes = torch.tensor([s.numel() - 1 for s in sequences])
        ids = torch.cat([s[:-1] for s in sequences]).to(device)
        labels = torch.cat([s[1:] for s in sequences]).to(device)
        positions = torch.cat([torch.arange(int(n)) for n in sizes]).to(device)
        cu = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)]).to(device)
        rows = (positions >= prompt - 1).nonzero().squeeze(1)
        logprobs, _ = self.decoder(ids, positions, PackedAttention(cu), make_head(labels, rows, temperature=self.temperature))
        return logprobs.float().cpu()
