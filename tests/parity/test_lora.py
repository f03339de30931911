"""LoRA against dense arithmetic, and the average of the weights, in one process. Several ranks:
tests/ranks/test_adapters.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM, Qwen2Config

from executors.build_trainer import build_trainer
from llamarl.config.command_line import ConfigError, check_command_line
from llamarl.errors import BadInput
from llamarl.launch.checks import check_inputs
from llamarl.learning.trained_model import WeightAverage
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, read_config
from llamarl.models.loading import training_decoder
from llamarl.models.lora import LoraLinear, reset_lora
from llamarl.models.shape import Lora
from tests.decoding import our_decoder
from tests.random_models import SIZES, save_drawn
from tests.tolerances import rounding
from tests.unit.refusals import job

pytestmark = pytest.mark.machine

MERGED = rounding(terms=48, depth=2 * 2)  # logits of size 1: the product is added before or after
GRADIENTS = rounding(terms=48, depth=2 * 2 * 2)  # of the largest: norms are float32
LORA = Lora(rank=3, alpha=7.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"), seed=5)
TOKENS = torch.arange(40) * 7 % 53


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Random, with weights so large that every one of them shows in the logits."""
    config = Qwen2Config(**SIZES | {"num_hidden_layers": 2}, tie_word_embeddings=True)
    path = tmp_path_factory.mktemp("lora")
    save_drawn(AutoModelForCausalLM.from_config(config), path)
    return path


def adapted(directory, lora=LORA, b=0.05):
    """A decoder whose B are not zero, as after training."""
    how = {"mesh": None, "device": torch.device("cpu"), "compute_dtype": torch.float32}
    decoder = training_decoder(directory, lora=lora, **how)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for m in adapters(decoder):
            m.lora_b.normal_(0, b, generator=draw)
    return decoder


def adapters(decoder):
    return [m for m in decoder.modules() if isinstance(m, LoraLinear)]


def logits(decoder, **kwargs):
    inputs = (TOKENS, torch.arange(len(TOKENS)), PackedAttention(torch.tensor([0, 25, 40])))
    return functional_call(decoder, kwargs, inputs) if kwargs else decoder(*inputs)


def test_adapters_start_as_nothing_and_only_they_are_trained(directory):
    decoder = adapted(directory, b=0.0)
    assert (logits(decoder) - logits(our_decoder(directory))).abs().max() <= MERGED
    logits(decoder).square().mean().backward()
    trained = {n for n, p in decoder.named_parameters() if p.grad is not None}
    assert trained == {n for n, p in decoder.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 4 and all(n.endswith((".lora_a", ".lora_b")) for n in trained)
    bound = max(m.lora_a.abs().max() * m.in_features**0.5 for m in adapters(decoder))
    assert 0.9 < bound <= 1 and not any(m.lora_b.any() for m in adapters(decoder))


def test_gradients_are_those_of_a_dense_product(directory):
    """Against a plain decoder whose weights are W + alpha/r B A as functions of A and B, in
    float64.
    """
    decoder, reference = adapted(directory).double(), our_decoder(directory).double()
    leaves, weights = {}, dict(reference.named_parameters())
    for name, p in decoder.named_parameters():
        if name.endswith(("lora_a", "lora_b")):
            leaves[name] = p.detach().clone().requires_grad_()
    for name in {n.rpartition(".")[0] for n in leaves}:
        product = leaves[f"{name}.lora_b"] @ leaves[f"{name}.lora_a"]
        weights[f"{name}.weight"] = weights[f"{name}.weight"].detach() + 7.0 / 3 * product
    upstream = torch.randn(len(TOKENS), 53, generator=torch.Generator().manual_seed(2)).double()
    want, got = logits(reference, **weights), logits(decoder)
    assert (want - got).abs().max() < MERGED < want.std()
    (want * upstream).sum().backward()
    (got * upstream).sum().backward()
    largest = max(p.grad.abs().max() for p in leaves.values())
    for name, p in decoder.named_parameters():
        if name in leaves:
            assert leaves[name].grad.abs().max() > 0.01 * largest
            assert (p.grad - leaves[name].grad).abs().max() <= GRADIENTS * largest, name


def test_frozen_weights_stay_the_same_bits(directory):
    decoder = adapted(directory)
    before = {n: p.detach().clone() for n, p in decoder.named_parameters()}
    trained = [p for p in decoder.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, weight_decay=0.1)
    logits(decoder).square().mean().backward()
    optimizer.step()
    for name, p in decoder.named_parameters():
        assert torch.equal(p, before[name]) != name.endswith(("lora_a", "lora_b")), name


def test_a_target_that_is_absent_is_named(directory):
    with pytest.raises(ValueError, match="no projection is called lm_head"):
        lora = dataclasses.replace(LORA, targets=("q_proj", "lm_head"))
        build_decoder(dataclasses.replace(read_config(directory), lora=lora))


def test_values_of_adapters_follow_from_the_seed(directory):
    first, same, other = (adapted(directory, dataclasses.replace(LORA, seed=s)) for s in (1, 1, 2))
    for decoder in (first, same):
        reset_lora(decoder, LORA.seed)
    for mine, equal, another in zip(*map(adapters, (first, same, other))):
        assert torch.equal(mine.lora_a, equal.lora_a)
        assert not torch.equal(mine.lora_a, another.lora_a)


# --- the average of the weights ---


def test_the_average_is_that_of_hand_arithmetic():
    """w: 1, then -0.5 a step; d = 0.75:  e = 1, 0.75 + 0.25 * 0.5 = 0.875, 0.75 * 0.875 + 0.25 * 0
    = 0.65625
    """
    w = torch.nn.Parameter(torch.ones(1))
    frozen = torch.nn.Parameter(torch.full((1,), 9.0), requires_grad=False)
    optimizer = torch.optim.SGD([w], lr=0.5)
    average = WeightAverage([w, frozen], optimizer, 0.75)
    seen = []
    for _ in range(2):
        w.grad = torch.ones(1)
        optimizer.step()
        seen.append(average.of(w).item())
    assert seen == [0.875, 0.65625] and w.item() == 0.0
    assert average.of(frozen) is frozen
    average.restart()
    assert average.of(w).item() == 0.0


def test_the_average_of_bfloat16_weights_is_kept_in_float32():
    """Steps of 1/512 of the average: bfloat16 would lose them."""
    w = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    average = WeightAverage([w], torch.optim.SGD([w], lr=0.0), 511 / 512)
    with torch.no_grad():
        w.fill_(2.0)
    average.update()
    assert average.of(w).item() == pytest.approx(1 + 1 / 512, abs=1e-7)


# --- settings ---


def test_what_cannot_be_is_said():
    with pytest.raises(ConfigError, match="trainer.ema_decay=1"):
        check_command_line(["trainer.ema_decay=1"], world_size=1)


def test_a_projection_that_the_model_lacks_is_named_with_those_that_it_has():
    made = job("trainer.lora.rank=8", "trainer.lora.targets=[qproj]")
    with pytest.raises(BadInput) as refused:
        check_inputs(made.inputs)
    said = "trainer.lora.targets: no projection is called qproj; choose among down_proj, "
    assert said in str(refused.value)


def test_settings_reach_the_trainer():
    lora = ("rank=8", "alpha=16", "targets=[q_proj,up_proj]")
    made = job(*(f"trainer.lora.{one}" for one in lora), "trainer.ema_decay=0.9", "seed=4")
    settings = build_trainer(made.config, made).model_settings
    assert settings.lora == Lora(8, 16.0, ("q_proj", "up_proj"), 4)
    assert settings.ema_decay == 0.9
