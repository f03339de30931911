"""Decoders of transformers' modules against transformers itself: logits packed, alone and behind a
cache, gradients, greedy tokens and files, for families that our own decoder does not know.

Weights are random.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from llamarl.inference import Engine, SamplingParams, generate
from llamarl.inference.agreement import check_agreement
from llamarl.models import hf
from llamarl.models.attention import PackedAttention, Scores
from llamarl.models.build import build_decoder, read_config
from llamarl.models.hf import export, load_buffers, load_weights, named_parameters_hf
from llamarl.models.loading import training_decoder
from llamarl.models.lora import adapters_of
from llamarl.models.peft import export_adapted, load_policy
from llamarl.models.shape import Lora
from llamarl.models.transformers_config import stored_buffers
from llamarl.models.transformers_model import attention_of_transformers
from tests.decoding import our_decoder, whole_logits
from tests.house import ROOT
from tests.random_models import save_drawn
from tests.small_families import FAMILIES, SIZES, config_of, packed, sequences
from tests.support_table import table
from tests.tolerances import assert_same_greedy, margins_of, rounding

# Fast: a window, a soft cap, sinks, experts, a state beside attention, a head with a bias, learned
# positions with matrices [in, out], and files that name the head otherwise.
FAST = ("gemma2", "gpt2", "gpt_neox", "gpt_oss", "lfm2", "olmo3", "phi", "qwen3_moe")
GREEDY = ("gemma3_text", "gpt2", "gpt_neox", "granite", "lfm2", "qwen3_moe", "smollm3")
EACH = [pytest.param(f, marks=() if f in FAST else pytest.mark.slow) for f in FAMILIES]
# GPT-2's projections are no nn.Linear.
ADAPTED = [
    pytest.param(f, marks=() if f in FAST else pytest.mark.slow) for f in FAMILIES if f != "gpt2"
]
# The largest logit is some ten deviations, and norms that follow norms enlarge roundings.
LOGITS = rounding(terms=48, depth=2 * 2 * 4, size=10.0)
# Of the largest gradient. In float64 transformers' softmax, norms and rotary tables are
# float32; experts are multiplied in float32 at most.
GRADIENTS = {
    torch.float64: rounding(terms=20, depth=2 * 2 * 4),
    torch.float32: rounding(terms=48, depth=2 * 2 * 2 * 4),
}
CPU = torch.device("cpu")


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


def theirs_of(path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")


@pytest.mark.proves("logits, files")
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


@pytest.mark.proves("gradients")
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


ROUTED_FAMILIES = [f for f, fields in FAMILIES.items() if "num_experts_per_tok" in fields]


@pytest.mark.proves("routes")
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in FAST else pytest.mark.slow) for f in ROUTED_FAMILIES],
)
@torch.no_grad()
def test_routes_that_are_given_are_taken(directory, family):
    """By each router of the family: its own, then the next experts by number."""
    decoder = our_decoder(directory(family))
    ids = sequences()
    wanted = packed(decoder, ids)
    routing = decoder.routing
    assert not routing.unknown and routing.routers
    own = routing.taken
    assert own.min() >= 1 and own.max() <= 4
    routing.replays = True
    for routes in (own, own % 4 + 1):
        got = packed(decoder, ids, routes=routes)
        assert torch.equal(routing.taken, routes)
        if routes is own:
            assert torch.equal(got, wanted)
        else:
            assert (got - wanted).abs().max() > 100 * LOGITS
            assert routing.differing(torch.arange(40)).mean() > 0.5
    assert torch.equal(packed(decoder, ids), wanted), "a pass without routes chooses again"


@pytest.mark.proves("sampling")
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


VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
SEEING = {
    "gemma3": {"text_config": SIZES, "vision_config": VISION, "mm_tokens_per_image": 4},
    "mistral3": {
        "text_config": SIZES | {"model_type": "mistral", "sliding_window": None},
        "vision_config": VISION | {"model_type": "pixtral"},
    },
    "qwen3_5": {
        "text_config": SIZES,
        "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 4, "out_hidden_size": 32},
    },
}


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f == "gemma3" else pytest.mark.slow) for f in SEEING]
)
@torch.no_grad()
def test_the_decoder_of_a_model_that_sees_is_computed_and_its_eyes_are_carried(tmp_path, family):
    config = AutoConfig.for_model(family, **SEEING[family])
    save_drawn(AutoModelForImageTextToText.from_config(config), tmp_path)
    decoder = our_decoder(tmp_path)
    names = [name for name, _ in named_parameters_hf(decoder)]
    assert decoder.config.carried and not any("visi" in n or "visual" in n for n in names)
    ids = sequences()
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager")
    wanted = torch.cat([theirs(input_ids=one[None], use_cache=False).logits[0] for one in ids])
    assert (packed(decoder, ids) - wanted).abs().max() <= LOGITS * max(1, wanted.std())
    check_agreement(decoder, tmp_path, CPU, torch.float32)

    for parameter in decoder.parameters():
        parameter.mul_(1.5)
    export(named_parameters_hf(decoder), tmp_path, tmp_path / "out", dtype=torch.float32)
    before = load_file(tmp_path / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    same = {name for name in before if torch.equal(after[name], before[name])}
    assert len(same) == len(decoder.config.carried), "what sees, and nothing else"
    assert not any("lm_head" in name or "layers.0.mlp.up" in name for name in same)


@torch.no_grad()
def test_a_family_of_our_own_is_computed_by_either_modules_from_the_same_files(tmp_path):
    fields = SIZES | {"head_dim": 8, "tie_word_embeddings": True}
    config = AutoConfig.for_model("qwen3", **fields)
    save_drawn(AutoModelForCausalLM.from_config(config), tmp_path)
    made = {}
    for made_by in ("auto", "native", "transformers"):
        decoder = load_weights(build_decoder(read_config(tmp_path, made_by)), tmp_path)
        made[made_by] = decoder
        assert (
            packed(decoder, sequences()) - packed(made["auto"], sequences())
        ).abs().max() <= LOGITS
    assert [type(d).__name__ for d in made.values()] == [
        "NativeDecoder",
        "NativeDecoder",
        "TransformersDecoder",
    ]
    native = dict(named_parameters_hf(made["native"]))
    theirs = dict(named_parameters_hf(made["transformers"]))
    assert native.keys() == theirs.keys(), "what a version of the weights calls them"


def test_modules_that_cannot_compute_a_model_are_refused(directory):
    with pytest.raises(ValueError, match="do not compute Gemma2ForCausalLM.*implementation=auto"):
        read_config(directory("gemma2"), "native")


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
    monkeypatch.setattr(Scores, "window_within", lambda self, longest: None)
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


@pytest.mark.parametrize("family", ["qwen3_moe", "lfm2"])  # in one pass; each sequence by itself
def test_layers_that_are_recomputed_give_the_same_gradients(directory, family):
    ids = sequences()
    found = []
    for recompute in (False, True):
        decoder = training_decoder(
            directory(family),
            mesh=None,
            device=CPU,
            compute_dtype=torch.float32,
            activation_checkpointing=recompute,
        )
        assert decoder.activation_checkpointing == recompute
        found.append(_gradients(packed(decoder, ids), ids, named_parameters_hf(decoder)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@torch.no_grad()
def test_shards_of_files_that_name_tensors_otherwise_load_here_and_in_transformers(
    directory, tmp_path, monkeypatch
):
    monkeypatch.setattr(hf, "SHARD_BYTES", 30_000)
    path, out = directory("gpt_neox"), tmp_path / "out"
    ids = sequences()[0]
    export(named_parameters_hf(our_decoder(path)), path, out, dtype=torch.float32)
    assert len(list(out.glob("model-*.safetensors"))) > 2
    wanted = theirs_of(path)(ids[None]).logits[0]
    assert (theirs_of(out)(ids[None]).logits[0] - wanted).abs().max() <= LOGITS
    assert (whole_logits(our_decoder(out), ids) - wanted).abs().max() <= LOGITS


@torch.no_grad()
def test_older_directories_of_gpt2_leave_out_how_names_begin_and_keep_masks(directory, tmp_path):
    path = shutil.copytree(directory("gpt2"), tmp_path / "older")
    ids = sequences()[0]
    wanted = whole_logits(our_decoder(path), ids)
    file = path / "model.safetensors"
    older = {name.removeprefix("transformer."): x for name, x in load_file(file).items()}
    for layer in range(SIZES["num_hidden_layers"]):
        older[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 256, 256)
    save_file(older, file, metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    del raw["tie_word_embeddings"]  # which transformers takes to be true
    (path / "config.json").write_text(json.dumps(raw))
    decoder = our_decoder(path)
    assert (whole_logits(decoder, ids) - wanted).abs().max() <= LOGITS
    out = tmp_path / "out"
    export(named_parameters_hf(decoder), path, out, dtype=torch.float32)
    assert (whole_logits(our_decoder(out), ids) - wanted).abs().max() <= LOGITS
    assert (theirs_of(out)(ids[None]).logits[0] - wanted).abs().max() <= LOGITS


def test_an_engine_is_as_long_as_there_are_learned_positions(tmp_path):
    config = AutoConfig.for_model("gpt2", **(SIZES | {"max_position_embeddings": 16}))
    save_drawn(AutoModelForCausalLM.from_config(config), tmp_path)
    decoder = our_decoder(tmp_path).eval()
    with pytest.raises(ValueError, match="max_len=17.* 16"):
        Engine(decoder, max_slots=2, max_len=17)
    full = SamplingParams(13, temperature=1.0)
    prompt = sequences()[0][:3].tolist()
    for (completion,) in generate(Engine(decoder, max_slots=2, max_len=16), [prompt], full):
        assert completion.token_ids.numel() == 13


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


@pytest.mark.proves("adapters")
@pytest.mark.parametrize("family", ADAPTED)
def test_every_projection_of_a_family_can_have_an_adapter(directory, family):
    lora = Lora(rank=2, alpha=4.0, targets=("all-linear",))
    ids = sequences()
    decoder = training_decoder(
        directory(family), mesh=None, device=CPU, compute_dtype=torch.float32, lora=lora
    )
    with torch.no_grad():
        plain = packed(our_decoder(directory(family)), ids)
        assert (packed(decoder, ids) - plain).abs().max() <= LOGITS  # B is 0
    packed(decoder, ids).square().mean().backward()
    found = {name: p.grad for name, p in adapters_of(decoder) if name.endswith("lora_b")}
    unused = [name for name, grad in found.items() if grad is None or not grad.abs().max()]
    assert found and not unused


def test_adapters_merge_into_files_that_name_tensors_otherwise(directory, tmp_path):
    path, out = directory("gpt_neox"), tmp_path / "hf"
    lora = Lora(rank=2, alpha=4.0, targets=("query_key_value", "dense_4h_to_h"))
    decoder = training_decoder(path, mesh=None, device=CPU, compute_dtype=torch.float32, lora=lora)
    adapters = dict(adapters_of(decoder))
    with torch.no_grad():
        for adapter in adapters.values():
            adapter.add_(0.1)
    export_adapted(adapters, lora, path, out, dtype=torch.float32)
    assert "embed_out.weight" in load_file(out / "model.safetensors")
    with torch.no_grad():
        wanted = packed(decoder, sequences())
        assert (packed(our_decoder(path), sequences()) - wanted).abs().max() > 100 * LOGITS
        assert (packed(our_decoder(out), sequences()) - wanted).abs().max() <= LOGITS
        adapted = load_policy(path, tmp_path / "adapter", dtype=torch.float32, device="cpu")
        assert (packed(adapted, sequences()) - wanted).abs().max() <= LOGITS


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"model_type": "unheard_of"}, "transformers makes no decoder of it"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
    ],
)
def test_what_transformers_cannot_compute_is_refused_with_the_file(tmp_path, fields, said):
    raw = config_of("olmo3").to_dict() | {"architectures": ["Olmo3ForCausalLM"]} | fields
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=f"config.json: .*{said}"):
        read_config(tmp_path)


def test_the_documents_list_what_these_tests_prove():
    assert table() in (ROOT / "docs" / "models.md").read_text(), (
        "python -m tests.support_table prints the table"
    )
