"""The generator alone, with fakes on both sides: versions on tokens, pinned evaluations, what it
asks for, checkpoints, temperatures of tickets, and replicas in lockstep.
"""

import itertools
import json
import math
import threading
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, save

from executors.build import build_generator
from executors.build_trainer import build_trainer
from executors.generator import TRAIN, Generator
from llamarl.config.command_line import compose_config
from llamarl.errors import ParityError
from llamarl.evaluation.ask import SAMPLED, eval_completion
from llamarl.executor import ExecutorGroup
from llamarl.inference import SamplingParams, TemperatureRange
from llamarl.inference.build import build_native, build_vllm
from llamarl.launch.placement import Placement
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.parity import FULL, Canary, ParityLimits, Sequence
from llamarl.models.shape import Lora
from llamarl.tasks.parts import APART
from llamarl.tickets.service import TicketService
from llamarl.types import Completion, EvalCompletion, Policy, Prompt, Stretch
from tests.build.ledger import build_ledger
from tests.executors.fakes import FakeControl, FakeSender, FakeTickets, FakeWeights, seat
from tests.tolerances import of_logprobs

NATS = of_logprobs(read_config(tiny_directory()), size=2.0)
PROMPT = Prompt(torch.tensor([1, 5, 6, 14, 7, 8, 18]), "12+34=", {"answer": "46"})
GROUP, EVALS = 2, 3
SLOTS = 8
TOLERANCE = 0.01
IN_ONE_TOKEN = TOLERANCE * FULL**0.5  # a difference that makes that root mean square
LONG = {"new_tokens": 14, "least": 1, "temperature": 2.5, "chunk": 1}


def rank_of(rank, num_ranks, tensor_parallel=1):
    ranks = tuple(range(num_ranks))
    cpu = torch.device("cpu")
    return ExecutorGroup("generator", ranks, rank, cpu, tensor_parallel=tensor_parallel)


def generator(
    version=None,
    evaluate=False,
    *,
    grants=1,
    synchronous=False,
    in_flight=True,
    new_tokens=6,
    least=None,
    temperature=1.0,
    chunk=2,
    group=None,
    control=None,
    outputs=(),
    engine=None,
    **options,
):
    """A generator with the tiny model and fakes on both sides, to which the weights of `version`
    have come. engine: options of the engine.
    """
    group = group or rank_of(0, 1)
    least = new_tokens if least is None else least
    params = SamplingParams(
        new_tokens, min_new_tokens=least, temperature=temperature, n=GROUP, stop_token_ids=(2,)
    )
    sizes = {"model_dtype": "float32", "max_slots": SLOTS, "max_len": 32, **(engine or {})}
    made = Generator(
        build_engine=partial(build_native, model_path=str(tiny_directory()), **sizes),
        prompts=[PROMPT] * 100,
        eval_prompts=dict.fromkeys(range(EVALS), PROMPT),
        sampling=params,
        chunk_tokens=chunk,
        in_flight_updates=in_flight,
        parity=ParityLimits.of(fixed=TOLERANCE),
        tensor_parallel=group.tensor_parallel,
        **options,
    )
    weights = FakeWeights(in_order=group.tensor_parallel > 1)
    tickets = FakeTickets()
    tickets.grants, tickets.synchronous = grants, synchronous
    ends = {"inputs": {Policy: weights}, "outputs": outputs}
    seat(made, group=group, control=control, tickets=tickets, **ends)
    if version is not None:
        weights.arrive(version, evaluate)
    return made


def sent(g, kind=Completion):
    return g.outputs.of(kind).records


def run_until(g, count, kind=Completion):
    """Step until so many records are sent; return them."""
    while len(sent(g, kind)) < count:
        g.step()
    return sent(g, kind)


def take_turns(*generators):
    for g in generators:
        g.step()


def versions_of(completions):
    """Return the policy versions under which their tokens were sampled."""
    return set(torch.cat([c.policy_versions for c in completions]).tolist())


def place_of(completion):
    return completion.ticket, completion.sample_index


def canary_of(difference: float) -> dict:
    """What a trainer would say of the prompt's second half, but for `difference` in one logprob."""
    source = generator(0)
    source.step()
    ids = PROMPT.prompt_ids.tolist()
    logprobs = source.engine.score(ids[:3], ids[3:]).tolist()
    return Canary([Sequence(ids, 3)], [*logprobs[:-1], logprobs[-1] + difference], [], []).to_json()


