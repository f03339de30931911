"""Model directories and rows of a stranger's: refused in words that name the file, or harmless.

Each is looked at as a run looks at it, before anything starts.
"""

import itertools
import json
import math
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llamarl.config.command_line import RED_TEAM, RL, compose_config
from llamarl.errors import BadInput, BadWeights
from llamarl.launch.checks import check_inputs
from llamarl.launch.job import Job
from llamarl.launch.run_directory import RunDirectory
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.directory import weights_digest
from llamarl.models.hf import (
    SafetensorsDir,
    check_encoder_directory,
    export,
    load_tokenizer,
    load_weights,
)
from llamarl.scoring.classifier import check_encoder
from llamarl.scoring.embedding import check_sentence_encoder
from llamarl.tasks.files import read_jsonl, row_to_example
from tests.build.model_directory import copy_tiny
from tests.scorers import write_encoder, write_scorer
from tests.unit.refusals import WORLD, change, model_job, model_refusal

pytestmark = pytest.mark.timeout(60)  # some of these once took minutes, and all memory

DEEP = "[" * 200_000
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path):
    """A copy of the embedded model, to be spoilt."""
    return copy_tiny(tmp_path / "model")


def test_a_copy_that_is_not_spoilt_is_taken(model):
    check_inputs(model_job(model).inputs)
    assert weights_digest(model) == weights_digest(tiny_directory())


# --- config.json ---

