"""The work of a reference: logprobs of every completion token of whole groups, and resets of its
weights to the policy's.

    submit(groups) --> work() --> next_done() --> (group, logprobs [T])

Batched computes groups together, once they have come. Streamed reads their completions while these
are sampled, so that their logprobs are there when they end. It reads completions in pieces of
piece_tokens, so that a group's logprobs have the same bits whatever was read ahead, and equal those
of Batched within rounding. Both run on all ranks of a site, and the first of them plans.

    trainer --"reset" message: version v is sent--> due --> all ranks hold it --> swap
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from llamarl.comm.together import CollectiveCall, RankCalls
from llamarl.ddma.channel import RESET
from llamarl.ddma.receiver import WeightsReceiver
from llamarl.errors import TimedOut
from llamarl.executor import Executor, State
from llamarl.learning.logprobs import LateEnds
from llamarl.models.build import Decoder
from llamarl.models.fsdp import local
from llamarl.models.lora import travelling
from llamarl.models.sharded_state import Shard, load_model, saved_state, shards_of
from llamarl.models.sharding import Box
from llamarl.scoring.ahead import Ahead, LogprobHead, StreamSettings
from llamarl.scoring.growing import GrowingSequences, Key, Pass, Piece
from llamarl.scoring.scorer import Site
from llamarl.scoring.sharded import (
    ShardedReference,
    asked_of,
    from_message,
    to_message,
)
from llamarl.types import Group, Stretch

# Keep finished logprobs of this many completions per cache slot until their group comes; older ones
# are dropped and computed again.
_KEPT_A_SLOT = 16


class Batched:
    """Computes all groups that have come at once. Used on the first rank, as Streamed is.

    models: by their directories. path_of: says which of them scores a group.
    """

    def __init__(
        self,
        models: Mapping[str, ShardedReference],
        site: Site,
        *,
        path_of: Callable[[Group], str],
    ):
        self._site = site
        self._path_of = path_of
        self._waiting: list[Group] = []
        self._done: deque[tuple[Group, Tensor]] = deque()
        for path, model in models.items():
            compute = partial(model.logprobs, together=not site.reproducible)
            call = CollectiveCall(compute, to_message, from_message)
            site.together.add(f"score by {path}", call)

    @property
    def num_waiting(self) -> int:
        """How many groups were submitted and not yet returned."""
        return len(self._waiting) + len(self._done)

    def hear(self, stretch: Stretch, prompt_ids: Tensor) -> None:
        """Do nothing, because nothing is read ahead."""

    def submit(self, groups: Sequence[Group]) -> None:
        """Take groups; does not block."""
        self._waiting += groups

    def work(self) -> bool:
        """Compute all groups that wait, with all ranks. False if there were none."""
        if not self._waiting:
            return False
        by_path: dict[str, list[int]] = defaultdict(list)  # places of the groups
        for place, group in enumerate(self._waiting):
            by_path[self._path_of(group)].append(place)
        found: dict[int, Tensor] = {}
        for path, places in by_path.items():
            asked = [asked_of(self._waiting[place]) for place in places]
            logprobs = self._site.together.call(f"score by {path}", asked)
            found.update(zip(places, logprobs))
        for place, group in enumerate(self._waiting):
            self._done.append((group, found[place]))
        self._waiting = []
        return True

    def next_done(self) -> tuple[Group, Tensor] | None:
        """Return the group that came first with its logprobs [T], float32, nats; None if none is
        done.
        """
        return self._done.popleft() if self._done else None

    def tensors(self) -> Iterator[Tensor]:
        """Yield nothing, because nothing is kept on the device."""
        yield from ()


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A group that was submitted and not yet returned."""

    group: Group
    keys: tuple[Key, ...]  # keys of its completions that have tokens
    came: float  # seconds