def test_without_weights_or_room_it_samples_nothing_and_says_what_it_waits_for():
    g = generator()
    assert g.step() is False and g.tickets.asked == [] and g.waiting_for().startswith("weights:")
    g.weights.arrive(0)
    g.outputs.of(Completion).room = 0
    g.step()
    assert g.tickets.asked == [] and g.waiting_for().startswith("room:")


def test_a_version_is_compared_with_its_canary_before_anything_is_sampled_from_it():
    g = generator()
    g.weights.arrive(0, canary=canary_of(0.5 * IN_ONE_TOKEN))
    for completion in run_until(g, 1):
        told = completion.columns
        assert told["parity/canary_diff_max"] == pytest.approx(0.5 * IN_ONE_TOKEN, rel=1e-3)
        assert told["parity/canary_diff_rms"] < told["parity/canary_diff_max"]
    sampled, asked = g.engine.num_live, len(g.tickets.asked)
    g.weights.arrive(3, canary=canary_of(2 * IN_ONE_TOKEN))
    with pytest.raises(ParityError, match="rank 0 and the trainer on .* version 3: .* by 0.0"):
        g.step()
    assert g.engine.num_live == sampled and len(g.tickets.asked) == asked


def test_weights_that_are_not_the_trainers_are_seen_before_anything_is_sampled_from_them():
    g = generator()
    _, weights = g.weights.held()["model.norm.weight"]
    for version, value in ((0, float(weights[2])), (1, float(weights[2]) + 1e-6)):
        marks = [{"name": "model.norm.weight", "place": [2], "value": value}]
        g.weights.arrive(version, canary=canary_of(0.0) | {"marks": marks})
        if version == 0:
            g.step()
    sampled = g.engine.num_live
    with pytest.raises(ParityError, match="rank 0 does not hold .* version 1, .* 1 of 1"):
        g.step()
    assert g.engine.num_live == sampled and len(g.tickets.asked) == 1


@pytest.mark.parametrize("in_flight, stamps", [(True, {3, 4}), (False, {3})])
def test_weights_that_come_in_flight_stamp_the_later_tokens_and_others_wait(in_flight, stamps):
    g = generator(3, in_flight=in_flight)
    g.step()
    g.tickets.grants = 0
    g.weights.arrive(4)
    completions = run_until(g, GROUP)
    versions = [c.policy_versions.tolist() for c in completions]
    assert all(v == sorted(v) and set(v) == stamps for v in versions)
    g.step()
    assert g.version == 4


def test_tickets_begin_with_what_the_trainer_on_this_rank_has_published_if_it_may_come_in():
    g = generator(chunk=1, in_flight=False)
    g.weights.from_local = 3
    g.step()
    assert g.version == 3 and {version for _, version in g.tickets.asked} == {3}
    g.weights.from_local = 4
    g.step()
    assert g.engine.num_live and g.version == 3 and g.weights.from_local == 4


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_tickets_begin_with_what_this_ranks_trainer_is_about_to_make(is_evaluated):
    """Unless a version is pinned, which the newer one would have to wait for."""
    g = generator(0, is_evaluated, chunk=1)
    g.tickets.has_batch = True
    g.step()
    assert bool(g.tickets.asked) == is_evaluated
    g.tickets.has_batch = False
    g.weights.arrive(1)
    g.step()
    assert g.tickets.asked[-1][1] == (0 if is_evaluated else 1)


# --- Evaluations ---


def test_held_out_prompts_of_every_set_are_answered_under_their_numbers_by_the_pinned_version():
    options = {"least": 1, "temperature": 2.0, "eval_samples": 3}
    g = generator(5, True, grants=0, chunk=1, **options)
    g.eval_prompts = dict.fromkeys([0, APART, APART + 1, 2 * APART], PROMPT)
    g.step()
    g.weights.arrive(6)
    while len(sent(g, EvalCompletion)) < 4 * 4:
        assert g.version == 5
        g.step()
    answers = sent(g, EvalCompletion)
    greedy = {c.prompt_index: c.token_ids for c in answers if c.greedy}
    sampled = {(c.prompt_index, c.sample_index): c.token_ids for c in answers if not c.greedy}
    assert len(answers) == 4 * 4 and sorted(greedy) == list(g.eval_prompts)
    assert sorted(sampled) == list(itertools.product(g.eval_prompts, range(3)))
    assert versions_of(answers) == {5}
    assert len({tuple(ids.tolist()) for ids in greedy.values()}) == 1  # one prompt, greedily
    assert len({tuple(ids.tolist()) for ids in sampled.values()}) > 3  # by random numbers each
    g.step()
    assert g.version == 6


def num_evaluated(g):
    """How many held-out answers are being sampled."""
    return sum(sample.request.stream != TRAIN for sample in g.engine._running)


