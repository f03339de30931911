"""Decoders of transformers' modules against transformers itself: logits packed, alone and behind a
cache, gradients, greedy tokens and files, for families that our own decoder does not know.

Weights are random. A family is a class of layers, and the fields that make it small.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from llamarl.inference import Engine, SamplingParams, generate
from llamarl.inference.agreement import check_agreement
from llamarl.models.attention import PackedAttention, Scores
from llamarl.models.build import build_decoder, read_config
from llamarl.models.hf import export, load_buffers, named_parameters_hf
from llamarl.models.loading import training_decoder
from llamarl.models.lora import adapters_of
from llamarl.models.shape import Lora
from llamarl.models.transformers_config import stored_buffers, transformers_config
from llamarl.models.transformers_model import attention_of_transformers
from tests.decoding import our_decoder, whole_logits
from tests.random_models import save_drawn
from tests.tolerances import assert_same_greedy, margins_of, rounding

SIZES = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
FAMILIES = {
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": {},
    "deepseek_v3": ROUTED | LATENT,
    "ernie4_5": {},
    "exaone4": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma4_text": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": ROUTED,
    "gpt_oss": EXPERTS,
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3},
    "granitemoe": EXPERTS,
    "helium": {},
    "hunyuan_v1_dense": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": EXPERTS,
    "minimax_m2": EXPERTS,
    "ministral3": {},
    "mistral": {},
    "mixtral": EXPERTS,
    "nemotron": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": {},
    "qwen3_5_text": {},
    "qwen3_moe": QWEN_EXPERTS,
    "qwen3_next": QWEN_EXPERTS,
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}
# Fast: a window, a soft cap, sinks, experts, a state beside attention, a head with a bias.
FAST = ("gemma2", "gpt_oss", "lfm2", "olmo3", "phi", "qwen3_moe")
GREEDY = ("gemma3_text", "granite", "lfm2", "qwen3_moe", "smollm3")
EACH = [pytest.param(f, marks=() if f in FAST else pytest.mark.slow) for f in FAMILIES]
# The largest logit is some ten deviations, and norms that follow norms enlarge roundings.
LOGITS = rounding(terms=48, depth=2 * 2 * 4, size=10.0)
# Of the largest gradient. In float64 transformers' softmax, norms and rotary tables are
# float32; experts are multiplied in float32 at most.
GRADIENTS = {
    torch.float64: rounding(terms=20, depth=2 * 2 * 4),
    torch.float32: rounding(terms=48, depth=2 * 2 * 2 * 4),
}
LENGTHS = (13, 20, 7)
CPU = torch.device("cpu")


def config_of(family):
    return AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """directory(family): transformers' own directory of a small random model, made once."""
    made = {}

    def of(family):
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            model = AutoModelForCausalLM.from_config(config_of(family))
            for name, buffer in stored_buffers(model):
                if "bias" in name or "scalar" in name:  # others are an activation's constants
                    buffer.add_(0.1 * torch.randn(buffer.shape))
            save_drawn(model, path)
            made[family] = path
        return made[family]

    return of


def sequences():
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, 53, (n,), generator=draw) for n in LENGTHS]


