"""Two and three tensor-parallel ranks compute what one rank computes: logits, completions,
gradients; and hold only their part.

The ranks are a world of three whose first two are also a group of their own; each leaves what it
computed in a safetensors file.
"""

import dataclasses
import functools
import itertools
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from llamarl.inference import Engine, SamplingParams, generate
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.fsdp import held_box
from llamarl.models.hf import load_weights, named_parameters_hf
from llamarl.models.lora import adapters_of
from llamarl.models.shape import Lora
from llamarl.models.sharding import (
    LORA_A,
    LORA_B,
    Box,
    adapter_shapes,
    heads_of,
    tensor_parallel_box,
)
from llamarl.models.tp import TensorParallel, gathered
from tests.build.model_directory import write_model
from tests.decoding import full_forward_logits
from tests.tolerances import assert_same_greedy, first_difference, margins_of, of_logprobs, rounding

pytestmark = pytest.mark.machine

SIZES, WORLD = (2, 3), 3
# Of the largest gradient; width and layers of the largest model here, "tiny".
GRADIENTS = rounding(terms=192, depth=2 * 4)
DEADLINE_S = 200
BASE = {
    "hidden_size": 48,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
# over 2 ranks the K/V heads of "uneven" and "biased" do not divide, nor do the vocabularies and the
# hidden units
LLAMA, QWEN2 = "LlamaForCausalLM", "Qwen2ForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
# Architecture, query and K/V heads, vocabulary, hidden units, whether embeddings are tied.
ROWS = {
    "uneven": (LLAMA, 6, 3, 53, 77, False),
    "biased": (QWEN2, 9, 3, 61, 80, True),
    "normed_heads": (QWEN3, 6, 3, 53, 80, True),
    "one_kv_head": (LLAMA, 4, 1, 49, 64, True),
}


def config_of(architecture, heads, kv_heads, vocabulary, hidden, is_tied):
    return BASE | {
        "architectures": [architecture],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "intermediate_size": hidden,
        "tie_word_embeddings": is_tied,
    }


MODELS = {name: config_of(*row) for name, row in ROWS.items()}
NAMES = ("tiny", *MODELS)
QKV = ("q_proj", "k_proj", "v_proj")
QUICK = {"uneven": (3,), "biased": (2,)}  # model -> ranks; the others are slow
PROMPTS = ([1, 5, 6, 14, 7, 8, 18], [3], [9, 9, 4, 31], [40, 2, 17, 6, 6])
TOKENS = torch.tensor([1, 5, 6, 14, 7, 8, 18, 40, 3, 9, 44, 12])
CU_SEQLENS = torch.tensor([0, 7, 12])
POSITIONS = torch.tensor([*range(7), *range(5)])
MODES = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 5}}


def logits_of(decoder, *head) -> torch.Tensor:
    return decoder(TOKENS, POSITIONS, PackedAttention(CU_SEQLENS), *head)


def completions_of(decoder, mode: str) -> dict[str, torch.Tensor]:
    """Fewer slots than samples, and samples that end early: slots are given back and rows moved."""
    engine = Engine(decoder, max_slots=3, max_len=32)
    params = SamplingParams(9, n=2, stop_token_ids=(2, 7, 9, 12, 21, 33), **MODES[mode])
    found = []
    for group in generate(engine, PROMPTS, params):
        found += group
    lengths = torch.tensor([c.token_ids.numel() for c in found])
    probe = engine.score(PROMPTS[0], PROMPTS[3], 0.9)
    parts = {}
    for name in ("token_ids", "generator_logprobs"):
        parts[name] = torch.cat([getattr(c, name) for c in found])
    if decoder.tensor_parallel is None:
        # Of one rank alone: what others sample is compared with it.
        parts["margins"] = torch.cat([margins_of(full_forward_logits(decoder, c)) for c in found])
    return parts | {"lengths": lengths, "probe": probe}


