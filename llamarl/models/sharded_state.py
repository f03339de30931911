"""Shards of parameters with their Adam moments, as each rank saves its own and takes what it needs
of those that others saved, whatever their number was.

A rank saves, of each parameter, what it holds of it and of its moments, and says which box of the
whole that is. A rank that loads reads of every part what overlaps with its own box:

    saved by 2 ranks     rows 0-3 | rows 4-7
    loaded by 4 ranks    0-1 | 2-3 | 4-5 | 6-7

What is saved of a parameter NAME is called, with the prefixes that its owner chooses,

    {weights}NAME                                its values
    {moments}exp_avg/NAME, ...exp_avg_sq/NAME    what its moments stand for
    {moments}exp_avg_scale/NAME, ...             the scales of their blocks, where they are 8-bit
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llamarl.models.decoder import Decoder
from llamarl.models.fsdp import held_box, local, peers_of
from llamarl.models.sharding import Box, Shape, overlap, whole_shapes

MOMENTS = ("exp_avg", "exp_avg_sq")

_OTHER_MODEL = "it is another model's; resume with the model.path that it was trained from"


def box_of(part: Mapping, name: str, index: tuple[slice, ...]) -> Tensor:
    """Return part[name][index]; if the part has a method `box`, without reading the rest."""
    if hasattr(part, "box"):
        return part.box(name, index)
    return part[name][index]


def moment(value: Tensor) -> Tensor:
    """Return this rank's part of one of MOMENTS as a plain tensor; an 8-bit one as the float32
    values that it stands for.
    """
    own = local(value)
    if hasattr(own, "codes"):
        return own.dequantize()
    return own


def moment_scale(value: Tensor) -> Tensor | None:
    """Return the factors of the blocks of an 8-bit moment, for this rank's part; None for a plain
    moment.
    """
    return getattr(local(value), "scale", None)


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a parameter. peers: the ranks with its other tensor-parallel parts; None: it
    has none.
    """

    name: str
    parameter: nn.Parameter
    box: Box  # of the whole parameter
    peers: dist.ProcessGroup | None = None

    def state(
        self, optimizer: torch.optim.Optimizer, *, weights: str, moments: str
    ) -> dict[str, Tensor]:
        """Return what is to be saved of this shard; moments only once the optimizer has made a
        step.
        """
        tensors = {f"{weights}{self.name}": local(self.parameter)}
        kept = optimizer.state.get(self.parameter, {})
        for key in MOMENTS:
            if key not in kept:
                continue
            value = kept[key]
            tensors[f"{moments}{key}/{self.name}"] = moment(value)
            scale = moment_scale(value)
            if scale is not None:
                tensors[f"{moments}{key}_scale/{self.name}"] = scale
        return tensors

    def load(
        self,
        part: Mapping,
        theirs: Box,
        optimizer: torch.optim.Optimizer,
        *,
        weights: str,
        moments: str,
    ) -> None:
        """Take this shard and its moments from a saved part, which holds the box `theirs`.

        8-bit moments are left as plain tensors for llamarl.learning.optim.settle_moments, their
        scales beside them where the boxes are the same.
        """
        if self.box.numel and not overlap(self.box, theirs).numel:
            return  # the part's tensors are not asked for, so that its file stays closed
        self.copy_overlap(self.parameter, part, f"{weights}{self.name}", theirs)
        for key in MOMENTS:
            saved = f"{moments}{key}/{self.name}"
            if saved not in part:
                continue
            kept = optimizer.state[self.parameter]
            if key not in kept:
                kept[key] = torch.zeros_like(self.parameter)
            self.copy_overlap(kept[key], part, saved, theirs)
            scale = f"{moments}{key}_scale/{self.name}"
            if self.box == theirs and scale in part:
                kept[f"{key}_scale"] = part[scale]

    @torch.no_grad()
    def copy_overlap(self, tensor: Tensor, part: Mapping, saved: str, theirs: Box) -> None:
        """Copy part[saved] into a tensor that is sharded like the parameter, where their boxes
        overlap.
        """
        common = overlap(self.box, theirs)
        if common.numel:  # else there is nothing to read
            values = box_of(part, saved, common.within(theirs))
            local(tensor)[common.within(self.box)].copy_(values)


