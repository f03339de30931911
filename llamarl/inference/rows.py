"""What the engine knows of each running sample, row by row and dense: row i is slot i of the cache.

Shapes: R rows, L places, S stop tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.inference.requests import Admission, Recorded
from llamarl.inference.sampler import (
    SamplingParams,
    process,
    sample,
    sample_keys,
    stream_key,
    uniforms,
)


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
        """Rows of zeros, none of them live."""
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

    def start(self, first: int, admissions: list[Admission]) -> None:
        """Rows from `first` on become the samples of these admissions."""
        requests = [admission.request for admission in admissions]
        params = [request.params for request in requests]
        sizes = torch.tensor([admission.num_samples for admission in admissions])
        rows = slice(first, first + int(sizes.sum()))
        device = self.token.device

        def spread(values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
            """A value an admission, once for each of its samples."""
            return torch.tensor(values, dtype=dtype).repeat_interleave(sizes, dim=0).to(device)

        indices = torch.cat([torch.arange(a.begin, a.end) for a in admissions])
        keys = [stream_key(r.params.seed, r.stream, r.ticket) for r in requests]
        self.key[rows] = sample_keys(spread(keys), indices.to(device))
        self.position[rows] = spread([request.ids.numel() for request in requests]) - 1
        self.count[rows] = 0
        self.live[rows] = True
        for name in ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p"):
            table = getattr(self, name)
            table[rows] = spread([getattr(p, name) for p in params], table.dtype)
        self._widen_stops(max(len(p.stop_token_ids) for p in params))
        self.stops[rows] = spread([self._padded_stops(p) for p in params])
        row = first
        for admission in admissions:
            if admission.request.recorded.token_ids.numel():
                self._go_on(row, admission.request.recorded)
            row += admission.num_samples

    def _widen_stops(self, width: int) -> None:
        missing = width - self.stops.shape[1]
        if missing > 0:
            self.stops = F.pad(self.stops, (0, missing), value=-1)

    def _padded_stops(self, params: SamplingParams) -> list[int]:
        """[S], -1 for none."""
        stops = list(params.stop_token_ids)
        return stops + [-1] * (self.stops.shape[1] - len(stops))

    def _go_on(self, row: int, had: Recorded) -> None:
        """A row begins with tokens that were sampled before."""
        count = had.token_ids.numel()
        self.count[row] = count
        self.tokens[row, :count] = had.token_ids
        self.logprobs[row, :count] = had.generator_logprobs
        self.versions[row, :count] = had.policy_versions

    def demands(self, num_rows: int) -> Demands:
        """What any of the first rows asks of the sampler. Waits once for the device."""
        rows = slice(0, num_rows)
        temperature = self.temperature[rows]
        asked = {
            "temperature": ((temperature != 0) & (temperature != 1)).any(),
            "greedy": (temperature == 0).any(),
            "top_k": (self.top_k[rows] > 0).any(),
            "top_p": (self.top_p[rows] < 1).any(),
            "min_new_tokens": (self.min_new_tokens[rows] > self.count[rows]).any(),
        }
        answers = torch.stack(list(asked.values())).tolist()
        return Demands(**dict(zip(asked, answers)))

    def append(self, rows: slice, logits_RV: Tensor, version: Tensor, demands: Demands) -> None:
        """Sample one token for each of `rows`, record it where the row is live, and end the rows
        that it ends. version: [1].
        """
        count = self.count[rows]
        live = self.live[rows]
        stops = self.stops[rows]
        temperature = self.temperature[rows]
        banned = None
        if demands.min_new_tokens:
            may_stop = count >= self.min_new_tokens[rows]
            banned = stops.masked_fill(may_stop[:, None], -1)
        logits = process(
            logits_RV,
            temperature_N=temperature if demands.temperature else None,
            top_k_N=self.top_k[rows] if demands.top_k else None,
            top_p_N=self.top_p[rows] if demands.top_p else None,
            banned_NS=banned,
        )
        greedy = temperature == 0 if demands.greedy else None
        token, logprob = sample(logits, uniforms(self.key[rows], count), greedy)
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

    def recorded(self, rows: list[int]) -> list[Recorded]:
        """What each of some rows has sampled so far, on the CPU."""
        index = torch.tensor(rows, device=self.token.device)
        lengths_N = self.count[index]
        longest = int(lengths_N.max())
        lengths = lengths_N.tolist()
        is_sampled_NL = torch.arange(longest, device=index.device) < lengths_N[:, None]

        def split(table: Tensor) -> Sequence[Tensor]:
            return table[index, :longest][is_sampled_NL].cpu().split(lengths)

        parts = zip(split(self.tokens), split(self.logprobs), split(self.versions))
        return [Recorded(*part) for part in parts]

    def tables(self) -> list[Tensor]:
        """Every tensor of the rows, none copied."""
        return [getattr(self, field.name) for field in fields(self)]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows `source` to rows `target`."""
        for table in self.tables():
            table.index_copy_(0, target, table.index_select(0, source))
