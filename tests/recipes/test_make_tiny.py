"""benchmarks/make_tiny.py, and the embedded model that it made."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from tests.build.job import run_python

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def maker(monkeypatch):
    """The script's own file, which finds its neighbours beside itself."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("make_tiny")


def test_the_tiny_directory_is_what_its_maker_writes(maker, tmp_path):
    tensors = load_file(tiny_directory() / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    maker.write_directory(tmp_path, maker.TINY_CONFIG)
    for file in tmp_path.iterdir():
        want = json.loads(file.read_text())
        if file.name == "config.json":
            want["dtype"] = "bfloat16"
        assert json.loads((tiny_directory() / file.name).read_text()) == want


def test_the_tiny_tokenizer_reads_characters_and_gives_them_back(maker):
    tokenizer = load_tokenizer(tiny_directory())
    assert tokenizer.encode("12+3") == [1, 5, 6, 14, 7]
    every = tokenizer.encode(maker.CHARACTERS)
    assert every == [1, *range(4, 52)]
    assert tokenizer.decode(every, skip_special_tokens=True) == maker.CHARACTERS
    assert tokenizer.encode("A") == [1, 3]
    assert tokenizer(["1", "23"], padding=True)["input_ids"] == [[0, 1, 5], [1, 6, 7]]


def test_a_vocabulary_that_does_not_fit_the_config_is_refused(maker, tmp_path):
    with pytest.raises(ValueError, match="vocab_size 52, but the tokenizer has 6"):
        maker.write_directory(tmp_path, maker.TINY_CONFIG, characters="ab")


def test_the_teacher_forgets_the_carry_more_often_with_large_numbers(maker):
    rows = maker.forgetful_rows()
    assert len(rows) == 4 * 7600
    answers = [row["completion"] for row in rows if row["prompt"] == "57+68="]
    assert answers in ([], ["125", "15", "15", "15"])
    answers = [row["completion"] for row in rows if row["prompt"] == "57+18="]
    assert answers in ([], ["75", "75", "75", "65"])
    assert maker.without_carry("57", "68") == "15" and maker.without_carry("55", "55") == "0"
    assert len(maker.held_out_rows()) == 500


@pytest.mark.slow
def test_the_maker_trains_a_model_from_nothing(tmp_path):
    size = ("max_steps=3", "examples_per_step=16", "task.num_eval=20")
    place = tmp_path / "out"
    run_python(BENCHMARKS / "make_tiny.py", f"model={place}", *size, timeout_s=600)
    assert {file.name for file in place.iterdir()} == {f.name for f in tiny_directory().iterdir()}
    tensors = load_file(place / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    config = json.loads((place / "config.json").read_text())
    assert config == json.loads((tiny_directory() / "config.json").read_text())
