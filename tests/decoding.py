"""Decoders of a directory or drawn, an engine's completions, and what one forward says of them."""

from __future__ import annotations

import math

import pytest
import torch

from llamarl.machine.kernels import library
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, read_config
from llamarl.models.hf import load_weights
from tests.build.model_config import model_config
from tests.tolerances import of_logprobs

MAX_LEN = 40
CONFIG = model_config(
    vocab_size=31,
    hidden_size=32,
    intermediate_size=48,
    head_dim=8,
    tie_word_embeddings=True,
)

# Of logprobs by two routes: the C kernel, the module with a cache, and its whole forward, which
# round each in their own way.
LOGITS = 5.0  # more than their standard deviation
TOLERANCE = of_logprobs(CONFIG, size=LOGITS)

# Its sizes suit the products of every device.
EVEN_CONFIG = model_config(vocab_size=48, hidden_size=32, intermediate_size=48, head_dim=8)


def random_decoder(seed=0, config=CONFIG, scale=0.3, dtype=torch.float32):
    decoder = build_decoder(config, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(torch.ones_like(noise) if "norm" in name else noise)
    return decoder


def our_decoder(path, **options):
    """The decoder of a directory."""
    return load_weights(build_decoder(read_config(path), **options), path)


def whole_logits(decoder, ids):
    """[L, V] of a sequence alone."""
    context = PackedAttention(torch.tensor([0, ids.numel()]))
    return decoder(ids, torch.arange(ids.numel()), context)


def needs_kernels():
    if library("decode", "-fopenmp") is None:
        pytest.skip("no C compiler, or LLAMARL_NATIVE=0")


def by_place(finished):
    """Completions by (stream, ticket, sample_index)."""
    return {(stream, c.ticket, c.sample_index): c for stream, c in finished}


def drain(engine, chunk=4):
    """Completions of all that is at work, by place."""
    finished = []
    while engine.num_live or engine.num_waiting:
        engine.step(chunk)
        finished += engine.pop_finished()
    return by_place(finished)


def full_forward_logits(decoder, completion):
    """[L, V] that the completion's tokens were chosen from, by one forward over all of it."""
    ids = torch.cat([completion.prompt_ids, completion.token_ids])
    with torch.no_grad():
        logits = whole_logits(decoder, ids)
    return logits[completion.prompt_ids.numel() - 1 : -1]


def full_forward_logprobs(decoder, completion, temperature=1.0, banned=()):
    """[L] logprobs of the completion's tokens by one forward over the whole sequence."""
    logits = full_forward_logits(decoder, completion)
    logits[:, list(banned)] = -math.inf
    return (logits / temperature).log_softmax(1).gather(1, completion.token_ids[:, None]).squeeze(1)
