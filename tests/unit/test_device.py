"""One key says what a job computes on, for all that it computes; a device that is not there is
refused at the start; an Apple GPU is used without torch.cuda, float64 or copies that nothing waits
for.
"""

import os
import runpy
import sys
from unittest import mock

import pytest
import torch

from llamarl.comm.groups import this_rank_info
from llamarl.config.command_line import check_command_line
from llamarl.config.evaluation import EVALUATION
from llamarl.config.preferences import PREFERENCES
from llamarl.config.supervised import REWARD_MODEL, SFT
from llamarl.errors import BadInput
from llamarl.inference import Engine, SamplingParams
from llamarl.learning.preference import held_out_sums
from llamarl.machine import device
from llamarl.machine.device import CPU, choose_device, in_float64
from llamarl.machine.free_memory import memory_of
from llamarl.machine.precision import use_float32_products
from llamarl.words.findings import ConfigError
from tests.decoding import EVEN_CONFIG, drain, random_decoder
from tests.house import ROOT
from tests.imagined_gpu import APPLE, OnGpu, imagined_apple_gpu, imagined_gpu
from tests.imagined_streams import OrderError

SAMPLED = SamplingParams(max_new_tokens=6, n=2, seed=3, top_p=0.9, stop_token_ids=(2,))


@pytest.fixture
def machine(monkeypatch):
    """machine(num_gpus, has_apple, cuda): what PyTorch says of a machine."""

    def make(num_gpus=0, has_apple=False, cuda="13.0"):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_apple)

    return make


def test_auto_takes_gpus_in_turn_and_an_apple_gpu_never(machine):
    machine(num_gpus=2, has_apple=True)
    assert [choose_device(local_rank=n).index for n in range(3)] == [0, 1, 0]
    machine(has_apple=True)
    assert choose_device("auto", local_rank=1) == CPU


def test_a_device_that_is_named_is_taken(machine):
    machine(num_gpus=2, has_apple=True)
    assert choose_device("cpu", local_rank=1) == CPU
    assert choose_device("cuda", local_rank=1) == torch.device("cuda", 1)
    assert choose_device("mps", local_rank=1) == torch.device("mps", 0)


