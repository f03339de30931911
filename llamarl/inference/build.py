"""Functions that build an engine on a rank of the generator. With its keywords bound, each is a
BuildEngine (llamarl/inference/protocol.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from llamarl.executor import ExecutorGroup
from llamarl.inference.engine import Engine
from llamarl.inference.protocol import Bind
from llamarl.inference.vllm_engine import VLLMEngine
from llamarl.models.build import Decoder, build_decoder, config_of, read_config
from llamarl.models.hf import absent_rows, load_buffers, load_weights
from llamarl.models.lora import lay_side_by_side, travelling
from llamarl.models.quantize import quantize_decoder
from llamarl.models.shape import AUTO, Lora
from llamarl.models.sharding import adapter_shapes, parameter_shapes
from llamarl.models.tp import TensorParallel


def build_native(
    group: ExecutorGroup,
    bind: Bind,
    *,
    model_path: str,
    model_dtype: str,
    quantize: str = "none",
    quantize_exclude: tuple[str, ...] = (),
    adapt: Callable[[Decoder], None] = lambda decoder: None,
    lora: Lora | None = None,
    made_by: str = AUTO,
    **options,
) -> Engine:
    """Build an `Engine`, on one rank or, tensor-parallel, on several that share the model.

    model_path: a Hugging Face directory. quantize: the form that the weights arrive and are held
    in, or "none". quantize_exclude: parts of names of modules that keep model_dtype. adapt: changes
    the decoder before the engine is built around it. lora: adapters arrive alone, and the weights
    beside them are read from the directory once. made_by: of config_of. options: the engine's
    others.
    """
    config = dataclasses.replace(config_of(model_path, made_by), lora=lora)
    decoder = build_decoder(
        config,
        dtype=getattr(torch, model_dtype),
        tensor_parallel=TensorParallel.of(group),
    )
    if lora is not None:
        load_weights(decoder, model_path, device=group.device)
    if quantize != "none":
        quantize_decoder(decoder, quantize, quantize_exclude)
    if lora is None:
        decoder = decoder.to_empty(device=group.device)
        load_buffers(decoder, model_path)
    decoder = decoder.eval().requires_grad_(False)
    decoder.absent_rows = absent_rows(model_path, config.vocab_size, group.device)
    lay_side_by_side(decoder)
    bind(decoder.config, travelling(decoder))
    adapt(decoder)
    return Engine(decoder, device=group.device, **options)


def build_vllm(
    group: ExecutorGroup,
    bind: Bind,
    *,
    model_path: str,
    model_dtype: str,
    lora: Lora | None = None,
    **options,
) -> VLLMEngine:
    """Build a `VLLMEngine`: one vLLM a rank, in a process of its own.

    The rank also holds the weights, or the adapters of `lora`, as they come, outside vLLM, on its
    device. model_path: a Hugging Face directory. options: the engine's others.
    """
    assert group.tensor_parallel == 1, "config lets no tensor-parallel vLLM through"
    config = dataclasses.replace(read_config(model_path), lora=lora)
    dtype = getattr(torch, model_dtype)
    shapes = adapter_shapes(config) if lora is not None else parameter_shapes(config)
    parameters = []
    for name, shape in shapes.items():
        held = torch.empty(shape, dtype=dtype, device=group.device)
        parameters.append((name, nn.Parameter(held, requires_grad=False)))
    bind(config, parameters)
    return VLLMEngine(
        config,
        parameters,
        model_path=model_path,
        absent_rows=absent_rows(model_path, config.vocab_size, torch.device("cpu")),
        device=group.device,
        **options,
    )
