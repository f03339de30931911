"""bfloat16 compute over float32 masters: what is held, and how gradients of microbatches add up."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from llamarl.learning.optim import build_optimizer
from llamarl.models.attention import PackedAttention
from llamarl.models.fsdp import drop_gradients, local, next_backward, training_decoder
from llamarl.models.scratch import tiny_directory


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh.from_group(dist.group.WORLD, "cpu")
    dist.destroy_process_group()


def decoder_of(mesh, **options):
    return training_decoder(tiny_directory(), mesh=mesh, device=torch.device("cpu"), compute_dtype=torch.bfloat16, **options)


def backward(decoder, seed: int, *, last: bool = True) -> None:
    next_backward(decoder, last=last)
    tokens = torch.randint(4, 52, (24,), generator=torch.Generator().manual_seed(seed))
    logits = decoder(tokens, torch.arange(24), PackedAttention(torch.tensor([0, 24])))
    assert logits.dtype == torch.bfloat16
    torch.nn.functional.cross_entropy(logits.float(), tokens.roll(-1)).backward()


def gradients(decoder) -> dict[str, torch.Tensor]:
    return {name: local(p.grad).clone() for name, p in decoder.named_parameters()}


def test_masters_gradients_and_moments_are_float32_and_layers_compute_in_bfloat16(mesh):
    decoder, seen = decoder_of(mesh), []
    optimizer = build_optimizer(decoder.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    decoder.layers[0].mlp.register_forward_hook(lambda module, x, y: seen.append((module.w1.weight.dtype, x[0].dtype, y.dtype)))
    backward(decoder, 0)
    optimizer.step()
    assert seen == [(torch.bfloat16,) * 3]
    for p in decoder.parameters():
        kept = [p, p.grad, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]
        assert {local(t).dtype for t in kept} == {torch.float32}
    for module in (decoder, *decoder.layers):
        policy = module._get_fsdp_state()._mp_policy
        assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    moved = local(next(decoder.parameters())) - local(next(decoder_of(mesh).parameters()))
    assert 0 < moved.abs().max() < 2e-3, "a step that bfloat16 masters would have lost in part"


def test_gradients_of_microbatches_add_up_in_float32(mesh):
    """Bit for bit the float32 sum of each microbatch's own bfloat16 gradient; a bfloat16 sum differs."""
    parts = []
    for seed in range(3):
        decoder = decoder_of(mesh)
        backward(decoder, seed)
        parts.append(gradients(decoder))
    decoder = decoder_of(mesh)
    for seed in range(3):
        backward(decoder, seed, last=seed == 2)
        if seed < 2:
            assert all(p.grad is None for p in decoder.parameters()), "reduced before the last microbatch"
    got = gradients(decoder)
    assert got.keys() == parts[0].keys()
    for name in got:
        assert torch.equal(got[name], parts[0][name] + parts[1][name] + parts[2][name]), name
    narrow = {n: (parts[0][n].bfloat16() + parts[1][n].bfloat16() + parts[2][n].bfloat16()).float() for n in got}
    assert not all(torch.equal(got[name], narrow[name]) for name in got)


def test_a_step_that_is_dropped_leaves_nothing_for_the_next(mesh):
    clean, dropped = decoder_of(mesh), decoder_of(mesh)
    backward(dropped, 5, last=False)
    drop_gradients(dropped)
    for decoder in (clean, dropped):
        backward(decoder, 1, last=False)
        backward(decoder, 2)
    want, got = gradients(clean), gradients(dropped)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_offloaded_masters_get_the_same_gradients(mesh):
    """On a CPU there is nowhere to go; that weights come and go layer by layer must change nothing."""
    plain, offloaded = decoder_of(mesh), decoder_of(mesh, cpu_offload=True)
    for decoder in (plain, offloaded):
        backward(decoder, 0, last=False)
        backward(decoder, 1)
    for module in (offloaded, *offloaded.layers):
        assert isinstance(module._get_fsdp_state()._fsdp_param_group.offload_policy, CPUOffloadPolicy)
    for (name, want), (_, got) in zip(gradients(plain).items(), gradients(offloaded).items(), strict=True):
        assert torch.equal(want, got), name
