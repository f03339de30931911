"""A supervised step that is not finite changes nothing, whichever of loss and gradient shows it."""

import math
from types import SimpleNamespace

import pytest
import torch

from llamarl.errors import NotFinite
from llamarl.learning.supervised import SupervisedSettings, SupervisedUpdate
from llamarl.models.build import build_decoder, random_weights
from llamarl.models.config import read_config, tiny_directory

SETTINGS = SupervisedSettings(
    lr=0.5,
    schedule="constant",
    warmup_steps=0,
    max_steps=2,
    microbatch_tokens=8,
    max_grad_norm=1.0,
)


def sound(weight):
    return weight.square().sum()


def infinite_gradient(weight):
    """0, whose derivative by the root of 0 is not finite."""
    return (weight - weight.detach()).abs().sqrt().sum()


def infinite_loss(weight):
    """A constant that is no number beside a gradient that is one."""
    return weight.square().sum() + math.inf


class OfOneWeight:
    """An Objective whose examples say what the loss of their microbatch is."""

    def num_tokens(self, example):
        return 8  # a microbatch each

    def num_targets(self, example):
        return 1

    def pack(self, examples, device):
        return examples

    def loss(self, decoder, batch):
        weight = decoder.norm.scale
        return batch[0](weight), {}, SimpleNamespace(padded_tokens=8)


def weights_of(decoder):
    return [parameter.detach().clone() for parameter in decoder.parameters()]


@pytest.mark.parametrize("broken, said", [(infinite_gradient, "nan"), (infinite_loss, "inf")])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_not_finite_changes_nothing_and_the_next_step_is_sound(broken, said, place):
    decoder = random_weights(build_decoder(read_config(tiny_directory())), seed=3)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=0.5)
    device = torch.device("cpu")
    update = SupervisedUpdate(
        decoder, optimizer, OfOneWeight(), SETTINGS, group=None, device=device
    )
    before = weights_of(decoder)
    examples = [sound, sound]
    examples[place] = broken
    with pytest.raises(NotFinite, match=rf"step 0: loss .*{said}.*; nothing was changed"):
        update.run(examples, 0)
    assert all(map(torch.equal, weights_of(decoder), before))
    assert not optimizer.state, "a moment of what is not finite would spoil all later steps"
    assert all(parameter.grad is None for parameter in decoder.parameters())
    row = update.run([sound, sound], 1)
    assert math.isfinite(row["loss/value"]) and math.isfinite(row["grad_norm"])
    changed = [torch.equal(*pair) for pair in zip(weights_of(decoder), before)]
    assert changed.count(False) == 1
