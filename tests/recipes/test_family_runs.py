"""Whole runs of models whose layers are not Llama's, by our own decoder and by transformers:
sharded trainer ranks, weights to two generator ranks, checkpoints that transformers loads.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

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
LOGITS = rounding(terms=48, depth=2 * 2)


def digits_at_the_start(prompt: str, completion: str, meta: dict) -> float:
    """A reward that a random model sometimes gets."""
    return float(completion[:1].isdigit())


SMALL_HEADS = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 32}
OF_TRANSFORMERS = {
    "gemma3_text": {},
    "gpt2": {"n_inner": 80},
    "gpt_neox": {"rotary_pct": 0.5},
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


def test_a_run_of_our_own_layers_leaves_a_model_that_transformers_loads(tmp_path):
    """Two ranks share the trainer's layers, and two others of three the generator's (tensor
    parallel)."""
    config = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)
    directory = written(config, tmp_path / "model")
    assert read_config(directory).implementation == "native"
    split = ("generator.quantize=none", "generator.tensor_parallel=2")
    check_run(directory, tmp_path, "placement.trainer=[0,1]", "placement.generator=[1,2]", *split)


TO_PARTS = ("placement.trainer=[0,1]", "placement.generator=[1,2]", "generator.tensor_parallel=2")
IN_PARTS = "trainer.tensor_parallel=2"
SHARED = {
    "shards": ("placement.trainer=[0,1]", "placement.generator=[2]"),
    "shards to parts": TO_PARTS,
    "parts to parts": (*TO_PARTS, IN_PARTS),
    "shards of parts": ("placement.trainer=[0,1,2,3]", "placement.generator=[3]", IN_PARTS),
}


@pytest.mark.proves("a run")
@pytest.mark.parametrize(
    "family, how",
    [
        ("gemma3_text", "shards to parts"),
        ("gpt2", "shards"),
        ("gpt_neox", "shards"),
        ("gpt_oss", "shards"),
        ("olmo3", "shards"),
        ("qwen3_moe", "shards to parts"),
        ("qwen3_moe", "parts to parts"),
        ("smollm3", "shards of parts"),
    ],
)
def test_a_run_of_transformers_modules_does_too(tmp_path, family, how):
    """FSDP2's shards, tensor-parallel parts in the generator and in the trainer, shards of such
    parts.
    """
    fields = SIZES | SMALL_HEADS | OF_TRANSFORMERS[family]
    directory = written(AutoConfig.for_model(family, **fields), tmp_path / "model")
    assert read_config(directory).implementation == "transformers"
    check_run(directory, tmp_path, *SHARED[how], num_ranks=4 if how == "shards of parts" else 3)


def test_routes_are_replayed_in_a_run_that_is_interrupted(tmp_path):
    """Weights come while completions run, which go on behind a checkpoint."""
    fields = SIZES | SMALL_HEADS | OF_TRANSFORMERS["qwen3_moe"] | {"output_router_logits": True}
    directory = written(AutoConfig.for_model("qwen3_moe", **fields), tmp_path / "model")
    given = ("model=hf", f"model.path={directory}", "model.dtype=float32", "lr=3e-3")
    ranks = ("placement.trainer=[0,1]", "placement.generator=[2]", "max_lag=1")
    reward = "reward.fn=tests.recipes.test_family_runs:digits_at_the_start"
    replayed = (*SMALL, *given, *ranks, reward, "trainer.routing_replay=true", "eval.every=0")
    run_dir = tmp_path / "run"
    finished_job(*replayed, "generator.chunk_tokens=2", run_dir=run_dir, ranks=3)
    more = ("max_steps=6", "resume=auto")
    rows = finished_job(*replayed, *more, run_dir=run_dir, ranks=3).rows
    trained = [row for row in rows if row["tokens/trained"]]
    assert len(rows) == 6 and trained
    for row in trained:
        assert 1 <= row["moe/load_max"] <= 4 and row["moe/balance_loss"] > 0
        assert 0 <= row["moe/route_diff"] < 0.5
        fresh = row["parity/logprob_diff_max"]
        assert fresh is None or fresh <= 1e-4


@torch.no_grad()
def check_run(directory, tmp_path, *ranks, num_ranks=3):
    given = ("model=hf", f"model.path={directory}", "model.dtype=float32", "lr=3e-3")
    reward = "reward.fn=tests.recipes.test_family_runs:digits_at_the_start"
    job = finished_job(
        *SMALL, *given, *ranks, reward, "max_lag=1", run_dir=tmp_path / "run", ranks=num_ranks
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