def test_an_evaluation_leaves_half_of_the_slots_to_tickets():
    g = generator(5, True, chunk=1, eval_samples=1)
    g.eval_prompts = dict.fromkeys(range(10), PROMPT)
    evaluated = []
    while len(sent(g, EvalCompletion)) < 20:
        g.step()
        evaluated.append(num_evaluated(g))
    assert max(evaluated) == SLOTS // 2
    assert g.tickets.asked[0] == (2, 5), "two groups of two have room beside them"
    assert len(sent(g)) >= 4, "which were sampled meanwhile"
    numbers = [c.prompt_index for c in sent(g, EvalCompletion) if c.greedy]
    assert sorted(numbers) == list(range(10))


class Rationed(FakeTickets):
    """Grants `left` tickets in all, and refuses what is more once it was asked for."""

    is_refused = False

    def __init__(self, left):
        super().__init__()
        self.left = left

    def ask(self, generator, count, version, *, is_idle=False):
        self.grants = min(count, self.left)
        self.left -= self.grants
        self.is_refused = self.grants < count
        return super().ask(generator, count, version, is_idle=is_idle)


def test_an_evaluation_takes_the_other_half_once_the_last_group_is_whole():
    g = generator(5, True, chunk=1)
    g.eval_prompts = dict.fromkeys(range(20), PROMPT)
    g.tickets = Rationed(left=1)
    beside = []
    while len(sent(g)) < GROUP:
        g.step()
        beside.append(num_evaluated(g))
    assert g.tickets.is_refused and max(beside) == SLOTS // 2
    g.step()
    assert g.engine.num_live == SLOTS


def test_a_prompt_of_more_answers_than_half_of_the_slots_is_evaluated_all_the_same():
    g = generator(5, True, grants=0, chunk=1, eval_samples=6)
    run_until(g, EVALS * 7, EvalCompletion)
    assert not g._evaluating


def test_in_step_with_the_trainer_it_asks_for_nothing_while_it_evaluates():
    g = generator(0, True, synchronous=True, chunk=1)
    g.step()
    assert g.engine.num_live and g.tickets.asked == []
    run_until(g, EVALS, EvalCompletion)
    g.step()
    assert g.tickets.asked[0] == (4, 0)  # eight free slots hold four groups of two


# --- What it asks for ---


class LateAnswers(FakeTickets):
    """Grants all that was asked for, but only `turns` turns after it was first asked."""

    def __init__(self, turns):
        super().__init__()
        control = {"is_leader": False, "leader": 0, "rank": 1}
        control |= {"post": self._asked, "take": self._answers}
        ledger = build_ledger(groups_per_step=1, overcommit=0)
        desk = TicketService(ledger, SimpleNamespace(**control), trainer_ranks=(0,), timeout_s=1)
        self.turns = turns
        self.now = 0
        self.mail = []
        self.ask, self.granted = desk.ask, desk.granted

    def _asked(self, rank, topic, payload):
        self.asked.append((payload["count"], payload["version"]))
        tickets = [[self.next + i, 1, None] for i in range(payload["count"])]
        self.next += len(tickets)
        self.mail.append((self.now + self.turns, {"tickets": tickets}))

    def _answers(self, topic):
        due = [(0, payload) for at, payload in self.mail if at <= self.now]
        self.mail = [(at, payload) for at, payload in self.mail if at > self.now]
        return due


@pytest.mark.parametrize("turns", [0, 4])
def test_it_is_never_granted_more_than_it_has_room_for_however_late_the_answer(turns):
    g = generator(0, chunk=1)
    g.tickets = LateAnswers(turns)
    submitted = []
    submit = g.engine.submit
    g.engine.submit = lambda *args, **options: (
        submitted.append(g.engine.free_slots - g.engine.num_waiting),
        submit(*args, **options),
    )
    for g.tickets.now in range(40):
        g.step()
        assert g.engine.num_waiting + g.engine.num_live <= SLOTS
    assert len(submitted) > SLOTS and all(room >= GROUP for room in submitted)
    assert all(count <= 4 for count, _ in g.tickets.asked)


# --- What the config says ---


def configured(*words, build=build_generator, **inputs):
    config = compose_config(list(words))
    given = {"model_path": "m", "prompts": None, "eval_prompts": {}, "fixed_prompts": []}
    given |= {"stop_token_ids": (2,), "eval_due": None, "decode": str, "lora": None, **inputs}
    job = SimpleNamespace(
        inputs=SimpleNamespace(**given),
        files=SimpleNamespace(sample_maker=None),
        placement=Placement(compose_config([]), 2),
    )
    return build(config, job)


