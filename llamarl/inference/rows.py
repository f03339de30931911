"""What the engine knows of each running sample, row by row and dense: row i is slot i of the cache.

Shapes: R rows, L places, S stop tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.inference.requests import Recorded, Sample
from llamarl.inference.sampler import process, sample, sample_keys, uniforms


@dataclass(frozen=True, slots=True)
class Demands:
    """What any running row asks of the sampler. What none asks for is not computed."""

    temperature: bool
    greedy: bool
    top_k: bool
    top_p: bool
    min_new_tokens: bool


class Rows:
    """One entry (or row) a slot. Rows that have ended but are not yet taken out go on computing and
    record nothing.
    """

    def __init__(self, max_slots: int, max_len: int, device: torch.device):
        def zeros(*width: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(max_slots, *width, dtype=dtype, device=device)

        self.token = zeros()  # [R], the newest token; the decoder reads it next
        self.position = zeros()  # [R], its place
        self.count = zeros()  # [R], tokens sampled
        self.live = zeros(dtype=torch.bool)  # [R]; at first none is
        self.key = zeros()  # [R], of the row's uniforms
        self.max_new_tokens = zeros()  # [R]
        self.min_new_tokens = zeros()  # [R]
        self.temperature = zeros(dtype=torch.float32)  # [R]
        self.top_k = zeros()  # [R]
        self.top_p = zeros(dtype=torch.float64)  # [R]
        self.stops = zeros(1)  # [R, S], -1 for none
        self.tokens = zeros(max_len)  # [R, L], what was sampled, and its
        self.logprobs = zeros(max_len, dtype=torch.float32)  # [R, L]
        self.versions = zeros(max_len)  # [R, L]

    def start(self, first: int, samples: list[Sample]) -> None:
        """Rows from `first` on become these samples."""
        rows = slice(first, first + len(samples))
        params = [request.params for request, _ in samples]
        for name in ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p"):
            table = getattr(self, name)
            values = [getattr(wanted, name) for wanted in params]
            table[rows] = torch.tensor(values, dtype=table.dtype)
        missing = max(len(wanted.stop_token_ids) for wanted in params) - self.stops.shape[1]
        if missing > 0:
            self.stops = F.pad(self.stops, (0, missing), value=-1)
        stops, places, lengths, counts = [], [], [], []
        for request, index in samples:
            ids = list(request.params.stop_token_ids)
            stops.append(ids + [-1] * (self.stops.shape[1] - len(ids)))
            places.append((request.params.seed, request.stream, request.ticket, index))
            lengths.append(request.ids.numel())
            counts.append(request.recorded.token_ids.numel())
        self.stops[rows] = torch.tensor(stops)
        self.key[rows] = sample_keys(torch.tensor(places))
        self.position[rows] = torch.tensor(lengths) - 1
        self.count[rows] = torch.tensor(counts)
        self.live[rows] = True
        for row, (request, _) in enumerate(samples, first):
            had, count = request.recorded, counts[row - first]
            if count:  # tokens that were sampled before
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
        lengths = self.count[rows].tolist()
        longest = max(lengths, default=0)
        tables = (self.tokens, self.logprobs, self.versions)
        columns = [table[rows, :longest].cpu() for table in tables]
        recorded = []
        for i, length in enumerate(lengths):
            recorded.append(Recorded(*[column[i, :length] for column in columns]))
        return recorded

    def tables(self) -> list[Tensor]:
        """Every tensor of the rows, none copied."""
        return list(vars(self).values())

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows `source` to rows `target`."""
        for table in self.tables():
            table.index_copy_(0, target, table.index_select(0, source))
