"""Families whose layers are not Llama's: what their models sample, learn, quantise and adapt,
against transformers.

Logits, directories and packing: tests/parity/test_models.py; scores: test_scorers.py; ranks:
test_tensor_parallel.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, Qwen3Config

from llamarl.inference import Engine, SamplingParams, generate
from llamarl.inference.decode import NativeDecode
from llamarl.models import hf
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import Lora
from llamarl.models.hf import to_stored
from llamarl.models.loading import training_decoder
from llamarl.models.lora import LoraLinear, adapters_of
from llamarl.models.peft import export_adapted
from llamarl.models.quantize import QuantizedLinear, quantize_decoder
from tests.random_models import save_drawn
from tests.tolerances import assert_same_greedy, margins_of, rounding

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("float32_products")]

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {  # tests/parity/test_models.py has their variants
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=3, head_dim=8, tie_word_embeddings=False),
    "gpt_neox": GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "gpt2": GPT2Config(**SIZES, n_inner=80),
}
SEQUENTIAL = GPTNeoXConfig(
    **SIZES, rotary_pct=1.0, use_parallel_residual=False, rotary_emb_base=500
)
ARCHITECTURES = {
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "qwen3": "Qwen3ForCausalLM",
}
LOGITS = rounding(terms=48, depth=2 * 3, size=3.0)  # width and layers, and how logits deviate
GRADIENTS = rounding(terms=48, depth=2 * 2 * 3)  # of a parameter's largest
PROMPTS = [[1, 5, 9], [1, 7], [3], [2, 4, 6, 8, 10, 12, 14]]
TOKENS = torch.arange(24) * 7 % 53 + 1
CPU = torch.device("cpu")


@pytest.fixture(params=CONFIGS)
def directory(request, tmp_path) -> Path:
    """A random model that transformers saved, whose every weight shows in the logits."""
    save_drawn(AutoModelForCausalLM.from_config(CONFIGS[request.param]), tmp_path)
    return tmp_path


def theirs(path: Path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def ours(path: Path):
    return hf.load_weights(build_decoder(read_config(path)), path)


def trained(path: Path, **settings):
    return training_decoder(path, mesh=None, device=CPU, compute_dtype=torch.float32, **settings)


def logits_of(decoder) -> torch.Tensor:
    ends = torch.tensor([0, len(TOKENS)])
    return decoder(TOKENS, torch.arange(len(TOKENS)), PackedAttention(ends))


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:-1], TOKENS[1:])


def in_files(name: str, model) -> str:
    """transformers calls GPT-NeoX's head otherwise than its files do."""
    if model.config.model_type == "gpt_neox":
        return name.replace("lm_head.", "embed_out.")
    return name


@torch.no_grad()
def test_greedy_completions_are_those_of_transformers(directory):
    """Prompts of unlike lengths in fewer slots than there are prompts."""
    model = theirs(directory)
    greedy = SamplingParams(40, temperature=0.0, stop_token_ids=(2,))
    engine = Engine(ours(directory), max_slots=3, max_len=64)
    for prompt, (completion,) in zip(PROMPTS, generate(engine, PROMPTS, greedy)):
        generated = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        logits = model(generated).logits[0, len(prompt) - 1 : -1]
        want = generated[0, len(prompt) :]
        assert_same_greedy(completion.token_ids, want, margins_of(logits), LOGITS)


def test_the_native_decoding_path_says_no_to_layers_that_it_does_not_compute(directory):
    assert not NativeDecode.fits(ours(directory), CPU, torch.float32)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_gradients_are_those_of_transformers(directory, recompute):
    model = theirs(directory)
    loss_of(model(TOKENS[None]).logits[0]).backward()
    want = {in_files(name, model): p.grad for name, p in model.named_parameters()}
    decoder = trained(directory, activation_checkpointing=recompute)
    loss_of(logits_of(decoder)).backward()
    gradients = ((name, p.grad) for name, p in hf.named_parameters_hf(decoder))
    got = dict(to_stored(gradients, decoder.config))
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        largest = gradient.abs().max()
        assert (got[name] - gradient).abs().max() <= GRADIENTS * largest.clamp(min=1e-3), name


def test_bfloat16_masters_are_trained(directory):
    """A single rank's mixed precision reaches every parameter."""
    decoder = training_decoder(directory, mesh=None, device=CPU, compute_dtype=torch.bfloat16)
    exact = trained(directory)
    for each in (decoder, exact):
        loss_of(logits_of(each).float()).backward()
    for (name, p), (_, q) in zip(decoder.named_parameters(), exact.named_parameters()):
        if q.grad.abs().max() < 1e-5:  # of a bias of keys without rotary: softmax cancels it
            continue
        likeness = F.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0)
        assert likeness > 0.9, name