def test_options_of_the_config_reach_the_generator_and_its_engine():
    made = configured(
        "generator.cache_tokens=640",
        "generator.prefill_chunk=7",
        "generator.recompute_kv=true",
        "eval.num_samples=3",
        "generator.chunk_tokens=5",
    )
    plain = configured()
    options = "recompute_kv", "eval_samples", "in_flight_updates", "chunk_tokens"
    assert [getattr(made, name) for name in options] == [True, 3, True, 5]
    assert [getattr(plain, name) for name in options] == [False, 0, True, 8]
    options = "cache_tokens", "prefill_chunk"
    assert [made.build_engine.keywords[name] for name in options] == [640, 7]
    assert [plain.build_engine.keywords[name] for name in options] == [None, 512]
    assert made.max_quantization_kl is None, "what is not quantised is compared as it is"
    g = generator(grants=0, engine={"cache_tokens": 64, "prefill_chunk": 3}, recompute_kv=True)
    assert (g.engine._cache.room.budget, g.engine._scheduler.prefill_chunk) == (64, 3)
    told = []
    g.engine.weights_changed = lambda version, **options: told.append((version, options))
    g.weights.arrive(4)
    g.step()
    assert told == [(4, {"recompute_kv": True})]


def test_the_config_names_the_engine(monkeypatch):
    monkeypatch.setattr("llamarl.inference.vllm_engine.vllm_problem", lambda: None)
    native = configured("generator.quantize=int8")
    assert native.build_engine.func is build_native
    assert (native.build_engine.keywords["quantize"], native.max_quantization_kl) == ("int8", 0.5)
    vllm = configured("generator=vllm")
    assert vllm.build_engine.func is build_vllm and type(vllm) is Generator
    lora = Lora(8, 32.0, ("q_proj",))
    adapted = configured("generator=vllm", "trainer.lora.rank=8", lora=lora)
    assert adapted.build_engine.keywords["lora"] is lora


# --- Temperatures that are drawn a ticket ---


LOW, HIGH = 0.7, 2.0
SEED = 11
DRAWN = TemperatureRange(LOW, HIGH, SEED)
TICKETS = 4


def test_it_is_uniform_and_a_function_of_seed_and_ticket_alone():
    temperatures = torch.tensor([DRAWN.of(ticket) for ticket in range(2000)])
    again = [TemperatureRange(LOW, HIGH, SEED).of(ticket) for ticket in reversed(range(200))]
    assert again[::-1] == pytest.approx(temperatures[:200].tolist(), abs=0.0, rel=1e-7)
    shares = (temperatures.double() - LOW) / (HIGH - LOW)
    assert 0 <= shares.min() and shares.max() < 1
    # Kolmogorov-Smirnov at one in a thousand.
    place = torch.arange(2000) / 2000
    farthest = (shares.sort().values - place).abs().max()
    assert farthest < 1.95 / math.sqrt(2000)
    other = TemperatureRange(LOW, HIGH, SEED + 1)
    assert all(other.of(ticket) != DRAWN.of(ticket) for ticket in range(9))


def test_logprobs_are_those_of_what_the_ticket_was_sampled_from():
    g = generator(0, grants=TICKETS, new_tokens=8, temperatures=DRAWN)
    g.step()
    finish([g])
    assert len(sent(g)) == GROUP * TICKETS
    for completion in sent(g):
        ids = completion.token_ids
        at = DRAWN.of(completion.ticket)
        # Its end token is banned, as min_new_tokens says: the mass of the others alone.
        logprobs_LV = g.engine.score_all(PROMPT.prompt_ids, ids, at).clone()
        logprobs_LV[:, 2] = -torch.inf
        expected = logprobs_LV.log_softmax(1).gather(1, ids[:, None]).squeeze(1)
        assert torch.allclose(completion.generator_logprobs, expected, atol=1e-4)
        elsewhere = g.engine.score_all(PROMPT.prompt_ids, ids, at + 0.2)
        at_another = elsewhere.gather(1, ids[:, None]).squeeze(1)
        assert not torch.allclose(completion.generator_logprobs, at_another, atol=1e-3)