def gradients_of(decoder) -> dict[str, torch.Tensor]:
    """Of a loss with the head inside when every rank has it whole, on logits when the vocabulary is
    split.
    """
    tp, labels = decoder.tensor_parallel, TOKENS.roll(-1)
    if tp is None or not tp.split_vocabulary:
        loss = logits_of(decoder, lambda h, w: F.cross_entropy(F.linear(h, w), labels))
    else:
        loss = F.cross_entropy(logits_of(decoder), labels)
    loss.backward()
    return {name: p.grad for name, p in named_parameters_hf(decoder)}


def adapted(path: Path, tp: TensorParallel | None):
    """A decoder with adapters beside all projections. A and B are of size 0.2."""
    config = read_config(path)
    targets = (*QKV, "o_proj", "up_proj", "down_proj", "gate_proj")
    lora = Lora(rank=3, alpha=2.0, targets=targets)
    config = dataclasses.replace(config, lora=lora)
    decoder = load_weights(build_decoder(config, tensor_parallel=tp), path)
    draw = torch.Generator().manual_seed(3)
    shapes = adapter_shapes(config)
    for name, parameter in adapters_of(decoder):
        whole = torch.randn(shapes[name], generator=draw) * 0.2
        box = held_box(decoder, name, parameter)
        parameter.data.copy_(whole[box.within(Box.whole(shapes[name]))])
    return decoder


def compute(path: Path, tp: TensorParallel | None) -> dict[str, torch.Tensor]:
    """Everything of interest, and the local weights."""

    def decoder(**changes):
        mine = dataclasses.replace(tp, **changes) if tp else None
        return load_weights(build_decoder(read_config(path), tensor_parallel=mine), path)

    out = {f"weight/{name}": p.detach() for name, p in named_parameters_hf(decoder())}
    out["logits"] = logits_of(decoder()).detach()
    for mode in MODES:
        found = completions_of(decoder().requires_grad_(False), mode)
        out |= {f"{mode}/{name}": value for name, value in found.items()}
    for kind, split in (("split", True), ("whole", False)):
        shared = decoder(split_vocabulary=split)
        shared.activation_checkpointing = kind == "whole"
        out |= {f"grad_{kind}/{name}": value for name, value in gradients_of(shared).items()}
        shared = adapted(path, dataclasses.replace(tp, split_vocabulary=split) if tp else None)
        out[f"adapted_{kind}/logits"] = logits_of(shared).detach()
        for name, value in gradients_of(shared).items():
            if value is not None:
                out[f"adapted_{kind}/{name}"] = value
    return {name: value.contiguous() for name, value in out.items()}


def compute_on_ranks(rank: int, directory: str, name: str, sizes: list[int]) -> None:
    """What one rank of the pool runs."""
    directory = Path(directory)
    for size in sizes:
        group = dist.new_group(list(range(size)))
        if rank < size:
            computed = compute(directory / name, TensorParallel(rank, size, group))
            save_file(computed, directory / f"{name}.{size}.rank{rank}.safetensors")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("tensor_parallel")
    shutil.copytree(tiny_directory(), root / "tiny")
    for seed, (name, raw) in enumerate(MODELS.items()):
        write_model(root / name, raw, seed=seed, scale=0.2)
    return root


@pytest.fixture(scope="module")
def ranks(pool, directory):
    """ranks(name, size): what each rank computed of a model, made when it is first asked for."""

    @functools.cache
    def ranks_of(name: str, size: int) -> list[dict[str, torch.Tensor]]:
        where = {"timeout_s": DEADLINE_S, "directory": str(directory)}
        pool.call(__file__, "compute_on_ranks", ranks=size, name=name, sizes=[size], **where)
        files = [directory / f"{name}.{size}.rank{rank}.safetensors" for rank in range(size)]
        return list(map(load_file, files))

    return ranks_of


