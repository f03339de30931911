"""Supervised fine-tuning's objective against transformers' own loss."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from llamarl.learning.sft import NextToken, SFTPair, read_sft_data
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.models.loading import training_decoder
from tests.supervised import task_of, update_that_keeps_weights
from tests.tolerances import rounding

CPU = torch.device("cpu")
CONFIG = read_config(tiny_directory())
DEPTH = 4 * CONFIG.num_hidden_layers
LOSS = rounding(terms=CONFIG.hidden_size, depth=DEPTH)


def rows() -> list[SFTPair]:
    draw = torch.Generator().manual_seed(2)
    pairs = []
    for size, given in ((9, 4), (3, 1), (14, 13)):
        ids = torch.randint(3, CONFIG.vocab_size, (size,), generator=draw)
        pairs.append(SFTPair(ids, torch.arange(size) >= given))
    return pairs


@pytest.mark.machine
@pytest.mark.parametrize("budget", [1, 1000])
def test_loss_and_gradient_are_those_of_transformers(budget, float32_products):
    decoder = training_decoder(tiny_directory(), mesh=None, device=CPU, compute_dtype=torch.float32)
    update = update_that_keeps_weights(decoder, NextToken(), budget)
    row = update.run(rows(), 0)
    evaluated = update.evaluate(rows())

    theirs = AutoModelForCausalLM.from_pretrained(tiny_directory(), dtype=torch.float32)
    total = torch.zeros(())
    for pair in rows():
        labels = pair.token_ids.masked_fill(~pair.learned, -100)
        mean = theirs(pair.token_ids[None], labels=labels[None]).loss
        total = total + mean * pair.learned.sum()
    loss = total / (5 + 2 + 1)
    loss.backward()
    assert row["targets/trained"] == 8
    assert row["loss/value"] == pytest.approx(loss.item(), rel=LOSS)
    assert evaluated["eval/loss"] == pytest.approx(loss.item(), rel=LOSS)
    assert evaluated["eval/perplexity"] == pytest.approx(math.exp(evaluated["eval/loss"]))
    gradient = theirs.get_input_embeddings().weight.grad
    ours = decoder.tok_embeddings.weight.grad
    scale = float(gradient.abs().max())
    torch.testing.assert_close(ours, gradient, rtol=0, atol=LOSS * scale)


def test_rows_that_are_too_long_are_left_out_or_named(tmp_path, caplog):
    file = tmp_path / "rows.jsonl"
    lines = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+1=", "completion": "2" * 30}]
    file.write_text("\n".join(map(json.dumps, lines)))
    tokenizer = load_tokenizer(tiny_directory())
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: 36 tokens"):
        read_sft_data(task_of(file), tokenizer)
    data = read_sft_data(task_of(file, drop_long=True), tokenizer)
    assert len(data.train) == 1
    assert "1 of 2 rows have more than task.max_tokens=16 tokens" in caplog.text
