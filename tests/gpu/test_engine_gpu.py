"""The decoder, the engine with its CUDA graphs, and a trainer in host memory."""

import pytest
import torch

from llamarl.inference import Engine, SamplingParams, generate
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_weights
from tests.decoding import drain
from tests.launching import SMALL, Job

FLOAT32 = 1e-4  # nats; another device or batch size sums in another order, with TF32 off
PROMPTS = [[1, 5, 6, 14, 7, 8, 18], [1, 9, 9, 14, 9, 9, 18], [1, 6, 18]]


def decoder_on(device):
    decoder = build_decoder(read_config(tiny_directory()))
    return load_weights(decoder, tiny_directory(), device=device).eval()


def engine(cuda_graphs, **options):
    sizes = {"max_slots": 24, "max_len": 64, "device": "cuda", "cuda_graphs": cuda_graphs}
    return Engine(decoder_on("cuda"), **sizes, **options)


def submit(engine):
    """Groups that ask for different things, more samples than slots, and lengths that
    leave holes.
    """
    sampled = SamplingParams(max_new_tokens=12, n=9, seed=3, stop_token_ids=(2,))
    for ticket, prompt in enumerate(PROMPTS):
        engine.submit(ticket, prompt, sampled)
    engine.submit(7, PROMPTS[0], SamplingParams(max_new_tokens=9, temperature=0.0))
    narrow = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "min_new_tokens": 4}
    engine.submit(8, PROMPTS[1], SamplingParams(9, **narrow, stop_token_ids=(2, 3), n=4))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, c in expected.items():
        assert torch.equal(found[key].token_ids, c.token_ids), key
        assert torch.allclose(found[key].generator_logprobs, c.generator_logprobs, atol=FLOAT32)


def test_graphs_sample_what_single_kernels_sample():
    replayed, eager = engine(True), engine(False)
    for e in (replayed, eager):
        submit(e)
    assert_same(drain(replayed, 5), drain(eager, 5))
    assert replayed._graphs._graphs and eager._graphs is None


def test_graphs_read_weights_that_are_copied_in_place_and_stamp_the_new_version():
    replayed, eager = engine(True), engine(False)
    completions = []
    for e in (replayed, eager):
        e.submit(0, PROMPTS[0], SamplingParams(max_new_tokens=40, n=8))
        e.step(6)
        recorded = len(e._graphs._graphs) if e._graphs else 0
        with torch.no_grad():
            for parameter in e.decoder.parameters():
                parameter.mul_(0.9)
        e.weights_changed(3)
        e.step(6)
        assert not e._graphs or len(e._graphs._graphs) == recorded
        completions.append(drain(e))
    assert_same(*completions)
    for c in completions[0].values():
        assert c.policy_versions.tolist() == [0] * 6 + [3] * (c.token_ids.numel() - 6)


def test_graphs_are_recorded_anew_when_parameters_move():
    e = engine(True)
    e.submit(0, PROMPTS[0], SamplingParams(max_new_tokens=30, temperature=0.0))
    e.step(4)
    moved = [p.data.clone() for p in e.decoder.parameters()]
    for parameter, value in zip(e.decoder.parameters(), moved):
        parameter.data = value
    (found,) = drain(e).values()
    other = engine(False)
    other.submit(0, PROMPTS[0], SamplingParams(max_new_tokens=30, temperature=0.0))
    assert torch.equal(found.token_ids, next(iter(drain(other).values())).token_ids)


def test_a_long_prompt_in_pieces_is_not_written_over_by_the_rows_that_fill_a_graph():
    replayed, eager = engine(True, prefill_chunk=4), engine(False)
    for e in (replayed, eager):
        e.submit(0, PROMPTS[2], SamplingParams(max_new_tokens=40, n=5))  # a graph of eight rows
        e.step(2)
        e.submit(1, PROMPTS[0] * 3, SamplingParams(max_new_tokens=10, n=3))
        e.step(2)
        assert e.score(PROMPTS[0], [5, 6, 7]).isfinite().all()
    assert_same(drain(replayed, 5), drain(eager, 5))


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
        words = (*SMALL, "max_lag=0", f"trainer.cpu_offload={offload}")
        with Job(*words, run_dir=tmp_path / offload, env={"CUDA_VISIBLE_DEVICES": "0"}) as job:
            assert job.wait() == 0, job.output
        rows.append(job.rows[1])
    for name in ("reward/mean", "tokens/trained"):
        assert rows[0][name] == rows[1][name]
    for name in ("loss/value", "grad_norm"):
        assert rows[1][name] == pytest.approx(rows[0][name], abs=FLOAT32, rel=FLOAT32)
