"""A tiny decoder, groups of random tokens, and a PolicyUpdate of them."""

from __future__ import annotations

import dataclasses

import torch

from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.update import PolicyUpdate, UpdateSettings
from llamarl.models.build import build_decoder
from tests.build.group import build_group
from tests.build.model_config import model_config
from tests.decoding import whole_logits
from tests.tolerances import rounding

NAN = float("nan")
VOCAB, VERSION = 23, 5
# Of the largest change of a weight: width, and the layers there and back.
STEP = rounding(terms=24, depth=2 * 2 * 2)
SETTINGS = UpdateSettings(
    lr=0.5,
    schedule="linear",
    warmup_steps=0,
    max_steps=10,
    microbatch_tokens=1000,
    max_grad_norm=0.05,
    temperature=0.7,
    advantages="group_mean",
    skip_zero_advantage=False,
    parity=None,
)


def go_on():
    return False


def decoder_of(uniform=False):
    """Random weights. `uniform`: all logits are 0, so every logprob is -log(VOCAB)."""
    decoder = build_decoder(model_config(vocab_size=VOCAB), device="cpu")
    random = torch.Generator().manual_seed(0)
    for parameter in decoder.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random) * 0.3
    if uniform:
        decoder.output.weight.data.zero_()
    return decoder


def update_of(decoder=None, loss_fn=None, optimizer=torch.optim.SGD, critic=None, **changes):
    decoder = decoder or decoder_of()
    made = dataclasses.replace(SETTINGS, **changes)
    loss_fn = loss_fn or regularised(policy_gradient)
    made_by = optimizer(decoder.parameters(), lr=123.0)
    return PolicyUpdate(
        decoder, made_by, loss_fn, made, group=None, device=torch.device("cpu"), critic=critic
    )


def group(ticket, lengths, rewards, **fields):
    """Random tokens with generator logprobs of -3 (near the decoder's), sampled from the version
    before.
    """
    given = {"prompt": 1 + ticket % 5, "vocab_size": VOCAB, "version": VERSION - 1}
    return build_group(ticket, lengths, rewards, **{**given, **fields})


def all_logprobs(decoder, prompt_ids, completion):
    """[L, VOCAB] at each place of a completion, from its sequence alone."""
    logits = whole_logits(decoder, torch.cat([prompt_ids, completion]))[len(prompt_ids) - 1 : -1]
    return (logits / SETTINGS.temperature).log_softmax(-1)


def logprobs_alone(decoder, prompt_ids, completion):
    """[L] of a completion's tokens, from its sequence alone."""
    return all_logprobs(decoder, prompt_ids, completion).gather(1, completion[:, None])[:, 0]


def weights_of(update):
    return [p.detach().clone() for p in update.decoder.parameters()]


def groups_of():
    """Completions with advantage 0 (in a group, and a whole group), one that failed and one that
    was cut off.
    """
    return [
        group(4, [6, 2, 9], [1.0, 0.5, 0.0]),
        group(1, [3, 4], [1.0, 1.0]),
        group(3, [1, 5, 2, 7], [0.0, 1.0, NAN, 1.0]),
        group(7, [2, 2, 8], [0.0, 3.0, 1.0], finish_reasons=("stop", "aborted", "length")),
    ]