@pytest.fixture(scope="module")
def alone(directory):
    """alone(name): what one process computes of a model."""

    @functools.cache
    def alone_of(name: str) -> dict[str, torch.Tensor]:
        return compute(directory / name, None)

    return alone_of


def cases() -> list:
    """Models, each with a number of ranks."""
    found = []
    for name, size in itertools.product(NAMES, SIZES):
        marks = () if size in QUICK.get(name, ()) else pytest.mark.slow
        found.append(pytest.param((name, size), marks=marks, id=f"{name}-{size}"))
    return found


@pytest.fixture(params=cases())
def case(request) -> tuple[str, int]:
    return request.param


@pytest.fixture
def name(case) -> str:
    return case[0]


@pytest.fixture
def one(alone, name) -> dict[str, torch.Tensor]:
    return alone(name)


@pytest.fixture
def several(ranks, case) -> list[dict[str, torch.Tensor]]:
    """What the ranks computed of the model, by rank."""
    return ranks(*case)


def boxed(config, parameter: str, whole, rank: int, size: int, split: bool = True):
    """A rank's part of a whole parameter."""
    shape = tuple(whole.shape)
    box = tensor_parallel_box(config, parameter, shape, rank, size, split_vocabulary=split)
    return whole[box.within(Box.whole(shape))]


@pytest.fixture
def config(directory, name):
    return read_config(directory / name)


def test_the_models_need_all_of_the_rules(directory):
    configs = {name: read_config(directory / name) for name in NAMES}
    assert not heads_of(configs["uneven"], 0, 2).uniform
    assert not heads_of(configs["biased"], 1, 2).uniform
    assert heads_of(configs["one_kv_head"], 0, 2).uniform
    assert heads_of(configs["one_kv_head"], 1, 3).num_query == 1
    vocabularies = [config.vocab_size for config in configs.values()]
    assert {size % ranks for size, ranks in itertools.product(vocabularies, SIZES)} > {0}


def test_a_rank_holds_its_part_of_every_parameter_and_no_more(config, several, one):
    names = {key for key in one if key.startswith("weight/")}
    sizes = []
    for rank, computed in enumerate(several):
        assert {key for key in computed if key.startswith("weight/")} == names
        for key in names:
            want = boxed(config, key.removeprefix("weight/"), one[key], rank, len(several))
            assert torch.equal(computed[key], want), key
        sizes.append(sum(computed[key].numel() for key in names if not is_whole(key)))
    whole = sum(one[key].numel() for key in names if not is_whole(key))
    assert max(sizes) < whole * 1.4 / len(several)


def is_whole(key: str) -> bool:
    """Whether every rank holds all of this parameter."""
    return "norm" in key


@pytest.fixture
def close(config, one) -> float:
    """How far two ways to compute the model's logits or logprobs may be apart."""
    return of_logprobs(config, size=float(one["logits"].std()))


def test_logits_are_those_of_one_rank_and_the_same_bits_on_all(several, one, close):
    assert all(torch.equal(rank["logits"], several[0]["logits"]) for rank in several)
    torch.testing.assert_close(several[0]["logits"], one["logits"], atol=close, rtol=0)


def completions_in(computed, mode: str) -> list[dict[str, torch.Tensor]]:
    """What was computed of each completion."""
    lengths = computed[f"{mode}/lengths"].tolist()
    names = ["token_ids", "generator_logprobs"]
    names += ["margins"] if f"{mode}/margins" in computed else []
    parts = zip(*(computed[f"{mode}/{name}"].split(lengths) for name in names), strict=True)
    return [dict(zip(names, part, strict=True)) for part in parts]


