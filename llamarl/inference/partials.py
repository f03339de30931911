"""Carries groups that are not whole over a checkpoint: partial completions go on where they were,
ended ones are sent again.

    Generator.state_dict --pack--> its part of a checkpoint --unpack--> Partial, Completion

A Partial goes to an engine's submit_partial, a Completion to the reward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llamarl.inference.requests import Partial, Recorded
from llamarl.inference.sampler import SamplingParams
from llamarl.types import NO_ROUTES, Completion, Ending

if TYPE_CHECKING:
    from llamarl.tickets.prompts import AnyPrompts

# Every tensor of a sample, and under what name its lengths are kept.
_LENGTHS = {
    "prompt_ids": "prompt_lengths",
    "token_ids": "lengths",
    "generator_logprobs": "lengths",
    "policy_versions": "lengths",
    "loss_mask": "lengths",
    "restarts": "lengths",
    "routes": "routed_lengths",
}


def pack(samples: Sequence[Partial | Completion]) -> dict[str, Tensor | list]:
    """Return samples as tensors and JSON; in_work: the tickets that they belong to. What streams
    and sampling parameters partial ones have is not kept.
    """
    tickets = [s.ticket for s in samples]
    state: dict[str, Tensor | list] = {"in_work": sorted(set(tickets))}
    if not samples:
        return state
    # None: the completion has not ended.
    state["finish_reasons"] = [getattr(s, "finish_reason", None) for s in samples]
    endings = [getattr(s, "ending", None) for s in samples]
    state["endings"] = [None if one is None else dataclasses.asdict(one) for one in endings]
    state["columns"] = [dict(getattr(s, "columns", {})) for s in samples]
    sample_indices = [s.sample_index for s in samples]
    state["tickets"] = torch.tensor(tickets)
    state["sample_indices"] = torch.tensor(sample_indices)
    for name, lengths in _LENGTHS.items():
        # A partial one is read again, and so are its routes noted.
        tensors = [getattr(s, name, NO_ROUTES) for s in samples]
        state[name] = torch.cat(tensors)
        state[lengths] = torch.tensor([len(tensor) for tensor in tensors])
    return state


def unpack(
    state: Mapping, newest: int, stream: int, params_of: Callable[[int], SamplingParams]
) -> Iterator[Partial | Completion]:
    """Yield what was packed, without tokens of policy versions after `newest`: the run that goes on
    will make those anew. stream, params_of(ticket): how partial ones go on.
    """
    if not state["in_work"]:
        return
    tables = {name: _parts(state, name) for name in _LENGTHS}
    tickets = state["tickets"].tolist()
    sample_indices = state["sample_indices"].tolist()
    for i, reason in enumerate(state["finish_reasons"]):
        had = {name: parts[i] for name, parts in tables.items()}
        is_kept = had["policy_versions"] <= newest
        for name in Recorded._fields:
            had[name] = had[name][: is_kept.sum()]
        if reason is None or not is_kept.all():
            yield Partial(
                stream=stream,
                ticket=tickets[i],
                sample_index=sample_indices[i],
                prompt_ids=had["prompt_ids"],
                token_ids=had["token_ids"],
                generator_logprobs=had["generator_logprobs"],
                policy_versions=had["policy_versions"],
                params=params_of(tickets[i]),
                loss_mask=had["loss_mask"],
                restarts=had["restarts"],
            )
        else:
            yield Completion(
                ticket=tickets[i],
                sample_index=sample_indices[i],
                prompt_ids=had["prompt_ids"],
                token_ids=had["token_ids"],
                generator_logprobs=had["generator_logprobs"],
                policy_versions=had["policy_versions"],
                finish_reason=reason,
                loss_mask=had["loss_mask"],
                restarts=had["restarts"],
                ending=_ending_of(state["endings"][i]),
                columns=state["columns"][i],
                routes=had["routes"],
            )


def _ending_of(values: Mapping) -> Ending:
    """Return an ending from its JSON values."""
    return Ending(**{**values, "turn_rewards": tuple(values["turn_rewards"])})


def _parts(state: Mapping, name: str) -> Sequence[Tensor]:
    """Return one of the tensors of each sample."""
    return state[name].split(state[_LENGTHS[name]].tolist())


def of_other_prompts(state: Mapping, prompts: AnyPrompts) -> set[int]:
    """Return the tickets of what was packed that ask another prompt now than what their completions
    were sampled for.
    """
    if not state["in_work"]:
        return set()
    others = set()
    for ticket, prompt_ids in zip(state["tickets"].tolist(), _parts(state, "prompt_ids")):
        if not torch.equal(prompt_ids, prompts[ticket].prompt_ids):
            others.add(ticket)
    return others
