"""Losses and objectives on a GPU that is not there: every operation has its tensors on one device,
and value and gradient are a CPU's.
"""

import contextlib
import dataclasses

import pytest
import torch

from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.preference import BradleyTerry, Preference
from llamarl.learning.sft import NextToken, SFTPair
from llamarl.learning.supervised import SupervisedSettings, SupervisedUpdate
from llamarl.models.config import tiny_directory
from llamarl.models.loading import training_decoder
from tests.imagined_gpu import CPU, GPU, OnGpu, imagined_gpu
from tests.loss_problems import PUBLISHED, problem
from tests.tolerances import rounding

EXACT = dict(atol=1e-12, rtol=1e-11)  # float64 sums in another order


def on_gpu(record):
    """A record whose tensors are on the GPU, those of records inside too."""
    moved = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, torch.Tensor):
            wants_gradient = value.requires_grad
            value = value.detach().to(GPU).requires_grad_(wants_gradient)
        elif dataclasses.is_dataclass(value):
            value = on_gpu(value)
        moved[field.name] = value
    return dataclasses.replace(record, **moved)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_loss_on_a_gpu_is_a_cpus(name):
    fn = regularised(PUBLISHED[name], kl_coef=0.1)
    given = problem(seed=3)
    value, metrics = given.call(fn)
    gradient = given.gradient(fn)
    with imagined_gpu():
        there = on_gpu(given)
        found, of_gpu = there.call(fn)
        assert isinstance(found, OnGpu) and found.shape == () and found.dtype == value.dtype
        assert of_gpu.keys() == metrics.keys()
        (backward,) = torch.autograd.grad(found, there.pi)
        assert torch.allclose(found.detach().cpu(), value.detach(), **EXACT)
        assert torch.allclose(backward.cpu(), gradient, **EXACT)
        for key, one in of_gpu.items():
            own = torch.as_tensor(metrics[key]).double()
            its = torch.as_tensor(one).detach().cpu().double()
            assert torch.allclose(its, own, atol=1e-6), key


def pairs(name):
    """Three pairs of preferences, or three rows to learn."""
    random = torch.Generator().manual_seed(0)

    def ids(count):
        return torch.randint(4, 40, (count,), generator=random)

    if name == "preferences":
        return [Preference(ids(3), ids(n), ids(n + 2), margin=0.1) for n in (2, 4, 3)]
    learned = torch.tensor([False, False, True, True, True])
    return [SFTPair(ids(5), learned) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["preferences", "rows"])
def test_a_supervised_step_on_a_gpu_is_a_cpus(name):
    """And so is its evaluation."""
    is_scorer = name == "preferences"
    settings = SupervisedSettings(
        lr=1e-3,
        schedule="constant",
        warmup_steps=0,
        max_steps=2,
        microbatch_tokens=16,
        max_grad_norm=1.0,
    )
    given = {"mesh": None, "compute_dtype": torch.float32, "score_seed": 0 if is_scorer else None}
    found = []
    for device in (CPU, GPU):
        with imagined_gpu() if device == GPU else contextlib.nullcontext():
            decoder = training_decoder(tiny_directory(), device=device, **given)
            objective = BradleyTerry(center_coef=0.1) if is_scorer else NextToken()
            optimizer = torch.optim.SGD(decoder.parameters(), lr=1e-3)
            made = (decoder, optimizer, objective, settings)
            update = SupervisedUpdate(*made, group=None, device=device)
            row = update.run(pairs(name), 0)
            found.append((row, update.evaluate(pairs(name))))
    (cpu, held_out), (gpu, its_held_out) = found
    same = rounding(terms=decoder.config.hidden_size, depth=4 * decoder.config.num_hidden_layers)
    assert gpu.keys() == cpu.keys() and its_held_out.keys() == held_out.keys()
    assert gpu["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=same)
    assert its_held_out["eval/loss"] == pytest.approx(held_out["eval/loss"], rel=same)


def test_a_loss_that_forgets_its_device_is_found():
    def forgetful(inputs):
        weights = torch.ones(inputs.trainer_logprobs.shape)
        return (inputs.trainer_logprobs * weights).sum(), {}

    given = problem()
    given.call(forgetful)
    with imagined_gpu(), pytest.raises(RuntimeError, match="two devices, cuda:0 and cpu"):
        on_gpu(given).call(forgetful)