@pytest.mark.parametrize(
    "wanted, cuda, system, said",
    [
        ("cuda", None, "Linux", r"is built for CPUs alone; install a build for CUDA \(docs/quick"),
        ("cuda", "13.0", "Linux", "sees no GPU on this machine; look at nvidia-smi and CUDA_VISI"),
        ("mps", None, "Linux", "an Apple GPU is in a Mac, and this is Linux"),
        ("mps", None, "Darwin", "sees no Apple GPU on this Mac"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_a_remedy(
    machine, monkeypatch, wanted, cuda, system, said
):
    machine(cuda=cuda)
    monkeypatch.setattr(device.platform, "system", lambda: system)
    with pytest.raises(BadInput, match=said) as refused:
        choose_device(wanted)
    text = str(refused.value)
    assert text.startswith(f"device={wanted}: ") and text.endswith("device=cpu")
    assert "\n" not in text


RECIPES = {
    "llama_async": ["max_steps=1"],
    "evaluate": [],
    "sft": ["task=addition", "max_new_tokens=4"],
    "reward_model": ["task.path=PAIRS", "epochs=1"],
    "preferences": ["task=addition"],
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_kind_of_job_asks_for_its_device_before_anything_starts(
    machine, run_here, monkeypatch, tmp_path, name
):
    machine()
    (tmp_path / "PAIRS").write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n')
    monkeypatch.chdir(tmp_path)
    model = f"model.path={ROOT}/llamarl/models/tiny"
    out = "run_dir=out" if name == "llama_async" else "out=out"
    recipe = str(ROOT / "recipes" / f"{name}.py")
    words = [recipe, model, out, *RECIPES[name], "device=cuda"]
    monkeypatch.setattr(sys, "argv", words)
    code, said = run_here(lambda: runpy.run_path(recipe, run_name="__main__"))
    assert code == 2 and "device=cuda: torch sees no GPU" in said.err, said
    assert sorted(os.listdir(tmp_path)) == ["PAIRS"]


@pytest.mark.parametrize("section", ["model", "trainer", "generator", "reward", "eval"])
def test_a_device_of_one_section_hints_at_the_jobs(section):
    with pytest.raises(ConfigError, match=rf"{section}.device +unknown key; did you mean device\?"):
        check_command_line([f"{section}.device=cuda"])


@pytest.mark.parametrize("kind", [EVALUATION, SFT, REWARD_MODEL, PREFERENCES])
def test_so_do_other_jobs(kind):
    with pytest.raises(ConfigError, match=r"model.device +unknown key; did you mean device\?"):
        check_command_line(["model.device=cuda"], kind=kind)


@pytest.mark.parametrize(
    "words, ranks, said",
    [
        (["placement.trainer=[0,1]"], 4, "ranks cannot share a model .*; placement.trainer=.0."),
        ([], 4, "placement.trainer=.0."),
        (["generator.quantize=int8"], 1, "generator.quantize=int8 +not on a Mac's GPU"),
        (["trainer.cpu_offload=true"], 1, "trainer.cpu_offload=true +not on a Mac's GPU"),
        (["placement.trainer=[0]", "generator.tensor_parallel=3"], 4, "parallel=3 +not on a Mac"),
    ],
)
def test_what_an_apple_gpu_cannot_do_is_refused(words, ranks, said):
    with pytest.raises(ConfigError, match=said):
        check_command_line(["device=mps", *words], world_size=ranks)
    check_command_line(["device=mps", "placement.trainer=[0]"], world_size=4)


def test_ranks_cannot_share_a_supervised_jobs_model_there(tmp_path):
    (tmp_path / "rows").write_text("{}\n")
    model = f"model.path={ROOT}/llamarl/models/tiny"
    words = [model, f"task.path={tmp_path}/rows", "device=mps"]
    check_command_line(words, kind=REWARD_MODEL)
    with pytest.raises(ConfigError, match="device=mps +2 ranks cannot share"):
        check_command_line(words, kind=REWARD_MODEL, world_size=2)


def engine_on(where):
    return Engine(random_decoder(config=EVEN_CONFIG), max_slots=4, max_len=32, device=where)


def sampled(engine):
    engine.submit(0, [1, 5, 6, 14], SAMPLED)
    return {key: one.token_ids.tolist() for key, one in drain(engine).items()}


def test_an_apple_gpu_samples_what_a_cpu_does(process_state):
    here = sampled(engine_on("cpu"))
    with imagined_apple_gpu() as gpu:
        engine = engine_on("mps")
        assert engine._graphs is None and isinstance(engine.decoder.tok_embeddings.weight, OnGpu)
        assert sampled(engine) == here
        assert gpu.allocated and memory_of(APPLE) == 16 << 30


def test_float64_is_the_cpus_where_the_device_has_none():
    ones = torch.ones(2)
    with imagined_apple_gpu():
        there = ones.to(APPLE)
        with pytest.raises(TypeError, match="float64"):
            there.double()
        assert in_float64(there).dtype == torch.float64
        sums = held_out_sums(there, there * 0, there * 0)
        assert float(sums["right"]) == 2.0
    with imagined_gpu():
        assert in_float64(ones.to("cuda")).device.type == "cuda"


def test_the_imagined_apple_gpu_refuses_cuda_and_copies_that_nothing_waits_for():
    with imagined_apple_gpu():
        with pytest.raises(OrderError, match="nothing waits"):
            torch.ones(2).to(APPLE, non_blocking=True)
        with pytest.raises(AssertionError, match="synchronize is called"):
            torch.cuda.synchronize()


@pytest.mark.parametrize("on, is_measured", [(CPU, True), (APPLE, False)])
def test_float32_products_are_measured_on_a_cpu_alone(machine, process_state, on, is_measured):
    machine(num_gpus=1)
    assert ("GFLOP/s" in use_float32_products(reproducible=True, device=on)) is is_measured


def test_without_linux_calls_ranks_have_cores_and_share_no_memory():
    """macOS has neither sched_getaffinity nor memfd_create."""
    whole = vars(os).copy()
    for name in ("sched_getaffinity", "memfd_create"):
        del whole[name]
    with mock.patch.dict(vars(os), whole, clear=True):
        info = this_rank_info(0, CPU)
    assert info.num_cores == os.cpu_count() and info.host.endswith(f"/{os.getpid()}")