BLOOM = ["BloomForCausalLM"]
MANY_HEADS = {"head_dim": None, "num_attention_heads": 384, "num_key_value_heads": 384}


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers=10000000: need at most 10,000"),
        ({"vocab_size": 10**15}, "vocab_size=1000000000000000: need at most"),
        ({"head_dim": 7}, "7 features of a head are turned in pairs"),
        ({"num_attention_heads": 2, "head_dim": 64}, "weights do not fit"),
        ({"num_key_value_heads": 3}, "query heads cannot share 3 key/value heads evenly"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x': need a finite number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05: need a finite number of at least 0"),
        ({"rope_theta": 0}, "rope_theta=0: need a finite number of at least 1"),
        ({"rope_theta": math.inf}, "rope_theta=inf: need a finite number"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_parameters.rope_theta=-1.0: need"),
        ({"rope_scaling": {"type": "linear", "factor": math.nan}}, "no finite numbers"),
        (
            {"rope_parameters": {"partial_rotary_factor": 2.0}},
            "heads of this family are turned whole",
        ),
        (
            {"model_type": "bloom", "architectures": BLOOM, "n_layer": 10**7},
            "n_layer=10000000: need",
        ),
        (MANY_HEADS, "hidden_size=192 is too small for 384 heads"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false': need true or false"),
        ({"sliding_window": "all"}, "sliding_window='all': need a whole number"),
        ({"architectures": [5]}, "architectures=[5]: need a list of names"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM': need a list"),
    ],
)
def test_a_config_beyond_belief_is_refused_by_its_field(model, fields, said):
    change(model / "config.json", **fields)
    message = model_refusal(model)
    assert message.startswith(f"{model}") and said in message


def test_a_context_without_an_end_costs_nothing(model):
    change(model / "config.json", max_position_embeddings=10**30)
    check_inputs(model_job(model).inputs)


def test_a_stop_token_beyond_all_vocabularies_is_refused(model):
    change(model / "generation_config.json", eos_token_id=[10**30])
    assert "generation_config.json: eos_token_id=1000" in model_refusal(model)


# --- JSON that no parser reads ---


NESTED = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX]


@pytest.mark.parametrize("name", NESTED)
def test_json_that_is_nested_too_deep_or_no_object_is_named(model, name):
    (model / name).write_text('{"a":' + DEEP)
    assert model_refusal(model).startswith(f"{model / name}: its JSON is nested too deep")
    if name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text("[]")
        assert model_refusal(model).startswith(f"{model / name}: need a JSON object, this is list")


def test_a_template_that_never_ends_is_loaded_and_not_run(model):
    loops = "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}"
    change(model / "tokenizer_config.json", chat_template=loops)
    check_inputs(model_job(model, "task.chat=false").inputs)


# --- Weights ---


def header_of(file: Path) -> tuple[dict, bytes]:
    """The header of a safetensors file, and the bytes behind it."""
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def write_header(file: Path, header: dict, numbers: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + numbers)


def test_a_file_that_lies_about_its_header_is_refused(model):
    header, numbers = header_of(model / WEIGHTS)
    first = next(name for name in header if name != "__metadata__")
    header[first]["data_offsets"] = [0, 10**15]
    write_header(model / WEIGHTS, header, numbers)
    beyond_the_file = (model / WEIGHTS).read_bytes()
    for raw in (beyond_the_file, struct.pack("<Q", 2**40) + b"{}", b""):
        (model / WEIGHTS).write_bytes(raw)
        assert f"{model / WEIGHTS}: not a whole safetensors file" in model_refusal(model)


def as_integers(path: Path) -> None:
    """Have a directory's weights say that they are integers of the same size."""
    header, numbers = header_of(path / WEIGHTS)
    integers = {"F32": "I32", "BF16": "I16", "F16": "I16"}
    for name, entry in header.items():
        if name != "__metadata__":
            entry["dtype"] = integers[entry["dtype"]]
    write_header(path / WEIGHTS, header, numbers)


def test_integers_are_no_weights(model):
    as_integers(model)
    message = model_refusal(model)
    assert "weights do not fit config.json" in message and ": I" in message
    assert "need one of F64, F32, F16, BF16" in message
    with pytest.raises(ValueError, match="need one of F64"):
        loaded(model)


def loaded(path: Path) -> None:
    load_weights(build_decoder(read_config(path)), path)


def save(path: Path, tensors: dict) -> None:
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


UP_PROJ = "model.layers.1.mlp.up_proj.weight"


def test_weights_that_are_no_numbers_are_named_as_they_are_loaded(model):
    tensors = load_file(model / WEIGHTS)
    tensors[UP_PROJ][3, 5] = math.inf
    save(model, tensors)
    with pytest.raises(BadWeights) as refused:
        loaded(model)
    assert str(refused.value).startswith(f"{model}: {UP_PROJ} holds 1 numbers that are NaN")


def test_numbers_of_eight_bits_are_weights_and_looked_at_too(model):
    stored = load_file(model / WEIGHTS).items()
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in stored}
    save(model, tensors)
    loaded(model)
    tensors[UP_PROJ].view(torch.uint8)[3, 5] = 0x7F  # NaN
    save(model, tensors)
    with pytest.raises(BadWeights, match=f"{UP_PROJ} holds 1 numbers that are NaN"):
        loaded(model)


def lead_out(path: Path, where: str = "../outside.safetensors") -> None:
    """Have an index say that the weights are elsewhere."""
    with safe_open(path / WEIGHTS, "pt") as held:
        index = {"weight_map": dict.fromkeys(held.keys(), where)}
    shutil.move(path / WEIGHTS, path.parent / "outside.safetensors")
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "where", ["../outside.safetensors", "/outside.safetensors", "model\0.safetensors"]
)
def test_an_index_that_leads_elsewhere_is_refused(model, where):
    lead_out(model, where)
    message = model_refusal(model)
    assert message.startswith(f"{model / INDEX}: ") and "no file of the directory" in message
    (model / INDEX).write_text('{"weight_map": {"a": 5}}')
    assert f"{model / INDEX}: no weight_map" in model_refusal(model)


# --- Files that are none ---


@pytest.mark.parametrize("name", [WEIGHTS, "NOTICE"])
def test_a_pipe_is_no_file_of_a_model(model, name):
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    assert model_refusal(model) == f"{model / name}: no regular file; fetch the directory again"