def test_held_out_prompts_and_the_canary_have_the_runs_temperature():
    g = generator(temperatures=DRAWN, eval_samples=1, temperature=1.0)
    submitted = []
    submit = g.engine.submit

    def noting(ticket, prompt_ids, params, *, stream=0):
        submitted.append((stream, ticket, params.temperature))
        submit(ticket, prompt_ids, params, stream=stream)

    g.engine.submit = noting
    # What the trainer says at 1: at any of the drawn ones it would differ.
    g.weights.arrive(0, evaluate=True, canary=canary_of(0.0))
    g.step()
    assert {t for stream, _, t in submitted if stream == SAMPLED} == {1.0}
    assert [t for stream, _, t in submitted if stream == TRAIN] == [DRAWN.of(0)]


def test_the_config_gives_the_range_to_the_generator_and_takes_the_comparison_from_the_trainer():
    made = configured("generator.temperature=[0.7,2]", "seed=11")
    assert made.temperatures == DRAWN and made.sampling.temperature == 1.0
    assert configured().temperatures is None
    words = ("generator.temperature=[0.7,2]", "generator.temperature=[1,1]", "seed=1")
    parity = [configured(word, build=build_trainer).settings.parity for word in words]
    assert [one is not None for one in parity] == [False, True, True]


# --- Checkpoints ---


def stored(state):
    """As a checkpoint keeps it: safetensors and JSON."""
    tensors = {k: v.contiguous() for k, v in state.items() if isinstance(v, torch.Tensor)}
    others = {k: v for k, v in state.items() if k not in tensors}
    return json.loads(json.dumps(others)) | load(save(tensors))


def begun(steps, replicas=1, **options):
    """Generators that have begun TICKETS groups of completions of many lengths, and have then made
    some steps.
    """
    made = []
    share = TICKETS // replicas
    for rank in range(replicas):
        g = generator(0, grants=share, group=rank_of(rank, replicas), **LONG | options)
        g.tickets.next = rank * share
        g.step()
        g.tickets.grants = 0
        for _ in range(steps):
            g.step()
        made.append(g)
    return made


def resumed(parts, replicas=1, working=None, **options):
    """Other generators, with the same weights, that load what was saved. working: the tickets that
    are in work; those of the parts.
    """
    if working is None:
        working = set(itertools.chain.from_iterable(part["in_work"] for part in parts))
    made = []
    for rank in range(replicas):
        g = generator(grants=0, group=rank_of(rank, replicas), **LONG | options)
        g.tickets.working = working
        g.load_state_dict(stored(part) for part in parts)
        assert not sent(g) and g.step() is False, "nothing is decoded before there are weights"
        g.weights.arrive(0)
        made.append(g)
    return made


def by_place(*generators):
    """Return {(ticket, sample_index): completion} of what they have sent."""
    completions = list(itertools.chain.from_iterable(map(sent, generators)))
    found = {place_of(completion): completion for completion in completions}
    assert len(found) == len(completions), "a completion was sent twice"
    return found


def sent_by(generators):
    """Return {(ticket, sample_index): (tokens, finish_reason)} of what they have sent."""
    found = by_place(*generators)
    return {place: (c.token_ids.tolist(), c.finish_reason) for place, c in found.items()}


def finish(generators):
    """Step generators to the end of their work; return all that they sent, as `sent_by` does."""
    for g in generators:
        g.tickets.grants = 0
        while g.step():
            pass
        assert not g.engine.num_live and not g._begun
    return sent_by(generators)


@pytest.mark.parametrize("steps, before, after", [(0, 1, 1), (5, 1, 3), (2, 2, 1)])
def test_unfinished_groups_go_on_token_for_token_in_any_number_of_generators(steps, before, after):
    expected = finish(begun(0))
    assert len({len(tokens) for tokens, _ in expected.values()}) > 3, "lengths that differ"
    first = begun(steps, before)
    parts = [g.state_dict() for g in first]
    working = set(itertools.chain.from_iterable(part["in_work"] for part in parts))
    whole = {key: value for key, value in sent_by(first).items() if key[0] not in working}
    num_sent = Counter(ticket for ticket, _ in whole)
    assert all(number == GROUP for number in num_sent.values())
    is_partly_sent = not working.isdisjoint(ticket for ticket, _ in sent_by(first))
    assert is_partly_sent == (steps > 0), "else nothing would be sent again"
    again = finish(resumed(parts, after))
    assert not again.keys() & whole.keys() and again | whole == expected


@pytest.mark.bitwise("a resumed completion is the one that was not stopped")
def test_partial_completions_go_on_at_their_tickets_temperature():
    drawn = {"temperatures": DRAWN, "least": LONG["new_tokens"]}
    first = begun(1, **drawn)
    part = first[0].state_dict()
    assert sorted(part["in_work"]) == list(range(TICKETS)), "nothing has ended yet"
    second = resumed([part], **drawn)
    assert finish(second) == finish(first)
    whole = by_place(*first)
    for key, completion in by_place(*second).items():
        assert completion.generator_logprobs.tolist() == whole[key].generator_logprobs.tolist()


