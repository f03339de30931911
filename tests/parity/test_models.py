"""The decoder against transformers: what models compute, sample, learn, quantise and adapt, alone
and packed, and model directories in and out.

Scores: test_scorers.py; what a config.json may say: test_resolved.py; ranks:
test_tensor_parallel.py.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
)

from llamarl.inference import Engine, SamplingParams, generate
from llamarl.inference.decode import NativeDecode
from llamarl.models import attention, hf
from llamarl.models.attention import PackedAttention, Rotary
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.families import FAMILIES, Family
from llamarl.models.loading import training_decoder
from llamarl.models.lora import LoraLinear, adapters_of
from llamarl.models.peft import export_adapted
from llamarl.models.quantize import QuantizedLinear, quantize_decoder
from llamarl.models.shape import Lora
from llamarl.models.sharding import num_parameters, parameter_shapes
from tests.decoding import our_decoder, whole_logits
from tests.random_models import SIZES, save_drawn
from tests.tolerances import assert_same_greedy, margins_of, rounding

pytestmark = [
    pytest.mark.machine,
    pytest.mark.usefixtures("float32_products", "threads_of_machine"),
]

# The longest sum (the feed-forward's), the layers and how the logits of the models below deviate.
LOGITS = rounding(terms=SIZES["intermediate_size"], depth=2 * SIZES["num_hidden_layers"], size=2.0)
GRADIENTS = 1e-7  # of a mean over tokens, in float64 (but the norms and rotary tables are float32)
# Of the largest gradient: norms and rotary tables alone are float32.
SHARED_GRADIENTS = rounding(terms=1, depth=2 * 3)
# Of a parameter's largest, in float32: width, and the layers there and back.
FLOAT32_GRADIENTS = rounding(terms=48, depth=2 * 2 * 3)
EMBEDDING = "model.embed_tokens.weight"
LENGTH = 60  # tokens; beyond the original context of the llama3 scaling below
CPU = torch.device("cpu")

LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
LLAMA3_ROPE = LINEAR | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = LINEAR | {"rope_type": "yarn", "original_max_position_embeddings": 32}
BOUNDS = {"truncate": False, "beta_fast": 3.0, "beta_slow": 0.4}
BOUNDS |= {"mscale": 0.7, "mscale_all_dim": 0.4}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
LONG = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
# Models whose rotary embedding is scaled.
SCALED = {
    "llama_llama3_rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama_linear_rope": LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "qwen2_yarn": Qwen2Config(**SIZES, rope_parameters=YARN),  # Qwen2.5 at 128 k
    "llama_yarn_bounds": LlamaConfig(**SIZES, rope_parameters=YARN | BOUNDS),
    "llama_yarn_factor": LlamaConfig(**SIZES, rope_parameters=YARN | {"attention_factor": 1.3}),
}
CONFIGS = SCALED | {
    "llama_tied": LlamaConfig(**SIZES, **TIED),
    "llama_untied": LlamaConfig(**SIZES, **UNTIED, rms_norm_eps=1e-3),
    "llama_2": LlamaConfig(**SIZES | {"num_key_value_heads": 6}, **UNTIED, rms_norm_eps=1e-5),
    "llama_3_2": LlamaConfig(**SIZES, **TIED, rope_parameters=LLAMA3_ROPE),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=16),
    "mistral_short_context": MistralConfig(**SIZES, sliding_window=128, **LONG),
    "qwen2": Qwen2Config(**SIZES, **TIED),
    "qwen2_untied": Qwen2Config(**SIZES, **UNTIED),
    "qwen3": Qwen3Config(**SIZES, **TIED, head_dim=16),
    "qwen3_untied": Qwen3Config(**SIZES, **UNTIED, head_dim=8),
}


def make_directory(config, path):
    """A random model that transformers saved."""
    save_drawn(AutoModelForCausalLM.from_config(config), path)
    return path


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: make_directory(config, root / name) for name, config in CONFIGS.items()}


@pytest.fixture
def copied(directories, tmp_path):
    """A model directory that a test may damage."""
    return shutil.copytree(directories["llama_untied"], tmp_path / "copied")


def theirs(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def logits_of_theirs(path, tokens):
    with torch.no_grad():
        return theirs(path)(tokens[None]).logits[0]


def random_tokens(length=LENGTH, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(SIZES["vocab_size"], (length,), generator=draw)


def file_tensors(path):
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def export(path, out, dtype=torch.float32, decoder=None):
    """Export the decoder of a directory."""
    hf.export(hf.named_parameters_hf(decoder or our_decoder(path)), path, out, dtype=dtype)
    return out


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_model_is_transformers_and_its_directory_comes_out_as_it_went_in(
    directories, tmp_path, name
):
    path, tokens = directories[name], random_tokens()
    decoder = our_decoder(path)
    config = decoder.config
    want = logits_of_theirs(path, tokens)
    got = whole_logits(decoder, tokens)
    assert want.std() > 0.3
    # A scaling of queries and keys makes scores larger, and so what rounding is left of them.
    scaling = getattr(CONFIGS[name], "rope_parameters", None) or {}
    assert (got - want).abs().max() <= LOGITS * scaling.get("attention_factor", 1.0) ** 2

    shapes = {key: tuple(p.shape) for key, p in hf.named_parameters_hf(decoder)}
    assert shapes == parameter_shapes(config) and list(shapes)[0] == EMBEDDING
    assert num_parameters(config) == sum(p.numel() for p in decoder.parameters())
    assert len(decoder.layers) == config.num_hidden_layers
    assert decoder.output_weight.shape == shapes[EMBEDDING]

    out = export(path, tmp_path / "out", decoder=decoder)
    before, after = file_tensors(path), file_tensors(out)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert read_config(out) == read_config(path)

    if name in SCALED:
        # Otherwise parity would not show a scaling that is ignored.
        decoder.rotary = Rotary(config.head_dim, config.rope_theta, None)
        assert (whole_logits(decoder, tokens) - got).abs().max() > 100 * LOGITS


@torch.no_grad()
def test_a_family_of_llamas_blocks_is_one_entry(tmp_path, monkeypatch):
    """The example of docs/models.md."""
    theirs_config = SeedOssConfig(**SIZES, attention_bias=True, attention_out_bias=False)
    path = make_directory(theirs_config, tmp_path / "seed_oss")
    assert read_config(path).implementation == "transformers"
    monkeypatch.setitem(FAMILIES, "SeedOss", Family(qkv_bias=True))
    tokens = random_tokens()
    want = logits_of_theirs(path, tokens)
    assert read_config(path).implementation == "native"
    assert (whole_logits(our_decoder(path), tokens) - want).abs().max() <= LOGITS


# --- Directories ---


@torch.no_grad()
def test_sharded_export_loads_in_transformers_and_here(directories, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "SHARD_BYTES", 60_000)
    path, tokens = directories["llama_untied"], random_tokens()
    out = export(path, tmp_path / "out")
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 2 and not (out / "model.safetensors").exists()
    assert all(shard.stat().st_size < 70_000 for shard in shards)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    want = logits_of_theirs(path, tokens)
    assert (logits_of_theirs(out, tokens) - want).abs().max() <= LOGITS
    assert (whole_logits(our_decoder(out), tokens) - want).abs().max() <= LOGITS
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=shards[1].name):
        our_decoder(out)


def test_export_rounds_to_the_dtype_and_says_so(directories, tmp_path):
    out = export(directories["qwen2"], tmp_path / "out", torch.bfloat16)
    want = {key: value.bfloat16() for key, value in file_tensors(directories["qwen2"]).items()}
    assert all(torch.equal(value, want[key]) for key, value in file_tensors(out).items())
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


@pytest.mark.parametrize("end", [400, -1])
def test_truncated_safetensors_is_named(copied, end):
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(ValueError, match="copied/model.safetensors: not a whole safetensors file"):
        our_decoder(copied)


def test_all_misfitting_tensors_are_named_at_once(copied):
    tensors = load_file(copied / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.ones(3)
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    decoder = build_decoder(read_config(copied), device="cpu")
    before = {name: p.clone() for name, p in decoder.named_parameters()}
    with pytest.raises(ValueError) as caught:
        hf.load_weights(decoder, copied)
    for line in (
        "model.layers.1.mlp.up_proj.weight: absent",
        "model.norm.weight: shape (3,), the config says (48,)",
        "model.layers.0.self_attn.q_norm.weight: not in this architecture",
    ):
        assert line in str(caught.value)
    for name, p in decoder.named_parameters():
        assert p.equal(before[name]) or p.isnan().any(), f"{name} is loaded, and others are not"


def test_a_pickled_model_is_refused(copied):
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="safetensors only"):
        our_decoder(copied)


def test_an_exported_directory_has_all_named_templates(tmp_path):
    model = shutil.copytree(tiny_directory(), tmp_path / "model")
    tokenizer = hf.load_tokenizer(model)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "+{{ messages }}"}
    tokenizer.save_pretrained(model)
    weights = load_file(model / "model.safetensors")
    hf.export(weights.items(), model, tmp_path / "out", dtype=torch.bfloat16)
    assert hf.load_tokenizer(tmp_path / "out").chat_template == tokenizer.chat_template


def test_a_named_template_that_links_out_of_the_directory_is_refused(copied, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("of this machine")
    (copied / "additional_chat_templates").mkdir()
    (copied / "additional_chat_templates" / "a.jinja").symlink_to(secret)
    with pytest.raises(ValueError, match="additional_chat_templates/a.jinja: a link to"):
        read_config(copied)


# --- A family whose layers are not Llama's: what its models sample, learn, quantise and adapt ---


@pytest.fixture
def directory(directories):
    return directories["qwen3_untied"]


PROMPTS = [[1, 5, 9], [1, 7], [3], [2, 4, 6, 8, 10, 12, 14]]
TOKENS = torch.arange(24) * 7 % 52 + 1


def trained(path, dtype=torch.float32, **settings):
    return training_decoder(path, mesh=None, device=CPU, compute_dtype=dtype, **settings)


def loss_of(logits):
    return F.cross_entropy(logits[:-1].float(), TOKENS[1:])


@torch.no_grad()
def test_greedy_completions_are_those_of_transformers(directory):
    """Prompts of unlike lengths in fewer slots than there are prompts."""
    model = theirs(directory)
    greedy = SamplingParams(40, temperature=0.0, stop_token_ids=(2,))
    engine = Engine(our_decoder(directory), max_slots=3, max_len=64)
    for prompt, (completion,) in zip(PROMPTS, generate(engine, PROMPTS, greedy)):
        how = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
        generated = model.generate(torch.tensor([prompt]), **how)
        logits = model(generated).logits[0, len(prompt) - 1 : -1]
        want = generated[0, len(prompt) :]
        assert_same_greedy(completion.token_ids, want, margins_of(logits), LOGITS)


def test_the_native_decoding_path_says_no_to_layers_that_it_does_not_compute(directory):
    assert not NativeDecode.fits(our_decoder(directory), CPU, torch.float32)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_gradients_are_those_of_transformers(directory, recompute):
    model = theirs(directory)
    loss_of(model(TOKENS[None]).logits[0]).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    decoder = trained(directory, activation_checkpointing=recompute)
    loss_of(whole_logits(decoder, TOKENS)).backward()
    got = {name: p.grad for name, p in hf.named_parameters_hf(decoder)}
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        largest = gradient.abs().max().clamp(min=1e-3)
        assert (got[name] - gradient).abs().max() <= FLOAT32_GRADIENTS * largest, name


def test_bfloat16_masters_are_trained(directory):
    """A single rank's mixed precision reaches every parameter."""
    decoder, exact = trained(directory, torch.bfloat16), trained(directory)
    for each in (decoder, exact):
        loss_of(whole_logits(each, TOKENS)).backward()
    for (name, p), (_, q) in zip(decoder.named_parameters(), exact.named_parameters()):
        likeness = F.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0)
        assert likeness > 0.9, name


