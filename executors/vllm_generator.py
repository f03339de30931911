"""VLLMGenerator: Generator whose engine is vLLM. Tickets, versions, canaries and evaluations are
Generator's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from executors.generator import Generator
from llamarl.comm.lockstep import Lockstep
from llamarl.inference.partials import pack
from llamarl.inference.vllm_engine import VLLMEngine
from llamarl.models.config import read_config
from llamarl.models.sharding import parameter_shapes


class VLLMGenerator(Generator):
    """One vLLM a rank, in a process of its own. gpu_memory_utilization is VLLMEngine's; the rest is
    Generator's.

    Each rank also holds the weights as they come, outside vLLM, on its device.
    """

    def __init__(self, *, gpu_memory_utilization: float, **settings):
        super().__init__(**settings)
        assert self.tensor_parallel == 1 and self.quantize == "none", "config lets neither through"
        self.gpu_memory_utilization = gpu_memory_utilization

    def setup(self) -> None:
        config, dtype, device = (
            read_config(self.model_path),
            getattr(torch, self.model_dtype),
            self.group.device,
        )
        held = [
            (
                name,
                nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False),
            )
            for name, shape in parameter_shapes(config).items()
        ]
        self.replica = Lockstep(self.group, self.control)
        self.weights = self.inputs["policy"]
        self.weights.bind(config, held)
        self.engine = VLLMEngine(
            config,
            held,
            model_path=self.model_path,
            max_slots=self.max_slots,
            max_len=self.max_len,
            gpu_memory_utilization=self.gpu_memory_utilization,
            device=device,
        )

    def state_dict(self) -> dict:
        return pack([])  # unfinished completions start again

    def load_state_dict(self, parts: Iterable[dict]) -> None:
        pass

    def offloadable(self) -> list[torch.Tensor]:
        return []  # vLLM's memory is not ours to move

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "engine"):
            self.engine.close()
