"""The trainer's decoder: FSDP2 over a mesh, mixed precision, weights read shard by shard."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from llamarl.models.build import Decoder, build_decoder, read_config
from llamarl.models.hf import load_weights


def training_decoder(
    path: str | Path,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    compute_dtype: torch.dtype,
    activation_checkpointing: bool = False,
) -> Decoder:
    """A decoder with float32 master weights, sharded over `group`, that computes in compute_dtype and reduces in float32.

    Collective over `group` from its first use on. One rank in float32 needs no wrapper and gets none. FileNotFoundError
    or ValueError naming the file when the directory is not whole.
    """
    decoder = build_decoder(read_config(path), dtype=torch.float32)
    decoder.activation_checkpointing = activation_checkpointing
    size = group.size() if group is not None else 1
    if size > 1 or compute_dtype != torch.float32:
        mesh = DeviceMesh.from_group(group, device.type)
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        for layer in decoder.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=size > 1)
        fully_shard(decoder, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    load_weights(decoder, path, device=device)
    return decoder.train()
