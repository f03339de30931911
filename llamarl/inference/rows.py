"""Rows: what the engine knows of each running sample, row by row and dense: row i is slot i of the
cache.

Shapes: R rows, L places, S stop tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.inference.requests import Recorded, Request
from llamarl.inference.sampler import process, sample, sample_keys, uniforms
from llamarl.inference.schedule import Sample
from llamarl.machine.device import CPU, has_float64
from llamarl.types import begin_of_turn


@dataclass(frozen=True, slots=True)
class Demands:
    """The demands of the running rows on the sampler. What no row needs is not computed."""

    temperature: bool
    greedy: bool
    top_k: bool
    top_p: bool
    min_p: bool
    min_new_tokens: bool


class Rows:
    """One entry (or row) a slot. Rows that have ended but are not yet taken out go on computing and
    record nothing. They are on the CPU if the device has no float64, in which tokens are drawn.
    """

    def __init__(self, max_slots: int, max_len: int, device: torch.device):
        at = device if has_float64(device) else CPU

        def zeros(*width: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(max_slots, *width, dtype=dtype, device=at)

        self.token = zeros()  # [R], the newest token; the decoder reads it next
        self.position = zeros()  # [R], its place
        self.count = zeros()  # [R], tokens behind the prompt: sampled ones and context
        self.begin = zeros()  # [R], those of them before the turn that is being sampled
        self.told = zeros()  # [R], those of them that `news` has given
        self.searched = zeros()  # [R], those of them that were searched for stop strings
        self.stopped = zeros(dtype=torch.bool)  # [R], whether a stop string ended it
        self.live = zeros(dtype=torch.bool)  # [R]; at first none is
        self.key = zeros()  # [R], of the row's uniforms
        self.max_new_tokens = zeros()  # [R]
        self.min_new_tokens = zeros()  # [R]
        self.temperature = zeros(dtype=torch.float32)  # [R]
        self.top_k = zeros()  # [R]
        self.top_p = zeros(dtype=torch.float64)  # [R]
        self.min_p = zeros(dtype=torch.float64)  # [R]
        self.stops = zeros(1)  # [R, S], -1 for none
        self.tokens = zeros(max_len)  # [R, L], those tokens, and their
        self.logprobs = zeros(max_len, dtype=torch.float32)  # [R, L]
        self.versions = zeros(max_len)  # [R, L]
        self.mask = zeros(max_len, dtype=torch.bool)  # [R, L], whether it was sampled
        self.restarts = zeros(max_len, dtype=torch.bool)  # [R, L], as of a Completion

    def start(self, first: int, samples: list[Sample[Request]]) -> None:
        """Begin these samples in the rows from `first` on."""
        rows = slice(first, first + len(samples))
        params = [request.params for request, _ in samples]
        numbers = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p")
        for name in numbers:
            table = getattr(self, name)
            values = [getattr(wanted, name) for wanted in params]
            table[rows] = torch.tensor(values, dtype=table.dtype)
        most_stops = max(len(wanted.stop_token_ids) for wanted in params)
        missing = most_stops - self.stops.shape[1]
        if missing > 0:
            self.stops = F.pad(self.stops, (0, missing), value=-1)
        width = self.stops.shape[1]
        stops = []
        for wanted in params:
            nones = [-1] * (width - len(wanted.stop_token_ids))
            stops.append([*wanted.stop_token_ids, *nones])
        self.stops[rows] = torch.tensor(stops, dtype=torch.int64)
        self.count[rows] = 0
        self.begin[rows] = 0
        self.told[rows] = 0
        self.searched[rows] = 0
        self.stopped[rows] = False
        self.live[rows] = True
        places = []
        lengths = []
        for row, (request, index) in enumerate(samples, first):
            wanted = request.params
            places.append((wanted.seed, request.stream, request.ticket, index))
            had = request.recorded
            count = had.token_ids.numel()
            lengths.append(request.num_read)
            if count:  # they are of an earlier start
                self.count[row] = count
                self.begin[row] = begin_of_turn(had.loss_mask)
                self.tokens[row, :count] = had.token_ids
                self.logprobs[row, :count] = had.generator_logprobs
                self.versions[row, :count] = had.policy_versions
                self.mask[row, :count] = had.loss_mask
                self.restarts[row, :count] = had.restarts
        self.key[rows] = sample_keys(torch.tensor(places))
        self.position[rows] = torch.tensor(lengths) - 1

    def demands(self, num_rows: int) -> Demands:
        """Return what any of the first rows asks of the sampler. Waits once for the device."""
        rows = slice(0, num_rows)
        temperature = self.temperature[rows]
        is_greedy = temperature == 0
        is_scaled = ~is_greedy & (temperature != 1)
        must_go_on = self.min_new_tokens[rows] > self.count[rows]
        asked = {
            "temperature": is_scaled,
            "greedy": is_greedy,
            "top_k": self.top_k[rows] > 0,
            "top_p": self.top_p[rows] < 1,
            "min_p": self.min_p[rows] > 0,
            "min_new_tokens": must_go_on,
        }
        answers = torch.stack(list(asked.values())).any(1)
        return Demands(**dict(zip(asked, answers.tolist())))

    def append(self, rows: slice, logits_RV: Tensor, version: Tensor, demands: Demands) -> None:
        """Sample one token for each of `rows`, record it where the row is live, and end the rows
        that it ends. version: [1].
        """
        logits_RV = logits_RV.to(self.token.device)
        version = version.to(self.token.device)
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
            min_p_N=self.min_p[rows] if demands.min_p else None,
            banned_NS=banned,
        )
        greedy = temperature == 0 if demands.greedy else None
        chosen = uniforms(self.key[rows], count)
        token, logprob = sample(logits, chosen, greedy)
        # A dead row writes just behind its end, where nobody reads.
        place_R1 = count[:, None]
        token_R1 = token[:, None]
        self.token[rows] = token
        self.tokens[rows].scatter_(1, place_R1, token_R1)
        self.logprobs[rows].scatter_(1, place_R1, logprob[:, None])
        self.versions[rows].scatter_(1, place_R1, version.expand_as(place_R1))
        self.mask[rows].scatter_(1, place_R1, True)
        self.restarts[rows].scatter_(1, place_R1, False)
        count += live
        live &= (token_R1 != stops).all(1)
        live &= count < self.max_new_tokens[rows]
        # A row that just ended stays where it is: its next place may lie beyond its slot.
        self.position[rows] += live

    def recorded(self, rows: Iterable[int]) -> list[Recorded]:
        """Return what each of some rows has so far, on the CPU."""
        index = list(rows)
        lengths = self.count[index].tolist()
        longest = max(lengths, default=0)
        # All rows' tokens end to end, which are then cut: one operation a table and not one a row.
        is_held = torch.arange(longest) < torch.tensor(lengths, dtype=torch.int64)[:, None]
        columns = []
        for table in (self.tokens, self.logprobs, self.versions, self.mask, self.restarts):
            columns.append(table[index, :longest].cpu()[is_held].split(lengths))
        return [Recorded(*parts) for parts in zip(*columns)]

    def news(self, num_rows: int) -> list[tuple[int, Tensor]]:
        """Return (begin, tokens [n] on the CPU) of each of the first rows: what it has sampled
        since this was last asked. Waits once for the device.
        """
        rows = slice(0, num_rows)
        begins = self.told[rows].tolist()
        ends = self.count[rows].tolist()
        first = min(begins, default=0)
        last = max(ends, default=0)
        tokens = self.tokens[rows, first:last].clone().cpu()
        self.told[rows] = self.count[rows]
        news = []
        for row, (begin, end) in enumerate(zip(begins, ends)):
            news.append((begin, tokens[row, begin - first : end - first]))
        return news

    def unsearched(self, rows: list[int]) -> list[tuple[int, list[int]]]:
        """Return (seen, tokens) of each of some rows: all that it has sampled in this turn, and how
        many of them this has given before. Waits for the device.
        """
        counts = self.count[rows]
        begins = self.begin[rows].tolist()
        searched = self.searched[rows].tolist()
        self.searched[rows] = counts
        ends = counts.tolist()
        tokens = self.tokens[rows, : max(ends)].tolist()
        found = []
        for seen, row, begin, end in zip(searched, tokens, begins, ends):
            found.append((max(0, seen - begin), row[begin:end]))
        return found

    def stop(self, row: int, end: int) -> None:
        """End a row with the first `end` of its turn's tokens."""
        self.count[row] = self.begin[row] + end
        self.stopped[row] = True
        self.live[row] = False

    def tables(self) -> list[Tensor]:
        """Return every tensor of the rows, none copied."""
        return list(vars(self).values())

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows `source` to rows `target`."""
        source = source.to(self.token.device)
        target = target.to(self.token.device)
        for table in self.tables():
            table.index_copy_(0, target, table.index_select(0, source))
