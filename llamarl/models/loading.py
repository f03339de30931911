"""Decoders of model directories: to train in mixed precision, or frozen; over a mesh, in
tensor-parallel parts, or on one rank. Each rank reads its own shard.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from llamarl.executor import ExecutorGroup
from llamarl.machine.precision import warn_of_slow_bfloat16
from llamarl.models.build import Decoder, build_decoder, config_of, read_config
from llamarl.models.config import as_scorer
from llamarl.models.fsdp import local, wrap
from llamarl.models.hf import absent_rows, load_weights
from llamarl.models.lora import reset_lora
from llamarl.models.masters import Masters
from llamarl.models.scorer import SCORE, draw_score_head
from llamarl.models.shape import AUTO, Lora
from llamarl.models.tp import TensorParallel

log = logging.getLogger(__name__)
MOST_TIES = 1e-3  # share of the weights; of weights as training leaves them 2^-16 are ties


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
    made_by: str = AUTO,
) -> Decoder:
    """Load a decoder with float32 master weights that computes in compute_dtype and reduces in
    float32.

    mesh: [shard], or [replicate, shard] for replicas of the shards (HSDP): the ranks that hold the
    same tensor-parallel part, which must hold embedding and head whole. Collective over both from
    the first use on. One rank needs no mesh, and is wrapped by FSDP for cpu_offload alone. lora:
    the weights are frozen, and only adapters beside them require gradients. cpu_offload: masters,
    gradients and so the optimizer's moments are in host memory, a layer's weights on the device
    while it computes. score_seed: make a scorer of the directory's model, whose head is drawn from
    this seed if there is none. made_by: of config_of. FileNotFoundError or ValueError naming the
    file when the directory is not whole. The first rank warns of a CPU that is slow in bfloat16,
    and of weights that lie half-way between two numbers of it.
    """
    assert tensor_parallel is None or not tensor_parallel.split_vocabulary, (
        "the loss needs the whole head"
    )
    is_first = mesh is None or mesh.get_rank() == int(mesh.mesh.min())
    if is_first and device.type == "cpu" and compute_dtype == torch.bfloat16:
        warn_of_slow_bfloat16()
    config = dataclasses.replace(config_of(path, made_by), lora=lora)
    if config.labels:
        score_seed = None  # it has a head
    if score_seed is not None:
        config = as_scorer(config)
    decoder = build_decoder(config, dtype=torch.float32, tensor_parallel=tensor_parallel)
    decoder.activation_checkpointing = activation_checkpointing
    if cpu_offload or (mesh is not None and mesh.size() > 1):
        wrap(decoder, mesh, compute_dtype, device, cpu_offload=cpu_offload)
    elif compute_dtype != torch.float32:
        decoder.masters = Masters(decoder, decoder.layers, compute_dtype)
    may_lack = () if score_seed is None else (SCORE,)
    holder = torch.device("cpu") if cpu_offload else device
    load_weights(decoder, path, device=holder, may_lack=may_lack)
    if not config.labels:
        decoder.absent_rows = absent_rows(path, config.vocab_size, device)
    if score_seed is not None:
        draw_score_head(decoder, seed=score_seed)
    if lora is not None:
        reset_lora(decoder, lora.seed)
    if is_first and compute_dtype == torch.bfloat16:
        warn_of_ties(decoder, path)
    return decoder.train()


def warn_of_ties(decoder: Decoder, path: str | Path) -> None:
    """Warn if more than MOST_TIES of the float32 weights that this rank trains are ties: half-way
    between two numbers of bfloat16.

    The first update tips about half of the ties by a whole step of bfloat16, however small the
    learning rate is. Weights that were dequantised from few bits have many.
    """
    num_ties = 0.0
    num_weights = 0
    for parameter in decoder.parameters():
        weights = local(parameter)
        if parameter.requires_grad and weights.numel():
            num_weights += weights.numel()
            num_ties += weights.numel() * share_of_bfloat16_ties(weights)
    if num_ties > MOST_TIES * num_weights:
        log.warning(
            "%s: some %.1f %% of its weights lie exactly half-way between two bfloat16 numbers, as "
            "weights dequantised from few bits do. The first update rounds half of these to the "
            "other number, at any lr: a jump that no later update repeats. Store the directory in "
            "bfloat16 (AutoModelForCausalLM.from_pretrained(DIR, dtype='bfloat16')"
            ".save_pretrained(OUT)), or set trainer.compute_dtype=float32",
            path,
            100 * num_ties / num_weights,
        )


def share_of_bfloat16_ties(weights: Tensor) -> float:
    """Return the share of float32 numbers that lie half-way between two bfloat16 numbers: those
    whose lower 16 bits, which bfloat16 lacks, are 1000...

    Of a large tensor it looks at 65,536 numbers or some more, evenly apart. The step is odd, since
    quantised blocks are powers of 2.
    """
    step = (weights.numel() >> 16) | 1
    lower_bits = weights.flatten()[::step].view(torch.int32) & 0xFFFF
    return float((lower_bits == 0x8000).float().mean())


def frozen_decoder(
    path: str | Path,
    *,
    mesh: DeviceMesh | None,
    device: torch.device,
    dtype: torch.dtype,
    tensor_parallel: TensorParallel | None = None,
    cpu_offload: bool = False,
    lora: Lora | None = None,
    made_by: str = AUTO,
) -> Decoder:
    """Load the decoder of a Hugging Face directory in dtype, with frozen weights.

    mesh: [shard], or [replicate, shard]: the ranks that hold the same tensor-parallel part, over
    which FSDP2 shards it; each reads its own rows alone. Collective over both from the first use
    on. A rank that holds it whole needs no mesh. cpu_offload: weights are in host memory, a layer's
    on the device while it computes. lora: adapters beside them, whose products are 0 until others
    are copied there. made_by: of config_of. FileNotFoundError or ValueError naming the file when
    the directory is not whole.
    """
    config = dataclasses.replace(config_of(path, made_by), lora=lora)
    decoder = build_decoder(config, dtype=dtype, tensor_parallel=tensor_parallel)
    decoder.requires_grad_(False)
    if cpu_offload or (mesh is not None and mesh.shape[-1] > 1):
        wrap(decoder, mesh, dtype, device, cpu_offload=cpu_offload)
    load_weights(decoder, path, device=torch.device("cpu") if cpu_offload else device)
    if not config.labels:
        decoder.absent_rows = absent_rows(path, config.vocab_size, device)
    if lora is not None:
        reset_lora(decoder, lora.seed)
    return decoder.eval()


def decoder_over(
    group: ExecutorGroup,
    path: str | Path,
    *,
    dtype: torch.dtype,
    lora: Lora | None = None,
    made_by: str = AUTO,
) -> Decoder:
    """Return the frozen decoder of a directory, which the ranks of an executor hold together. Where
    they share layers, each rank holds the whole embedding and head, for a token's logprob. made_by:
    of config_of.
    """
    return frozen_decoder(
        path,
        mesh=group.data_mesh() if group.size > 1 else None,
        device=group.device,
        dtype=dtype,
        tensor_parallel=TensorParallel.of(group, split_vocabulary=False),
        lora=lora,
        made_by=made_by,
    )


def load_scorer(
    path: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    mesh: DeviceMesh | None = None,
    tensor_parallel: TensorParallel | None = None,
) -> Decoder:
    """Load the `frozen_decoder` of a ...ForSequenceClassification directory. ValueError naming the
    directory if it holds a language model, or weights that do not fit.
    """
    config = read_config(path)
    if not config.labels:
        raise ValueError(
            f"{path}: {config.architecture} has no score head; recipes/reward_model.py trains one"
        )
    return frozen_decoder(
        path, mesh=mesh, device=device, dtype=dtype, tensor_parallel=tensor_parallel
    )
