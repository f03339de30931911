"""vLLM samples models of transformers' families from the trainer's weights: its logprobs are those
of the native engine, for two versions.

    recipes/install_vllm_cpu.sh
    pytest -m vllm tests/vllm/test_vllm_families.py

Weights are random.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from llamarl.inference import Engine, SamplingParams
from llamarl.inference.vllm_engine import VLLMEngine, vllm_problem
from llamarl.models.build import read_config
from llamarl.models.hf import named_parameters_hf
from tests.random_models import save_drawn
from tests.tolerances import rounding

# Sizes for which vLLM has kernels, on a CPU too.
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES = {
    "glm4_moe": ROUTED | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "gpt2": {},
    "gpt_neox": {"num_key_value_heads": 4},
    "granite": {},
    "olmo3": {"sliding_window": 16},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128},
    "qwen3_moe": ROUTED | {"num_experts": 4, "decoder_sparse_step": 1},
    "smollm3": {},
}
MEAN = rounding(torch.bfloat16, terms=1, depth=2 * 2 * 4)  # nats

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(vllm_problem() is not None, reason=str(vllm_problem())),
]


@pytest.mark.proves("vLLM")
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_the_native_engines(tmp_path, family):
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
    save_drawn(AutoModelForCausalLM.from_config(config).bfloat16(), tmp_path)
    sizes = {"max_slots": 4, "max_len": 64}
    native = Engine.from_hf(tmp_path, dtype="bfloat16", device="cpu", **sizes)
    parameters = []
    for name, parameter in named_parameters_hf(native.decoder):
        parameters.append((name, nn.Parameter(parameter.detach().clone(), requires_grad=False)))
    config = read_config(tmp_path)
    share = {"gpu_memory_utilization": 0.1}
    vllm = VLLMEngine(config, parameters, model_path=tmp_path, **sizes, **share)
    try:
        for version in (1, 2):
            if version == 2:
                change(native, parameters)
            vllm.weights_changed(version)
            for ticket, prompt in enumerate(([5, 6, 7, 8, 9], [100, 200, 300])):
                vllm.submit(ticket, prompt, SamplingParams(max_new_tokens=24, n=2))
            while vllm.num_live or vllm.num_waiting:
                vllm.step(8)
            found = [completion for _, completion in vllm.pop_finished()]
            assert len(found) == 4
            for completion in found:
                own = native.score(completion.prompt_ids, completion.token_ids, 1.0)
                gaps = (own - completion.generator_logprobs).abs()
                assert completion.generator_logprobs.mean() < -0.5, "no certain tokens"
                assert gaps.mean() <= MEAN
    finally:
        vllm.close()


def change(native, parameters):
    """Give both other weights: every matrix with its rows in another order."""
    draw = torch.Generator().manual_seed(1)
    own = dict(named_parameters_hf(native.decoder))
    with torch.no_grad():
        for name, parameter in parameters:
            if parameter.dim() > 1:
                order = torch.randperm(len(parameter), generator=draw)
                parameter.copy_(parameter[order])
                own[name].copy_(parameter)
    native.weights_changed(2)
