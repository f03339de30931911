"""Routes of a mixture of experts: noted by the engine, carried by completions, replayed by the
trainer.

The generator takes the experts with the lowest scores. So its logprobs are another model's, unless
the trainer takes the same ones.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from llamarl.comm import wire
from llamarl.environments.engine import with_context
from llamarl.inference import Engine, SamplingParams
from llamarl.inference.partials import pack as packed_state
from llamarl.inference.partials import unpack
from llamarl.learning.logprobs import label_logprobs
from llamarl.learning.packing import pack
from llamarl.learning.replay import _joined
from llamarl.learning.sft import NextToken, pair_of
from llamarl.learning.targets import Targets
from llamarl.models.attention import PackedAttention
from llamarl.models.routing import Routing
from llamarl.types import NO_ROUTES, Completion, Group, Outcome
from tests.build.completion import build_completion
from tests.build.group import build_group
from tests.build.model_config import model_config
from tests.decoding import drain, our_decoder, random_decoder, whole_logits
from tests.random_models import SIZES, save_drawn
from tests.tolerances import of_logprobs
from tests.updating import go_on, update_of

CPU = torch.device("cpu")
FIELDS = SIZES | {
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LOGPROBS = of_logprobs(model_config(hidden_size=48, intermediate_size=80), size=10.0)
STOPS = tuple(range(2, 12))  # so that rows end at unlike times
PROMPTS = ([5, 6, 7, 8, 9], [11, 12, 13])


@pytest.fixture(scope="module", params=["qwen3_moe", "lfm2_moe"])
def directory(request, tmp_path_factory):
    """A model whose layers attend, and one that reads each sequence by itself."""
    path = tmp_path_factory.mktemp(request.param)
    fields = FIELDS | {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    if request.param == "lfm2_moe":
        fields |= {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
    config = AutoConfig.for_model(request.param, **fields)
    save_drawn(AutoModelForCausalLM.from_config(config), path)
    return path


def with_worst(decoder):
    """A decoder whose routers choose the experts with the lowest scores."""
    choose = decoder.routing._choose

    def worst(number, scores_TE, best):
        indices = scores_TE.neg().topk(best.indices.shape[1]).indices
        return choose(
            number, scores_TE, torch.return_types.topk((scores_TE.gather(1, indices), indices))
        )

    decoder.routing._choose = worst
    return decoder


def engine_of(directory, **options):
    decoder = with_worst(our_decoder(directory).eval())
    given = {"max_slots": 3, "max_len": 40, "prefill_chunk": 4, "notes_routes": True}
    return Engine(decoder, device="cpu", **given | options)


def submit(engine, new_tokens=14):
    params = SamplingParams(max_new_tokens=new_tokens, stop_token_ids=STOPS, n=4)
    for ticket, prompt in enumerate(PROMPTS):
        engine.submit(ticket, prompt, params)


def sampled(directory, **options):
    """Completions of two prompts, of which rows are moved, and a prompt that comes in chunks."""
    engine = engine_of(directory, **options)
    submit(engine)
    return list(drain(engine).values())


def groups_of(completions):
    groups = []
    for ticket in range(len(PROMPTS)):
        scored = [(c, Outcome.score(c.sample_index)) for c in completions if c.ticket == ticket]
        groups.append(Group.of(scored))
    return groups


def differences(directory, completions, *, replays=True):
    """[R] the trainer's logprobs minus the generator's, of all tokens."""
    decoder = our_decoder(directory)
    decoder.routing.replays = replays
    groups = groups_of(completions)
    targets = [Targets.of(g, torch.ones_like(g.rewards)) for g in groups]
    packing = pack(groups, targets, budget_tokens=1000, skip_zero_advantage=False)
    (batch,) = packing.microbatches
    logprobs = label_logprobs(decoder, batch, CPU, temperature=1.0)
    return logprobs - batch.generator_logprobs


def test_the_ratio_of_a_replayed_route_is_one(directory):
    completions = sampled(directory)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    assert differences(directory, completions).abs().max() <= LOGPROBS
    assert differences(directory, completions, replays=False).abs().max() > 0.1

    def permuted(completion):
        routes = completion.routes
        return dataclasses.replace(completion, routes=routes.where(routes == 0, routes % 6 + 1))

    assert differences(directory, list(map(permuted, completions))).abs().max() > 0.1


def test_routes_come_through_messages(directory):
    completions = sampled(directory)
    none = dataclasses.replace(completions[0], routes=NO_ROUTES)
    sent = wire.decode(wire.encode([none, *completions]))
    assert not sent[0].routes.numel()
    for one, other in zip(sent[1:], completions, strict=True):
        assert torch.equal(one.routes, other.routes) and one.routes.dtype == torch.uint8


def test_a_partial_completion_has_its_routes_when_it_has_ended(directory):
    """Ended ones come through a checkpoint; others are read again by another engine, or behind
    what the environment said."""
    engine = engine_of(directory)
    submit(engine)
    engine.step(3)
    ended = [completion for _, completion in engine.pop_finished()]
    partials = engine.export_partials()
    params = SamplingParams(max_new_tokens=14, stop_token_ids=STOPS)
    again = list(unpack(packed_state([*ended, *partials]), 0, 0, lambda ticket: params))
    engine = engine_of(directory)
    for one in again:
        if not isinstance(one, Completion):
            engine.submit_partial(one)
    completions = [one for one in again if isinstance(one, Completion)]
    assert len(completions) == len(ended) > 0
    completions += drain(engine).values()
    assert len(completions) == 8
    assert differences(directory, completions).abs().max() <= LOGPROBS
    assert not with_context(completions[0], [7], 0).routes.numel()


def test_routes_are_kept_and_recomputed_as_keys_and_values_are(directory):
    engine = engine_of(directory)
    submit(engine)
    engine.step(3)
    before = [completion for _, completion in engine.pop_finished()]
    with torch.no_grad():
        for parameter in engine.decoder.parameters():
            parameter.mul_(1.1)
    engine.weights_changed(1, recompute_kv=True)
    completions = list(drain(engine).values())
    assert len(before) + len(completions) == 8
    decoder = our_decoder(directory)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.1)
    decoder.routing.replays = True
    for one in completions:
        ids = torch.cat([one.prompt_ids, one.token_ids])
        attention = PackedAttention(torch.tensor([0, len(ids) - 1]))
        attention.routes = one.routes[:-1]
        with torch.no_grad():
            logits = decoder(ids[:-1], torch.arange(len(ids) - 1), attention)
        logprobs = logits.log_softmax(1)[len(one.prompt_ids) - 1 :]
        own = logprobs.gather(1, one.token_ids[:, None])[:, 0]
        is_new = one.policy_versions == 1
        assert (own - one.generator_logprobs)[is_new].abs().max() <= LOGPROBS


def test_a_step_replays_and_says_how_routes_differ(directory):
    """Also where layers are computed again in backward."""
    completions = sampled(directory)
    rows = {}
    weights = []
    for replays, recomputes in ((True, False), (True, True), (False, False)):
        if recomputes and our_decoder(directory).config.is_read_alone:
            continue
        decoder = our_decoder(directory).train()
        decoder.activation_checkpointing = recomputes
        update = update_of(decoder, temperature=1.0, replays_routes=replays, lr=1e-3)
        rows[replays] = update.run(groups_of(completions), 1, go_on)
        if replays:
            weights.append([p.detach().clone() for p in decoder.parameters()])
    for one, other in zip(weights[0], weights[-1], strict=True):
        torch.testing.assert_close(one, other)
    assert rows[True]["moe/route_diff"] > 0.9, "the worst are not the best"
    assert rows[True]["ratio/mean"] == pytest.approx(1.0, abs=1e-3)
    assert "moe/route_diff" not in rows[False]
    assert abs(rows[False]["ratio/mean"] - 1) > 0.01
    assert all(1 <= row["moe/load_max"] <= 6 for row in rows.values())


def test_load_is_of_the_most_loaded_expert_over_the_mean():
    """Of 4 experts, 2 tokens choose 1 and 2, and 1 and 3: expert 1 has 2 of 4, four times a mean of
    1 is 2. All to one pair: 2 and 2 of 4."""
    routing = random_routing()
    routing.num_experts = 4
    note(routing, "taken", [[1, 2], [1, 3]], [[1, 2], [3, 0]])
    assert float(routing.load_max()) == (2.0 + 1.0) / 2
    note(routing, "own", [[2, 1], [1, 0]], [[1, 2], [3, 0]])
    assert routing.differing(torch.tensor([0, 1, 1])).tolist() == [0.0, 0.5, 0.5]


def random_routing():
    routing = Routing(nn.Module(), nn.ModuleList())
    routing.routers = [nn.Identity(), nn.Identity()]
    routing.passes.append({})
    return routing


def note(routing, of, *choices):
    for number, choice in enumerate(choices):
        routing.passes[0][of, number] = torch.tensor(choice)


def test_routers_choose_in_float32_whatever_layers_compute_in(directory):
    """Of experts in pairs, whose logits bfloat16 could not tell apart."""
    decoder = our_decoder(directory, dtype=torch.bfloat16)
    found = []
    for router in decoder.routing.routers:
        router.register_forward_hook(lambda m, args, made: found.append((m, args[0], made)))
        router.weight.data[1::2] = router.weight.data[::2] * (1 + 2**-7)
    with torch.no_grad():
        whole_logits(decoder, torch.arange(50) + 3)
        routers = set()
        for router, hidden_TD, (_, weights_TK, chosen_TK) in found:
            logits_TE = nn.functional.linear(hidden_TD.float(), router.weight.float())
            assert torch.equal(chosen_TK, logits_TE.topk(2).indices)
            assert weights_TK.dtype == torch.bfloat16, "the experts'"
            routers.add(router)
    assert routers == set(decoder.routing.routers)


def test_the_load_balancing_loss_is_transformers(directory):
    decoder = our_decoder(directory)
    pairs = [pair_of(torch.arange(3, 8), torch.arange(9, 15))]
    batch = NextToken().pack(pairs, CPU)
    size = batch.rows.numel()
    loss, sums, _ = NextToken().loss(decoder, batch)
    with torch.no_grad():
        alone, more, _ = NextToken().loss(decoder, batch)
    if decoder.config.architecture != "Qwen3MoeForCausalLM":
        assert "moe/balance_loss" not in sums, "transformers has none for it"
        return
    theirs = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    made = theirs(pairs[0].token_ids[None, :-1], output_router_logits=True, use_cache=False)
    wanted = 0.5 * load_balancing_loss_func(made.router_logits, 6, 2)
    torch.testing.assert_close(sums["moe/balance_loss"] / size, wanted.detach())
    torch.testing.assert_close(loss.detach(), alone + wanted.detach() * size)
    assert "moe/balance_loss" not in more, "held-out rows are measured without"
    (gradient,) = torch.autograd.grad(wanted, theirs.model.layers[0].mlp.gate.weight)
    NextToken().loss(decoder, batch)
    router = decoder.routing.routers[0].weight
    (got,) = torch.autograd.grad(decoder.routing.balance_loss(), router)
    torch.testing.assert_close(got, gradient)


def routed(group):
    """A group whose tokens' routes are the tokens themselves; 0 is no token."""
    ids = torch.cat([group.prompt_ids, group.token_ids]).to(torch.uint8)
    return dataclasses.replace(group, routes=ids[:, None, None].repeat(1, 3, 2))