class Streamed:
    """Reads completions as they grow, and the rest of them once their groups have come.

    Its metrics are reference/prefilled_early, the share of a group's tokens whose logprobs were
    known when it came; reference/tail_s, from a group to its logprobs; and reference/evictions.
    microbatch_tokens: tokens of a pass, per rank.
    """

    def __init__(
        self,
        model: ShardedReference,
        settings: StreamSettings,
        site: Site,
        *,
        temperature: float,
        microbatch_tokens: int,
        late_ends: LateEnds | None,
    ):
        self._metrics = site.metrics
        self._microbatch_tokens = microbatch_tokens
        self._ahead = Ahead(
            model.decoder,
            LogprobHead(temperature, absent_rows=model.decoder.absent_rows, late_ends=late_ends),
            settings,
            site,
            call="read",
            about="reference",
            last_is_label=True,
        )
        most_kept = settings.slots * _KEPT_A_SLOT
        self._streams = [StreamedLogprobs(growing, most_kept) for growing in self._ahead.caches]
        self._waiting: deque[_Waiting] = deque()

    @property
    def num_waiting(self) -> int:
        """How many groups were submitted and not yet returned."""
        return len(self._waiting)

    def hear(self, stretch: Stretch, prompt_ids: Tensor) -> None:
        """Note new tokens of a completion, in the cache of its ticket."""
        self._stream_of(stretch.ticket).hear(stretch, prompt_ids)

    def submit(self, groups: Sequence[Group]) -> None:
        """Take groups, whose completions are then read to their ends."""
        for group in groups:
            stream = self._stream_of(group.ticket)
            keys = []
            early = 0
            for index, token_ids in enumerate(group.token_ids.split(group.lengths.tolist())):
                if not token_ids.numel():
                    continue
                key = (group.ticket, index)
                early += stream.want(key, group.prompt_ids, token_ids)
                keys.append(key)
            if keys and self._metrics is not None:
                share = early / group.token_ids.numel()
                self._metrics.add_mean("reference/prefilled_early", share)
            self._waiting.append(_Waiting(group, tuple(keys), time.monotonic()))

    def work(self) -> bool:
        """Read a pass: whole completions, or if there are none, what may be read ahead."""
        passes = [stream.next_pass(self._microbatch_tokens) for stream in self._streams]
        if not any(one.pieces for one in passes):
            return False
        values = iter(self._ahead.read(passes))
        for stream, one in zip(self._streams, passes):
            for piece in one.pieces:
                stream.note(piece, next(values))
        self._ahead.note_evictions()
        return True

    def next_done(self) -> tuple[Group, Tensor] | None:
        """Return the group that came first, once all its completions are read; otherwise None."""
        if not self._waiting:
            return None
        first = self._waiting[0]
        stream = self._stream_of(first.group.ticket)
        if not all(stream.has(key) for key in first.keys):
            return None
        self._waiting.popleft()
        if self._metrics is not None:
            self._metrics.add_mean("reference/tail_s", time.monotonic() - first.came)
        return first.group, torch.cat([torch.zeros(0), *map(stream.take, first.keys)])

    def tensors(self) -> Iterator[Tensor]:
        """Yield the caches."""
        yield from self._ahead.tensors()

    def _stream_of(self, ticket: int) -> StreamedLogprobs:
        return self._streams[self._ahead.index_of(ticket)]