@pytest.mark.parametrize("mode", MODES)
def test_completions_are_those_of_one_rank_and_the_same_bits_on_all(several, one, mode, close):
    lengths = one[f"{mode}/lengths"].unique()
    assert mode == "greedy" or lengths.numel() > 2, "samples should end at different places"
    for rank in several:
        for what in ("lengths", "token_ids", "generator_logprobs", "probe"):
            assert torch.equal(rank[f"{mode}/{what}"], several[0][f"{mode}/{what}"]), what
    compared = left = 0
    pairs = zip(completions_in(several[0], mode), completions_in(one, mode), strict=True)
    for ours, theirs in pairs:
        both = ours["token_ids"], theirs["token_ids"]
        same = first_difference(*both)
        if mode == "greedy":
            assert_same_greedy(*both, theirs["margins"], close)
        got, want = ours["generator_logprobs"][:same], theirs["generator_logprobs"][:same]
        torch.testing.assert_close(got, want, atol=close, rtol=0)
        compared += same
        left += not torch.equal(*both)
    # A uniform number may lie within rounding of a token's edge, and two logits within rounding of
    # each other.
    assert left <= 1 and compared > 0.8 * one[f"{mode}/token_ids"].numel()
    probes = several[0][f"{mode}/probe"], one[f"{mode}/probe"]
    torch.testing.assert_close(*probes, atol=close, rtol=0)


@pytest.mark.parametrize("kind", ["split", "whole"])
def test_gradients_are_the_parts_of_one_ranks(config, several, one, kind):
    names = [key for key in one if key.startswith(f"grad_{kind}/")]
    largest = max(one[key].abs().max().item() for key in names)
    for rank, computed in enumerate(several):
        for key in names:
            if is_whole(key):
                torch.testing.assert_close(computed[key], several[0][key], atol=1e-7, rtol=1e-5)
            parameter = key.removeprefix(f"grad_{kind}/")
            want = boxed(config, parameter, one[key], rank, len(several), kind == "split")
            got = computed[key]
            assert got.shape == want.shape, f"{parameter} on rank {rank}"
            difference = (got - want).abs().max() if got.numel() else 0
            assert difference <= GRADIENTS * largest, f"{parameter} on rank {rank}"


def test_weights_of_another_shape_are_named_by_the_shape_of_the_whole(directory, tmp_path):
    path = shutil.copytree(directory / "uneven", tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] = torch.zeros(48, 76)
    save_file(weights, path / "model.safetensors")
    decoder = build_decoder(read_config(path), tensor_parallel=TensorParallel(0, 2, None))
    said = r"down_proj.weight: shape \(48, 76\), the config says \(48, 77\)"
    with pytest.raises(ValueError, match=said):
        load_weights(decoder, path)


def test_a_head_that_needs_the_whole_weight_is_refused_under_a_split_vocabulary(directory):
    with pytest.raises(ValueError, match="split_vocabulary=False"):
        gathered(torch.zeros(3), 53, TensorParallel(0, 2, None))


def test_fewer_query_heads_than_ranks_are_refused(directory):
    with pytest.raises(ValueError, match="6 query heads"):
        build_decoder(read_config(directory / "uneven"), tensor_parallel=TensorParallel(0, 7, None))


@pytest.mark.parametrize("kind", ["split", "whole"])
def test_adapters_give_the_logits_and_gradients_of_one_rank(config, several, one, kind, close):
    prefix = f"adapted_{kind}/"
    names = [key for key in one if key.startswith(prefix) and key.endswith((LORA_A, LORA_B))]
    assert {key.split(".")[-2] for key in names} >= {*QKV, "o_proj", "down_proj"}
    plain, adapted = one["logits"], one[f"{prefix}logits"]
    assert (adapted - plain).abs().max() > 100 * close, "adapters show"
    largest = max(one[key].abs().max() for key in names)
    for rank, computed in enumerate(several):
        assert (computed[f"{prefix}logits"] - adapted).abs().max() <= close
        for key in names:
            parameter = key.removeprefix(prefix)
            want = boxed(config, parameter, one[key], rank, len(several))
            assert (computed[key] - want).abs().max() <= GRADIENTS * largest, key
