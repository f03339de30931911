"""A LoRA update that is far below the rounding of the weights is in what trainer, generator and
quantised generator compute, in the adapter that is exported, and not in a merged bfloat16 export,
which says so. Everything is compared with products in float64.
"""

from __future__ import annotations

import dataclasses
import logging
import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from llamarl.inference import Engine
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_weights
from llamarl.models.lora import LoraLinear, adapters_of, adapters_off, lay_side_by_side
from llamarl.models.peft import export_adapted
from llamarl.models.quantize import quantize_decoder
from llamarl.models.shape import Lora
from llamarl.models.sharding import adapter_shapes
from tests.tolerances import of_logprobs

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = Lora(rank=3, alpha=8.0, targets=ALL)  # no multiple of anything
LR = 1e-6
STEPS = 100
TOKENS = torch.arange(3, 15)
LEAST = 0.1  # the share of an update that may be missing


def adapters_after(lr: float, steps: int, config) -> dict[str, torch.Tensor]:
    """A as at the start, and B after steps of Adam, each of which moves every element by lr."""
    draw = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in adapter_shapes(config).items():
        value = torch.randn(shape, generator=draw)
        if name.endswith(".lora_a"):
            found[name] = value / shape[1] ** 0.5
        else:
            found[name] = value.sign() * lr * steps
    return found


def decoder_with(adapters, dtype=torch.float32, lora=LORA):
    decoder = load_weights(build_decoder(config_of(lora), dtype=dtype), tiny_directory())
    with torch.no_grad():
        for name, parameter in adapters_of(decoder):
            parameter.copy_(adapters[name])
    return decoder.eval().requires_grad_(False)


def config_of(lora=LORA):
    return dataclasses.replace(read_config(tiny_directory()), lora=lora)


def seen(got, update) -> float:
    """How much of an update is in `got`, by least squares: 1 all of it, 0 nothing."""
    got, update = got.double(), update.double()
    return float((got * update).sum() / update.square().sum())


@pytest.fixture(params=["trainer", "generator", "quantised generator"])
def projection(request):
    """A bfloat16 projection whose update is a hundredth of what rounds away in its outputs."""
    draw = torch.Generator().manual_seed(1)
    base = nn.Linear(256, 512, bias=False)
    base.weight.data = torch.randn(512, 256, generator=draw) * 0.06
    holder = nn.Module()
    holder.q_proj = LoraLinear(base, Lora(4, 8.0, ("q_proj",)), None, inputs_split=False)
    holder = holder.bfloat16().requires_grad_(False)
    holder.q_proj.lora_a.copy_(torch.randn(4, 256, generator=draw) / 16)
    holder.q_proj.lora_b.copy_(torch.randn(512, 4, generator=draw).sign() * 1e-5)
    if request.param == "generator":
        lay_side_by_side(holder)
        assert not holder.q_proj.lora_b.is_contiguous()
    if request.param == "quantised generator":
        layer = nn.Module()
        layer.attn = holder
        decoder = nn.Module()
        decoder.layers = nn.ModuleList([layer])
        quantize_decoder(decoder, "int8", ())
        holder = layer.attn
    return holder.q_proj


def test_a_small_product_is_not_rounded_away_in_bfloat16(projection):
    x = torch.randn(2048, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    a, b = projection.lora_a.double(), projection.lora_b.double()
    update = 2.0 * x.double() @ a.T @ b.T
    adapted = projection(x)
    saved = projection.lora_b.clone()
    projection.lora_b.zero_()
    without = projection(x)
    projection.lora_b.copy_(saved)
    rounding = without.abs().double().median() * 2**-8
    assert update.abs().median() < rounding / 50
    assert seen(adapted - without, update) == pytest.approx(1, abs=LEAST)


@pytest.mark.parametrize(
    "dtype, targets, is_laid",
    [
        (torch.float32, ALL, True),
        (torch.float32, ("v_proj", "gate_proj"), False),
        (torch.bfloat16, ALL, False),
        (torch.bfloat16, ("v_proj", "gate_proj"), True),
    ],
)
def test_the_kernel_decodes_adapters_as_the_module_does(dtype, targets, is_laid):
    lora = dataclasses.replace(LORA, targets=targets)
    decoder = decoder_with(adapters_after(1e-3, STEPS, config_of(lora)), dtype, lora)
    if is_laid:
        lay_side_by_side(decoder)
    native, module = (Engine(decoder, max_slots=4, max_len=64, device="cpu") for _ in range(2))
    module._runner.take("module")
    if native._runner.native is None:
        pytest.skip("no C kernels here")
    native._runner.take("vectors")
    close = of_logprobs(config_of(lora), size=4.0, dtype=dtype)
    for factor in (1.0, 0.5, -2.0):  # a new version each: only B is others
        with torch.no_grad():
            for name, parameter in adapters_of(decoder):
                if name.endswith(".lora_b"):
                    parameter.mul_(factor)
        for engine in (native, module):
            engine.weights_changed(1)
        got, want = (engine.score(TOKENS[:1], TOKENS[1:], 1.0) for engine in (native, module))
        with adapters_off(decoder):
            base = module.score(TOKENS[:1], TOKENS[1:], 1.0)
        assert (got - want).abs().max() <= close
        assert (want - base).abs().max() > 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_says_what_rounding_takes_and_its_adapter_has_all(dtype, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    adapters = adapters_after(LR, STEPS, config_of())
    export_adapted(adapters, LORA, tiny_directory(), tmp_path / "hf", dtype=dtype)
    base = load_file(tiny_directory() / "model.safetensors")
    merged = load_file(tmp_path / "hf" / "model.safetensors")
    beside = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    update = lost_merged = lost_beside = 0.0
    for name in base:
        stem = name.removesuffix(".weight")
        if f"{stem}.lora_a" not in adapters:
            assert torch.equal(merged[name], base[name].to(dtype))
            continue
        a, b = (adapters[f"{stem}.lora_{x}"].double() for x in "ab")
        want = 8.0 / 3 * b @ a
        a, b = (beside[f"base_model.model.{stem}.lora_{x}.weight"].double() for x in "AB")
        got = merged[name].double() - base[name].to(dtype).double()
        update += float(want.square().sum())
        lost_merged += float((got - want).square().sum())
        lost_beside += float((8.0 / 3 * b @ a - want).square().sum())
    assert lost_beside == 0.0
    share = (lost_merged / update) ** 0.5
    assert (share > 0.5) if dtype == torch.bfloat16 else (share < LEAST)
    (said,) = re.findall(r"takes ([0-9.]+) % of the update", caplog.text)
    assert float(said) == pytest.approx(100 * share, abs=0.1)
    assert ("WARNING" in caplog.text) == (share > LEAST)
