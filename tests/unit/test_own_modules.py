"""Hooks and subclasses of a model's modules are called, although kernels could do without calls."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from benchmarks.random_weights import random_weights
from llamarl.inference import Engine
from llamarl.models.attention import PackedAttention
from llamarl.models.build import Decoder, FeedForward, build_decoder, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.fused import RMSNorm

IDS = [7, 8, 9, 10]


class Doubled(FeedForward):
    def forward(self, x):
        return 2 * super().forward(x)


class DoubledNorm(RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def double(module, inputs, output):
    return 2 * output


def double_input(module, inputs, named):
    return (2 * inputs[0],), named


def forward_of_its_own(module: nn.Module) -> None:
    own = module.forward
    module.forward = lambda *inputs, **named: 2 * own(*inputs, **named)


CHANGES = {
    "hook_of_a_layer": lambda d: d.layers[0].register_forward_hook(double),
    "hook_of_a_projection": lambda d: d.layers[0].attn.q_proj.register_forward_hook(double),
    "hook_before_the_mlp": lambda d: d.layers[0].mlp.register_forward_pre_hook(
        double_input, with_kwargs=True
    ),
    "hook_of_a_norm": lambda d: d.layers[0].mlp_norm.register_forward_hook(double),
    "hook_of_the_embedding": lambda d: d.tok_embeddings.register_forward_hook(double),
    "subclass_with_parts": lambda d: setattr(d.layers[0].mlp, "__class__", Doubled),
    "subclass_of_a_norm": lambda d: setattr(d.layers[0].sa_norm, "__class__", DoubledNorm),
    "forward_of_its_own": lambda d: forward_of_its_own(d.layers[0].mlp),
}
LATE = ("hook_of_a_layer", "subclass_of_a_norm", "forward_of_its_own")  # behind the engine


def plain_decoder() -> Decoder:
    return random_weights(build_decoder(read_config(tiny_directory())), seed=3)


def logits_of(decoder: Decoder) -> torch.Tensor:
    attention = PackedAttention(torch.tensor([0, len(IDS)]))
    return decoder(torch.tensor(IDS), torch.arange(len(IDS)), attention)


@torch.no_grad()
@pytest.mark.parametrize(
    "change, late",
    [*((change, False) for change in CHANGES), *((change, True) for change in LATE)],
)
def test_an_engine_computes_with_hooks_and_subclasses_and_says_so(change, late, caplog):
    decoder = plain_decoder()
    unchanged = logits_of(decoder)
    if not late:
        CHANGES[change](decoder)
    with caplog.at_level(logging.WARNING):
        engine = Engine(decoder, max_slots=2, max_len=16)
        had_kernels = engine._runner.native is not None
        if late:
            CHANGES[change](decoder)
        scored = engine.score_all(IDS[:1], IDS[1:])
    want = logits_of(decoder)[:-1].log_softmax(1)
    assert not torch.allclose(want, unchanged[:-1].log_softmax(1), atol=1e-3), "nothing changed"
    torch.testing.assert_close(scored, want, atol=1e-4, rtol=0)
    if had_kernels if late else engine_has_kernels():
        assert "C kernels" in caplog.text


def engine_has_kernels() -> bool:
    return Engine(plain_decoder(), max_slots=2, max_len=16)._runner.native is not None


def test_an_engine_of_plain_modules_says_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        Engine(plain_decoder(), max_slots=2, max_len=16).score(IDS[:1], IDS[1:])
    assert "C kernels" not in caplog.text


@pytest.mark.parametrize("change", CHANGES)
def test_a_pass_with_gradients_computes_what_one_without_does(change):
    """With gradients projections and norms are fused; without them modules are called."""
    decoder = plain_decoder()
    unchanged = logits_of(decoder)
    CHANGES[change](decoder)
    trained = logits_of(decoder)
    assert trained.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(trained, logits_of(decoder), atol=1e-5, rtol=0)
    assert not torch.allclose(trained, unchanged, atol=1e-3), "the change was not called"
