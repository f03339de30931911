"""Two tensor-parallel ranks compute with transformers' modules what one rank computes: logits,
completions, gradients, adapters, given routes, scores; and hold only their part. For each family
that can be split.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from llamarl.inference import Engine, SamplingParams, generate
from llamarl.models.build import build_decoder, read_config
from llamarl.models.fsdp import held_box
from llamarl.models.hf import load_weights, named_parameters_hf
from llamarl.models.loading import load_scorer
from llamarl.models.lora import adapters_of
from llamarl.models.shape import Lora
from llamarl.models.sharding import (
    EXPERTS,
    Box,
    adapter_shapes,
    kind_of,
    tensor_parallel_box,
    why_not_split,
)
from llamarl.models.tp import TensorParallel
from tests.decoding import full_forward_logits
from tests.random_models import save_drawn
from tests.small_families import FAMILIES, config_of, packed, sequences
from tests.tolerances import assert_same_greedy, margins_of, rounding

pytestmark = pytest.mark.machine

UNSPLIT = {
    "apertus": "plan leaves out .*alpha_p",
    "bitnet": "has no plan",
    "gpt2": "has no plan",
    "hunyuan_v1_dense": "has no plan",
    "lfm2": "has no plan",
    "llama4_text": "experts is moe_tp_experts",
    "opt": "has no plan",
    "stablelm": "has no plan",
}
SPLIT = [family for family in FAMILIES if family not in UNSPLIT]
# Fast: norms of heads, joined projections with norms of their whole width, experts beside whole
# attention, experts beside split attention.
FAST = ("gemma3_text", "gpt_oss", "olmo3", "qwen3_moe")
EACH = [pytest.param(f, marks=() if f in FAST else pytest.mark.slow) for f in SPLIT]
CPU = torch.device("cpu")
SIZE = 2
DEADLINE_S = 200
LOGITS = rounding(terms=48, depth=2 * 2 * 4, size=10.0)
GRADIENTS = rounding(terms=48, depth=2 * 2 * 2 * 4)  # of the largest
PARTS = ("weight", "gradient", "adapter")


def read(path, **changes):
    return dataclasses.replace(read_config(path, "transformers"), **changes)


def logits_of(decoder, *head):
    return packed(decoder, sequences(), *head)


def gradients_of(decoder) -> dict[str, torch.Tensor]:
    """Of a loss inside the head, whose weight every rank has."""
    labels = torch.cat([one.roll(-1) for one in sequences()])

    def loss_of(h_TD, weight_VD):
        return F.cross_entropy(decoder.project(h_TD, weight_VD), labels)

    loss = logits_of(decoder, loss_of)
    if decoder.routing:
        balance = decoder.routing.balance_loss()
        loss = loss if balance is None else loss + balance
    loss.backward()
    named = named_parameters_hf(decoder)
    return {name: p.grad for name, p in named if p.grad is not None}


def completions_of(decoder) -> dict[str, torch.Tensor]:
    engine = Engine(decoder, max_slots=2, max_len=40, device="cpu")
    params = SamplingParams(max_new_tokens=8, temperature=0.0)
    prompts = [ids.tolist() for ids in sequences()]
    found = [group[0] for group in generate(engine, prompts, params)]
    made = {"tokens": torch.cat([c.token_ids for c in found])}
    made["logprobs"] = torch.cat([c.generator_logprobs for c in found])
    if decoder.tensor_parallel is None:
        logits = [full_forward_logits(decoder, c) for c in found]
        made["margins"] = torch.cat([margins_of(one) for one in logits])
    return made


def routed(decoder) -> dict[str, torch.Tensor]:
    """Logits by random routes."""
    routing = decoder.routing
    if routing is None:
        return {}
    shape = (sum(map(len, sequences())), len(routing.routers), routing.num_experts)
    scores_TME = torch.rand(shape, generator=torch.Generator().manual_seed(4))
    routing.replays = True
    routes_TMK = scores_TME.topk(routing.taken.shape[2]).indices + 1
    logits = packed(decoder, sequences(), routes=routes_TMK).detach()
    routing.replays = False
    return {"routed logits": logits, "routes": routing.taken}


def adapted(path, tp):
    """A decoder with adapters beside all projections. A and B are of size 0.1."""
    config = read(path, lora=Lora(rank=2, alpha=2.0, targets=("all-linear",)))
    decoder = load_weights(build_decoder(config, tensor_parallel=tp), path)
    draw = torch.Generator().manual_seed(3)
    shapes = adapter_shapes(config)
    for name, parameter in adapters_of(decoder):
        whole = torch.randn(shapes[name], generator=draw) * 0.1
        box = held_box(decoder, name, parameter)
        parameter.data.copy_(whole[box.within(Box.whole(shapes[name]))])
    return decoder


def compute(path: Path, tp: TensorParallel | None) -> dict[str, torch.Tensor]:
    decoder = load_weights(build_decoder(read(path), tensor_parallel=tp), path)
    made = {f"weight/{name}": p.detach().clone() for name, p in named_parameters_hf(decoder)}
    made["logits"] = logits_of(decoder).detach()
    made |= routed(decoder)
    made |= {f"gradient/{name}": grad for name, grad in gradients_of(decoder).items()}
    made |= completions_of(decoder.requires_grad_(False).eval())
    decoder = adapted(path, tp)
    made["adapted logits"] = logits_of(decoder).detach()
    made |= {f"adapter/{name}": grad for name, grad in gradients_of(decoder).items()}
    return {name: value.contiguous() for name, value in made.items()}


def compute_on_ranks(rank: int, path: str) -> None:
    """What one rank of the pool runs."""
    group = dist.new_group(list(range(SIZE)))
    save_file(compute(Path(path), TensorParallel(rank, SIZE, group)), f"{path}/rank{rank}.out")


@pytest.fixture(scope="module")
def computed(tmp_path_factory, pool):
    """computed(family): its config, what one process computes, and what each rank does."""

    @functools.cache
    def of(family):
        path = tmp_path_factory.mktemp(family)
        config = config_of(family)
        config.output_router_logits = True
        config.router_aux_loss_coef = 0.5
        save_drawn(AutoModelForCausalLM.from_config(config), path)
        pool.call(__file__, "compute_on_ranks", ranks=SIZE, timeout_s=DEADLINE_S, path=str(path))
        ranks = [load_file(path / f"rank{rank}.out") for rank in range(SIZE)]
        return read(path), compute(path, None), ranks

    return of


@pytest.mark.proves("split")
@pytest.mark.parametrize("family", EACH)
def test_two_ranks_compute_what_one_does(computed, family):
    config, one, ranks = computed(family)
    names = {name for name in one if name.startswith(PARTS)}
    largest = dict.fromkeys(PARTS, 0.0)
    for name in names:
        part = name.partition("/")[0]
        largest[part] = max(largest[part], float(one[name].abs().max()))
    for rank, made in enumerate(ranks):
        assert made.keys() == one.keys() - {"margins"}
        assert torch.equal(made["logits"], ranks[0]["logits"]), "the same bits"
        for name in made.keys() & {"logits", "adapted logits", "routed logits"}:
            size = max(1, one[name].std())
            assert (made[name] - one[name]).abs().max() <= LOGITS * size, name
        for name in names:
            part, _, parameter = name.partition("/")
            whole = one[name]
            box = tensor_parallel_box(config, parameter, tuple(whole.shape), rank, SIZE)
            wanted = whole[box.within(Box.whole(tuple(whole.shape)))]
            limit = 0 if part == "weight" else GRADIENTS * largest[part]
            assert made[name].shape == wanted.shape, name
            assert (made[name] - wanted).abs().max() <= limit, f"{name} on rank {rank}"
        if "routes" in one:
            assert torch.equal(made["routes"], one["routes"])
            assert (one["routed logits"] - one["logits"]).abs().max() > 100 * LOGITS
        assert torch.equal(made["tokens"], ranks[0]["tokens"]), "all ranks sample the same"
        assert torch.equal(made["logprobs"], ranks[0]["logprobs"])
    assert_same_greedy(ranks[0]["tokens"], one["tokens"], one["margins"], LOGITS)
    shared = [n for n in names if n.startswith("weight") and ranks[0][n].shape != one[n].shape]
    projections = [n for n in shared if one[n].dim() > 1]
    experts = [n for n in shared if kind_of(config, n[7:].rpartition(".")[0]) == EXPERTS]
    assert len(projections) >= 2 * config.num_hidden_layers - 1
    assert bool(experts) == ("num_experts_per_tok" in FAMILIES[family])
    for name in shared:
        assert ranks[0][name].numel() * SIZE == one[name].numel(), name


def scores_of(path: Path, tp: TensorParallel | None) -> torch.Tensor:
    scorer = load_scorer(path, device=CPU, dtype=torch.float32, tensor_parallel=tp)
    with torch.no_grad():
        return logits_of(scorer)


def score_on_ranks(rank: int, path: str) -> None:
    """What one rank of the pool runs."""
    group = dist.new_group(list(range(SIZE)))
    scores = scores_of(Path(path), TensorParallel(rank, SIZE, group))
    save_file({"scores": scores}, f"{path}/rank{rank}.out")


def test_two_ranks_score_as_one_does(tmp_path, pool):
    config = config_of("gemma2")
    config.num_labels = 3
    theirs = save_drawn(AutoModelForSequenceClassification.from_config(config), tmp_path)
    pool.call(__file__, "score_on_ranks", ranks=SIZE, timeout_s=DEADLINE_S, path=str(tmp_path))
    wanted = scores_of(tmp_path, None)
    with torch.no_grad():
        lasts = [theirs(one[None]).logits[0] for one in sequences()]
    ends = torch.tensor([len(one) for one in sequences()]).cumsum(0) - 1
    assert (wanted[ends] - torch.stack(lasts)).abs().max() <= LOGITS
    for rank in range(SIZE):
        scores = load_file(tmp_path / f"rank{rank}.out")["scores"]
        assert (scores - wanted).abs().max() <= LOGITS * max(1, wanted.std())


def small(tmp_path, family, **fields) -> Path:
    config = config_of(family)
    for name, value in fields.items():
        setattr(config, name, value)
    save_drawn(AutoModelForCausalLM.from_config(config), tmp_path)
    return tmp_path


REFUSED = [(family, {}, 2, said) for family, said in UNSPLIT.items()]
REFUSED += [
    ("smollm3", {}, 4, "at most 2 share its heads evenly"),
    ("smollm3", {"intermediate_size": 47}, 2, "has 47 rows"),
    ("phi", {"qk_layernorm": True}, 2, "leaves out .*q_layernorm.weight"),
    ("qwen3_moe", {"num_experts": 3}, 2, "has 3 rows"),
]


@pytest.mark.parametrize("family, fields, size, said", REFUSED)
def test_a_model_that_ranks_cannot_share_is_refused_before_it_is_built(
    tmp_path, family, fields, size, said
):
    config = read(small(tmp_path, family, **fields))
    assert why_not_split(config, 1) is None
    with pytest.raises(ValueError, match=f"{size} ranks cannot share its layers: .*{said}"):
        build_decoder(config, tensor_parallel=TensorParallel(0, size, None))
