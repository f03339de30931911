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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llamarl.models.fsdp import local
from llamarl.models.sharding import Box, overlap

MOMENTS = ("exp_avg", "exp_avg_sq")

_OTHER_MODEL = ": it is another model's; resume with the model.path that it was trained from"


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
    """A rank's part of a parameter."""

    name: str
    parameter: nn.Parameter
    box: Box  # of the whole parameter

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
    ) -> int:
        """Take this shard and its moments from a saved part, which holds the box `theirs`.

        Returns how many elements of the parameter that was. 8-bit moments are left as plain tensors
        for llamarl.learning.optim.settle_moments, their scales beside them where the boxes are the
        same.
        """
        common = overlap(self.box, theirs)
        if self.box.numel and not common.numel:
            return 0  # the part's tensors are not asked for, so that its file stays closed
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
        return common.numel

    @torch.no_grad()
    def copy_overlap(self, tensor: Tensor, part: Mapping, saved: str, theirs: Box) -> None:
        """Copy part[saved] into a tensor that is sharded like the parameter, where their boxes
        overlap.
        """
        common = overlap(self.box, theirs)
        if common.numel:  # else there is nothing to read
            values = box_of(part, saved, common.within(theirs))
            local(tensor)[common.within(self.box)].copy_(values)


def saved_shards(
    shards: Sequence[Shard], parts: Iterable[Mapping], *, boxes: str = "boxes"
) -> Iterator[tuple[Shard, Mapping, Box]]:
    """Yield, part by part, each shard whose parameter a part holds something of, the part, and the
    box that it holds. boxes: the key under which parts say their boxes by parameter's name.
    """
    for part in parts:
        held = part.get(boxes, {})
        for shard in shards:
            if shard.name in held:
                yield shard, part, box_from(held[shard.name])


def load_shards(
    shards: Sequence[Shard],
    parts: Sequence[Mapping],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    take: Callable[[Shard, Mapping, Box], object],
) -> None:
    """Take all elements of these shards from the parts that any number of ranks have saved.

    shapes: of the model's whole parameters, by name. take(shard, part, theirs): copies what the
    part, which holds the box `theirs`, has of the shard. ValueError if a part is of a model of
    other shapes, or if no part holds some elements.
    """
    for part in parts:
        check_fits(part["boxes"], shapes)
    missing = {shard.name: shard.box.numel for shard in shards}  # elements
    for shard, part, theirs in saved_shards(shards, parts):
        take(shard, part, theirs)
        missing[shard.name] -= overlap(shard.box, theirs).numel
    check_complete(missing)


def box_from(saved: list) -> Box:
    """Return the box of [offsets, lengths], as JSON gives them back."""
    offsets, lengths = saved
    return Box(tuple(offsets), tuple(lengths))


def check_fits(boxes: Mapping[str, list], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if the boxes of a saved part belong to tensors that a model of these shapes
    does not have, or to larger ones.
    """
    for name, saved in boxes.items():
        shape = shapes.get(name)
        if shape is None or not box_from(saved).fits(shape):
            raise ValueError(
                f"the checkpoint's {name} does not fit this run's model, where its shape is "
                f"{shape}{_OTHER_MODEL}"
            )


def check_complete(missing: Mapping[str, int]) -> None:
    """Raise ValueError if no part held some elements of a parameter. missing: their number by the
    parameter's name.
    """
    absent = [name for name, elements in missing.items() if elements]
    if absent:
        raise ValueError(
            f"the checkpoint lacks {', '.join(absent[:5])}, or parts of it, which this run's "
            f"model has{_OTHER_MODEL}"
        )


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
