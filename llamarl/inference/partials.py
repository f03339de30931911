"""Groups that are not whole, over a checkpoint: partial completions go on where they were, ended
ones are sent again.

    Generator.state_dict --pack--> its part of a checkpoint --unpack--> Partial, Completion

A Partial goes to an engine's submit_partial, a Completion to the reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llamarl.inference.requests import Partial
from llamarl.inference.sampler import SamplingParams
from llamarl.types import Completion

if TYPE_CHECKING:
    from llamarl.tickets.prompts import PromptStream

_PER_TOKEN = ("token_ids", "generator_logprobs", "policy_versions")


def pack(samples: Sequence[Partial | Completion]) -> dict[str, Tensor | list]:
    """Tensors and JSON; in_work: the tickets that they belong to. What streams and sampling
    parameters partial ones have is not kept.
    """
    state: dict[str, Tensor | list] = {"in_work": sorted({s.ticket for s in samples})}
    if not samples:
        return state
    # None: it has not ended.
    state["finish_reasons"] = [getattr(s, "finish_reason", None) for s in samples]
    state["tickets"] = torch.tensor([s.ticket for s in samples])
    state["sample_indices"] = torch.tensor([s.sample_index for s in samples])
    state["prompt_lengths"] = torch.tensor([s.prompt_ids.numel() for s in samples])
    state["prompt_ids"] = torch.cat([s.prompt_ids for s in samples])
    state["lengths"] = torch.tensor([s.token_ids.numel() for s in samples])
    for name in _PER_TOKEN:
        state[name] = torch.cat([getattr(s, name) for s in samples])
    return state


def unpack(
    state: Mapping, newest: int, stream: int, params: SamplingParams
) -> Iterator[Partial | Completion]:
    """What was packed, without tokens of policy versions after `newest`: the run that goes on will
    make those anew. stream, params: how partial ones go on.
    """
    if not state["in_work"]:
        return
    lengths = state["lengths"].tolist()
    prompts = state["prompt_ids"].split(state["prompt_lengths"].tolist())
    tables = {name: state[name].split(lengths) for name in _PER_TOKEN}
    tickets = state["tickets"].tolist()
    sample_indices = state["sample_indices"].tolist()
    for i, reason in enumerate(state["finish_reasons"]):
        num_kept = int((tables["policy_versions"][i] <= newest).sum())
        had = {name: table[i][:num_kept] for name, table in tables.items()}
        had |= {"ticket": tickets[i], "sample_index": sample_indices[i], "prompt_ids": prompts[i]}
        if reason is None or num_kept < lengths[i]:
            yield Partial(stream=stream, params=params, **had)
        else:
            yield Completion(finish_reason=reason, **had)


def of_other_prompts(state: Mapping, prompts: PromptStream) -> set[int]:
    """The tickets of what was packed that ask another prompt now than what their completions were
    sampled for.
    """
    if not state["in_work"]:
        return set()
    tickets = state["tickets"].tolist()
    then = state["prompt_ids"].split(state["prompt_lengths"].tolist())
    others = set()
    for ticket, prompt_ids in zip(tickets, then):
        if not torch.equal(prompt_ids, prompts[ticket].prompt_ids):
            others.add(ticket)
    return others
