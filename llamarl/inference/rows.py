"""What the engine knows of each running sample, row by row and dense: row i is slot i of the cache.

Shapes: R rows, L places, S stop tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from llamarl.inference.sampler import (
    SamplingParams,
    process,
    sample,
    sample_keys,
    stream_key,
    uniforms,
)


@dataclass(frozen=True, slots=True)
class Partial:
    """A sample that has not ended. Made by Engine.export_partials, consumed by
    Engine.submit_partial, of any engine.
    """

    stream: int
    ticket: int
    sample_index: int
    prompt_ids: Tensor  # [P] int64
    token_ids: Tensor  # [L] int64, L from 0 to max_new_tokens - 1
    generator_logprobs: Tensor  # [L] float32
    policy_versions: Tensor  # [L] int64
    params: SamplingParams


def check_vocabulary(what: str, ids: Tensor, vocab_size: int) -> None:
    """ValueError if `ids`, [N] int64, are of another kind, or one lies outside the vocabulary."""
    if ids.dim() != 1 or ids.dtype != torch.int64:
        raise ValueError(f"{what}: {list(ids.shape)} {ids.dtype}; need [N] int64")
    if not ids.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{what} {low}..{high} lie outside the model's vocabulary of {vocab_size}; "
            "is the tokenizer another model's?"
        )


@dataclass(slots=True)
class Request:
    """A submitted prompt; its samples num_started..end-1 take slots as they come free, in order."""

    stream: int
    ticket: int
    prompt_ids: Tensor  # [P] int64, on the CPU
    params: SamplingParams
    end: int
    num_started: int = 0
    partial: Partial | None = None  # what its only sample has already
    num_cached: int = 0  # tokens of a long prompt that wait in the staging slot

    def check(self, vocab_size: int, max_len: int) -> None:
        """ValueError for an empty prompt, one that max_len has no room for, or unknown ids.

        For a partial completion also if it has ended, or has not a logprob and a version a token.
        """
        prompt, params, ticket = self.prompt_ids, self.params, self.ticket
        if prompt.dim() != 1 or prompt.numel() == 0:
            raise ValueError(
                f"ticket {ticket}: prompt_ids of shape {list(prompt.shape)}; need [P] with at least one token"
            )
        if self.max_tokens > max_len:
            raise ValueError(
                f"ticket {ticket}: {prompt.numel()} prompt tokens + max_new_tokens={params.max_new_tokens} exceed "
                f"max_len={max_len}; give the engine a larger max_len, or shorten either"
            )
        shapes = [list(had.shape) for had in self.recorded]
        if len(shapes[0]) != 1 or any(shape != shapes[0] for shape in shapes):
            names = "tokens, logprobs and versions"
            raise ValueError(f"ticket {ticket}: {names} of shapes {shapes}; need [L] each")
        check_vocabulary(f"ticket {ticket}: prompt ids", self.ids, vocab_size)
        stops = torch.tensor(params.stop_token_ids, dtype=torch.int64)
        check_vocabulary(f"ticket {ticket}: stop tokens", stops, vocab_size)
        done = self.recorded[0]
        if done.numel() >= params.max_new_tokens or (
            done.numel() and int(done[-1]) in params.stop_token_ids
        ):
            raise ValueError(
                f"ticket {ticket}: a completion of {done.numel()} tokens that has ended cannot go on"
            )

    @property
    def num_waiting(self) -> int:
        return self.end - self.num_started

    @property
    def max_tokens(self) -> int:
        """Of prompt and completion."""
        return self.prompt_ids.numel() + self.params.max_new_tokens

    @property
    def recorded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, logprobs and versions of a partial completion; of one that has not begun, none."""
        if had := self.partial:
            return had.token_ids, had.generator_logprobs, had.policy_versions
        return torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0, dtype=torch.int64)

    @property
    def ids(self) -> Tensor:
        """What is prefilled before its samples start."""
        return torch.cat([self.prompt_ids, self.recorded[0]]) if self.partial else self.prompt_ids


@dataclass(frozen=True, slots=True)
class Demands:
    """What any running row asks of the sampler. What none asks for is not computed."""

    temperature: bool
    greedy: bool
    top_k: bool
    top_p: bool
    min_new_tokens: bool


