"""Groups that are not whole, over a checkpoint: partial completions go on where they were, ended
ones are sent again.

Generator.state_dict --pack--> its part of a checkpoint --unpack--> Sample --> Engine.submit_partial, or the reward
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llamarl.inference.rows import Partial
from llamarl.types import Completion, FinishReason

if TYPE_CHECKING:
    from llamarl.tickets.prompts import PromptStream

_PER_TOKEN = ("token_ids", "generator_logprobs", "policy_versions")


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion as far as it had come."""

    ticket: int
    sample_index: int
    prompt_ids: Tensor  # [P] int64, what it was sampled for
    token_ids: Tensor  # [L] int64
    generator_logprobs: Tensor  # [L] float32 nats
    policy_versions: Tensor  # [L] int64
    finish_reason: FinishReason | None  # None: it had not ended


def pack(samples: Sequence[Partial | Completion]) -> dict[str, Tensor | list]:
    """Tensors and JSON; in_work: the tickets that they belong to."""
    state: dict[str, Tensor | list] = {"in_work": sorted({s.ticket for s in samples})}
    if samples:
        state["finish_reasons"] = [
            s.finish_reason if isinstance(s, Completion) else None for s in samples
        ]
        state["tickets"] = torch.tensor([s.ticket for s in samples])
        state["sample_indices"] = torch.tensor([s.sample_index for s in samples])
        state["prompt_lengths"] = torch.tensor([s.prompt_ids.numel() for s in samples])
        state["prompt_ids"] = torch.cat([s.prompt_ids for s in samples])
        state["lengths"] = torch.tensor([s.token_ids.numel() for s in samples])
        state |= {name: torch.cat([getattr(s, name) for s in samples]) for name in _PER_TOKEN}
    return state


def unpack(state: Mapping, newest: int) -> Iterator[Sample]:
    """What was packed, without tokens of policy versions after `newest`: the run that goes on will
    make those anew.
    """
    if not state["in_work"]:
        return
    lengths = state["lengths"].tolist()
    prompts = state["prompt_ids"].split(state["prompt_lengths"].tolist())
    tables = [state[name].split(lengths) for name in _PER_TOKEN]
    samples = zip(
        state["tickets"].tolist(),
        state["sample_indices"].tolist(),
        state["finish_reasons"],
        prompts,
        *tables,
    )
    for ticket, sample_index, reason, prompt_ids, tokens, logprobs, versions in samples:
        kept = int((versions <= newest).sum())
        yield Sample(
            ticket=ticket,
            sample_index=sample_index,
            prompt_ids=prompt_ids,
            token_ids=tokens[:kept],
            generator_logprobs=logprobs[:kept],
            policy_versions=versions[:kept],
            finish_reason=reason if kept == tokens.numel() else None,
        )


def of_other_prompts(state: Mapping, prompts: PromptStream) -> set[int]:
    """The tickets of what was packed that ask another prompt now than what their completions were
    sampled for.
    """
    if not state["in_work"]:
        return set()
    then = zip(
        state["tickets"].tolist(), state["prompt_ids"].split(state["prompt_lengths"].tolist())
    )
    return {
        ticket
        for ticket, prompt_ids in then
        if not torch.equal(prompt_ids, prompts[ticket].prompt_ids)
    }