@torch.no_grad()
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_projections_stay_near(directory, kind):
    decoder = our_decoder(directory)
    want = whole_logits(decoder, TOKENS).log_softmax(-1)
    quantize_decoder(decoder, kind)
    assert type(decoder.layers[0].attn.output_proj) is QuantizedLinear
    got = whole_logits(decoder, TOKENS).log_softmax(-1)
    kl = (want.exp() * (want - got)).sum(-1).mean()
    assert 0 < kl < 0.1


def test_adapters_train_and_merge(directory, tmp_path):
    lora = Lora(rank=3, alpha=7.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"), seed=5)
    decoder = trained(directory, lora=lora)
    loss_of(whole_logits(decoder, TOKENS)).backward()
    adapters = [m for m in decoder.modules() if isinstance(m, LoraLinear)]
    assert len(adapters) == 4 * 3
    with torch.no_grad():
        for adapter in adapters:
            assert adapter.lora_b.grad.abs().max() > 0
            adapter.lora_b.sub_(adapter.lora_b.grad)
    out = tmp_path / "hf"
    export_adapted(dict(adapters_of(decoder)), lora, directory, out, dtype=torch.float32)
    assert (tmp_path / "adapter").is_dir()
    with torch.no_grad():
        want = whole_logits(decoder, TOKENS)
        assert (whole_logits(trained(directory), TOKENS) - want).abs().max() > 100 * LOGITS
        assert (whole_logits(our_decoder(out), TOKENS) - want).abs().max() <= LOGITS
        assert (logits_of_theirs(out, TOKENS) - want).abs().max() <= LOGITS


# --- Packed sequences ---


def use_kernels(monkeypatch, short, call):
    """Plain products up to `short` keys; segments of unlike lengths apart where padding costs more
    than `call` pairs.
    """
    monkeypatch.setattr(attention, "SHORT", dict.fromkeys(attention.SHORT, short))
    monkeypatch.setattr(attention, "CALL", {"cpu": call, "cuda": call})


KERNELS = pytest.mark.parametrize(
    "short, call",
    [(0, 1 << 13), (256, 1 << 13), (256, 0), (9, 20)],
    ids=["fused", "plain", "classes", "both"],
)


@KERNELS
@pytest.mark.parametrize("lengths", [[7, 1, 12, 3], [40, 2]])
def test_packed_sequences_give_their_separate_logits_and_gradients(
    directories, monkeypatch, lengths, short, call
):
    use_kernels(monkeypatch, short, call)
    decoder, total = our_decoder(directories["qwen3"]).double(), sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(n) for n in lengths])
    tokens, labels = random_tokens(total), random_tokens(total, seed=2)

    def backward(logits, labels):
        (F.cross_entropy(logits, labels, reduction="sum") / total).backward()

    packed = decoder(tokens, positions, PackedAttention(cu_seqlens))
    backward(packed, labels)
    packed_gradients = [p.grad.clone() for p in decoder.parameters()]
    decoder.zero_grad()
    separate = [whole_logits(decoder, part) for part in tokens.split(lengths)]
    for logits, part in zip(separate, labels.split(lengths)):
        backward(logits, part)

    assert (packed - torch.cat(separate)).abs().max() <= LOGITS
    assert max(g.abs().max() for g in packed_gradients) > 0.1
    for got, parameter in zip(packed_gradients, decoder.parameters()):
        assert (got - parameter.grad).abs().max() <= GRADIENTS