@dataclass(slots=True)
class Rows:
    """One entry (or row) a slot. Rows that have ended but are not yet taken out go on computing and
    record nothing.
    """

    token: Tensor  # [R] int64, the newest token; the decoder reads it next
    position: Tensor  # [R] int64, its place
    count: Tensor  # [R] int64, tokens sampled
    live: Tensor  # [R] bool
    key: Tensor  # [R] int64, of the row's uniforms
    max_new_tokens: Tensor  # [R] int64
    min_new_tokens: Tensor  # [R] int64
    temperature: Tensor  # [R] float32
    top_k: Tensor  # [R] int64
    top_p: Tensor  # [R] float64
    stops: Tensor  # [R, S] int64, -1 for none
    tokens: Tensor  # [R, L] int64, what was sampled, and its
    logprobs: Tensor  # [R, L] float32
    versions: Tensor  # [R, L] int64

    @classmethod
    def empty(cls, max_slots: int, max_len: int, device: torch.device) -> Rows:
        dtypes = {
            "live": torch.bool,
            "temperature": torch.float32,
            "top_p": torch.float64,
            "logprobs": torch.float32,
        }
        widths = {"stops": [1], "tokens": [max_len], "logprobs": [max_len], "versions": [max_len]}

        def zeros(name: str) -> Tensor:
            return torch.zeros(
                max_slots, *widths.get(name, []), dtype=dtypes.get(name, torch.int64), device=device
            )

        return cls(**{field.name: zeros(field.name) for field in fields(cls)})

    def start(self, first: int, jobs: list[tuple[Request, int, int]]) -> None:
        """Rows from `first` on become samples begin..end-1 of each (request, begin, end)."""
        sizes = torch.tensor([end - begin for _, begin, end in jobs])
        rows = slice(first, first + int(sizes.sum()))

        def spread(values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
            return (
                torch.tensor(values, dtype=dtype)
                .repeat_interleave(sizes, dim=0)
                .to(self.token.device)
            )

        params = [request.params for request, _, _ in jobs]
        index = torch.cat([torch.arange(begin, end) for _, begin, end in jobs]).to(
            self.token.device
        )
        keys, lengths = zip(
            *((stream_key(r.params.seed, r.stream, r.ticket), r.ids.numel()) for r, _, _ in jobs)
        )
        self.key[rows] = sample_keys(spread(keys), index)
        self.position[rows] = spread(lengths) - 1
        self.count[rows] = 0
        self.live[rows] = True
        for name in ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p"):
            table = getattr(self, name)
            table[rows] = spread([getattr(p, name) for p in params], table.dtype)
        width = max(self.stops.shape[1], *(len(p.stop_token_ids) for p in params))
        if width > self.stops.shape[1]:
            self.stops = torch.nn.functional.pad(
                self.stops, (0, width - self.stops.shape[1]), value=-1
            )
        self.stops[rows] = spread(
            [list(p.stop_token_ids) + [-1] * (width - len(p.stop_token_ids)) for p in params]
        )
        row = first
        for request, begin, end in jobs:
            if request.partial:
                self.count[row] = count = request.recorded[0].numel()
                for table, had in zip(
                    (self.tokens, self.logprobs, self.versions), request.recorded
                ):
                    table[row, :count] = had
            row += end - begin

    def demands(self, num_rows: int) -> Demands:
        """One synchronisation with the device."""
        temperature = self.temperature[:num_rows]
        asked = (
            ((temperature != 0) & (temperature != 1)).any(),
            (temperature == 0).any(),
            (self.top_k[:num_rows] > 0).any(),
            (self.top_p[:num_rows] < 1).any(),
            (self.min_new_tokens[:num_rows] > self.count[:num_rows]).any(),
        )
        return Demands(*torch.stack(asked).tolist())

    def append(self, rows: slice, logits_RV: Tensor, version: Tensor, demands: Demands) -> None:
        """Sample one token for each of `rows`, record it where the row is live, and end the rows
        that it ends. version: [1].
        """
        count, live, stops = self.count[rows], self.live[rows], self.stops[rows]
        temperature = self.temperature[rows]
        banned = (
            stops.masked_fill((count >= self.min_new_tokens[rows])[:, None], -1)
            if demands.min_new_tokens
            else None
        )
        logits = process(
            logits_RV,
            temperature_N=temperature if demands.temperature else None,
            top_k_N=self.top_k[rows] if demands.top_k else None,
            top_p_N=self.top_p[rows] if demands.top_p else None,
            banned_NS=banned,
        )
        token, logprob = sample(
            logits, uniforms(self.key[rows], count), temperature == 0 if demands.greedy else None
        )
        # A dead row writes just behind its end, where nobody reads.
        place = count[:, None]
        self.token[rows] = token
        self.tokens[rows].scatter_(1, place, token[:, None])
        self.logprobs[rows].scatter_(1, place, logprob[:, None])
        self.versions[rows].scatter_(1, place, version.expand_as(place))
        count += live
        live &= (token[:, None] != stops).all(1)
        live &= count < self.max_new_tokens[rows]
        # A row that just ended stays where it is: its next place may lie beyond its slot.
        self.position[rows] += live

    def recorded(self, rows: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Tokens, logprobs and versions of each of some rows so far, on the CPU."""
        index = torch.tensor(rows, device=self.token.device)
        lengths_N = self.count[index]
        longest, lengths = int(lengths_N.max()), lengths_N.tolist()
        recorded_NL = torch.arange(longest, device=index.device) < lengths_N[:, None]
        tables = (self.tokens, self.logprobs, self.versions)
        return list(
            zip(*(table[index, :longest][recorded_NL].cpu().split(lengths) for table in tables))
        )

    def tables(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows `source` to rows `target`."""
        for table in self.tables():
            table.index_copy_(0, target, table.index_select(0, source))
