"""Decoders that builders of torchtune make, against transformers and against torchtune's own."""

from __future__ import annotations

import shutil
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from torchtune.models.convert_weights import hf_to_tune, tune_to_hf
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune, qwen2_tune_to_hf
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from llamarl.inference import Engine, SamplingParams, generate
from llamarl.inference.agreement import _cached, _each_alone, _packed
from llamarl.models import hf
from llamarl.models.build import build_decoder, config_of, read_config
from llamarl.models.loading import training_decoder
from llamarl.models.lora import LoraLinear, reset_lora
from llamarl.models.shape import Lora
from llamarl.models.sharding import parameter_shapes
from tests import torchtune_builders
from tests.decoding import our_decoder, whole_logits
from tests.random_models import SIZES, save_drawn
from tests.tolerances import rounding
from tests.torchtune_builders import ROPE

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("float32_products")]

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
CONFIGS = {
    "untied": LlamaConfig(**SIZES, **UNTIED),
    "tied": LlamaConfig(**SIZES, **TIED, rope_parameters=ROPE),
    "qwen": Qwen2Config(**SIZES, **TIED),
}
# torchtune's own conversions of weights: from Hugging Face's layout, and back.
CONVERSIONS = {"qwen": (qwen2_hf_to_tune, qwen2_tune_to_hf)}
HEADS = {
    "num_heads": SIZES["num_attention_heads"],
    "num_kv_heads": SIZES["num_key_value_heads"],
    "dim": SIZES["hidden_size"],
}
NEAR = rounding(terms=48, depth=2 * 2 * 3, size=5.0)  # of the largest logits
CPU = torch.device("cpu")
TOKENS = torch.arange(60) * 7 % 52 + 1


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        save_drawn(AutoModelForCausalLM.from_config(config), root / name)
    return root


def path_of(builder):
    return f"tests.torchtune_builders.{builder}"


def built(path, builder=None, dtype=torch.float32):
    config = config_of(path, path_of(builder or path.name))
    return hf.load_weights(build_decoder(config, dtype=dtype), path)


def trained(path, dtype=torch.float32, **settings):
    how = {"mesh": None, "device": CPU, "compute_dtype": dtype, "made_by": path_of(path.name)}
    return training_decoder(path, **how, **settings)


def loss_of(logits):
    return F.cross_entropy(logits[:-1].float(), TOKENS[1:])


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_builders_model_is_that_of_transformers_and_of_torchtune(directories, name):
    path = directories / name
    decoder = built(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    got = whole_logits(decoder, TOKENS)
    assert (got - model(TOKENS[None]).logits[0]).abs().max() <= NEAR
    assert decoder.config.implementation == "torchtune"

    to_tune, to_hf = CONVERSIONS.get(name, (hf_to_tune, tune_to_hf))
    weights = dict(hf.named_parameters_hf(decoder))
    assert {key: tuple(x.shape) for key, x in weights.items()} == parameter_shapes(decoder.config)
    converted = to_tune(weights, **HEADS)
    torchtunes = getattr(torchtune_builders, name)().eval()
    torchtunes.load_state_dict(converted)
    assert (got - torchtunes(TOKENS[None])[0]).abs().max() <= NEAR
    back = to_hf(converted, **HEADS)
    assert all(torch.equal(back[key], weights[key]) for key in weights)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_packed_and_cached_passes_give_what_each_sequence_gives_alone(directories, name):
    decoder = built(directories / name)
    alone = _each_alone(decoder, CPU)
    assert (_packed(decoder, CPU) - torch.cat(alone)).abs().max() <= NEAR
    last = torch.stack([logits[-1] for logits in alone])
    assert (_cached(decoder, CPU, torch.float32) - last).abs().max() <= NEAR


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_has_the_bytes_of_the_directory(directories, tmp_path, name):
    path = directories / name
    hf.export(hf.named_parameters_hf(built(path)), path, tmp_path, dtype=torch.float32)
    file = "model.safetensors"
    assert (tmp_path / file).read_bytes() == (path / file).read_bytes()


@torch.no_grad()
def test_an_engine_samples_what_our_own_decoder_samples(directories):
    path = directories / "tied"
    greedy = SamplingParams(30, temperature=0.0, stop_token_ids=(2,), n=2)
    prompts = [[1, 5, 9], [3], [2, 4, 6, 8, 10, 12, 14]]
    made = []
    for decoder in (built(path), our_decoder(path)):
        engine = Engine(decoder, max_slots=3, max_len=64)
        completions = chain.from_iterable(generate(engine, prompts, greedy))
        made.append([one.token_ids.tolist() for one in completions])
    assert made[0] == made[1]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_our_own_decoder_and_nothing_is_dropped(
    directories, name, recompute
):
    path = directories / name
    ours = our_decoder(path)
    theirs = trained(path, activation_checkpointing=recompute)
    for decoder in (ours, theirs):
        loss_of(whole_logits(decoder, TOKENS)).backward()
    want = dict(hf.named_parameters_hf(ours))
    for key, parameter in hf.named_parameters_hf(theirs):
        largest = want[key].grad.abs().max().clamp(min=1e-3)
        assert (parameter.grad - want[key].grad).abs().max() <= 1e-4 * largest, key


def test_bfloat16_masters_are_trained(directories):
    decoder, exact = (trained(directories / "tied", d) for d in (torch.bfloat16, torch.float32))
    for each in (decoder, exact):
        loss_of(whole_logits(each, TOKENS)).backward()
    for (name, p), (_, q) in zip(decoder.named_parameters(), exact.named_parameters()):
        assert F.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0) > 0.9, name


