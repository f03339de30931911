"""The decoder against transformers, and model directories in and out."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
)

from llamarl.models import attention, hf
from llamarl.models.attention import PackedAttention, Rotary
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.families import FAMILIES, Family
from llamarl.models.protocol import LanguageModel
from llamarl.models.sharding import num_parameters, parameter_shapes
from tests.protocols import missing_members
from tests.random_models import SIZES, save_drawn
from tests.tolerances import rounding

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("float32_products")]

# The longest sum (the feed-forward's), the layers and how the logits of the models below deviate.
LOGITS = rounding(terms=SIZES["intermediate_size"], depth=2 * SIZES["num_hidden_layers"], size=2.0)
GRADIENTS = 1e-7  # of a mean over tokens, in float64 (but the norms and rotary tables are float32)
SHARED_GRADIENTS = rounding(
    terms=1, depth=2 * 3
)  # of the largest gradient: norms and rotary tables alone are float32
EMBEDDING = "model.embed_tokens.weight"
LENGTH = 60  # tokens; beyond the original context of the llama3 scaling below

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Models whose rotary embedding is scaled.
SCALED = (
    "llama_llama3_rope",
    "llama_linear_rope",
    "qwen2_yarn",
    "llama_yarn_bounds",
    "llama_yarn_factor",
)
CONFIGS = {
    "llama_tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama_untied": LlamaConfig(**SIZES, tie_word_embeddings=False, rms_norm_eps=1e-3),
    "llama_llama3_rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama_linear_rope": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    ),
    "llama_without_groups": LlamaConfig(
        **SIZES | {"num_key_value_heads": 6}, tie_word_embeddings=False, rms_norm_eps=1e-5
    ),  # Llama 2
    "llama_llama3_rope_tied": LlamaConfig(
        **SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True
    ),  # Llama 3.2
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=16),
    "mistral_short_context": MistralConfig(
        **SIZES, sliding_window=128, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2_untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2_yarn": Qwen2Config(**SIZES, rope_parameters=YARN),  # Qwen2.5 at 128 k
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3_untied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
    "gpt_neox": GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "gpt_neox_sequential": GPTNeoXConfig(
        **SIZES, rotary_pct=1.0, use_parallel_residual=False, rotary_emb_base=500
    ),
    "gpt_neox_tied": GPTNeoXConfig(
        **SIZES, rotary_pct=0.25, hidden_act="gelu_fast", tie_word_embeddings=True
    ),
    "gpt2": GPT2Config(**SIZES, n_inner=80),
    "gpt2_untied": GPT2Config(
        **SIZES, activation_function="gelu", layer_norm_epsilon=1e-3, tie_word_embeddings=False
    ),
    "llama_yarn_bounds": LlamaConfig(
        **SIZES,
        rope_parameters=YARN
        | {
            "truncate": False,
            "beta_fast": 3.0,
            "beta_slow": 0.4,
            "mscale": 0.7,
            "mscale_all_dim": 0.4,
        },
    ),
    "llama_yarn_factor": LlamaConfig(**SIZES, rope_parameters=YARN | {"attention_factor": 1.3}),
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


def ours(path):
    return hf.load_weights(build_decoder(read_config(path)), path)


def theirs(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def random_tokens(length=LENGTH, seed=1):
    return torch.randint(
        SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed)
    )


def whole(decoder, tokens):
    return decoder(
        tokens, torch.arange(tokens.numel()), PackedAttention(torch.tensor([0, tokens.numel()]))
    )


def file_tensors(path):
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= {k: v for k, v in load_file(file).items()}
    return found


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_model_is_transformers_and_its_directory_comes_out_as_it_went_in(
    directories, tmp_path, name
):
    path, tokens = directories[name], random_tokens()
    decoder = ours(path)
    config = decoder.config
    want = theirs(path)(tokens[None]).logits[0]
    got = whole(decoder, tokens)
    assert want.std() > 0.3
    # A scaling of queries and keys makes scores larger, and so what rounding is left of them.
    scaling = getattr(CONFIGS[name], "rope_parameters", None) or {}
    assert (got - want).abs().max() <= LOGITS * scaling.get("attention_factor", 1.0) ** 2

    # What trainer, engine and transfer ask of a model.
    assert missing_members(decoder, LanguageModel) == []
    shapes = {key: tuple(p.shape) for key, p in hf.named_parameters_hf(decoder)}
    assert shapes == parameter_shapes(config) and list(shapes)[0] == EMBEDDING
    assert num_parameters(config) == sum(p.numel() for p in decoder.parameters())
    assert len(decoder.layers) == config.num_hidden_layers
    assert decoder.output_weight.shape == shapes[EMBEDDING]

    hf.export(hf.named_parameters_hf(decoder), path, tmp_path / "out", dtype=torch.float32)
    before, after = file_tensors(path), file_tensors(tmp_path / "out")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert read_config(tmp_path / "out") == read_config(path)

    if name in SCALED:
        # Otherwise parity would not show a scaling that is ignored.
        decoder.rotary = Rotary(config.head_dim, config.rope_theta, None)
        assert (whole(decoder, tokens) - got).abs().max() > 100 * LOGITS


@torch.no_grad()
def test_an_older_transformers_config_reads_the_same(directories, tmp_path):
    path = shutil.copytree(directories["llama_linear_rope"], tmp_path / "older")
    raw = json.loads((path / "config.json").read_text())
    del raw["rope_parameters"]
    (path / "config.json").write_text(
        json.dumps(raw | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}})
    )
    tokens = random_tokens()
    want = whole(ours(directories["llama_linear_rope"]), tokens)
    assert (whole(ours(path), tokens) - want).abs().max() <= LOGITS


def test_a_member_that_is_missing_is_named(directories):
    decoder = ours(directories["llama_tied"])
    del decoder.layers
    assert "layers" in missing_members(decoder, LanguageModel)  # and what is told by them


@torch.no_grad()
def test_a_family_of_llamas_blocks_is_one_entry(tmp_path, monkeypatch):
    """The example of docs/models.md."""
    theirs_config = SeedOssConfig(**SIZES, attention_bias=True, attention_out_bias=False)
    path = make_directory(theirs_config, tmp_path / "seed_oss")
    with pytest.raises(ValueError, match="SeedOssForCausalLM is not supported"):
        read_config(path)
    monkeypatch.setitem(FAMILIES, "SeedOss", Family(qkv_bias=True))
    tokens = random_tokens()
    want = theirs(path)(tokens[None]).logits[0]
    assert (whole(ours(path), tokens) - want).abs().max() <= LOGITS


@pytest.mark.parametrize("name", ["llama_untied", "gpt_neox"])
@torch.no_grad()
def test_sharded_export_loads_in_transformers_and_here(directories, tmp_path, monkeypatch, name):
    monkeypatch.setattr(hf, "SHARD_BYTES", 60_000)
    out, tokens = tmp_path / "out", random_tokens()
    hf.export(
        hf.named_parameters_hf(ours(directories[name])), directories[name], out, dtype=torch.float32
    )
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 2 and not (out / "model.safetensors").exists()
    assert all(shard.stat().st_size < 70_000 for shard in shards)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    want = theirs(directories[name])(tokens[None]).logits[0]
    assert (theirs(out)(tokens[None]).logits[0] - want).abs().max() <= LOGITS
    assert (whole(ours(out), tokens) - want).abs().max() <= LOGITS


def test_export_rounds_to_the_dtype_and_says_so(directories, tmp_path):
    source, out = directories["qwen2"], tmp_path / "out"
    hf.export(hf.named_parameters_hf(ours(source)), source, out, dtype=torch.bfloat16)
    want = {key: value.bfloat16() for key, value in file_tensors(source).items()}
    assert all(torch.equal(value, want[key]) for key, value in file_tensors(out).items())
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


@pytest.mark.parametrize("end", [400, -1])
def test_truncated_safetensors_is_named(copied, end):
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(ValueError, match="copied/model.safetensors: not a whole safetensors file"):
        ours(copied)


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_all_misfitting_tensors_are_named_at_once(copied):
    def damage(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = torch.ones(3)
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)

    rewrite(copied, damage)
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
    assert all(
        p.equal(before[name]) or p.isnan().any() for name, p in decoder.named_parameters()
    ), "loaded by halves"


def test_a_shard_that_the_index_names_but_is_absent_is_named(directories, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "SHARD_BYTES", 60_000)
    source = directories["llama_untied"]
    hf.export(hf.named_parameters_hf(ours(source)), source, tmp_path / "out", dtype=torch.float32)
    lost = sorted((tmp_path / "out").glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=lost.name):
        ours(tmp_path / "out")


def test_a_pickled_model_is_refused(copied):
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="safetensors only"):
        ours(copied)


CONFIG_ERRORS = {
    "architecture": (
        {"architectures": ["BloomForCausalLM"]},
        "BloomForCausalLM is not supported; supported: LlamaForCausalLM, .*docs/models.md",
    ),
    "missing": ({"hidden_size": None}, "missing field hidden_size"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act gelu"),
    "window": (
        {"architectures": ["MistralForCausalLM"], "sliding_window": 32},
        "sliding-window attention is not supported",
    ),
    "rope": (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        "'longrope' is not supported",
    ),
    "rope_field": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        "'yarn' lacks factor",
    ),
    "biases": ({"attention_bias": True}, "attention_bias=True is not supported"),
    "mlp_biases": ({"mlp_bias": True}, "mlp_bias=True is not supported"),
    "silent_window": (
        {
            "architectures": ["MistralForCausalLM"],
            "sliding_window": None,
            "max_position_embeddings": 9000,
        },
        "sliding-window",
    ),
}


@pytest.mark.parametrize("name", CONFIG_ERRORS)
def test_unsupported_configs_say_what_is_wrong(copied, name):
    changes, message = CONFIG_ERRORS[name]
    raw = json.loads((copied / "config.json").read_text()) | changes
    (copied / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    with pytest.raises(ValueError, match=message):
        build_decoder(read_config(copied))


def test_a_config_that_is_absent_or_broken_is_named(copied, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_config(tmp_path / "nowhere")
    (copied / "config.json").write_text("{")
    with pytest.raises(ValueError, match="copied/config.json: not JSON"):
        read_config(copied)


def use_kernels(monkeypatch, short, call):
    """Plain products up to `short` keys; segments of unlike lengths apart where padding costs more
    than `call` pairs.
    """
    monkeypatch.setattr(attention, "SHORT", dict.fromkeys(attention.SHORT, short))
    monkeypatch.setattr(attention, "CALL", {"cpu": call, "cuda": call})


def pack(lengths):
    return torch.tensor([0, *lengths]).cumsum(0), torch.cat([torch.arange(n) for n in lengths])


KERNELS = pytest.mark.parametrize(
    "short, call",
    [(0, 1 << 13), (256, 1 << 13), (256, 0), (9, 20)],
    ids=["fused", "plain", "classes", "both"],
)


@KERNELS
@pytest.mark.parametrize(
    "name, lengths", [("qwen3", [7, 1, 12, 3]), ("gpt_neox", [40, 2]), ("gpt2", [7, 1, 12, 3])]
)
def test_packed_sequences_give_their_separate_logits_and_gradients(
    directories, monkeypatch, name, lengths, short, call
):
    use_kernels(monkeypatch, short, call)
    decoder, total = ours(directories[name]).double(), sum(lengths)
    cu_seqlens, positions = pack(lengths)
    tokens, labels = random_tokens(total), random_tokens(total, seed=2)

    def backward(logits, labels):
        (torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / total).backward()

    packed = decoder(tokens, positions, PackedAttention(cu_seqlens))
    backward(packed, labels)
    packed_gradients = [p.grad.clone() for p in decoder.parameters()]
    decoder.zero_grad()
    separate = [whole(decoder, part) for part in tokens.split(lengths)]
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
    decoder = ours(directories["qwen2"]).double()
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
    separate = [whole(decoder, tokens[branch]) for branch in branches]
    for branch, want in zip(branches, separate):
        assert (shared[branch] - want).abs().max() <= LOGITS
    got, want = backward([shared[branch] for branch in branches]), backward(separate)
    largest = max(g.abs().max() for g in want)
    assert largest > 0.1
    assert max((a - b).abs().max() for a, b in zip(got, want)) <= SHARED_GRADIENTS * largest


def test_the_longest_position_may_be_a_prompts_or_a_completions():
    """Rotary tables are made that long."""
    for lengths, parents, longest in (
        ([300, 5, 4], [-1, -1, 1], 300),
        ([30, 5, 4], [-1, 0, 0], 35),
        ([7, 3], None, 7),
    ):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        assert PackedAttention(cu_seqlens, parents and torch.tensor(parents)).longest == longest


@torch.no_grad()
def test_a_prompt_longer_than_every_group_finds_its_positions(directories):
    decoder, long = ours(directories["llama_untied"]), random_tokens(300)
    tokens, positions = torch.cat([long, long[:9]]), torch.cat([torch.arange(300), torch.arange(9)])
    logits = decoder(
        tokens,
        positions,
        PackedAttention(torch.tensor([0, 300, 305, 309]), torch.tensor([-1, -1, 1])),
    )
    assert (logits[:300] - whole(decoder, long)).abs().max() <= LOGITS
    assert (logits[300:] - whole(decoder, long[:9])).abs().max() <= LOGITS


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
def test_plain_products_equal_the_fused_kernel(dtype, tolerance, masked):
    generator = torch.Generator().manual_seed(0)
    keys = 23 if masked else 17
    q = torch.randn(5, 6, 17, 8, generator=generator).to(dtype).requires_grad_()
    k, v = (
        torch.randn(5, 2, keys, 8, generator=generator).to(dtype).requires_grad_() for _ in range(2)
    )
    mask = None
    if masked:
        mask = torch.rand(5, 1, 17, keys, generator=generator) < 0.4
        mask[..., 0] = True  # each query sees something
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=True
    )
    got = attention.masked_products(q, k, v, mask)
    assert got.dtype == dtype
    assert (got.double() - want.double()).abs().max() <= tolerance
    upstream = torch.randn(got.shape, generator=generator).to(dtype)
    for ours_, theirs_ in zip(
        torch.autograd.grad(got, (q, k, v), upstream),
        torch.autograd.grad(want, (q, k, v), upstream),
    ):
        assert (
            ours_.double() - theirs_.double()
        ).abs().max() <= 10 * tolerance  # sums over 17 queries and 3 heads


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
    decoder, tokens = ours(directories["llama_tied"]), random_tokens()
    context = PackedAttention(torch.tensor([0, LENGTH]))
    hidden, weight = decoder(
        tokens, torch.arange(LENGTH), context, lambda hidden, weight: (hidden, weight)
    )
    assert weight is decoder.tok_embeddings.weight
    logits = torch.nn.functional.linear(hidden, weight)
    assert (logits - whole(decoder, tokens)).abs().max() <= LOGITS


def test_model_config_has_no_field_that_is_not_read(copied):
    """Each field follows config.json when that changes."""
    raw = json.loads((copied / "config.json").read_text())
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    for field in ("vocab_size", *sizes, "rms_norm_eps", "max_position_embeddings"):
        (copied / "config.json").write_text(json.dumps(raw | {field: 77}))
        assert dataclasses.asdict(read_config(copied))[field] == 77


def test_an_exported_directory_has_all_named_templates(tmp_path):
    model = shutil.copytree(tiny_directory(), tmp_path / "model")
    tokenizer = hf.load_tokenizer(model)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "+{{ messages }}"}
    tokenizer.save_pretrained(model)
    weights = load_file(model / "model.safetensors")
    hf.export(weights.items(), model, tmp_path / "out", dtype=torch.bfloat16)
    assert hf.load_tokenizer(tmp_path / "out").chat_template == tokenizer.chat_template


def test_a_named_template_that_links_out_of_the_directory_is_refused(tmp_path):
    model = shutil.copytree(tiny_directory(), tmp_path / "model")
    secret = tmp_path / "secret"
    secret.write_text("of this machine")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "a.jinja").symlink_to(secret)
    with pytest.raises(ValueError, match="additional_chat_templates/a.jinja: a link to"):
        read_config(model)