@pytest.mark.parametrize("name", ["config.json", "NOTICE"])
def test_a_link_out_of_the_directory_is_refused_and_never_exported(model, tmp_path, name):
    outside = tmp_path / "outside"
    if (model / name).exists():
        shutil.move(model / name, outside)
    else:
        outside.write_text("a secret")
    (model / name).symlink_to(outside)
    message = model_refusal(model)
    assert message.startswith(f"{model / name}: a link to {outside}, outside of the directory")
    assert "cp -rL" in message
    with pytest.raises(ValueError, match="outside of the directory"):
        export([], like=model, out=tmp_path / "hf", dtype=torch.float32)
    assert not (tmp_path / "hf" / name).exists()


@pytest.mark.parametrize(
    "name, readers",
    [
        (WEIGHTS, (SafetensorsDir, weights_digest, check_encoder_directory, load_tokenizer)),
        ("config.json", (read_config, check_encoder_directory)),
    ],
)
def test_whoever_opens_a_file_alone_follows_no_link_out_either(model, tmp_path, name, readers):
    shutil.move(model / name, tmp_path / "secret")
    (model / name).symlink_to(tmp_path / "secret")
    for read in readers:
        with pytest.raises(ValueError, match="a link to .* outside of the directory"):
            read(model)


def test_links_inside_of_the_directory_and_a_link_to_it_are_followed(model, tmp_path):
    (model / WEIGHTS).rename(model / "weights.safetensors")
    (model / WEIGHTS).symlink_to("weights.safetensors")
    (model / "nothing.txt").symlink_to("not-there")
    (tmp_path / "named").symlink_to(model)
    check_inputs(model_job(tmp_path / "named").inputs)


def hub_cache(model: Path, folder: Path) -> Path:
    """The embedded model as huggingface_hub keeps it: a snapshot of links to blobs."""
    home = folder / "models--org--name"
    snapshot = home / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copyfile(file, home / "blobs" / f"hash{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash{number}")
    return snapshot


def test_a_snapshot_in_the_cache_of_the_hub_is_taken(model, tmp_path):
    snapshot = hub_cache(model, tmp_path)
    check_inputs(model_job(snapshot).inputs)
    loaded(snapshot)
    assert load_tokenizer(snapshot).encode("1+1=")
    (tmp_path / "linked").symlink_to(snapshot)
    check_inputs(model_job(tmp_path / "linked").inputs)


def test_a_snapshot_that_links_out_of_its_models_cache_is_refused(model, tmp_path):
    snapshot = hub_cache(model, tmp_path)
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "hash").write_text("another's")
    notice = snapshot / "NOTICE"
    notice.unlink(missing_ok=True)
    notice.symlink_to("../../../models--org--other/blobs/hash")
    assert f"{notice}: a link to" in model_refusal(snapshot)
    # Nor is any folder that is called snapshots the cache of the hub.
    notice.unlink()
    check_inputs(model_job(snapshot).inputs)
    home = (tmp_path / "models--org--name").rename(tmp_path / "home")
    assert "a link to" in model_refusal(home / "snapshots" / snapshot.name)


# --- Code ---


def test_a_tokenizers_own_code_is_refused_and_not_asked_about(model, tmp_path, monkeypatch):
    trace = tmp_path / "ran"
    (model / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Evil: pass\n")
    change(
        model / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
        tokenizer_class="Evil",
    )
    asked = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "y")
    message = model_refusal(model)
    assert message.startswith(f"{model / 'tokenizer_config.json'}: the tokenizer is code")
    assert not asked and not trace.exists()


# --- Whoever reads a directory ---


