"""The engine on a GPU that is not there: devices, dtypes and shapes of every operation, what the
host waits for, and CUDA graphs that are captured and replayed.
"""

import dataclasses

import pytest
import torch

from llamarl.inference import Engine, SamplingParams
from llamarl.inference.cache import Pieces, SlotCache
from llamarl.machine.offload import DeviceSharing
from llamarl.models.quantize import QuantizedLinear, _takes_row_scales, quantize_decoder
from tests.decoding import EVEN_CONFIG as CONFIG
from tests.decoding import LOGITS, drain, random_decoder
from tests.imagined_gpu import GPU, imagined_gpu
from tests.tolerances import of_logprobs, rounding

SLOW = pytest.mark.slow
SAME = of_logprobs(CONFIG, size=LOGITS)
PROMPTS = [[1, 5, 6, 14, 7, 8, 18], [1, 9, 9, 14, 9, 9, 18], [1, 6, 18]]
LONG = SamplingParams(24, n=3)
PLAIN = SamplingParams(max_new_tokens=6, n=2, seed=3, stop_token_ids=(2,))


@pytest.fixture
def gpu():
    with imagined_gpu() as made:
        _takes_row_scales.cache_clear()
        yield made
    _takes_row_scales.cache_clear()


@pytest.fixture
def at_work(gpu):
    """at_work(steps, ...): an engine on the GPU that has taken so many steps with three samples."""

    def begin(steps, params=LONG, **options):
        engine = engine_on("cuda", **options)
        engine.submit(0, PROMPTS[0], params)
        engine.step(steps)
        return engine

    return begin


def engine_on(device, *, cuda_graphs=True, decoder=None, **options):
    return Engine(
        decoder or random_decoder(config=CONFIG),
        max_slots=8,
        max_len=32,
        device=device,
        cuda_graphs=cuda_graphs,
        decode=lambda ids: "".join(f"<{i}>" for i in ids),
        **options,
    )


def drained(engine):
    """Completions by (ticket, sample_index)."""
    return {(ticket, index): c for (_, ticket, index), c in drain(engine).items()}


