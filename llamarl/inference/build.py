"""Settings of each engine, which build it on a rank: see EngineSettings in
llamarl/inference/protocol.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from llamarl.executor import ExecutorGroup
from llamarl.inference.engine import Engine
from llamarl.inference.protocol import Bind
from llamarl.inference.vllm_engine import VLLMEngine
from llamarl.models.build import build_decoder, read_config
from llamarl.models.hf import named_parameters_hf
from llamarl.models.quantize import quantize_decoder
from llamarl.models.sharding import parameter_shapes
from llamarl.models.tp import TensorParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSettings:
    """Settings of `Engine`, on one rank or, tensor-parallel, on several that share the model."""

    model_path: str  # a Hugging Face directory
    model_dtype: str
    max_slots: int  # this and what follows up to prefill_chunk: see Engine
    max_len: int
    cache_tokens: int | None = None
    prefill_chunk: int = 512
    quantize: str = "none"  # the form that the weights arrive and are held in
    quantize_exclude: tuple[str, ...] = ()  # parts of names of modules that keep model_dtype
    reproducible: bool = True  # see Engine

    def build(self, group: ExecutorGroup, bind: Bind) -> Engine:
        """The engine of this rank: EngineSettings.build."""
        tensor_parallel = None
        if group.tensor_parallel > 1:
            tensor_parallel = TensorParallel(
                group.tensor_index, group.tensor_parallel, group.tensor_group
            )
        decoder = build_decoder(
            read_config(self.model_path),
            dtype=getattr(torch, self.model_dtype),
            tensor_parallel=tensor_parallel,
        )
        if self.quantize != "none":
            quantize_decoder(decoder, self.quantize, self.quantize_exclude)
        decoder = decoder.to_empty(device=group.device).eval().requires_grad_(False)
        bind(decoder.config, list(named_parameters_hf(decoder)))
        return Engine(
            decoder,
            max_slots=self.max_slots,
            max_len=self.max_len,
            cache_tokens=self.cache_tokens,
            prefill_chunk=self.prefill_chunk,
            device=group.device,
            reproducible=self.reproducible,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMSettings:
    """Settings of `VLLMEngine`: one vLLM a rank, in a process of its own.

    The rank also holds the weights as they come, outside vLLM, on its device.
    """

    model_path: str  # a Hugging Face directory
    model_dtype: str
    max_slots: int  # this and what follows: see VLLMEngine
    max_len: int
    gpu_memory_utilization: float

    def build(self, group: ExecutorGroup, bind: Bind) -> VLLMEngine:
        """The engine of this rank: EngineSettings.build."""
        assert group.tensor_parallel == 1, "config lets no tensor-parallel vLLM through"
        config = read_config(self.model_path)
        dtype = getattr(torch, self.model_dtype)
        parameters = []
        for name, shape in parameter_shapes(config).items():
            held = torch.empty(shape, dtype=dtype, device=group.device)
            parameters.append((name, nn.Parameter(held, requires_grad=False)))
        bind(config, parameters)
        return VLLMEngine(
            config,
            parameters,
            model_path=self.model_path,
            max_slots=self.max_slots,
            max_len=self.max_len,
            gpu_memory_utilization=self.gpu_memory_utilization,
            device=group.device,
        )