Take = Callable[[Shard, Mapping, Box], object]  # copies what a saved part, of a box, has of a shard


def shards_of(decoder: Decoder, named: Iterable[tuple[str, nn.Parameter]]) -> list[Shard]:
    """Return this rank's shards of a decoder's parameters, which are given by Hugging Face name."""
    shards = []
    for name, parameter in named:
        box = held_box(decoder, name, parameter)
        shards.append(Shard(name, parameter, box, peers_of(decoder, name)))
    return shards


def saved_state(
    shards: Iterable[Shard],
    of: Callable[[Shard], Mapping[str, Tensor]],
    *,
    is_first_peer: bool,
    boxes: str = "boxes",
) -> dict[str, Any]:
    """Return what `of` gives of the shards that this rank saves, and under `boxes` the box of each.
    is_first_peer: whether it also saves what all tensor-parallel ranks hold.
    """
    saved = [shard for shard in shards if is_first_peer or shard.peers is not None]
    state: dict[str, Any] = {boxes: {s.name: [s.box.offsets, s.box.lengths] for s in saved}}
    for shard in saved:
        state |= of(shard)
    return state


def load_shards(
    shards: Sequence[Shard],
    parts: Sequence[Mapping],
    *,
    shapes: Mapping[str, Shape],
    take: Take,
    boxes: str = "boxes",
    remedy: str = _OTHER_MODEL,
) -> dict[str, int]:
    """Take these shards from the parts that any number of ranks have saved. Returns how many
    elements of each no part holds, if there are any.

    shapes: of the whole parameters, by name. take(shard, part, theirs): copies what the part, which
    holds the box `theirs`, has of the shard. boxes: the key under which parts say their boxes.
    ValueError with the remedy if a part is of other shapes.
    """
    for name, saved in chain.from_iterable(part.get(boxes, {}).items() for part in parts):
        shape = shapes.get(name)
        if shape is None or not box_from(saved).fits(shape):
            raise ValueError(
                f"the checkpoint's {name} does not fit this run's model, where its shape is "
                f"{shape}: {remedy}"
            )
    missing = {shard.name: shard.box.numel for shard in shards}
    for part in parts:
        held = part.get(boxes, {})
        for shard in shards:
            if shard.name in held:
                theirs = box_from(held[shard.name])
                take(shard, part, theirs)
                missing[shard.name] -= overlap(shard.box, theirs).numel
    return {name: count for name, count in missing.items() if count}


def load_model(
    decoder: Decoder,
    shards: Sequence[Shard],
    parts: Sequence[Mapping],
    take: Take,
) -> None:
    """Take all elements of a decoder's shards, as load_shards does. ValueError if some are
    missing.
    """
    absent = list(load_shards(shards, parts, shapes=whole_shapes(decoder.config), take=take))
    if absent:
        raise ValueError(
            f"the checkpoint lacks {', '.join(absent[:5])}, or parts of it, which this run's "
            f"model has: {_OTHER_MODEL}"
        )


def box_from(saved: list) -> Box:
    """Return the box of [offsets, lengths], as JSON gives them back."""
    offsets, lengths = saved
    return Box(tuple(offsets), tuple(lengths))


def steps_of(optimizer: torch.optim.Optimizer) -> float:
    """Return how many steps the optimizer has made."""
    return next((float(state["step"]) for state in optimizer.state.values()), 0.0)


def set_steps(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], steps: float
) -> None:
    """Let the optimizer go on as if it had made these steps; its moments are loaded already."""
    if not steps:
        return
    for parameter in parameters:
        optimizer.state[parameter]["step"] = torch.tensor(steps, device=parameter.device)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all tensors of the optimizer's state."""
    tensors = []
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return tensors