def theirs_of(path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")


def packed(decoder, ids):
    positions = torch.cat([torch.arange(len(one)) for one in ids])
    begins = torch.tensor([0, *(len(one) for one in ids)]).cumsum(0)
    return decoder(torch.cat(ids), positions, PackedAttention(begins))


@pytest.mark.parametrize("family", EACH)
@torch.no_grad()
def test_logits_and_files_are_transformers(directory, tmp_path, family):
    path = directory(family)
    config = read_config(path)
    assert config.implementation == "transformers" or family == "mistral"
    decoder = our_decoder(path)
    ids = sequences()
    theirs = theirs_of(path)
    wanted = torch.cat([theirs(one[None], use_cache=False).logits[0] for one in ids])
    assert wanted.std() > 0.01, "weights that show"
    assert (packed(decoder, ids) - wanted).abs().max() <= LOGITS * max(1, wanted.std())
    alone = torch.cat([whole_logits(decoder, one) for one in ids])
    assert (alone - wanted).abs().max() <= LOGITS * max(1, wanted.std())
    check_agreement(decoder, path, CPU, torch.float32)  # behind a cache, too

    export(named_parameters_hf(decoder), path, tmp_path / "out", dtype=torch.float32)
    before = load_file(path / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def _gradients(logits_TV, ids, named):
    targets = torch.cat([one.roll(-1) for one in ids])
    loss = torch.nn.functional.cross_entropy(logits_TV, targets)
    loss.backward()
    return {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.parametrize("family", EACH)
def test_gradients_are_those_of_transformers_own_attention(directory, family):
    path = directory(family)
    ids = sequences()
    dtype = torch.float32 if "num_experts_per_tok" in FAMILIES[family] else torch.float64
    theirs = theirs_of(path, dtype)
    logits = torch.cat([theirs(one[None], use_cache=False).logits[0] for one in ids])
    wanted = _gradients(logits, ids, theirs.named_parameters())
    decoder = our_decoder(path, dtype=dtype)
    got = _gradients(packed(decoder, ids), ids, named_parameters_hf(decoder))
    assert got.keys() == wanted.keys()
    largest = max(gradient.abs().max() for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (got[name] - gradient).abs().max() <= GRADIENTS[dtype] * largest, name


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in FAST else pytest.mark.slow) for f in GREEDY]
)
@torch.no_grad()
def test_the_engine_samples_the_likeliest_tokens_of_transformers(directory, family):
    path = directory(family)
    theirs = theirs_of(path)
    engine = Engine(our_decoder(path).eval(), max_slots=3, max_len=48, device="cpu")
    params = SamplingParams(max_new_tokens=12, temperature=0.0)
    prompts = [ids.tolist() for ids in sequences()]
    for ids, (ours,) in zip(sequences(), generate(engine, prompts, params), strict=True):
        whole = ids
        for _ in range(12):
            logits = theirs(whole[None], use_cache=False).logits[0]
            whole = torch.cat([whole, logits[-1:].argmax(-1)])
        margins = margins_of(logits[len(ids) - 1 :])
        assert_same_greedy(ours.token_ids, whole[len(ids) :], margins, LOGITS)


def test_a_prompt_that_completions_share_is_computed_once(directory):
    """A child sees its parent within the window, and no other segment."""
    decoder = our_decoder(directory("olmo3"))
    prompt, one, other = sequences()
    ids = torch.cat([prompt, one, other])
    begins = torch.tensor([0, 13, 33, 40])
    positions = torch.cat([torch.arange(13), torch.arange(13, 33), torch.arange(13, 20)])
    attention = PackedAttention(begins, torch.tensor([-1, 0, 0]))
    with torch.no_grad():
        got = decoder(ids, positions, attention)
        for begin, child in ((13, one), (33, other)):
            alone = whole_logits(decoder, torch.cat([prompt, child]))[13:]
            assert (got[begin : begin + len(child)] - alone).abs().max() <= LOGITS


def test_sequences_that_are_read_alone_share_a_prompt_too(directory):
    decoder = our_decoder(directory("lfm2"))
    assert decoder.config.is_read_alone
    prompt, one, _ = sequences()
    positions = torch.cat([torch.arange(13), torch.arange(13, 33)])
    attention = PackedAttention(torch.tensor([0, 13, 33]), torch.tensor([-1, 0]))
    with torch.no_grad():
        got = decoder(torch.cat([prompt, one]), positions, attention)
        alone = whole_logits(decoder, torch.cat([prompt, one]))
    assert (got - alone).abs().max() <= LOGITS


@pytest.mark.parametrize("family", ["bloom", "diffllama", "xglm"])
def test_a_model_that_contexts_do_not_know_is_refused_by_a_number(tmp_path, family):
    extra = {"d_model": 32, "ffn_dim": 48, "num_layers": 4, "attention_heads": 4}
    config = AutoConfig.for_model(family, **(SIZES | extra))
    save_drawn(AutoModelForCausalLM.from_config(config), tmp_path)
    decoder = our_decoder(tmp_path)
    said = r"is not computed right: the logits of .* and 0.001 is allowed. Its layers \(\w+\)"
    with pytest.raises(ValueError, match=said):
        check_agreement(decoder, tmp_path, CPU, torch.float32)


@torch.no_grad()
def test_a_window_that_is_left_out_is_seen_at_load(directory, monkeypatch):
    monkeypatch.setattr(Scores, "narrows", lambda self, longest: False)
    path = directory("olmo3")
    with pytest.raises(ValueError, match="the logits of each sequence alone"):
        check_agreement(our_decoder(path), path, CPU, torch.float32)


@pytest.mark.slow
def test_a_generator_reads_the_buffers_that_no_version_brings(directory):
    """A router's bias, say: the trainer changes none of them."""
    path = directory("glm4_moe")
    trained = our_decoder(path)
    sampling = build_decoder(read_config(path)).to_empty(device="cpu")
    with torch.no_grad():
        for target, source in zip(sampling.parameters(), trained.parameters(), strict=True):
            target.copy_(source)
    load_buffers(sampling, path)
    with torch.no_grad():
        assert torch.equal(packed(sampling, sequences()), packed(trained, sequences()))


def test_there_is_no_dropout_in_training(directory):
    path = directory("phi")
    decoder = training_decoder(path, mesh=None, device=CPU, compute_dtype=torch.float32)
    assert decoder.training
    with torch.no_grad():
        first, second = (packed(decoder, sequences()) for _ in range(2))
        with attention_of_transformers(decoder):
            assert torch.isfinite(packed(decoder, sequences())).all()
    assert torch.equal(first, second)


def test_layers_that_are_recomputed_give_the_same_gradients(directory):
    ids = sequences()
    found = []
    for recompute in (False, True):
        decoder = training_decoder(
            directory("qwen3_moe"),
            mesh=None,
            device=CPU,
            compute_dtype=torch.float32,
            activation_checkpointing=recompute,
        )
        assert decoder.activation_checkpointing == recompute
        found.append(_gradients(packed(decoder, ids), ids, named_parameters_hf(decoder)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("all-linear",)])
def test_adapters_stand_beside_transformers_projections(directory, targets):
    lora = Lora(rank=2, alpha=4.0, targets=targets)
    decoder = training_decoder(
        directory("olmo3"), mesh=None, device=CPU, compute_dtype=torch.float32, lora=lora
    )
    adapters = adapters_of(decoder)
    per_layer = 2 if targets[0] == "q_proj" else 7
    assert len(adapters) == 2 * 4 * per_layer
    plain = packed(our_decoder(directory("olmo3")), sequences())
    assert (packed(decoder, sequences()) - plain).abs().max() <= LOGITS  # B is 0
    packed(decoder, sequences()).square().mean().backward()
    assert all(p.grad is not None for name, p in adapters if name.endswith("lora_b"))


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"model_type": "unheard_of"}, "transformers makes no decoder of it"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
    ],
)
def test_what_transformers_cannot_compute_is_refused_with_the_file(tmp_path, fields, said):
    raw = config_of("olmo3").to_dict() | {"architectures": ["Olmo3ForCausalLM"]} | fields
    with pytest.raises(ValueError, match=f"config.json: .*{said}"):
        transformers_config(tmp_path / "config.json", raw)
