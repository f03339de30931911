"""Resets: resets the weights of a reference to the policy's, every so many steps (TBA, arXiv
2503.18929, section 6 and appendix D: rho).

    trainer --"reset" message: version v is sent--> due --> all ranks hold it --> swap

Each rank gets its own shard of a version, and all swap it between the same two batches. A group
whose newest token is of policy version g waits for the reference of version g - g % every or later.
So with max_lag=0 the version that scores a group does not depend on timing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping

import torch

from llamarl.comm.together import CollectiveCall, RankCalls
from llamarl.ddma.channel import RESET
from llamarl.ddma.receiver import WeightsReceiver
from llamarl.errors import TimedOut
from llamarl.executor import Executor, State
from llamarl.models.build import Decoder
from llamarl.models.fsdp import held_box, is_split, local
from llamarl.models.lora import travelling
from llamarl.models.sharded_state import Shard, load_shards
from llamarl.models.sharding import Box, adapter_shapes, parameter_shapes
from llamarl.types import Group


class Resets:
    """One rank's end of the resets.

    weights: the end where versions come in. every: steps between resets. timeout_s: how long a
    checkpoint waits for a version.
    """

    def __init__(
        self,
        executor: Executor,
        ranks: RankCalls,
        decoder: Decoder,
        weights: WeightsReceiver,
        *,
        every: int,
        timeout_s: float,
    ):
        self._executor = executor
        self._ranks = ranks
        self._decoder = decoder
        self._every = every
        self._timeout_s = timeout_s
        self._due: list[int] = []  # versions that the trainer has announced, oldest first
        self._newest = math.inf  # no version after this one may be swapped in now
        self._asked: int | None = None  # the step of a checkpoint that waits for versions
        self._until = math.inf  # by time.monotonic(): how long it waits
        named = travelling(decoder)
        self._shards = [Shard(name, p, held_box(decoder, name, p)) for name, p in named]
        self._weights = weights
        self._weights.bind(decoder.config, named)
        ranks.add("swap", CollectiveCall(self._swap, is_ready=self._may_swap))

    def begin_step(self) -> None:
        """Note that the trainer begins a version, which a checkpoint that was asked for before must
        not hold.
        """
        if self._asked is None:
            self._newest = -1 if self._executor.control.has("save") else math.inf

    def needs(self, group: Group) -> int:
        """Return the first version of the reference that may score a group."""
        newest = newest_version(group)
        return newest - newest % self._every

    def report(self) -> None:
        """On ranks other than the first: report which version is staged here."""
        self._ranks.lockstep.report(self._weights.staged)

    def swap_next(self) -> bool:
        """On the first rank: let all swap the next version that the trainer has announced, if it
        has come to all. Return whether it had.
        """
        if not self._may_swap() or self._ranks.lockstep.agreed(self._weights.staged) is None:
            return False
        self._ranks.call("swap", self._due[0])
        return True

    def close(self) -> None:
        """Close the weights' channel."""
        self._weights.close()

    def _may_swap(self) -> bool:
        """Whether the trainer has told of a version, and no checkpoint forbids it. On any rank in
        the order of the trainer's own words: a checkpoint is before the version it was made before,
        though the first rank may be past it already.
        """
        self._due += [message["version"] for _, message in self._executor.control.take(RESET)]
        return bool(self._due) and self._due[0] <= self._newest

    def _swap(self, version: int) -> None:
        staged = self._weights.swap()
        assert staged is not None, f"version {version} is not here"
        assert staged.version == version, f"version {staged.version} came, not {version}"
        self._executor.version = version
        self._due.remove(version)

    # --- Checkpoints ---

    def may_checkpoint(self, step: int) -> bool:
        """Take in versions that were sent up to that step. Return whether none is on its way any
        more; TimedOut if one does not come.
        """
        if self._asked is None:
            self._until = time.monotonic() + self._timeout_s
        self._asked = step
        self._newest = step
        has_worked = True
        while has_worked and self._may_swap():
            if self._ranks.follows:
                self.report()
                has_worked = self._ranks.follow()
            else:
                has_worked = self.swap_next()
        if self._may_swap():
            if time.monotonic() > self._until:
                raise TimedOut(
                    f"reference on rank {self._executor.group.rank} waited {self._timeout_s:.0f} s "
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
        version = self._executor.version
        boxes: dict[str, list] = {}
        state: dict[str, object] = {"version": version, "boxes": boxes}
        if not version or self._executor.group.replica > 0:
            return state
        is_first_peer = self._executor.group.tensor_index == 0
        for shard in self._shards:
            if not is_first_peer and not is_split(self._decoder, shard.name):
                continue
            boxes[shard.name] = [shard.box.offsets, shard.box.lengths]
            state[f"model/{shard.name}"] = local(shard.parameter).contiguous()
        return state

    @torch.no_grad()
    def load_state_dict(self, parts: Iterable[Mapping]) -> None:
        """Load from all ranks' parts, whatever their number was: each rank takes its own rows.

        ValueError if it is of a model of other shapes.
        """
        parts = list(parts)
        for part in parts:
            self._executor.version = int(part["version"])
        if self._executor.version:  # version 0 is what training started from, which is not saved
            config = self._decoder.config
            shapes = parameter_shapes(config) | adapter_shapes(config)
            load_shards(self._shards, parts, shapes=shapes, take=_load_shard)


def _load_shard(shard: Shard, part: Mapping, theirs: Box) -> None:
    shard.copy_overlap(shard.parameter, part, f"model/{shard.name}", theirs)


def newest_version(group: Group) -> int:
    """Return the newest policy version in a group's tokens; 0 without tokens."""
    return int(group.policy_versions.max()) if group.policy_versions.numel() else 0
