"""The trainer's decoder: FSDP2 over a mesh, of each tensor-parallel part; mixed precision; weights
read shard by shard.

A rank's box of a parameter is its rows (FSDP2) of its tensor-parallel part
(llamarl.models.sharding).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from llamarl.models.build import Decoder, build_decoder, read_config
from llamarl.models.hf import load_weights, local_rows
from llamarl.models.lora import Lora, add_lora, reset_lora
from llamarl.models.masters import Masters
from llamarl.models.sharding import Box, parameter_shapes, tensor_parallel_box
from llamarl.models.tp import TensorParallel


def training_decoder(
    path: str | Path,
    *,
    mesh: DeviceMesh | None,
    device: torch.device,
    compute_dtype: torch.dtype,
    activation_checkpointing: bool = False,
    tensor_parallel: TensorParallel | None = None,
    lora: Lora | None = None,
    cpu_offload: bool = False,
) -> Decoder:
    """A decoder with float32 master weights that computes in compute_dtype and reduces in float32.

    mesh: [shard], or [replicate, shard] for replicas of the shards (HSDP): the ranks that hold the
    same tensor-parallel part, which must hold embedding and head whole. Collective over both from
    the first use on. One rank needs no mesh, and is wrapped by FSDP for cpu_offload alone. lora:
    the weights are frozen, and only adapters beside them require gradients. cpu_offload: masters,
    gradients and so the optimizer's moments are in host memory, a layer's weights on the device
    while it computes. FileNotFoundError or ValueError naming the file when the directory is not
    whole.
    """
    assert tensor_parallel is None or not tensor_parallel.split_vocabulary, (
        "the loss needs the whole head"
    )
    decoder = build_decoder(read_config(path), dtype=torch.float32, tensor_parallel=tensor_parallel)
    decoder.activation_checkpointing = activation_checkpointing
    if lora:
        add_lora(decoder, lora)
    if (mesh is not None and mesh.size() > 1) or cpu_offload:
        wrap(
            decoder, mesh, compute_dtype, cpu_offload=cpu_offload, pin_memory=device.type == "cuda"
        )
    elif compute_dtype != torch.float32:
        decoder.masters = Masters(decoder, compute_dtype)
    load_weights(decoder, path, device=torch.device("cpu") if cpu_offload else device)
    if lora:
        reset_lora(decoder, lora)
    return decoder.train()


def wrap(
    decoder: Decoder,
    mesh: DeviceMesh | None,
    compute_dtype: torch.dtype,
    *,
    cpu_offload: bool,
    pin_memory: bool,
) -> None:
    """FSDP2 of every layer, and of the decoder around them, computing in compute_dtype and reducing
    in float32. Before weights load.
    """
    offload = CPUOffloadPolicy(pin_memory=pin_memory) if cpu_offload else OffloadPolicy()
    # Rotary tables stay float32: the layers round what they make of them.
    precision = {
        "param_dtype": compute_dtype,
        "reduce_dtype": torch.float32,
        "cast_forward_inputs": False,
    }
    policy = MixedPrecisionPolicy(**precision)
    shard = mesh.shape[-1] > 1 or cpu_offload
    for layer in decoder.layers:
        fully_shard(
            layer, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=shard
        )
    fully_shard(
        decoder, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False
    )
    decoder.whole_on_each_rank = not shard


def next_backward(decoder: Decoder, *, last: bool) -> None:
    """Before each microbatch of an optimizer step, `last` with its last one: where a rank holds
    every weight of its part, weights are cast once a step and gradients add up in float32, to be
    reduced once. Sharded ones do so at every microbatch.
    """
    if decoder.masters is not None:
        decoder.masters.last = last
    if decoder.whole_on_each_rank:
        decoder.set_requires_gradient_sync(last)
        decoder.set_reshard_after_backward(last)


def drop_gradients(decoder: Decoder) -> None:
    """Forget what microbatches have added up so far, on a step that ends before its last one."""
    if decoder.masters is not None:
        decoder.masters.forget()
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [
                state._fsdp_param_group
            ]  # torch 2.13; before
            for parameter in (p for group in groups if group for p in group.fsdp_params):
                parameter.unsharded_accumulated_grad = None
            module.reshard()
    decoder.zero_grad(set_to_none=True)


def tensor_box(decoder: Decoder, name: str) -> Box:
    """The part of the parameter with this Hugging Face name that the ranks of this one's mesh hold
    together.
    """
    shape, tp = parameter_shapes(decoder.config)[name], decoder.tensor_parallel
    return (
        tensor_parallel_box(decoder.config, name, shape, tp.rank, tp.size, split_vocabulary=False)
        if tp
        else Box.whole(shape)
    )


def is_split(decoder: Decoder, name: str) -> bool:
    """Whether tensor-parallel ranks hold different parts of a parameter, not each the whole."""
    return (
        decoder.tensor_parallel is not None
        and tensor_box(decoder, name).lengths != parameter_shapes(decoder.config)[name]
    )


def held_box(decoder: Decoder, name: str, parameter: nn.Parameter) -> Box:
    """The part of a parameter that this rank holds."""
    box = (
        tensor_box(decoder, name) if decoder.tensor_parallel else Box.whole(tuple(parameter.shape))
    )
    return box.cut(0, *local_rows(parameter)) if isinstance(parameter, DTensor) else box


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, without gradients: of the shape of its held_box."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_parameters(
    decoder: Decoder, parameters: Iterable[tuple[str, nn.Parameter]]
) -> Iterator[tuple[str, Tensor]]:
    """Collective over a replica's ranks: each parameter, one at a time; whole on tensor-parallel
    rank 0, elsewhere the rank's part.
    """
    for name, p in parameters:
        part = p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
        yield name, _joined(decoder, name, part) if is_split(decoder, name) else part


def _joined(decoder: Decoder, name: str, part: Tensor) -> Tensor:
    """Collective over the tensor-parallel ranks, whose parts are of one shape: the first gets them
    end to end.
    """
    tp, whole = decoder.tensor_parallel, parameter_shapes(decoder.config)[name]
    parts = [torch.empty_like(part) for _ in range(tp.size)] if tp.rank == 0 else None
    dist.gather(part.contiguous(), parts, group=tp.group, group_dst=0)
    dim = next(d for d, n in enumerate(whole) if part.shape[d] != n)
    return torch.cat(parts, dim) if parts else part
