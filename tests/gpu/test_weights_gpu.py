"""Weights between CUDA devices and processes: skipped, saying so, where CUDA is not available."""

import json

import pytest
import torch

from llamarl.comm.groups import this_rank_info
from llamarl.ddma.payload import Copier
from llamarl.ddma.receiver import WeightsReceiver
from llamarl.ddma.sender import WeightsSender
from llamarl.machine.offload import DeviceSharing
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_weights, named_parameters_hf
from tests.build.routes import route_of
from tests.launching import SMALL, Job


def digest_of(flat: torch.Tensor) -> int:
    return Copier("device").digest_all([flat])


def test_a_device_digest_sees_a_changed_byte_and_exchanged_words():
    flat = torch.arange(1 << 16, device="cuda").mul_(2654435761).view(torch.uint8)
    before = digest_of(flat)
    for place in (0, 4097, flat.numel() - 1):
        changed = flat.clone()
        changed[place] ^= 1
        assert digest_of(changed) != before
    words = flat.clone().view(torch.int64)
    words[[3, 4]] = words[[4, 3]]
    assert digest_of(words.view(torch.uint8)) != before
    odd = torch.arange(1001, device="cuda").to(torch.uint8)
    assert digest_of(odd) != digest_of(odd[:-1])


@pytest.mark.parametrize("on_host", [False, True])
def test_a_version_reaches_the_parameters_in_place(on_host):
    device = torch.device("cuda", 0)
    source = load_weights(
        build_decoder(read_config(tiny_directory())), tiny_directory(), device=device
    )
    target = build_decoder(
        read_config(tiny_directory()), device=device, dtype=torch.bfloat16
    ).requires_grad_(False)
    infos = [this_rank_info(0, device)]
    route = route_of(ranks=infos, dtype=torch.bfloat16, on_host=on_host, timeout_s=30)
    sender, receiver = WeightsSender(route), WeightsReceiver(route)
    sender.bind(source.config, list(named_parameters_hf(source)))
    receiver.bind(target.config, list(named_parameters_hf(target)))
    addresses = [p.data_ptr() for p in target.parameters()]
    for version in range(3):
        with torch.no_grad():
            for p in source.parameters():
                p.add_(0.01)
        sender.publish(version, evaluate=True, must_differ=version > 0)
        while receiver.staged is None:
            route.control.check()
            route.control.wait(0.01)
        assert receiver.swap().version == version
        for (name, a), (_, b) in zip(named_parameters_hf(source), named_parameters_hf(target)):
            assert torch.equal(a.bfloat16(), b), name
    assert addresses == [p.data_ptr() for p in target.parameters()], (
        "captured graphs would read old memory"
    )
    sender.close(), receiver.close()


def test_turns_free_device_memory():
    big = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
    turns = DeviceSharing(["a", "b"])
    before = torch.cuda.memory_allocated()
    turns.join("a", lambda: [big])
    assert torch.cuda.memory_allocated() <= before - big.numel()
    turns.claim("a")
    assert bool((big == 1).all())


@pytest.mark.parametrize(
    "overrides",
    [
        ("weights.transport=cuda_ipc",),
        ("generator.quantize=fp8", "model.dtype=bfloat16", "trainer.parity_tolerance=0.5"),
    ],
)
def test_two_processes_on_one_gpu_exchange_weights_by_ipc(tmp_path, overrides):
    with Job(
        *SMALL, *overrides, run_dir=tmp_path / "run", ranks=2, env={"CUDA_VISIBLE_DEVICES": "0"}
    ) as job:
        assert job.wait() == 0, job.output
        assert job.rows[-1]["weights/bytes"] > 0


def test_offload_changes_nothing_but_the_memory(tmp_path):
    rows = {}
    for name, more in {
        "apart": (),
        "turns": ("placement.colocate=[trainer,generator]", "offload=true"),
    }.items():
        with Job(
            *SMALL, "max_lag=0", *more, run_dir=tmp_path / name, env={"CUDA_VISIBLE_DEVICES": "0"}
        ) as job:
            assert job.wait() == 0, job.output
            rows[name] = [row["reward/mean"] for row in job.rows if row["step"]]
    assert json.dumps(rows["apart"]) == json.dumps(rows["turns"])