@torch.no_grad()
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_projections_stay_near(directory, kind):
    decoder = ours(directory)
    want = logits_of(decoder).log_softmax(-1)
    quantize_decoder(decoder, kind)
    assert type(decoder.layers[0].attn.output_proj) is QuantizedLinear
    got = logits_of(decoder).log_softmax(-1)
    kl = (want.exp() * (want - got)).sum(-1).mean()
    assert 0 < kl < 0.1


def test_adapters_train_and_merge(directory, tmp_path):
    lora = Lora(rank=3, alpha=7.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"), seed=5)
    decoder = trained(directory, lora=lora)
    loss_of(logits_of(decoder)).backward()
    adapters = [m for m in decoder.modules() if isinstance(m, LoraLinear)]
    assert len(adapters) == 4 * 3
    with torch.no_grad():
        for adapter in adapters:
            assert adapter.lora_b.grad.abs().max() > 0
            adapter.lora_b.sub_(adapter.lora_b.grad)
    out = tmp_path / "hf"
    export_adapted(dict(adapters_of(decoder)), lora, directory, out, dtype=torch.float32)
    assert (tmp_path / "adapter").is_dir() != bool(decoder.config.traits.names)
    with torch.no_grad():
        want = logits_of(decoder)
        assert (logits_of(trained(directory)) - want).abs().max() > 100 * LOGITS
        assert (logits_of(ours(out)) - want).abs().max() <= LOGITS
        assert (theirs(out)(TOKENS[None]).logits[0] - want).abs().max() <= LOGITS


def test_a_sequence_longer_than_the_learned_positions_is_refused(tmp_path):
    config = GPT2Config(**SIZES | {"max_position_embeddings": 16})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    decoder = ours(tmp_path)
    with pytest.raises(ValueError, match="24 tokens.* 16"):
        logits_of(decoder)
    with pytest.raises(ValueError, match="max_len=17.* 16"):
        Engine(decoder, max_slots=2, max_len=17)
    full = SamplingParams(13, temperature=1.0)
    for (completion,) in generate(Engine(decoder, max_slots=2, max_len=16), PROMPTS[:1], full):
        assert completion.token_ids.numel() == 13


def test_older_directories_of_gpt2_leave_out_how_names_begin_and_keep_masks(tmp_path):
    AutoModelForCausalLM.from_config(CONFIGS["gpt2"]).save_pretrained(tmp_path)
    want = logits_of(ours(tmp_path))
    file = tmp_path / "model.safetensors"
    older = {name.removeprefix("transformer."): x for name, x in load_file(file).items()}
    for layer in range(SIZES["num_hidden_layers"]):
        older[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 128, 128)
    save_file(older, file)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["tie_word_embeddings"]  # which transformers takes to be true
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert (logits_of(ours(tmp_path)) - want).abs().max() <= LOGITS


def test_pythias_own_config_names_rotary_positions_otherwise(tmp_path):
    AutoModelForCausalLM.from_config(SEQUENTIAL).save_pretrained(tmp_path)
    want = read_config(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]
    older = raw | {"rotary_pct": 1.0, "rotary_emb_base": 500, "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(older))
    got = read_config(tmp_path)
    assert (got.rotary_dim, got.rope_theta) == (want.rotary_dim, want.rope_theta) == (8, 500)
    del older["rotary_pct"]
    (tmp_path / "config.json").write_text(json.dumps(older))
    assert read_config(tmp_path).rotary_dim == 2


REFUSED = {
    "attention_bias": ("gpt_neox", {"attention_bias": False}, "attention_bias=False is not"),
    "activation": ("gpt_neox", {"hidden_act": "relu"}, "hidden_act relu is not"),
    "rotary": ("gpt_neox", {"rotary_pct": 2}, "rotary_pct=2: need"),
    "scale": ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False is not"),
    "gpt2_activation": ("gpt2", {"activation_function": "relu"}, "activation_function relu"),
    "missing": ("gpt2", {"n_embd": None}, "missing field n_embd"),
    "count": ("gpt2", {"n_head": 0}, "n_head=0: need"),
    "head": ("gpt2", {"architectures": ["GPT2ForCausalLM"]}, "GPT2LMHeadModel"),
    "qwen3": ("qwen3", {"attention_bias": True}, "attention_bias=True is not"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused_by_its_name_in_the_config(tmp_path, case):
    name, changes, message = REFUSED[case]
    raw = CONFIGS[name].to_dict() | {"architectures": [ARCHITECTURES[name]]} | changes
    raw = {key: value for key, value in raw.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)