def test_every_token_is_packed_with_its_own_route():
    """Beside a group without routes, of a prompt that goes on with context, with a completion that
    is read anew, and drawn again from a replay buffer.
    """
    context = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]], dtype=torch.bool)
    opened = build_group(
        1,
        [4, 4, 4],
        [1.0, 0.5, float("nan")],
        token_ids=torch.tensor([4, 5, 6, 7, 4, 5, 8, 9, 1, 2, 3, 4]),
        loss_mask=torch.cat([*context, torch.ones(4, dtype=torch.bool)]),
    )
    anew = build_group(
        2,
        [5],
        [1.0],
        loss_mask=torch.tensor([True, False, False, True, True]),
        restarts=torch.tensor([False, True, False, False, False]),
    )
    without = build_group(0, [3, 2], prompt=[30, 31], token_ids=torch.arange(32, 37))
    groups = [without, routed(opened), routed(anew)]
    rows = []
    for place, span in ((1, slice(4, 8)), (0, slice(0, 4))):
        row = SimpleNamespace(group=groups[1], place=place, span=span, reward=1.0)
        rows.append(row)
    groups.append(_joined(rows))
    targets = [Targets.of(g, torch.ones_like(g.rewards)) for g in groups]
    packing = pack(groups, targets, budget_tokens=1000, skip_zero_advantage=False)
    (batch,) = packing.microbatches
    routes_T = batch.routes[:, 2, 1].long()
    is_without = batch.input_ids >= 30
    assert is_without.sum() == 2 + 2 + 1
    assert batch.routes.shape[1:] == (3, 2) and (routes_T[is_without] == 0).all()
    assert torch.equal(routes_T[~is_without], batch.input_ids[~is_without])
    assert 8 in routes_T and 5 in routes_T, "a completion's own token, and one of the opening"


