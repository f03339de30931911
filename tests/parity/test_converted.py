"""Directories that call and cut tensors otherwise than transformers' parameters: what is read of
them, what is refused, and what is held while one is written.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llamarl.models.build import read_config
from llamarl.models.converted import ConvertedWeights, StoredForm
from llamarl.models.hf import named_parameters_hf
from tests.decoding import our_decoder
from tests.engines import over_stand_in
from tests.random_models import save_drawn
from tests.small_families import config_of

EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
ON_DISK = "model.layers.1.mlp.experts.{}.{}_proj.weight"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory of a small Qwen3-MoE, which has a matrix for each of four experts."""
    path = tmp_path_factory.mktemp("qwen3_moe")
    save_drawn(AutoModelForCausalLM.from_config(config_of("qwen3_moe")), path)
    return path


def copied(directory, path, change):
    """Return a copy of a directory whose tensors were changed."""
    (path / "config.json").write_text((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_of_experts_only_those_are_read_that_are_asked_for(directory, monkeypatch):
    weights = ConvertedWeights(directory, read_config(directory))
    stored = load_file(directory / "model.safetensors")
    read = []
    whole = weights._read
    monkeypatch.setattr(weights, "_read", lambda name: (read.append(name), whole(name))[1])
    part = weights.get_slice(EXPERTS)[1:3, :, 4:20]
    wanted = []
    for expert in (1, 2):
        wanted += [ON_DISK.format(expert, "gate"), ON_DISK.format(expert, "up")]
    assert sorted(read) == wanted
    for row, expert in enumerate((1, 2)):
        of_kind = [stored[ON_DISK.format(expert, kind)] for kind in ("gate", "up")]
        assert torch.equal(part[row], torch.cat(of_kind)[:, 4:20])
    assert torch.equal(weights.get_slice(EXPERTS)[...][1:3, :, 4:20], part)


def test_no_numbers_are_read_to_find_out_that_they_fit(directory, monkeypatch):
    monkeypatch.setattr(ConvertedWeights, "_read", lambda *_: pytest.fail("read"))
    weights = ConvertedWeights(directory, read_config(directory))
    assert weights.file_of.keys() == dict(read_config(directory).shapes).keys()


def without_an_expert(tensors):
    del tensors[ON_DISK.format(3, "up")]


def without_a_layers_experts(tensors):
    for name in [name for name in tensors if name.startswith("model.layers.1.mlp.experts")]:
        del tensors[name]


def of_integers(tensors):
    name = ON_DISK.format(2, "gate")
    tensors[name] = tensors[name].to(torch.int8)


def of_another_width(tensors):
    for expert in range(4):
        for kind in ("gate", "up"):
            name = ON_DISK.format(expert, kind)
            tensors[name] = tensors[name][:, 1:].contiguous()


def with_a_stranger(tensors):
    tensors["model.layers.1.mlp.stranger.weight"] = torch.ones(3)


@pytest.mark.parametrize(
    "change, said",
    [
        (without_an_expert, f"{EXPERTS}: cannot be made of "),
        (without_a_layers_experts, f"{EXPERTS}: absent"),
        (of_integers, ON_DISK.format(2, "gate") + ": I8, need one of F64"),
        (of_another_width, f"{EXPERTS}: shape (4, 64, 31), the config says (4, 64, 32)"),
        (with_a_stranger, "model.layers.1.mlp.stranger.weight: not in this architecture"),
    ],
)
def test_what_does_not_fit_is_named(directory, tmp_path, change, said):
    path = copied(directory, tmp_path, change)
    with pytest.raises(ValueError, match="weights do not fit config.json") as error:
        ConvertedWeights(path, read_config(path))
    assert said in str(error.value)


@torch.no_grad()
def test_tensors_are_written_as_they_come(directory):
    decoder = our_decoder(directory)
    taken = []

    def come():
        for name, parameter in named_parameters_hf(decoder):
            taken.append(name)
            yield name, parameter.detach()

    made = {}
    for name, tensor in StoredForm(decoder.config).tensors(come()):
        made[name] = tensor
        # An expert's matrices come of one parameter each, all else is only called otherwise.
        assert len(taken) <= len(made)
    stored = load_file(directory / "model.safetensors")
    assert made.keys() == stored.keys()
    assert all(torch.equal(made[name], stored[name]) for name in stored)


@torch.no_grad()
def test_vllm_is_told_of_each_version_as_a_directory_has_it(tmp_path, monkeypatch):
    """GLM's experts are cut otherwise, and their routers have biases that no version brings."""
    save_drawn(AutoModelForCausalLM.from_config(config_of("glm4_moe")), tmp_path)
    decoder = our_decoder(tmp_path)
    weights = {name: p.detach().clone() for name, p in named_parameters_hf(decoder)}
    log = tmp_path / "log"
    sizes = {"max_slots": 2, "max_len": 32}
    given = {name: torch.empty_like(weight) for name, weight in weights.items()}
    engine = over_stand_in(log, monkeypatch, decoder.config, given, path=tmp_path, **sizes)
    for factor in (2.0, 3.0):
        for name, weight in weights.items():
            given[name].copy_(weight * factor)
        engine.weights_changed(int(factor))
        told = json.loads(log.read_text().splitlines()[0])["tensors"]
        held = dict(zip((name for name, *_ in told), engine._shared, strict=True))
        stored = load_file(tmp_path / "model.safetensors")
        biases = {name for name in stored if name.endswith("e_score_correction_bias")}
        assert held.keys() == stored.keys() and biases
        for name, tensor in held.items():
            wanted = stored[name] * (1.0 if name in biases else factor)
            assert torch.equal(tensor, wanted), name
    engine.close()