# Groups: (prompt tokens, tokens of each completion that feed the model).
GROUPS = {
    "unlike": [(5, [3, 1, 7]), (1, [4]), (9, [])],
    "alike": [(4, [4, 4]), (4, [4, 4])],
    "long_prompt_without_completions": [(3, [2]), (40, [])],
    "no_completions": [(6, []), (2, [])],
}


def group_layout(groups):
    """cu_seqlens, parents and positions, and for each branch (a completion with its prompt, or a
    lone prompt) its places.
    """
    lengths, parents = [], []
    positions, branches = [], []
    total = 0
    for prompt, completions in groups:
        segment, prompt_places = len(lengths), list(range(total, total + prompt))
        lengths.append(prompt)
        parents.append(-1)
        positions += range(prompt)
        total += prompt
        for n in completions:
            lengths.append(n)
            parents.append(segment)
            positions += range(prompt, prompt + n)
            branches.append(prompt_places + list(range(total, total + n)))
            total += n
        if not completions:
            branches.append(prompt_places)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return cu_seqlens, torch.tensor(parents), torch.tensor(positions), branches


@KERNELS
@pytest.mark.parametrize("case", GROUPS)
def test_completions_that_share_a_prompt_give_their_separate_logits_and_gradients(
    directories, monkeypatch, case, short, call
):
    use_kernels(monkeypatch, short, call)
    decoder = our_decoder(directories["qwen2"]).double()
    cu_seqlens, parents, positions, branches = group_layout(GROUPS[case])
    tokens = random_tokens(len(positions))
    draw = torch.Generator().manual_seed(0)
    weights = []
    for branch in branches:
        shape = (len(branch), SIZES["vocab_size"])
        weights.append(torch.randn(shape, dtype=torch.float64, generator=draw))

    def backward(branch_logits):
        decoder.zero_grad()
        total = sum((logits * w).sum() for logits, w in zip(branch_logits, weights))
        (total / len(tokens)).backward()
        return [p.grad.clone() for p in decoder.parameters()]

    shared = decoder(tokens, positions, PackedAttention(cu_seqlens, parents))
    separate = [whole_logits(decoder, tokens[branch]) for branch in branches]
    for branch, want in zip(branches, separate):
        assert (shared[branch] - want).abs().max() <= LOGITS
    got, want = backward([shared[branch] for branch in branches]), backward(separate)
    largest = max(g.abs().max() for g in want)
    assert largest > 0.1
    assert max((a - b).abs().max() for a, b in zip(got, want)) <= SHARED_GRADIENTS * largest