def test_the_leader_is_told_which_tickets_go_on_and_can_have_them_ended():
    (first,) = begun(1)
    (g,) = resumed([first.state_dict()], working={1, 2})
    assert g.tickets.went_on == [1, 2]
    g.tickets.orders = [2]
    ended = {ticket for (ticket, _), (_, reason) in finish([g]).items() if reason == "aborted"}
    assert ended == {2}


def test_a_checkpoint_right_after_a_resume_holds_the_same():
    (first,) = begun(2)
    part = first.state_dict()
    (g,) = resumed([part])
    once_more = g.state_dict()
    assert once_more["in_work"] == part["in_work"]
    expected = finish([first])
    again = finish(resumed([once_more]))
    assert again == {key: value for key, value in expected.items() if key[0] in part["in_work"]}


def test_held_out_prompts_are_no_work_in_hand():
    g = generator(0, True, grants=0, chunk=1)
    g.step()
    assert g.engine.num_live and g.state_dict() == {"in_work": []}


def test_ranks_that_share_a_model_save_once_and_go_on_together(replica):
    leader, peer = replica(0, **LONG)
    take_turns(*(peer, leader) * 6)
    leader.tickets.grants = 0
    peer.step()
    part, nothing = leader.state_dict(), peer.state_dict()
    assert part["in_work"] and nothing == {"in_work": []}
    leader, peer = replica(0, grants=0, **LONG)
    for g in (leader, peer):
        g.tickets.working = frozenset(part["in_work"])
        g.load_state_dict([stored(part), nothing])
    assert leader.engine.num_waiting == peer.engine.num_waiting > 0
    settle(leader, peer)
    assert leader._sampled == peer._sampled > 0 and not sent(peer)
    mine = sorted(part["in_work"])[1::2]  # the second of two replicas
    assert sorted(map(place_of, sent(leader))) == list(itertools.product(mine, range(GROUP)))


# --- Completions that end where they are ---


def with_tickets(tickets):
    """A generator that has sampled a chunk of each of so many tickets."""
    g = generator(0, grants=tickets)
    g.step()
    g.tickets.grants = 0
    return g


def test_at_an_order_a_tickets_completions_end_with_the_tokens_so_far_and_no_others():
    uncut = with_tickets(2)
    finish([uncut])
    g = with_tickets(2)
    g.tickets.orders = [1]
    assert g.step() and {c.ticket for c in sent(g)} == {1}
    finish([g])
    whole, cut = by_place(uncut), by_place(g)
    assert cut.keys() == whole.keys()
    for (ticket, _), mine in cut.items():
        theirs = whole[place_of(mine)]
        n = len(mine.token_ids)
        assert (mine.finish_reason == "aborted") == (n < len(theirs.token_ids)) == (ticket == 1)
        assert 0 < n and mine.token_ids.tolist() == theirs.token_ids[:n].tolist()
        torch.testing.assert_close(
            mine.generator_logprobs, theirs.generator_logprobs[:n], rtol=0, atol=NATS
        )


def test_an_order_in_the_turn_of_its_tickets_grant_is_not_lost_and_a_late_one_changes_nothing():
    g = generator(0, grants=2)
    g.tickets.orders = [0]
    g.step()
    reasons = sorted((ticket, reason) for (ticket, _), (_, reason) in finish([g]).items())
    assert reasons == [(0, "aborted")] * GROUP + [(1, "length")] * GROUP
    g.tickets.orders = [0]
    assert not g.step() and g.tickets.orders == [] and len(sent(g)) == 2 * GROUP