def test_adapters_have_the_layout_of_the_directory(directories):
    """An adapter's rows are those of its weight, so our own decoder adds the same."""
    path = directories / "untied"
    lora = Lora(rank=3, alpha=7.0, targets=("q_proj", "k_proj", "down_proj"), seed=5)
    decoder = trained(path, lora=lora)
    own = training_decoder(path, mesh=None, device=CPU, compute_dtype=torch.float32, lora=lora)
    for each in (decoder, own):
        reset_lora(each, 5)
        adapters = [m for m in each.modules() if isinstance(m, LoraLinear)]
        assert len(adapters) == 3 * SIZES["num_hidden_layers"]
        with torch.no_grad():
            for adapter in adapters:
                rows = torch.arange(len(adapter.lora_b))[:, None]
                adapter.lora_b.copy_((rows * 5 % 11 - 5) * 0.02)
    with torch.no_grad():
        got, want = whole_logits(decoder, TOKENS), whole_logits(own, TOKENS)
        plain = whole_logits(our_decoder(path), TOKENS)
    assert (got - want).abs().max() <= NEAR < (want - plain).abs().max() / 100


# --- Refused ---


@pytest.mark.parametrize(
    "builder, what",
    [
        ("torchtune.models.llama3_2.llama3_2_2b", "has no function llama3_2_2b; did you mean"),
        ("no_such_module.f", "no module no_such_module"),
        ("llama", 'need an import path "module:function"'),
        ("torchtune.models.llama3:llama3", "cannot be called without arguments"),
        (path_of("no_model"), "makes no torchtune.modules.TransformerDecoder, but int"),
        ("torchtune.models.gemma2.gemma2_2b", "Gemma2"),
        (path_of("tied"), "lm_head.weight is absent in it and"),
        (path_of("wider"), r"gate_proj.weight is \(84, 48\) in it and \(80, 48\) there"),
        (path_of("more_heads"), "query heads"),
        (path_of("other_angles"), "other angles"),
        (path_of("other_norms"), "eps"),
    ],
)
def test_what_makes_another_model_is_refused_with_a_remedy(directories, builder, what):
    path = directories / "untied"
    with pytest.raises(ValueError, match=what) as caught:
        config_of(path, builder)
    assert str(caught.value).startswith(f"builder {builder} for {path}: ")


def test_a_family_without_a_builder_is_refused(directories, tmp_path):
    save_drawn(AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, head_dim=8)), tmp_path)
    with pytest.raises(ValueError, match="q_norm.weight is absent in it"):
        config_of(tmp_path, path_of("untied"))


def test_a_builder_may_know_fewer_positions_than_the_directory(directories, tmp_path):
    path = shutil.copytree(directories / "untied", tmp_path / "copied")
    config = CONFIGS["untied"].to_dict() | {"max_position_embeddings": 512}
    LlamaConfig.from_dict(config).save_pretrained(path)
    assert read_config(path).max_position_embeddings == 512
    assert config_of(path, path_of("untied")).max_position_embeddings == 128
