"""bfloat16 compute over float32 masters: what is held, and how gradients of microbatches add up."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from llamarl.learning.optim import build_optimizer
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.fsdp import drop_gradients, local, next_backward, wrap
from llamarl.models.hf import load_weights
from llamarl.models.loading import share_of_bfloat16_ties, training_decoder, warn_of_ties
from llamarl.models.lora import Lora
from tests.build.model_directory import copy_tiny


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh.from_group(dist.group.WORLD, "cpu")
    dist.destroy_process_group()


def decoder_of(mesh, **options):
    device = torch.device("cpu")
    return training_decoder(
        tiny_directory(), mesh=mesh, device=device, compute_dtype=torch.bfloat16, **options
    )


def backward(decoder, seed: int, *, last: bool = True) -> None:
    next_backward(decoder, last=last)
    tokens = torch.randint(4, 52, (24,), generator=torch.Generator().manual_seed(seed))
    logits = decoder(tokens, torch.arange(24), PackedAttention(torch.tensor([0, 24])))
    assert logits.dtype == torch.bfloat16
    torch.nn.functional.cross_entropy(logits.float(), tokens.roll(-1)).backward()


def gradients(decoder, *seeds) -> dict[str, torch.Tensor]:
    """Those of a decoder after the microbatches of a step."""
    for seed in seeds:
        backward(decoder, seed, last=seed == seeds[-1])
    return {name: local(p.grad).clone() for name, p in decoder.named_parameters()}


def assert_same(got, want, *, but_embeddings=False):
    """Bit for bit, but for the embedding's, whose two gradients FSDP adds in bfloat16."""
    assert got.keys() == want.keys()
    for name in want:
        if but_embeddings and name.startswith("tok_embeddings"):
            assert (got[name] - want[name]).abs().max() <= 2**-7 * want[name].abs().max()
        else:
            assert torch.equal(got[name], want[name]), name


def test_masters_gradients_and_moments_are_float32_and_layers_compute_in_bfloat16(mesh):
    decoder, seen = decoder_of(mesh), []
    optimizer = build_optimizer(
        decoder.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0
    )
    decoder.layers[0].mlp.register_forward_hook(
        lambda module, x, y: seen.append((module.w1.weight.dtype, x[0].dtype, y.dtype))
    )
    backward(decoder, 0)
    optimizer.step()
    assert seen == [(torch.bfloat16,) * 3]
    for p in decoder.parameters():
        kept = [p, p.grad, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]
        assert {local(t).dtype for t in kept} == {torch.float32}
    moved = local(next(decoder.parameters())) - local(next(decoder_of(mesh).parameters()))
    assert 0 < moved.abs().max() < 2e-3, "a step that bfloat16 masters would have lost in part"


def replica_of(mesh):
    """A decoder as one of several replicas has it, of which this mesh holds one alone."""
    decoder = build_decoder(read_config(tiny_directory()))
    wrap(decoder, mesh, torch.bfloat16, torch.device("cpu"), cpu_offload=False)
    load_weights(decoder, tiny_directory(), device=torch.device("cpu"))
    return decoder.train()


@pytest.mark.bitwise("a microbatch has the same bfloat16 gradients alone and among others")
@pytest.mark.parametrize("make", [decoder_of, replica_of])
def test_gradients_of_microbatches_add_up_in_float32(mesh, make):
    """The float32 sum of each microbatch's own bfloat16 gradient, to float32's rounding; a bfloat16
    sum differs by far more.
    """
    first, second, third = (gradients(make(mesh), seed) for seed in range(3))
    decoder = make(mesh)
    for seed in range(3):
        backward(decoder, seed, last=seed == 2)
        if seed < 2 and make is replica_of:  # not reduced before the last microbatch
            assert all(p.grad is None for p in decoder.parameters())
    got = gradients(decoder)
    assert got.keys() == first.keys()
    is_wide = []
    for name in got:
        own = first[name], second[name], third[name]
        want, narrow = sum(own), sum(part.bfloat16() for part in own).float()
        # A dozen roundings of float32.
        assert (got[name] - want).abs().max() <= 1e-6 * want.abs().max(), name
        is_wide.append(not torch.allclose(got[name], narrow, rtol=1e-4, atol=0))
    assert any(is_wide)


@pytest.mark.bitwise("one rank makes the products that FSDP makes")
def test_one_rank_computes_what_fsdp_does(mesh):
    alone, replica = gradients(decoder_of(mesh), 0, 1), gradients(replica_of(mesh), 0, 1)
    assert_same(alone, replica, but_embeddings=True)