@pytest.mark.parametrize(
    "lengths, parents, longest",
    [([300, 5, 4], [-1, -1, 1], 300), ([30, 5, 4], [-1, 0, 0], 35), ([7, 3], None, 7)],
)
def test_the_longest_position_may_be_a_prompts_or_a_completions(lengths, parents, longest):
    """Rotary tables are made that long."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    assert PackedAttention(cu_seqlens, parents and torch.tensor(parents)).longest == longest


@torch.no_grad()
def test_a_prompt_longer_than_every_group_finds_its_positions(directories):
    decoder, long = our_decoder(directories["llama_untied"]), random_tokens(300)
    tokens, positions = torch.cat([long, long[:9]]), torch.cat([torch.arange(300), torch.arange(9)])
    context = PackedAttention(torch.tensor([0, 300, 305, 309]), torch.tensor([-1, -1, 1]))
    logits = decoder(tokens, positions, context)
    assert (logits[:300] - whole_logits(decoder, long)).abs().max() <= LOGITS
    assert (logits[300:] - whole_logits(decoder, long[:9])).abs().max() <= LOGITS


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
def test_plain_products_equal_the_fused_kernel(dtype, tolerance, masked):
    draw = torch.Generator().manual_seed(0)
    keys = 23 if masked else 17
    shapes = (5, 6, 17, 8), (5, 2, keys, 8), (5, 2, keys, 8)
    qkv = [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]
    mask = None
    if masked:
        mask = torch.rand(5, 1, 17, keys, generator=draw) < 0.4
        mask[..., 0] = True  # each query sees something
    how = {"attn_mask": mask, "is_causal": not masked, "enable_gqa": True}
    want = F.scaled_dot_product_attention(*qkv, **how)
    got = attention.masked_products(*qkv, mask)
    assert got.dtype == dtype
    assert (got.double() - want.double()).abs().max() <= tolerance
    upstream = torch.randn(got.shape, generator=draw).to(dtype)
    gradients = [torch.autograd.grad(out, qkv, upstream) for out in (got, want)]
    for ours, theirs_ in zip(*gradients):  # sums over 17 queries and 3 heads
        assert (ours.double() - theirs_.double()).abs().max() <= 10 * tolerance


@pytest.mark.bitwise("a mask that is made once gives the bits of one that each layer makes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_that_is_made_once_gives_the_bits_of_bools_in_every_layer(dtype):
    """Behind a prompt of 520 tokens a completion of 60, which no plain product computes."""
    random = torch.Generator().manual_seed(0)
    shapes = ((580, 4, 16), (580, 2, 16), (580, 2, 16))
    drawn = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
    own = [x.clone().requires_grad_() for x in drawn]
    theirs = [x.clone().requires_grad_() for x in drawn]
    upstream = torch.randn(60, 4, 16, generator=random).to(dtype)
    attention = PackedAttention(torch.tensor([0, 520, 580]), torch.tensor([-1, 0]))
    out = attention.attend(0, *own)[520:]
    out.backward(upstream)
    seen = torch.arange(580) <= torch.arange(520, 580)[:, None]
    q, k, v = (x.transpose(0, 1)[None] for x in theirs)
    want = F.scaled_dot_product_attention(q[:, :, 520:], k, v, attn_mask=seen, enable_gqa=True)
    want = want[0].transpose(0, 1)
    want.backward(upstream)
    assert torch.equal(out, want)
    for x, y in zip(own, theirs):
        assert torch.equal(x.grad, y.grad)


def test_the_head_gets_normed_hidden_states_and_the_output_weight(directories):
    decoder, tokens = our_decoder(directories["llama_tied"]), random_tokens()
    context = PackedAttention(torch.tensor([0, LENGTH]))
    hidden, weight = decoder(tokens, torch.arange(LENGTH), context, lambda *given: given)
    assert weight is decoder.tok_embeddings.weight
    logits = F.linear(hidden, weight)
    assert (logits - whole_logits(decoder, tokens)).abs().max() <= LOGITS
