"""Every engine there is, made small, for tests of what all of them have in common; and what tests
have them do.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from llamarl.environments.dialogues import Dialogues, Environment
from llamarl.environments.engine import DialogueEngine
from llamarl.environments.pool import EnvironmentPool
from llamarl.inference import Engine, vllm_engine
from llamarl.inference.requests import on_cpu
from llamarl.inference.vllm_engine import VLLMEngine
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.directory import SafetensorsDir
from llamarl.models.hf import load_tokenizer, load_weights, named_parameters_hf
from llamarl.models.shape import Lora
from llamarl.models.sharding import adapter_shapes, parameter_shapes
from llamarl.tasks.environment import turn_tokens
from llamarl.types import Prompt

STAND_IN = Path(__file__).with_name("vllm") / "stand_in_worker.py"
PATIENCE_S = 60.0
SMOLLM2 = os.environ.get("LLAMARL_SMOLLM2", "")


def native(log, monkeypatch, **sizes):
    """Over the embedded model."""
    return Engine.from_hf(tiny_directory(), dtype="float32", device="cpu", **sizes)


class Answered(DialogueEngine):
    """One whose prompts are those that it is given, and whose steps wait for the environments."""

    def __init__(self, inner, make_dialogues):
        self._prompts = {}
        super().__init__(
            inner,
            make_dialogues,
            prompt_of=lambda stream, ticket: self._prompts[stream, ticket],
            reproducible=True,
        )

    def submit(self, ticket, prompt_ids, params, *, stream=0):
        self._prompts[stream, ticket] = Prompt(on_cpu(prompt_ids), "", {})
        super().submit(ticket, prompt_ids, params, stream=stream)

    def step(self, chunk):
        sampled = super().step(chunk)
        while not sampled and self.num_acting:
            self.wait(PATIENCE_S)
            sampled = super().step(chunk)
        return sampled


def dialogues(log, monkeypatch, **sizes):
    """Dialogues of one turn over the embedded model, with an environment that says nothing."""
    path = "tests.games:Unrewarded"
    tokenizer = load_tokenizer(tiny_directory())

    def make(on_answer):
        environment = Environment(
            pool=EnvironmentPool(path, timeout_s=PATIENCE_S, on_answer=on_answer),
            turns=turn_tokens(path, tokenizer, chat=False, system_prompt=None),
            read_calls=lambda text: [],
            prompt_key="prompt",
            is_own=False,
            is_dialogue=False,
            max_turns=8,
            max_turn_tokens=None,
        )
        return Dialogues({"task": environment}, decode=tokenizer.decode, seed=0, reproducible=True)

    return Answered(native(log, monkeypatch, **sizes), make)


def over_stand_in(log, monkeypatch, config, tensors, path=None, **sizes):
    """vLLM's engine over a worker that counts instead of sampling; `log` is what it was told.
    path: of the model's directory.
    """
    monkeypatch.setattr(vllm_engine, "vllm_problem", lambda: None)
    monkeypatch.setattr(vllm_engine, "WORKER", STAND_IN)
    monkeypatch.setenv("FAKE_LOG", str(log))
    parameters = [(name, nn.Parameter(tensor)) for name, tensor in tensors.items()]
    where = {"model_path": path or tiny_directory(), "gpu_memory_utilization": 0.5}
    return VLLMEngine(config, parameters, **where, **sizes)


def vllm_over_stand_in(log, monkeypatch, **sizes):
    """With weights of its own."""
    tensors = {"model.embed_tokens.weight": torch.zeros(3, 5), "model.norm.weight": torch.ones(4)}
    return over_stand_in(log, monkeypatch, read_config(tiny_directory()), tensors, **sizes)


def adapters_over_stand_in(log, monkeypatch, **sizes):
    """With adapters of rank 3 of the embedded model in bfloat16."""
    lora = Lora(3, 6.0, ("q_proj", "up_proj"))
    config = dataclasses.replace(read_config(tiny_directory()), lora=lora)
    tensors = {}
    for name, shape in adapter_shapes(config).items():
        tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)
    return over_stand_in(log, monkeypatch, config, tensors, **sizes)


def vllm(log, monkeypatch, **sizes):
    """vLLM itself, over SmolLM2."""
    config = read_config(SMOLLM2)
    source = SafetensorsDir(SMOLLM2)
    parameters = []
    for name in parameter_shapes(config):
        weight = source.get_slice(name)[...].to(torch.bfloat16)
        parameters.append((name, nn.Parameter(weight, requires_grad=False)))
    return VLLMEngine(config, parameters, model_path=SMOLLM2, gpu_memory_utilization=0.25, **sizes)


def load(engine, source, version, *, recompute_kv=False):
    """A directory's weights, or tensors by their Hugging Face names, as those of `version`."""
    if isinstance(source, Mapping):
        for name, parameter in named_parameters_hf(engine.decoder):
            parameter.data.copy_(source[name])
    else:
        load_weights(engine.decoder, source)
    engine.weights_changed(version, recompute_kv=recompute_kv)