def test_a_group_has_the_routes_of_its_completions_and_zeros_for_others():
    routes = torch.arange(1, 6, dtype=torch.uint8)[:, None, None]
    whole = build_completion(0, 0, [7, 8, 9], prompt=(5, 6), routes=routes)
    without = build_completion(0, 1, [7], prompt=(5, 6))
    group = Group.of([(without, Outcome.score(1.0)), (whole, Outcome.score(0.0))])
    assert group.routes.flatten().tolist() == [1, 2, 3, 4, 5, 0]
    with pytest.raises(ValueError, match="routes of 5 tokens"):
        build_completion(0, 0, [7, 8], prompt=(5, 6), routes=routes)
    with pytest.raises(ValueError, match="routes of 5 tokens"):
        build_group(0, [1], prompt=2, routes=routes)


def test_routers_that_cannot_be_replayed_are_named(tmp_path):
    """Phi's choose by another rule than topk; DeepSeek's V2 weigh experts of other groups 0."""
    for family, more, name in (
        ("phimoe", {"num_local_experts": 4}, "PhimoeSparseMoeBlock"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "DeepseekV2TopkRouter"),
    ):
        config = AutoConfig.for_model(family, **(FIELDS | more))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        routing = Routing.of(model, model.model.layers)
        assert routing.unknown == name


def test_a_dense_model_has_no_routes():
    assert random_decoder().routing is None