@torch.no_grad()
def halve(decoder) -> None:
    for p in decoder.parameters():
        p.mul_(0.5)


@pytest.mark.bitwise("recomputed products are the first ones")
@pytest.mark.parametrize("recompute", [False, True])
def test_copies_follow_the_masters_also_where_backward_recomputes(mesh, recompute):
    """A step between two backwards: copies of the first must not serve the second."""
    decoder, fresh = decoder_of(mesh, activation_checkpointing=recompute), decoder_of(mesh)
    backward(decoder, 0)
    halve(decoder)
    halve(fresh)
    decoder.zero_grad(set_to_none=True)
    assert_same(gradients(decoder, 1), gradients(fresh, 1))


@pytest.mark.bitwise("a step that was dropped and made again is the step")
def test_a_step_that_is_dropped_leaves_nothing_for_the_next(mesh):
    clean, dropped = decoder_of(mesh), decoder_of(mesh)
    backward(dropped, 5, last=False)
    drop_gradients(dropped)
    assert_same(gradients(dropped, 1, 2), gradients(clean, 1, 2))


@pytest.mark.bitwise("offloading changes no number")
def test_offloaded_masters_get_the_same_gradients(mesh):
    """On a CPU there is nowhere to go; that weights come and go layer by layer must
    change nothing.
    """
    plain, offloaded = decoder_of(mesh), decoder_of(mesh, cpu_offload=True)
    assert_same(gradients(offloaded, 0, 1), gradients(plain, 0, 1), but_embeddings=True)
    for module in (offloaded, *offloaded.layers):
        state = module._get_fsdp_state()
        assert isinstance(state._fsdp_param_group.offload_policy, CPUOffloadPolicy)
        policy = state._mp_policy
        assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)


def test_ties_are_counted_as_rounding_finds_them():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    above = (x.view(torch.int32) + 0x10000).view(torch.float32)  # the next bfloat16 number
    between = (x.double() + above.double()) / 2
    assert share_of_bfloat16_ties(x) == 0
    assert share_of_bfloat16_ties(between.float()) == 1
    assert share_of_bfloat16_ties((between * (1 + 1e-6)).float()) == 0
    third = torch.where(torch.arange(4096 * 65) % 3 == 0, between.float().repeat(65), x.repeat(65))
    assert share_of_bfloat16_ties(third.view(64, -1)) == pytest.approx(1 / 3, abs=0.01)
    # Rounding takes a tie to either neighbour, and the least push decides.
    assert torch.equal((between * (1 + 1e-6)).float().bfloat16().float(), above)
    assert torch.equal((between * (1 - 1e-6)).float().bfloat16().float(), x)


@pytest.mark.parametrize(
    ("share", "compute_dtype", "warns"),
    [
        (0.08, torch.bfloat16, True),
        (0.0005, torch.bfloat16, False),
        (0.08, torch.float32, False),
    ],
)
def test_a_start_warns_of_weights_that_the_first_update_tips(
    tmp_path, caplog, share, compute_dtype, warns
):
    path = copy_tiny(tmp_path / "dequantised")
    weights = load_file(path / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        bits = weight.float().bfloat16().float().view(torch.int32)
        is_tie = torch.rand(weight.shape, generator=random) < share
        weights[name] = torch.where(is_tie, bits | 0x8000, bits).view(torch.float32)
    save_file(weights, path / "model.safetensors")
    with caplog.at_level("WARNING"):
        training_decoder(path, mesh=None, device=torch.device("cpu"), compute_dtype=compute_dtype)
    said = [line for line in caplog.messages if "half-way between two bfloat16 numbers" in line]
    assert len(said) == warns
    if warns:
        assert f"{path}: some 8." in said[0]
        assert "Store the directory in bfloat16" in said[0]


def test_frozen_weights_may_be_ties(tmp_path, caplog):
    """Adapters alone are trained, so that no update tips anything."""
    decoder = decoder_of(None, lora=Lora(2, 4.0, ("q_proj",), seed=1))
    with torch.no_grad():
        for parameter in decoder.parameters():
            if not parameter.requires_grad:
                parameter.copy_((parameter.view(torch.int32) | 0x8000).view(torch.float32))
    caplog.clear()  # a CPU may have been said to be slow
    with caplog.at_level("WARNING"):
        warn_of_ties(decoder, tmp_path)
    assert not caplog.messages
