"""The trainer's decoder: read shard by shard, in mixed precision, over a mesh or on one rank."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from llamarl.models.build import Decoder, build_decoder, read_config
from llamarl.models.fsdp import wrap
from llamarl.models.hf import load_weights
from llamarl.models.lora import Lora, add_lora, reset_lora
from llamarl.models.masters import Masters
from llamarl.models.scorer import SCORE, draw_score_head
from llamarl.models.tp import TensorParallel
from llamarl.models.vocabulary import absent_rows
from llamarl.native.precision import warn_of_slow_bfloat16


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
    score_seed: int | None = None,
) -> Decoder:
    """Load a decoder with float32 master weights that computes in compute_dtype and reduces in
    float32.

    mesh: [shard], or [replicate, shard] for replicas of the shards (HSDP): the ranks that hold the
    same tensor-parallel part, which must hold embedding and head whole. Collective over both from
    the first use on. One rank needs no mesh, and is wrapped by FSDP for cpu_offload alone. lora:
    the weights are frozen, and only adapters beside them require gradients. cpu_offload: masters,
    gradients and so the optimizer's moments are in host memory, a layer's weights on the device
    while it computes. score_seed: make a scorer of the directory's model, whose head is drawn from
    this seed if there is none. FileNotFoundError or ValueError naming the file when the directory
    is not whole. The first rank warns of a CPU that is slow in bfloat16.
    """
    assert tensor_parallel is None or not tensor_parallel.split_vocabulary, (
        "the loss needs the whole head"
    )
    is_first = mesh is None or mesh.get_rank() == int(mesh.mesh.min())
    if is_first and device.type == "cpu" and compute_dtype == torch.bfloat16:
        warn_of_slow_bfloat16()
    config = read_config(path)
    if config.labels:
        score_seed = None  # it has a head
    if score_seed is not None:
        config = config.as_scorer()
    decoder = build_decoder(config, dtype=torch.float32, tensor_parallel=tensor_parallel)
    decoder.activation_checkpointing = activation_checkpointing
    if lora:
        add_lora(decoder, lora)
    if cpu_offload or (mesh is not None and mesh.size() > 1):
        pin_memory = device.type == "cuda"
        wrap(decoder, mesh, compute_dtype, cpu_offload=cpu_offload, pin_memory=pin_memory)
    elif compute_dtype != torch.float32:
        decoder.masters = Masters(decoder, decoder.layers, compute_dtype)
    holder = torch.device("cpu") if cpu_offload else device
    load_weights(decoder, path, device=holder, may_lack=() if score_seed is None else (SCORE,))
    if not config.labels:
        decoder.absent_rows = absent_rows(path, config.vocab_size, device)
    if score_seed is not None:
        draw_score_head(decoder, seed=score_seed)
    if lora:
        reset_lora(decoder, lora)
    return decoder.train()
