"""The engine's CUDA graphs, which only a GPU can show: skipped, saying so, where CUDA is not
available.
"""

import pytest
import torch

from llamarl.inference import Engine, SamplingParams
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

FLOAT32 = 1e-4  # nats; batches of other sizes sum in another order, with TF32 off
PROMPTS = [[1, 5, 6, 14, 7, 8, 18], [1, 9, 9, 14, 9, 9, 18], [1, 6, 18]]


def engine(cuda_graphs, **options):
    decoder = load_weights(
        build_decoder(read_config(tiny_directory())), tiny_directory(), device="cuda"
    ).eval()
    return Engine(
        decoder, max_slots=24, max_len=64, device="cuda", cuda_graphs=cuda_graphs, **options
    )


def drain(engine, chunk=5):
    finished = []
    while engine.num_live or engine.num_waiting:
        engine.step(chunk)
        finished += engine.pop_finished()
    return {(c.ticket, c.sample_index): c for _, c in finished}


def submit(engine):
    """Groups that ask for different things, more samples than slots, and lengths that
    leave holes.
    """
    for ticket, prompt in enumerate(PROMPTS):
        engine.submit(
            ticket, prompt, SamplingParams(max_new_tokens=12, n=9, seed=3, stop_token_ids=(2,))
        )
    engine.submit(7, PROMPTS[0], SamplingParams(max_new_tokens=9, temperature=0.0))
    engine.submit(
        8,
        PROMPTS[1],
        SamplingParams(
            9, temperature=0.7, top_k=5, top_p=0.9, min_new_tokens=4, stop_token_ids=(2, 3), n=4
        ),
    )


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, c in expected.items():
        assert torch.equal(found[key].token_ids, c.token_ids), key
        assert torch.allclose(found[key].generator_logprobs, c.generator_logprobs, atol=FLOAT32)


def test_graphs_sample_what_single_kernels_sample():
    replayed, eager = engine(True), engine(False)
    for e in (replayed, eager):
        submit(e)
    assert_same(drain(replayed), drain(eager))
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
    assert_same(drain(replayed), drain(eager))
