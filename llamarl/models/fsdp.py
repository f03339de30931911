"""A decoder's parameters over ranks: FSDP2 around its layers, and which part a rank holds.

A rank's box of a parameter is its rows (FSDP2) of its tensor-parallel part
(llamarl.models.sharding). `local` is the way to what a rank holds of a DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from llamarl.models.sharding import Box, Shape, tensor_parallel_box, whole_shapes

# torch.distributed.tensor and torch.distributed.fsdp take a CPU second to import. We load them only
# where something is sharded: a rank that trains alone, samples or scores does without.
if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from llamarl.models.decoder import Decoder


NamedTensors = Iterable[tuple[str, Tensor]]


def wrap(
    decoder: Decoder,
    mesh: DeviceMesh | None,
    compute_dtype: torch.dtype,
    device: torch.device,
    *,
    cpu_offload: bool,
) -> None:
    """Wrap every layer, and the decoder around them, in FSDP2. It computes in compute_dtype on the
    device and reduces in float32. Call it before weights load.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    offload = OffloadPolicy()
    if cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    # Rotary tables stay float32: the layers round what they make of them.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    shard = cpu_offload or (mesh is not None and mesh.shape[-1] > 1)
    wrap_one = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for layer in decoder.layers:
        wrap_one(layer, reshard_after_forward=shard)
    wrap_one(decoder, reshard_after_forward=False)
    decoder.whole_on_each_rank = not shard


def next_backward(decoder: Decoder, *, last: bool) -> None:
    """Prepare a microbatch of an optimizer step; `last` says that it is the step's last one. Where
    a rank holds every weight of its part, weights are cast once a step and gradients add up in
    float32, to be reduced once. Sharded ones do so at every microbatch.
    """
    if decoder.masters is not None:
        decoder.masters.last = last
    if decoder.whole_on_each_rank:
        assert is_fsdp_module(decoder), "`wrap` says so of the decoders that it wraps"
        decoder.set_requires_gradient_sync(last)
        decoder.set_reshard_after_backward(last)


def reshard(decoder: Decoder) -> None:
    """Release what a forward without backward keeps gathered: embedding, last norm and head."""
    if is_fsdp_module(decoder):
        decoder.reshard()


def drop_gradients(decoder: Decoder) -> None:
    """Drop the gradients of the microbatches so far, if a step ends before its last one."""
    if decoder.masters is not None:
        decoder.masters.forget()
    for module in decoder.modules():
        if is_fsdp_module(module):
            state = module._get_fsdp_state()
            # A list since torch 2.13, one group before.
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in groups:
                for parameter in group.fsdp_params if group else ():
                    parameter.unsharded_accumulated_grad = None
            module.reshard()
    decoder.zero_grad(set_to_none=True)


def _shape_of(decoder: Decoder, name: str) -> Shape:
    """Return the global shape of the parameter with this Hugging Face name, adapters included."""
    return whole_shapes(decoder.config)[name]


def _tensor_box(decoder: Decoder, name: str) -> Box:
    """Return the part of the parameter with this Hugging Face name that this rank of a
    tensor-parallel decoder and the others of its mesh hold together.
    """
    shape = _shape_of(decoder, name)
    tp = decoder.tensor_parallel
    assert tp is not None, "the decoder is not tensor-parallel"
    return tensor_parallel_box(
        decoder.config, name, shape, tp.rank, tp.size, split_vocabulary=tp.split_vocabulary
    )


def peers_of(decoder: Decoder, name: str) -> dist.ProcessGroup | None:
    """Return the ranks that hold the other tensor-parallel parts of the parameter with this Hugging
    Face name; None if each rank holds the whole.
    """
    tp = decoder.tensor_parallel
    if tp is None or _tensor_box(decoder, name).lengths == _shape_of(decoder, name):
        return None
    return tp.group


def held_box(decoder: Decoder, name: str, parameter: Tensor) -> Box:
    """Return the part of the parameter with this Hugging Face name that this rank holds."""
    if decoder.tensor_parallel is None:
        return held_rows(parameter, Box.whole(tuple(parameter.shape)))
    return held_rows(parameter, _tensor_box(decoder, name))


def held_rows(parameter: Tensor, box: Box) -> Box:
    """Return the part of a box that this rank holds: its rows, if FSDP2 has sharded it."""
    if not is_dtensor(parameter):
        return box
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return box.cut(0, offset[0] if offset else 0, shape[0])


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, without gradients. Its shape is that of held_box."""
    tensor = tensor.detach()
    if is_dtensor(tensor):
        tensor = tensor.to_local()
    return tensor


def fill(decoder: Decoder, name: str, parameter: Tensor, whole: Any) -> Tensor:
    """Copy what this rank holds of a parameter from the whole, a tensor or what is sliced as it
    lies on disk. Returns the copied numbers.
    """
    box = held_box(decoder, name, parameter)
    part = torch.empty(box.lengths)
    if box.numel:
        part = whole[box.within(Box((0,) * len(box.lengths), box.lengths))]
    local(parameter).copy_(part)
    return part


@contextmanager
def whole_parameters(
    decoder: Decoder, parameters: NamedTensors
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Collective over a replica's ranks: yield each parameter, one at a time; whole on
    tensor-parallel rank 0, elsewhere the rank's part.

    Parameters that the block did not take are still gathered at its end, also after an error,
    because the other ranks take part in gathering each.
    """
    whole = _made_whole(decoder, parameters)
    try:
        yield whole
    finally:
        for _ in whole:
            pass


def _made_whole(decoder: Decoder, parameters: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    for name, p in parameters:
        part = p.detach()
        if is_dtensor(part):
            part = part.full_tensor()
        peers = peers_of(decoder, name)
        if peers is not None:
            part = _joined(peers, part, is_by_rows=part.shape[0] != _shape_of(decoder, name)[0])
        yield name, part


def _joined(peers: dist.ProcessGroup, part: Tensor, *, is_by_rows: bool) -> Tensor:
    """Collective over the tensor-parallel ranks, whose parts are of one shape: join the parts end
    to end on the first of them.
    """
    if dist.get_rank(peers) > 0:
        dist.gather(part.contiguous(), group=peers, group_dst=0)
        return part
    parts = [torch.empty_like(part) for _ in range(peers.size())]
    dist.gather(part.contiguous(), parts, group=peers, group_dst=0)
    return torch.cat(parts, 0 if is_by_rows else 1)


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, of which each rank holds a part."""
    return _is_of(tensor, "torch.distributed.tensor", "DTensor")


def is_fsdp_module(module: object) -> TypeGuard[FSDPModule]:
    """Whether a module is wrapped by FSDP2."""
    return _is_of(module, "torch.distributed.fsdp", "FSDPModule")


def _is_of(instance: object, module: str, name: str) -> bool:
    """Whether an object is an instance of a module's class. The class exists once the module is
    loaded.
    """
    # Nothing can be an instance of a class that is not loaded; None also while it is being loaded.
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(instance, kind)
