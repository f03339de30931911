"""What only a GPU can show: skipped, saying so, where CUDA is not available."""

import pytest
import torch

from llamarl.inference import Engine, SamplingParams, generate
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_weights
from tests.launching import SMALL, Job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

FLOAT32 = 1e-4  # nats; GPU and CPU sum in another order, with TF32 off


def decoder_on(device):
    return load_weights(
        build_decoder(read_config(tiny_directory())), tiny_directory(), device=device
    ).eval()


@torch.inference_mode()
def test_packed_logits_equal_the_cpus_with_and_without_shared_prompts():
    tokens, positions = torch.arange(4, 16), torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9])
    for cu_seqlens, parents in (([0, 12], None), ([0, 6, 8, 12], [-1, 0, 0])):
        cu, behind = torch.tensor(cu_seqlens), None if parents is None else torch.tensor(parents)
        place = torch.arange(12) if parents is None else positions
        on_cpu = decoder_on("cpu")(tokens, place, PackedAttention(cu, behind))
        behind = None if behind is None else behind.cuda()
        on_gpu = decoder_on("cuda")(tokens.cuda(), place.cuda(), PackedAttention(cu.cuda(), behind))
        assert torch.allclose(on_gpu.cpu(), on_cpu, atol=FLOAT32)


def test_the_engine_samples_on_the_gpu_what_the_module_scores():
    engine = Engine(decoder_on("cuda"), max_slots=32, max_len=32, device="cuda")
    params = SamplingParams(max_new_tokens=8, n=8, seed=3, stop_token_ids=(2,))
    prompts = [[1, 5, 6, 14, 7, 8, 18], [1, 9, 9, 14, 9, 9, 18]]
    for prompt, group in zip(prompts, generate(engine, prompts, params)):
        for completion in group:
            ids = torch.cat([torch.tensor(prompt), completion.token_ids]).cuda()
            cu = torch.tensor([0, len(ids) - 1], device="cuda")
            with torch.inference_mode():
                logits = engine.decoder(
                    ids[:-1], torch.arange(len(ids) - 1, device="cuda"), PackedAttention(cu)
                )
            fresh = (
                logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)[len(prompt) - 1 :].cpu()
            )
            assert torch.allclose(fresh, completion.generator_logprobs, atol=FLOAT32)


def test_a_trainer_in_host_memory_trains_as_one_on_the_gpu(tmp_path):
    rows = []
    for offload in ("false", "true"):
        with Job(
            *SMALL,
            "max_lag=0",
            f"trainer.cpu_offload={offload}",
            run_dir=tmp_path / offload,
            env={"CUDA_VISIBLE_DEVICES": "0"},
        ) as job:
            assert job.wait() == 0, job.output
        rows.append(job.rows[1])
    for name in ("reward/mean", "tokens/trained"):
        assert rows[0][name] == rows[1][name]
    for name in ("loss/value", "grad_norm"):
        assert rows[1][name] == pytest.approx(rows[0][name], abs=FLOAT32, rel=FLOAT32)
