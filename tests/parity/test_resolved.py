"""config.json as transformers reads it: values in several places, fields that are not known."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GraniteConfig, LlamaConfig, SmolLM3Config

from llamarl.errors import BadInput
from llamarl.launch.checks import check_inputs
from llamarl.models.attention import rotary_of
from llamarl.models.config import check_as_transformers_reads, read_config, tiny_directory
from llamarl.models.directory import SafetensorsDir
from llamarl.models.families import FAMILIES, Family
from tests.random_models import SIZES
from tests.unit.refusals import change, model_job

LLAMA3 = json.loads("""{
"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
"original_max_position_embeddings": 8192, "rope_type": "llama3"
}""")
USUAL = json.loads("""{
"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
"initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.43.0",
"use_cache": true
}""")
# What the directories of well-known models say, without what all of them do.
SAID = {
    "Llama 2 7B": """
"_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"],
"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "max_length": 4096,
"max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
"num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
"tie_word_embeddings": false, "vocab_size": 32000
""",
    "Llama 3.2 1B Instruct": """
"architectures": ["LlamaForCausalLM"], "attention_bias": false,
"eos_token_id": [128001, 128008, 128009], "model_type": "llama", "head_dim": 64,
"hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
"mlp_bias": false, "num_attention_heads": 32, "num_hidden_layers": 16,
"num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
"rope_theta": 500000.0, "tie_word_embeddings": true, "unsloth_fixed": true,
"vocab_size": 128256
""",
    "SmolLM2 135M Instruct": """
"architectures": ["LlamaForCausalLM"], "attention_bias": false, "model_type": "llama",
"hidden_size": 576, "intermediate_size": 1536, "is_llama_config": true,
"max_position_embeddings": 8192, "mlp_bias": false, "num_attention_heads": 9,
"num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
"rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
"tie_word_embeddings": true,
"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "vocab_size": 49152
""",
    "Mistral 7B v0.3": """
"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096,
"intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
"num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
"rope_theta": 1000000.0, "sliding_window": null, "tie_word_embeddings": false,
"vocab_size": 32768
""",
    "Qwen2.5 7B Instruct": """
"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
"intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
"num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
"tie_word_embeddings": false, "use_mrope": false, "use_sliding_window": false,
"vocab_size": 152064
""",
    "Qwen3 8B, saved by transformers 5": """
"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "dtype": "bfloat16",
"model_type": "qwen3", "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
"max_position_embeddings": 40960, "max_window_layers": 36, "num_attention_heads": 32,
"num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "sliding_window": null,
"tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151936
""",
    "Pythia 410M": """
"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_act": "gelu",
"hidden_size": 1024, "intermediate_size": 4096, "layer_norm_eps": 1e-05,
"max_position_embeddings": 2048, "num_attention_heads": 16, "num_hidden_layers": 24,
"rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": false,
"use_parallel_residual": true, "vocab_size": 50304
""",
    "GPT-2 medium": """
