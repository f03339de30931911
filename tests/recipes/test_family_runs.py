"""Whole runs of models whose layers and directories are not Llama's: sharded trainer ranks, weights
to a generator of two ranks, checkpoints that transformers loads.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, Qwen3Config

from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_weights
from tests.build.job import finished_job
from tests.launching import SMALL
from tests.tolerances import rounding

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 52,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
    "gpt_neox": GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "gpt2": GPT2Config(**SIZES, n_inner=80),
}
LOGITS = rounding(terms=48, depth=2 * 2)
RANKS = (
    "placement.trainer=[0,1]",
    "placement.generator=[1,2]",
    "generator.tensor_parallel=2",
    "generator.quantize=none",
)


def digits_at_the_start(prompt: str, completion: str, meta: dict) -> float:
    """A reward that a random model sometimes gets."""
    return float(completion[:1].isdigit())


SMALL_HEADS = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 32}
OF_TRANSFORMERS = {
    "gemma3_text": {},
    "gpt_oss": EXPERTS,
    "olmo3": {},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "decoder_sparse_step": 1},
    "smollm3": {},
}


def written(config, path) -> Path:
    """A random model with the tiny model's tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    for file in tiny_directory().glob("tokenizer*"):
        shutil.copyfile(file, path / file.name)
    return path


@pytest.mark.parametrize("family", CONFIGS)
def test_a_run_learns_and_leaves_a_model_that_transformers_loads(tmp_path, family):
    directory = written(CONFIGS[family], tmp_path / "model")
    check_run(directory, tmp_path, *RANKS)


@pytest.mark.parametrize("family", OF_TRANSFORMERS)
def test_a_run_of_transformers_modules_does_too(tmp_path, family):
    """Two ranks share the layers (FSDP), and a third samples."""
    fields = SIZES | SMALL_HEADS | OF_TRANSFORMERS[family]
    directory = written(AutoConfig.for_model(family, **fields), tmp_path / "model")
    assert read_config(directory).implementation == "transformers"
    check_run(directory, tmp_path, "placement.trainer=[0,1]", "placement.generator=[2]")


@torch.no_grad()
def check_run(directory, tmp_path, *ranks):
    given = ("model=hf", f"model.path={directory}", "model.dtype=float32", "lr=3e-3")
    reward = "reward.fn=tests.recipes.test_family_runs:digits_at_the_start"
    job = finished_job(
        *SMALL, *given, *ranks, reward, "max_lag=1", run_dir=tmp_path / "run", ranks=3
    )
    rows = job.rows
    assert any(row.get("grad_norm") for row in rows)
    fresh = [row.get("parity/logprob_diff_max") for row in rows]
    assert max(diff for diff in fresh if diff is not None) <= 1e-4
    trained = job.checkpoint / "hf"
    ids = torch.arange(20) % 50 + 1
    theirs = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    ours = load_weights(build_decoder(read_config(trained)), trained)
    context = PackedAttention(torch.tensor([0, len(ids)]))
    logits = ours(ids, torch.arange(len(ids)), context)
    assert (logits - theirs(ids[None]).logits[0]).abs().max() <= LOGITS
    before = load_weights(build_decoder(read_config(directory)), directory)
    pairs = zip(before.parameters(), ours.parameters(), strict=True)
    assert not any(torch.equal(old, new) for old, new in pairs)
