"""A whole run whose decoders a builder of torchtune makes."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from llamarl.models.config import tiny_directory
from tests.build.job import finished_job
from tests.decoding import our_decoder, whole_logits
from tests.launching import SMALL
from tests.random_models import SIZES
from tests.tolerances import rounding

pytestmark = pytest.mark.slow

NEAR = rounding(terms=48, depth=2 * 2 * 3, size=5.0)  # of the largest logits


@torch.no_grad()
def test_a_run_trains_a_builders_model_and_leaves_one_of_transformers(tmp_path, monkeypatch):
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv("TEST_NOTES", str(notes))
    path = tmp_path / "model"
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    for file in tiny_directory().glob("tokenizer*"):
        shutil.copyfile(file, path / file.name)
    job = finished_job(
        *SMALL,
        "model=torchtune",
        "model.builder=tests.torchtune_builders.noted",
        f"model.path={path}",
        "model.dtype=float32",
        "lr=3e-3",
        "max_steps=2",
        "reference=frozen",
        "loss.kl_coef=0.01",
        "reward.fn=tests.recipes.test_family_runs:digits_at_the_start",
        run_dir=tmp_path / "run",
        ranks=3,
    )
    assert len(list(notes.iterdir())) == 3, "trainer, generator and reference compute with it"
    assert any(row.get("grad_norm") for row in job.rows)
    fresh = [row.get("parity/logprob_diff_max") for row in job.rows]
    assert max(diff for diff in fresh if diff is not None) <= 1e-4
    trained = job.checkpoint / "hf"
    ids = torch.arange(20) % 50 + 1
    theirs = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    logits = whole_logits(our_decoder(trained), ids)
    assert (logits - theirs(ids[None]).logits[0]).abs().max() <= NEAR
    assert not torch.equal(theirs(ids[None]).logits[0], whole_logits(our_decoder(path), ids))