class StreamedLogprobs:
    """The completions of one cache: how far each is read, and its logprobs so far.

    A completion is read to its end once a stretch says that it has ended, or its group has come.
    growing: plans for the cache, with a label at the end. most_kept: how many finished completions
    are kept that no group has asked for.
    """

    def __init__(self, growing: GrowingSequences, most_kept: int):
        self._growing = growing
        self._most_kept = most_kept
        # Logprobs of the pieces of unfinished sequences, by the place where the piece begins.
        self._parts: dict[Key, dict[int, Tensor]] = {}
        self._whole: dict[Key, Tensor] = {}  # tokens [L] of those being read to their ends
        self._wanted: set[Key] = set()  # completions of groups that have come
        # Tokens and logprobs, [L] each, of finished completions, the newest last.
        self._read: dict[Key, tuple[Tensor, Tensor]] = {}

    def hear(self, stretch: Stretch, prompt_ids: Tensor) -> None:
        """Note new tokens of a completion, and whether it has ended."""
        key = (stretch.ticket, stretch.sample_index)
        if key in self._whole or key in self._read:
            return
        begin = stretch.begin
        new = stretch.token_ids
        self._growing.extend(key, prompt_ids, begin, new, has_ended=stretch.has_ended)
        token_ids = self._growing.known(key)
        size = 0 if token_ids is None else token_ids.numel()
        is_whole = stretch.has_ended and 0 < size == begin + new.numel()
        if token_ids is not None and is_whole:
            self._finish(key, prompt_ids, token_ids)
        if len(self._parts) > self._growing.num_known:
            # Drop the parts of sequences that the plan has forgotten, because nothing was heard of
            # them for long.
            self._parts = {
                key: parts
                for key, parts in self._parts.items()
                if self._growing.known(key) is not None
            }

    def want(self, key: Key, prompt_ids: Tensor, token_ids: Tensor) -> int:
        """Want the completion [L] of a group, until `take`; it is read to its end if it is not yet.
        Return how many of its L >= 1 tokens have logprobs already.
        """
        self._wanted.add(key)
        if key in self._read:
            of_these, _ = self._read[key]
            if torch.equal(of_these, token_ids):
                return token_ids.numel()
            del self._read[key]  # it was sampled again, with other tokens
        if key in self._whole and not torch.equal(self._whole[key], token_ids):
            self._growing.forget(key)
            del self._whole[key]
        if key not in self._whole:
            self._finish(key, prompt_ids, token_ids)
        return self._growing.num_read(key)

    def next_pass(self, most_tokens: int) -> Pass:
        """Return what is read next. `note` takes the result."""
        return self._growing.next_pass(most_tokens)

    def note(self, piece: Piece, logprobs: Tensor) -> None:
        """Keep the logprobs of a piece."""
        parts = self._parts.setdefault(piece.key, {})
        parts[piece.begin] = logprobs
        if not piece.is_last:
            return
        del self._parts[piece.key]
        # What lies behind belongs to tokens that were sampled again since.
        begins = sorted(begin for begin in parts if begin <= piece.begin)
        token_ids = self._whole.pop(piece.key)
        found = torch.cat([parts[begin] for begin in begins])
        assert found.numel() == token_ids.numel(), (piece.key, begins)
        self._read[piece.key] = (token_ids, found)
        self._forget_oldest()

    def has(self, key: Key) -> bool:
        """Whether a wanted completion was read to its end."""
        return key in self._read

    def take(self, key: Key) -> Tensor:
        """Return and forget the logprobs [L] of a wanted completion that is done, float32, nats."""
        self._wanted.remove(key)
        _, logprobs = self._read.pop(key)
        return logprobs

    def _finish(self, key: Key, prompt_ids: Tensor, token_ids: Tensor) -> None:
        self._growing.finish(key, prompt_ids, token_ids)
        self._whole[key] = token_ids

    def _forget_oldest(self) -> None:
        """Forget the oldest logprobs, because their groups may never come."""
        spare = [key for key in self._read if key not in self._wanted]
        for key in spare[: max(0, len(spare) - self._most_kept)]:
            del self._read[key]