def assert_scored_alike(completions, cpu, temperature=1.0):
    """Every token has the logprob that a CPU's engine gives it."""
    assert completions
    for c in completions:
        scored = cpu.score(c.prompt_ids, c.token_ids, temperature)
        assert torch.allclose(c.generator_logprobs, scored, atol=SAME), c


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_what_a_gpu_samples_has_the_logprobs_that_a_cpu_gives_it(gpu, cuda_graphs):
    engine = engine_on("cuda", cuda_graphs=cuda_graphs)
    for ticket, prompt in enumerate(PROMPTS):
        engine.submit(ticket, prompt, PLAIN)
    found = drained(engine)
    assert len(found) == 6 and (engine._graphs is not None) is cuda_graphs
    assert all(c.token_ids.device.type == "cpu" for c in found.values())
    assert_scored_alike(found.values(), engine_on("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_every_demand_on_the_sampler_runs_on_a_gpu(gpu, cuda_graphs):
    """Of a vocabulary so large that a CPU looks at its likeliest tokens first."""
    config = dataclasses.replace(CONFIG, vocab_size=300)
    decoder = random_decoder(config=config)
    engine = engine_on("cuda", cuda_graphs=cuda_graphs, decoder=decoder)
    engine.submit(0, PROMPTS[0], SamplingParams(5, temperature=0.0))
    narrow = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01}
    engine.submit(1, PROMPTS[1], SamplingParams(5, **narrow))
    late = SamplingParams(5, min_new_tokens=4, stop_token_ids=tuple(range(2, 40)))
    engine.submit(2, PROMPTS[2], late)
    found = drained(engine)
    assert_scored_alike([found[0, 0]], engine_on("cpu", decoder=random_decoder(config=config)))
    assert found[2, 0].token_ids.numel() >= 4
    assert all(c.generator_logprobs.isfinite().all() for c in found.values())


def test_a_stop_string_ends_a_row_on_a_gpu(gpu):
    engine = engine_on("cuda")
    every = tuple(f"<{i}>" for i in range(CONFIG.vocab_size))
    engine.submit(0, PROMPTS[0], SamplingParams(5, stop_strings=every))
    (completion,) = drained(engine).values()
    assert completion.token_ids.numel() == 1 and completion.finish_reason == "stop"


@pytest.mark.slow
def test_a_long_prompt_in_pieces_and_rows_that_start_again_run_on_a_gpu(gpu):
    engine = engine_on("cuda", prefill_chunk=4)
    engine.submit(0, PROMPTS[2], PLAIN)
    engine.step(2)
    engine.submit(1, PROMPTS[0] * 2, PLAIN)
    engine.step(2)
    partials = engine.export_partials()
    engine.abort()
    engine.pop_finished()
    for partial in partials:
        engine.submit_partial(partial)
    found = drained(engine)
    assert_scored_alike(found.values(), engine_on("cpu"))
    cpu = engine_on("cpu")
    scored = engine.score(PROMPTS[0], [5, 6, 7])
    assert torch.allclose(scored.cpu(), cpu.score(PROMPTS[0], [5, 6, 7]), atol=SAME)


@pytest.mark.parametrize(
    "params, cuda_graphs",
    [
        (LONG, True),
        pytest.param(SamplingParams(24, n=3, temperature=0.7, top_k=4), False, marks=SLOW),
    ],
)
def test_the_host_waits_as_often_for_many_tokens_as_for_few(gpu, at_work, params, cuda_graphs):
    waits = []
    for chunk in (2, 12):
        engine = at_work(3, params, cuda_graphs=cuda_graphs)
        before = len(gpu.streams.syncs)
        assert engine.step(chunk) == 3 * chunk
        waits.append(len(gpu.streams.syncs) - before)
    assert waits[0] == waits[1]


@torch.inference_mode()
def test_a_graph_is_captured_once_for_a_shape_and_a_replay_is_all_that_a_token_takes(gpu, at_work):
    engine = at_work(4)
    assert gpu.streams.num_captures == 1
    graphs = list(engine._graphs._graphs.values())
    assert graphs[0].stream is not gpu.streams.default
    began = len(gpu.streams.log)
    allocated = len(gpu.allocated)
    engine._advance(engine.num_live)
    assert [done.what for done in gpu.streams.log[began:]] == ["replay"]
    assert len(gpu.allocated) == allocated
    engine.submit(1, PROMPTS[1], SamplingParams(4, n=1))
    drained(engine)
    kinds = list(engine._graphs._graphs)
    assert gpu.streams.num_captures == len(kinds) == len(set(kinds))
    assert sum(graph.num_replays for graph in engine._graphs._graphs.values()) > 20


@torch.inference_mode()
def test_the_first_token_of_a_shape_runs_before_it_is_captured(gpu, at_work):
    """And both streams wait for each other around it."""
    engine = at_work(1)
    began = len(gpu.streams.log)
    engine._advance(engine.num_live)
    said = [(done.who, done.what) for done in gpu.streams.log[began:]]
    side = engine._graphs._stream.name
    first = said.index((side, "wait for default"))
    place = said.index(("default", f"wait for {side}"))
    assert {who for who, _ in said[first:place]} == {side} and place > first + 100
    behind = [what for who, what in said[place + 1 :] if what != "synchronize"]
    assert behind == ["capture"]


def test_graphs_read_weights_that_are_copied_in_place_and_stamp_the_new_version(gpu, at_work):
    engine = at_work(5, SamplingParams(16, n=2))
    captured = gpu.streams.num_captures
    other = random_decoder(seed=1, config=CONFIG)
    with torch.no_grad():
        for mine, its in zip(engine.decoder.parameters(), other.parameters()):
            mine.copy_(its)
    engine.weights_changed(3, recompute_kv=True)
    found = drained(engine)
    assert gpu.streams.num_captures == captured
    cpu = engine_on("cpu", decoder=other)
    for c in found.values():
        assert c.policy_versions.tolist() == [0] * 5 + [3] * 11
        scored = cpu.score(c.prompt_ids, c.token_ids)
        assert torch.allclose(c.generator_logprobs[5:], scored[5:], atol=SAME)


def test_graphs_are_captured_anew_when_parameters_move(gpu, at_work):
    engine = at_work(5)
    weight = engine.decoder.output.weight
    engine.decoder.output.weight = torch.nn.Parameter(weight.detach().clone())
    engine.step(2)
    assert gpu.streams.num_captures == 2 and len(engine._graphs._graphs) == 1


def test_an_engine_whose_memory_was_away_goes_on_with_what_it_had(at_work):
    engine = at_work(5, SamplingParams(16, n=2))
    turns = DeviceSharing(["generator", "trainer"])
    turns.join("generator", engine.offloadable)
    turns.join("trainer", list)
    turns.claim("trainer")
    assert {t.untyped_storage().nbytes() for t in engine.offloadable()} == {0}
    turns.claim("generator")
    assert_scored_alike(drained(engine).values(), engine_on("cpu"))
    assert engine._graphs._addresses[0] == next(engine.decoder.parameters()).data_ptr()


@torch.no_grad()
def test_pieces_of_growing_sequences_attend_on_a_gpu_as_on_a_cpu(gpu):
    slots_N = torch.tensor([2, 0])
    lengths_N = torch.tensor([3, 2])
    random = torch.Generator().manual_seed(0)
    heads = (CONFIG.num_attention_heads, CONFIG.num_key_value_heads, CONFIG.num_key_value_heads)
    seen = {}
    for device in ("cpu", "cuda"):
        random.manual_seed(0)
        cache = SlotCache(random_decoder(config=CONFIG).to(device), 3, 16, 48)
        cache.reserve(3, 16)
        for starts in ([0, 0], [3, 2]):
            pieces = Pieces(cache, slots_N, torch.tensor(starts), lengths_N)
            shapes = [(5, count, CONFIG.head_dim) for count in heads]
            tensors = [torch.randn(shape, generator=random).to(device) for shape in shapes]
            seen[device] = pieces.attend(0, *tensors).cpu()
    same = rounding(terms=CONFIG.head_dim, depth=2)
    assert torch.allclose(seen["cuda"], seen["cpu"], atol=same)


@pytest.mark.slow
@pytest.mark.parametrize("kind, product", [("fp8", "_scaled_mm"), ("int8", "_int_mm")])
def test_a_quantised_generator_decodes_by_graphs_with_its_own_products(gpu, kind, product):
    decoder = random_decoder(config=CONFIG, dtype=torch.bfloat16)
    decoder.to("cuda")
    quantize_decoder(decoder, kind)
    engine = engine_on("cuda", decoder=decoder)
    engine.submit(0, PROMPTS[0], SamplingParams(6, n=2))
    found = drained(engine)
    assert all(c.generator_logprobs.isfinite().all() for c in found.values())
    linears = [m for m in decoder.modules() if isinstance(m, QuantizedLinear)]
    assert len(linears) == 14 and all(m.weight.device == GPU for m in linears)
    (graph,) = engine._graphs._graphs.values()
    names = [launch.name for launch in graph.launches]
    assert sum(product in name for name in names) == 14