OWN_CRITIC = ("loss=ppo", "trainer.critic.trunk=own", "trainer.advantages=gae")
ENCODER = ("reward=encoder", "reward.label=mild", "reward.max_tokens=32")
USERS = {
    "model": (copy_tiny, "model.path={}"),
    "victim": (copy_tiny, "victim.path={}"),
    "critic": (copy_tiny, *OWN_CRITIC, "trainer.critic.path={}"),
    "scorer": (write_scorer, "reward=model", "reward.path={}"),
    "encoder": (write_encoder, *ENCODER, "reward.path={}"),
    "gold": (write_scorer, "eval.gold={}"),
    "base": (copy_tiny, "eval.base={}"),
    "embedder": (write_encoder, "eval.embedder={}", "eval.num_samples=2"),
}


def nest(path: Path) -> None:
    (path / "config.json").write_text(DEEP)


def link_out(path: Path) -> None:
    (path.parent / "secret").write_text("a secret")
    (path / "NOTICE").unlink(missing_ok=True)
    (path / "NOTICE").symlink_to(path.parent / "secret")


def pile_up(path: Path) -> None:
    change(path / "config.json", num_hidden_layers=10**7)


SAID = {
    nest: "config.json: its JSON is nested too deep",
    link_out: "NOTICE: a link to",
    lead_out: "no file of the directory",
    pile_up: "num_hidden_layers=10000000: need at most",
    as_integers: "need one of F64",
}
# Decoders are read by one function, encoders by another; who asks for which is by hand.
CASES = [*itertools.product(("critic", "encoder"), SAID)]
CASES += itertools.product(USERS.keys() - {"critic", "encoder"}, (link_out, as_integers))


@pytest.mark.parametrize(
    "user, spoil", sorted(CASES, key=str), ids=lambda value: getattr(value, "__name__", value)
)
def test_every_user_of_a_directory_refuses_it_at_the_start(tmp_path, user, spoil):
    write, *overrides = USERS[user]
    path = tmp_path / "given"
    write(path)
    spoil(path)
    command = [override.format(path) for override in overrides]
    config = compose_config(command, RED_TEAM if user == "victim" else RL)
    with pytest.raises(BadInput) as refused:
        check_inputs(Job(config, WORLD, RunDirectory(tmp_path / "run", None)).inputs)
    message = str(refused.value)
    assert str(path) in message and SAID[spoil] in message


def test_an_encoder_may_keep_the_numbers_of_its_positions(tmp_path):
    write_encoder(tmp_path)
    positions = {"bert.embeddings.position_ids": torch.arange(40)[None]}
    save(tmp_path, load_file(tmp_path / WEIGHTS) | positions)
    check_encoder(tmp_path, "mild", 40)
    check_sentence_encoder(str(tmp_path))


# --- Rows ---


@pytest.mark.parametrize(
    "line, said",
    [
        (b'{"prompt":"a","answer":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'{"prompt":"a","answer":' + b"9" * 5000 + b"}", "Exceeds the limit (4300 digits)"),
        (b'{"prompt":"\\ud800","answer":"1"}', "half of a surrogate pair"),
        (b'{"prompt":"\xff","answer":"1"}', "can't decode byte 0xff"),
        ('\ufeff{"prompt":"a"}'.encode("utf-16"), "can't decode byte 0xff"),
    ],
    ids=["deep", "digits", "surrogate", "latin1", "utf16"],
)
def test_a_row_that_cannot_be_read_is_named_by_its_line(tmp_path, line, said):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt":"fine","answer":"1"}\n' + line)
    with pytest.raises(ValueError) as refused:
        read_jsonl(file, lambda row: row_to_example(row, "prompt", "answer"))
    last = str(refused.value).splitlines()[-1].strip()
    assert last.startswith(f"{file}:") and said in last


def test_an_odd_row_that_can_be_read_is_a_row(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(
        b'{"prompt":"a","answer":"1","x":"\\ud800"}\n{"prompt":"a\\u0000b","answer":NaN}'
    )
    assert len(read_jsonl(file, lambda row: row_to_example(row, "prompt", "answer"))) == 2