@dataclass(eq=False)
class Resets:
    """One rank's end of the resets.

    weights: the end where versions come in. every: steps between resets. timeout_s: how long a
    checkpoint waits for a version.
    """

    executor: Executor
    ranks: RankCalls
    decoder: Decoder
    weights: WeightsReceiver
    every: int
    timeout_s: float

    def __post_init__(self):
        self._due: list[int] = []  # versions that the trainer has announced, oldest first
        self._newest = math.inf  # no version after this one may be swapped in now
        self._asked: int | None = None  # the step of a checkpoint that waits for versions
        self._until = math.inf  # by time.monotonic(): how long it waits
        named = travelling(self.decoder)
        self._shards = shards_of(self.decoder, named)
        self.weights.bind(self.decoder.config, named)
        self.ranks.add("swap", CollectiveCall(self._swap, is_ready=self._may_swap))

    def begin_step(self) -> None:
        """Note that the trainer begins a version, which a checkpoint that was asked for before must
        not hold.
        """
        if self._asked is None:
            self._newest = -1 if self.executor.control.has("save") else math.inf

    def needs(self, group: Group) -> int:
        """Return the first version of the reference that may score a group."""
        newest = newest_version(group)
        return newest - newest % self.every

    def report(self) -> None:
        """On ranks other than the first: report which version is staged here."""
        self.ranks.lockstep.report(self.weights.staged)

    def swap_next(self) -> bool:
        """On the first rank: let all swap the next version that the trainer has announced, if it
        has come to all. Return whether it had.
        """
        if not self._may_swap() or self.ranks.lockstep.agreed(self.weights.staged) is None:
            return False
        self.ranks.call("swap", self._due[0])
        return True

    def close(self) -> None:
        """Close the weights' channel."""
        self.weights.close()

    def _may_swap(self) -> bool:
        """Whether the trainer has told of a version, and no checkpoint forbids it. On any rank in
        the order of the trainer's own words: a checkpoint is before the version it was made before,
        though the first rank may be past it already.
        """
        self._due += [message["version"] for _, message in self.executor.control.take(RESET)]
        return bool(self._due) and self._due[0] <= self._newest

    def _swap(self, version: int) -> None:
        staged = self.weights.swap()
        assert staged is not None, f"version {version} is not here"
        assert staged.version == version, f"version {staged.version} came, not {version}"
        self.executor.version = version
        self._due.remove(version)

    # --- Checkpoints ---

    def may_checkpoint(self, step: int) -> bool:
        """Take in versions that were sent up to that step. Return whether none is on its way any
        more; TimedOut if one does not come.
        """
        if self._asked is None:
            self._until = time.monotonic() + self.timeout_s
        self._asked = step
        self._newest = step
        has_worked = True
        while has_worked and self._may_swap():
            if self.ranks.follows:
                self.report()
                has_worked = self.ranks.follow()
            else:
                has_worked = self.swap_next()
        if self._may_swap():
            if time.monotonic() > self._until:
                raise TimedOut(
                    f"reference on rank {self.executor.group.rank} waited {self.timeout_s:.0f} s "
                    f"for version {self._due[0]} from the trainer"
                )
            return False
        self._asked = None
        return True

    def state_dict(self) -> State:
        """Return the version and, on the first copy and once it is not the one that training
        started from, this rank's shard of the weights. What tensor-parallel ranks all hold is
        stored by the first of them alone.
        """
        version = self.executor.version
        group = self.executor.group
        shards = self._shards if version and group.replica == 0 else []
        is_first_peer = group.tensor_index == 0
        return {"version": version} | saved_state(shards, _state_of, is_first_peer=is_first_peer)

    @torch.no_grad()
    def load_state_dict(self, parts: Iterable[Mapping]) -> None:
        """Load from all ranks' parts, whatever their number was: each rank takes its own rows.

        ValueError if it is of a model of other shapes.
        """
        parts = list(parts)
        for part in parts:
            self.executor.version = int(part["version"])
        if self.executor.version:  # version 0 is what training started from, which is not saved
            load_model(self.decoder, self._shards, parts, _load_shard)


def _state_of(shard: Shard) -> dict[str, Tensor]:
    return {f"model/{shard.name}": local(shard.parameter).contiguous()}


def _load_shard(shard: Shard, part: Mapping, theirs: Box) -> None:
    shard.copy_overlap(shard.parameter, part, f"model/{shard.name}", theirs)


def newest_version(group: Group) -> int:
    """Return the newest policy version in a group's tokens; 0 without tokens."""
    return int(group.policy_versions.max()) if group.policy_versions.numel() else 0