"predict_special_tokens": true, "output_past": true, "activation_function": "gelu_new",
"architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "_num_labels": 1, "embd_pdrop": 0.1,
"layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
"n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null,
"summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
"summary_use_proj": true,
"task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
"vocab_size": 50257
""",
}
PUBLISHED = {name: json.loads("{" + said + "}") for name, said in SAID.items()}
PUBLISHED["Llama 3.2 1B Instruct"]["rope_scaling"] = LLAMA3
PUBLISHED["Qwen3 8B, saved by transformers 5"]["layer_types"] = ["full_attention"] * 36


def written(path, config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", PUBLISHED.keys() - {"Pythia 410M", "GPT-2 medium"})
def test_published_configurations_are_read_as_transformers_reads_them(tmp_path, name):
    path = written(tmp_path, USUAL | PUBLISHED[name])
    check_as_transformers_reads(path, read_config(path))


def llama(**fields):
    return PUBLISHED["Llama 2 7B"] | fields


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize(
    "config, theta, length",
    [
        (llama(rope_scaling=None, rope_theta=500.0), 500.0, None),
        (llama(rope_scaling=LINEAR | {"rope_theta": 500.0}), 500.0, None),
        (llama(rope_theta=7.0, rope_parameters=DEFAULT), 500.0, None),
        (llama(rope_scaling=LINEAR, rope_parameters=DEFAULT), 10000.0, None),
        (llama(rope_scaling=YARN, original_max_position_embeddings=16), 10000.0, 16),
        (llama(rope_scaling=LLAMA3, original_max_position_embeddings=16), 10000.0, 16),
    ],
)
def test_a_value_in_several_places_is_the_one_that_transformers_takes(
    tmp_path, config, theta, length
):
    path = written(tmp_path, config)
    model = read_config(path)
    assert model.rope_theta == theta
    assert (model.rope_scaling or {}).get("original_max_position_embeddings") == length
    check_as_transformers_reads(path, model)


def test_whatever_transformers_reads_otherwise_is_named_at_the_start(tmp_path):
    path = written(tmp_path, llama(rope_theta=500.0))
    model = read_config(path)
    change(path / "config.json", rope_theta=501.0, num_key_value_heads=8)
    with pytest.raises(ValueError) as refused:
        check_as_transformers_reads(path, model)
    said = str(refused.value)
    assert "num_key_value_heads is 32 here and 8 in transformers" in said
    assert "rope_theta is 500.0 here and 501.0 in transformers" in said
    assert said.count(" here and ") == 2


def test_a_run_compares_its_model_with_transformers(tmp_path, monkeypatch):
    path = shutil.copytree(tiny_directory(), tmp_path / "model")
    change(path / "config.json", model_type="mistral", sliding_window=None)
    check_inputs(model_job(path).inputs)  # another type, the same values
    raw = json.loads((path / "config.json").read_text())
    del raw["max_position_embeddings"]
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(BadInput, match="max_position_embeddings is 2048 here and 131072"):
        check_inputs(model_job(path, "task.max_prompt_tokens=8").inputs)


NO_ROPE = ("no_rope_layers=[1, 1, 1]", "no_rope_layer_interval=4")


@pytest.mark.parametrize(
    "config, name, said",
    [
        (SmolLM3Config(**SIZES), "SmolLM3", NO_ROPE),
        (GraniteConfig(**SIZES, embedding_multiplier=12.0), "Granite", ["embedding_multiplier=12"]),
        (LlamaConfig(**SIZES, logit_soft_cap=30.0), "Llama", ["logit_soft_cap=30.0"]),
        (LlamaConfig(**SIZES, partial_rotary_factor=0.5), "Llama", ["partial_rotary_factor"]),
    ],
)
def test_a_field_that_a_family_does_not_know_is_refused(tmp_path, monkeypatch, config, name, said):
    monkeypatch.setitem(FAMILIES, name, FAMILIES.get(name, Family()))
    config.architectures = [f"{name}ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError) as refused:
        read_config(tmp_path)
    assert all(field in str(refused.value) for field in said)


def test_a_default_that_makes_another_model_is_refused(tmp_path, monkeypatch):
    """SmolLM3 leaves every fourth layer without positions, whether its config.json says so."""
    monkeypatch.setitem(FAMILIES, "SmolLM3", Family())
    config = llama(architectures=["SmolLM3ForCausalLM"], model_type="smollm3", rope_theta=2e6)
    path = written(tmp_path, config)
    with pytest.raises(ValueError, match="with transformers' defaults: .*no_rope_layer_interval=4"):
        check_as_transformers_reads(path, read_config(path))


LLAMA = "Llama 2 7B"
NEOX = "Pythia 410M"
GPT2 = "GPT-2 medium"
MISTRAL = {"architectures": ["MistralForCausalLM"]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4}
UNKNOWN = "config.json: HomeForCausalLM: transformers makes no decoder of it"


@pytest.mark.parametrize(
    "name, changes, message",
    [
        (LLAMA, {"architectures": ["HomeForCausalLM"], "model_type": "home"}, UNKNOWN),
        (LLAMA, {"hidden_size": None}, "missing field hidden_size"),
        (LLAMA, {"rope_parameters": LONGROPE}, "'longrope' is not supported"),
        (LLAMA, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "lacks factor"),
        (GPT2, {"n_head": 0}, "GPT2LMHeadModel: transformers makes no decoder of it"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name_in_the_config(
    tmp_path, name, changes, message
):
    raw = {key: value for key, value in (PUBLISHED[name] | changes).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        rotary_of(read_config(written(tmp_path, raw)))


@pytest.mark.parametrize(
    "name, changes",
    [
        (LLAMA, {"hidden_act": "gelu"}),
        (LLAMA, MISTRAL | {"model_type": "mistral", "sliding_window": 32}),
        (LLAMA, {"attention_bias": True}),
        (LLAMA, {"mlp_bias": True}),
        (NEOX, {}),
        (NEOX, {"attention_bias": False}),
        (NEOX, {"hidden_act": "relu"}),
        (GPT2, {}),
        (GPT2, {"scale_attn_weights": False}),
        (GPT2, {"activation_function": "relu"}),
        ("Qwen3 8B, saved by transformers 5", {"attention_bias": True}),
    ],
)
def test_what_our_layers_do_not_compute_transformers_computes(tmp_path, name, changes):
    config = read_config(written(tmp_path, PUBLISHED[name] | changes))
    assert config.implementation == "transformers"
    assert config.vocab_size == PUBLISHED[name]["vocab_size"]


def test_a_config_that_is_absent_or_broken_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: not JSON"):
        read_config(tmp_path)


def test_model_config_has_no_field_that_is_not_read(tmp_path):
    """Each field follows config.json when that changes."""
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    others = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")
    for field in ("vocab_size", *sizes, *others):
        path = written(tmp_path, llama(**{field: 77}))
        assert dataclasses.asdict(read_config(path))[field] == 77


def test_older_and_newer_names_of_a_scaling_are_read_the_same(tmp_path):
    newer = llama(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0})
    older = llama(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 4.0})
    read = [rotary_of(read_config(written(tmp_path, config))) for config in (newer, older)]
    plain = rotary_of(read_config(written(tmp_path, llama(rope_theta=500.0))))
    for rotary in read:
        assert torch.equal(rotary.inv_freq, plain.inv_freq / 4)


def test_a_single_file_and_an_index_of_others_are_refused(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "shard.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "shard.safetensors"}}))
    with pytest.raises(ValueError, match="model.safetensors is there too"):
        SafetensorsDir(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert SafetensorsDir(tmp_path).file_of.keys() == {"a"}
    assert load_file(SafetensorsDir(tmp_path).files[0])["a"].tolist() == [0.0]