def test_after_max_seconds_a_completion_ends_but_no_evaluation(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("executors.generator.time", SimpleNamespace(monotonic=lambda: now[0]))
    g = generator(0, True, max_seconds=5.0, chunk=1)
    g.step()
    g.tickets.grants = 0
    now[0] += 5.0
    assert g._expired() == [], "the limit has not passed"
    now[0] += 0.1
    assert not sent(g, EvalCompletion), "all of it is at work when it does"
    g.step()
    assert [c.finish_reason for c in sent(g)] == ["aborted"] * GROUP
    finish([g])
    reasons = [c.finish_reason for c in sent(g, EvalCompletion)]
    assert len(reasons) == EVALS and "aborted" not in reasons


# --- Replicas of several ranks: two generators in one process, each with the whole model, where
# ranks of a group would share it ---


@pytest.fixture
def replica(monkeypatch):
    """Makes a leader on rank 2 and a peer on rank 3, the second replica of ranks 0 to 3."""
    # No collectives: each computes all.
    monkeypatch.setattr("llamarl.models.tp.TensorParallel.of", lambda *_, **__: None)

    def make(*arrived, **options):
        boxes = {}
        made = []
        for rank in (2, 3):
            ends = {"group": rank_of(rank, 4, 2), "control": FakeControl(rank, boxes)}
            made.append(generator(*arrived, **ends, **options))
        return made

    return make


def settle(leader, peer):
    """Step both until neither has had anything to do for a while."""
    leader.tickets.grants = 0
    idle = 0
    for _ in range(200):
        idle = 0 if peer.step() | leader.step() else idle + 1
        if idle == 3:
            return
    raise AssertionError("they find no rest")


def test_a_replica_of_one_rank_posts_nothing():
    g = generator(0, True)
    run_until(g, 1)
    g.teardown()
    assert g.control.posts == []


def test_weights_are_swapped_when_every_rank_has_them_and_not_before(replica):
    leader, peer = replica()
    leader.weights.arrive(0)
    take_turns(*(peer, leader) * 3)
    assert leader.version == peer.version == -1 and leader.waiting_for().startswith("weights:")
    peer.weights.arrive(0)
    take_turns(peer, leader, peer)
    assert leader.version == peer.version == 0
    peer.weights.arrive(1)
    take_turns(*(peer, leader) * 3)
    assert leader.version == peer.version == 0
    assert leader.engine.num_live, "work goes on while weights are awaited"
    leader.weights.arrive(1)
    settle(leader, peer)
    assert leader.version == peer.version == 1


def test_while_a_replica_is_pinned_newer_versions_overtake_each_other_on_all_its_ranks(replica):
    leader, peer = both = replica(0, True, new_tokens=20, chunk=1, eval_samples=1)
    take_turns(*(peer, leader) * 4)
    assert leader.version == 0 and leader._evaluating
    for version in (1, 2, 3):
        assert all(g.weights.arrive(version) for g in both), "a pinned replica holds up a version"
        assert not leader.weights.arrive(version + 1)
        take_turns(*(peer, leader, peer) * 3)
        assert leader._evaluating and leader.weights.staged is None and peer.weights.staged is None
    for g in both:
        assert g.weights.arrive(4, evaluate=True) and not g.weights.arrive(5)
    take_turns(*(peer, leader) * 3)
    assert leader._evaluating, "4 must be evaluated"
    assert leader.weights.staged.version == peer.weights.staged.version == 4
    settle(leader, peer)
    assert leader.version == peer.version == 4


def test_a_peer_samples_what_its_leader_samples_and_sends_nothing(replica):
    leader, peer = replica(0, True, chunk=3)
    finished = []
    pop = peer.engine.pop_finished
    peer.engine.pop_finished = lambda: finished.extend(found := pop()) or found
    peer.step()
    for version in range(1, 5):
        take_turns(*(leader, peer) * 4)
        for g in (leader, peer):
            g.weights.arrive(version)
    settle(leader, peer)
    told = [*sent(leader), *sent(leader, EvalCompletion)]
    assert len(sent(leader)) > GROUP and len(versions_of(told)) > 1

    def key(completion):
        is_of_training = isinstance(completion, Completion)
        return (
            completion.ticket if is_of_training else completion.prompt_index,
            completion.sample_index,
            len(completion.token_ids),
            completion.policy_versions.tolist(),
            completion.token_ids.tolist(),
        )

    made = [c if stream == TRAIN else eval_completion(stream, c) for stream, c in finished]
    assert sorted(map(key, told)) == sorted(map(key, made))
    assert not sent(peer) and not sent(peer, EvalCompletion) and peer.tickets.asked == []
    counters = [g.metrics.counters["generator/tokens"] for g in (leader, peer)]
    assert counters == [leader._sampled, 0]
    assert {topic for _, topic in peer.control.posts} == {"held/generator"}
    assert {rank for rank, _ in leader.control.posts} == {3}
    # Of three held-out prompts the second is the second replica's.
    assert [c.prompt_index for c in sent(leader, EvalCompletion)] == [1]
    before = len(leader.control.posts)
    for _ in range(5):
        assert not leader.step() | peer.step()
    assert len(leader.control.posts) == before, "an idle leader posts nothing"


def test_a_peer_ends_what_its_leader_ends(replica):
    leader, peer = replica(0, grants=2)
    take_turns(*(peer, leader, peer) * 2)
    leader.tickets.grants, leader.tickets.orders = 0, [1]
    take_turns(leader, peer)
    assert 1 not in leader._begun and not peer._begun, "the leader alone looks at the clock"
    settle(leader, peer)
    assert peer._sampled == leader._sampled
    assert {c.ticket: c.finish_reason for c in sent(leader)}[1] == "aborted"


def test_ranks_that_have_come_apart_say_so(replica):
    leader, peer = replica(0)
    take_turns(peer, leader, peer)
    peer._sampled += 1
    leader.step()
    said = "generator ranks 2 and 3 share a model but have sampled"
    with pytest.raises(RuntimeError, match=said):
        peer.step()


def test_a_leader_needs_its_peers_until_the_last_version_has_nothing_in_work(replica):
    leader, peer = replica(0)
    for _ in range(2):
        assert leader.partners(0) == [3] and not peer.partners(0)
        take_turns(peer, leader, peer)
        assert leader.version == 0 and leader.engine.num_live
    settle(leader, peer)
    assert not leader.partners(0) and leader.partners(1) == [3]


def test_a_peer_ends_after_what_its_leader_had_begun(replica):
    leader, peer = replica(0)
    assert peer.follows and not leader.follows
    take_turns(peer, leader)  # a swap and a chunk are on their way
    ending = threading.Thread(target=peer.teardown)
    ending.start()
    until = time.monotonic() + 30
    while peer._sampled < leader._sampled and time.monotonic() < until:
        time.sleep(0.01)
    assert ending.is_alive() and peer._sampled == leader._sampled > 0
    leader.step()
    leader.teardown()
    ending.join(5)
    assert not ending.is_alive() and peer._sampled == leader._sampled


def test_a_peer_whose_leader_failed_does_not_wait_for_its_end(replica):
    _, peer = replica()
    peer.control.failure = RuntimeError("rank 2 failed")
    began = time.monotonic()
    peer.teardown()
    assert time.monotonic() - began < 10


# --- Stretches ---


def streaming_generator(num_readers=1, **options):
    readers = [FakeSender() for _ in range(num_readers)]
    g = generator(0, chunk=1, outputs=[(Stretch, reader) for reader in readers], **options)
    g.step()
    return g, readers


def heard(stretches):
    """What stretches say of each completion, which must follow each other without a gap."""
    told, ended = {}, set()
    for stretch in stretches:
        had = told.setdefault(place_of(stretch), [])
        assert stretch.begin == len(had) and place_of(stretch) not in ended
        had += stretch.token_ids.tolist()
        ended |= {place_of(stretch)} if stretch.has_ended else set()
    return told, ended


@pytest.mark.parametrize("in_flight", [True, False])
def test_what_is_sampled_is_told_after_every_chunk_and_is_the_completions(in_flight):
    """Whatever weights come meanwhile."""
    g, (first, second) = streaming_generator(num_readers=2, in_flight=in_flight)
    live = [s for s in first.records if not s.has_ended]
    assert live and all(s.begin == 0 and s.token_ids.numel() == 1 for s in live)
    for version in range(1, 4):
        take_turns(g, g)
        g.weights.arrive(version)
    run_until(g, 2 * GROUP)
    told, ended = heard(first.records)
    for completion in sent(g):
        assert place_of(completion) in ended
        assert told[place_of(completion)] == completion.token_ids.tolist()
    assert second.records == first.records
    assert any(len(versions_of([c])) > 1 for c in sent(g)) == in_flight


def test_without_room_for_stretches_it_decodes_on_and_tells_more_at_once():
    g, (reader,) = streaming_generator()
    before = reader.room = len(reader.records)
    for _ in range(3):
        assert g.step()
    assert len(reader.records) == before
    reader.room = 100
    g.step()
    assert reader.records[before].token_ids.numel() == 4
    reader.room = 0
    run_until(g, GROUP)  # what ends meanwhile is told by its completion alone
    reader.room = 100
    take_turns(*[g] * 20)
    _, ended = heard(reader.records)
    assert ended and not ended & {place_of(c) for c in sent(g)[:GROUP]}


def test_what_is_ended_by_an_order_is_told_as_ended():
    g, (reader,) = streaming_generator()
    g.step()
    (ticket, *_) = {s.ticket for s in reader.records}
    g.tickets.orders = [ticket]
    g.step()
    told, ended = heard(reader.records)
    assert ended >= {(ticket, index) for index in range(GROUP)}
    aborted = [c for c in sent(g) if c.finish_reason == "aborted"]
    assert {c.ticket for c in aborted} == {ticket}
    for completion in aborted:
        assert told[place_of(completion)] == completion.token_ids.tolist()
