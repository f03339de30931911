"""The generator alone, with fakes on both sides: versions on tokens, pinned evaluations, what it
asks for, and replicas in lockstep.
"""

import itertools
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from executors.build import build_generator
from executors.generator import TRAIN, Generator
from llamarl.config.command_line import compose_config
from llamarl.ddma.receiver import Staged
from llamarl.errors import ParityError
from llamarl.evaluation.ask import eval_completion
from llamarl.executor import ExecutorGroup
from llamarl.inference.build import build_native, build_vllm
from llamarl.models.config import Lora, read_config, tiny_directory
from llamarl.tasks.parts import APART
from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.service import TicketService
from llamarl.types import Completion, EvalCompletion, Stretch
from tests.executors.fakes import FakeMail, FakeTickets, Outbox
from tests.executors.generators import (
    EVALS,
    GROUP,
    IN_ONE_TOKEN,
    PROMPT,
    canary_of,
    generator,
    stored,
)
from tests.tolerances import of_logprobs

NATS = of_logprobs(read_config(tiny_directory()), size=2.0)


def versions_of(completions):
    """Return the policy versions under which their tokens were sampled."""
    stamps = torch.cat([c.policy_versions for c in completions])
    return set(stamps.tolist())


def test_without_weights_it_samples_nothing_and_says_what_it_waits_for():
    g = generator()
    assert g.step() is False and g.tickets.asked == [] and g.waiting_for().startswith("weights:")


def test_a_version_is_compared_with_its_canary_before_anything_is_sampled_from_it():
    g = generator()
    g.weights.staged = Staged(0, canary=canary_of(0.5 * IN_ONE_TOKEN))
    g.step()
    while not g.outputs.of(Completion):
        g.step()
    for completion in g.outputs.of(Completion):
        told = completion.columns
        assert told["parity/canary_diff_max"] == pytest.approx(0.5 * IN_ONE_TOKEN, rel=1e-3)
        assert told["parity/canary_diff_rms"] < told["parity/canary_diff_max"]
    sampled, asked = g.engine.num_live, len(g.tickets.asked)
    g.weights.staged = Staged(3, canary=canary_of(2 * IN_ONE_TOKEN))
    with pytest.raises(ParityError, match="rank 0 and the trainer on .* version 3: .* by 0.0"):
        g.step()
    assert g.engine.num_live == sampled and len(g.tickets.asked) == asked


def test_weights_that_are_not_the_trainers_are_seen_before_anything_is_sampled_from_them():
    g = generator()
    _, weights = g.weights.held()["model.norm.weight"]
    for version, value in ((0, float(weights[2])), (1, float(weights[2]) + 1e-6)):
        marks = [{"name": "model.norm.weight", "place": [2], "value": value}]
        g.weights.staged = Staged(version, canary=canary_of(0.0) | {"marks": marks})
        if version == 0:
            g.step()
    sampled = g.engine.num_live
    with pytest.raises(ParityError, match="rank 0 does not hold .* version 1, .* 1 of 1"):
        g.step()
    assert g.engine.num_live == sampled and len(g.tickets.asked) == 1


def test_weights_that_come_in_flight_stamp_the_later_tokens():
    g = generator()
    g.weights.staged = Staged(3)
    g.step()
    g.tickets.grants = 0
    g.weights.staged = Staged(4)
    while g.engine.num_live:
        g.step()
    versions = [c.policy_versions.tolist() for c in g.outputs.of(Completion)]
    assert len(versions) == GROUP and all(v == sorted(v) and set(v) == {3, 4} for v in versions)


def test_tickets_begin_with_what_the_trainer_on_this_rank_has_published():
    g = generator()
    g.weights.from_local = 3
    g.step()
    assert g.version == 3
    assert {version for _, version in g.tickets.asked} == {3}


def test_nothing_is_waited_for_where_no_version_may_be_taken_in():
    g = generator(chunk=1, in_flight=False)
    g.weights.staged = Staged(3)
    g.step()
    g.weights.from_local = 4
    g.step()
    assert g.engine.num_live and g.version == 3 and g.weights.from_local == 4


def test_without_in_flight_updates_running_completions_keep_their_version():
    g = generator(in_flight=False)
    g.weights.staged = Staged(3)
    g.step()
    g.tickets.grants = 0
    g.weights.staged = Staged(4)
    while not g.outputs.of(Completion):
        g.step()
    assert all(set(c.policy_versions.tolist()) == {3} for c in g.outputs.of(Completion))
    g.step()
    assert g.version == 4


def test_the_prompts_of_every_set_are_answered_once_under_their_numbers():
    g = generator(chunk=1, eval_samples=1)
    g.eval_prompts = dict.fromkeys([0, APART, APART + 1, 2 * APART], PROMPT)
    g.tickets.grants = 0
    g.weights.staged = Staged(5, must_load=True, evaluate=True)
    while len(g.outputs.of(EvalCompletion)) < 8:
        g.step()
    answers = g.outputs.of(EvalCompletion)
    asked = sorted((c.prompt_index, c.greedy) for c in answers)
    assert asked == list(itertools.product(g.eval_prompts, (False, True)))
    greedy = {tuple(c.token_ids.tolist()) for c in answers if c.greedy}
    sampled = {tuple(c.token_ids.tolist()) for c in answers if not c.greedy}
    assert len(greedy) == 1 and len(sampled) > 1  # of one prompt, by random numbers of their own


def test_an_evaluation_leaves_half_of_the_slots_to_tickets():
    g = generator(chunk=1, eval_samples=1)
    g.eval_prompts = dict.fromkeys(range(10), PROMPT)
    g.weights.staged = Staged(5, must_load=True, evaluate=True)
    evaluated = []
    while len(g.outputs.of(EvalCompletion)) < 20:
        g.step()
        running = [sample.request.stream for sample in g.engine._running]
        evaluated.append(len(running) - running.count(TRAIN))
    assert max(evaluated) == 4, "of eight slots"
    first = g.tickets.asked[0]
    assert first == (2, 5), "two groups of two have room beside them"
    assert len(g.outputs.of(Completion)) >= 4, "which were sampled meanwhile"
    numbers = [c.prompt_index for c in g.outputs.of(EvalCompletion) if c.greedy]
    assert sorted(numbers) == list(range(10))


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_tickets_begin_with_what_this_ranks_trainer_is_about_to_make(is_evaluated):
    """Unless a version is pinned, which the newer one would have to wait for."""
    g = generator(chunk=1)
    g.weights.staged = Staged(0, must_load=True, evaluate=is_evaluated)
    g.tickets.has_batch = True
    g.step()
    assert bool(g.tickets.asked) == is_evaluated
    g.tickets.has_batch = False
    g.weights.staged = Staged(1)
    g.step()
    assert g.tickets.asked[-1][1] == (0 if is_evaluated else 1)


class Rationed(FakeTickets):
    """Grants `left` tickets in all, and refuses what is more once it was asked for."""

    def __init__(self, left):
        super().__init__(synchronous=False)
        self.left = left
        self.has_refused = False

    @property
    def is_refused(self):
        return self.has_refused

    def ask(self, generator, count, version, *, is_idle=False):
        self.grants = min(count, self.left)
        self.left -= self.grants
        self.has_refused = self.grants < count
        return super().ask(generator, count, version, is_idle=is_idle)


def test_an_evaluation_takes_the_other_half_once_the_last_group_is_whole():
    g = generator(chunk=1)
    g.eval_prompts = dict.fromkeys(range(20), PROMPT)
    g.tickets = Rationed(left=1)
    g.weights.staged = Staged(5, must_load=True, evaluate=True)
    beside = []
    while len(g.outputs.of(Completion)) < GROUP:
        g.step()
        running = [sample.request.stream for sample in g.engine._running]
        beside.append(len(running) - running.count(TRAIN))
    assert g.tickets.is_refused and max(beside) == 4, "of eight slots"
    g.step()
    assert g.engine.num_live == 8


def test_a_prompt_of_more_answers_than_half_of_the_slots_is_evaluated_all_the_same():
    g = generator(chunk=1, eval_samples=6)
    g.tickets.grants = 0
    g.weights.staged = Staged(5, must_load=True, evaluate=True)
    while len(g.outputs.of(EvalCompletion)) < EVALS * 7:
        g.step()
    assert not g._evaluating


def test_in_step_with_the_trainer_it_asks_for_nothing_while_it_evaluates():
    g = generator(synchronous=True, chunk=1)
    g.weights.staged = Staged(0, must_load=True, evaluate=True)
    g.step()
    assert g.engine.num_live and g.tickets.asked == []
    while len(g.outputs.of(EvalCompletion)) < EVALS:
        g.step()
    g.step()
    assert g.tickets.asked[0] == (4, 0)  # eight free slots hold four groups of two


def test_a_full_channel_downstream_stops_it():
    g = generator()
    g.weights.staged = Staged(0)
    g.outputs.of(Completion).has_room = lambda: False
    g.step()
    assert g.tickets.asked == [] and g.waiting_for().startswith("room:")


class LateAnswers(FakeTickets):
    """Grants all that was asked for, but only `turns` turns after it was first asked."""

    def __init__(self, turns):
        super().__init__(synchronous=False)
        self.control = SimpleNamespace(
            is_leader=False, leader=0, rank=1, post=self._asked, take=self._answers
        )
        self.desk = TicketService(
            TicketLedger(groups_per_step=1, max_lag=1, overcommit=0),
            self.control,
            trainer_ranks=(0,),
            timeout_s=1,
        )
        self.turns = turns
        self.now = 0
        self.mail = []
        self.ask, self.granted = self.desk.ask, self.desk.granted

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
    g = generator(chunk=1)
    g.tickets = LateAnswers(turns)
    g.weights.staged = Staged(0)
    submitted = []
    submit = g.engine.submit
    g.engine.submit = lambda *args, **options: (
        submitted.append(g.engine.free_slots - g.engine.num_waiting),
        submit(*args, **options),
    )
    for g.tickets.now in range(40):
        g.step()
        assert g.engine.num_waiting + g.engine.num_live <= 8, "more than there are slots"
    assert len(submitted) > 8 and all(room >= GROUP for room in submitted)
    assert all(count <= 4 for count, _ in g.tickets.asked)


def test_options_of_the_engine_reach_it():
    g = generator(cache_tokens=64, prefill_chunk=3, recompute_kv=True)
    assert (g.engine._cache.room.budget, g.engine._scheduler.prefill_chunk) == (64, 3)
    told = []
    g.engine.weights_changed = lambda version, **options: told.append((version, options))
    g.weights.arrive(4)
    g.tickets.grants = 0
    g.step()
    assert told == [(4, {"recompute_kv": True})]


def job_of_two_ranks():
    inputs = SimpleNamespace(
        model_path="m",
        prompts=None,
        eval_prompts={},
        stop_token_ids=(2,),
        decode=str,
        lora=None,
    )
    placement = {"trainer": (0,), "generator": (1,), "reward": (1,)}
    return SimpleNamespace(inputs=inputs, placement=placement)


def test_options_of_the_config_reach_the_generator():
    job = job_of_two_ranks()
    own = [
        "generator.cache_tokens=640",
        "generator.prefill_chunk=7",
        "generator.recompute_kv=true",
        "eval.num_samples=3",
        "generator.chunk_tokens=5",
    ]
    made, plain = (build_generator(compose_config(words), job) for words in (own, []))
    options = "recompute_kv", "eval_samples", "in_flight_updates", "chunk_tokens"
    assert [getattr(made, name) for name in options] == [True, 3, True, 5]
    assert [getattr(plain, name) for name in options] == [False, 0, True, 8]
    options = "cache_tokens", "prefill_chunk"
    assert [made.build_engine.keywords[name] for name in options] == [640, 7]
    assert [plain.build_engine.keywords[name] for name in options] == [None, 512]
    assert made.max_quantization_kl is None, "what is not quantised is compared as it is"


def test_the_config_names_the_engine(monkeypatch):
    monkeypatch.setattr("llamarl.inference.vllm_engine.vllm_problem", lambda: None)
    job = job_of_two_ranks()
    native = build_generator(compose_config(["generator.quantize=int8"]), job)
    assert native.build_engine.func is build_native
    assert (native.build_engine.keywords["quantize"], native.max_quantization_kl) == ("int8", 0.5)
    vllm = build_generator(compose_config(["generator=vllm"]), job)
    assert vllm.build_engine.func is build_vllm and type(vllm) is Generator
    job.inputs.lora = Lora(8, 32.0, ("q_proj",))
    adapted = build_generator(compose_config(["generator=vllm", "trainer.lora.rank=8"]), job)
    assert adapted.build_engine.keywords["lora"] is job.inputs.lora


def test_held_out_prompts_are_also_sampled_under_the_pinned_version():
    g = generator(chunk=1, least=1, temperature=2.0, eval_samples=3)
    g.tickets.grants = 0
    g.weights.arrive(5, evaluate=True)
    g.step()
    g.weights.arrive(6)
    while len(g.outputs.of(EvalCompletion)) < EVALS * 4:
        assert g.version == 5
        g.step()
    answers = list(g.outputs.of(EvalCompletion))
    greedy = {c.prompt_index: c.token_ids for c in answers if c.greedy}
    sampled = {(c.prompt_index, c.sample_index): c.token_ids for c in answers if not c.greedy}
    assert len(answers) == EVALS * 4 and sorted(greedy) == list(range(EVALS))
    assert sorted(sampled) == list(itertools.product(range(EVALS), range(3)))
    assert versions_of(answers) == {5}
    assert len({tuple(ids.tolist()) for ids in greedy.values()}) == 1  # one prompt, greedily
    assert len({tuple(ids.tolist()) for ids in sampled.values()}) > 3
    g.step()
    assert g.version == 6


# --- checkpoints ---


def begun(steps, replicas=1, tickets=4):
    """Generators that have begun `tickets` groups of completions of many lengths, and have then
    made some steps.
    """
    made = []
    for rank in range(replicas):
        g = generator(
            group=ExecutorGroup("generator", tuple(range(replicas)), rank, torch.device("cpu")),
            **LONG,
        )
        g.weights.arrive(0)
        g.tickets.grants, g.tickets.next = tickets // replicas, rank * tickets // replicas
        g.step()
        g.tickets.grants = 0
        for _ in range(steps):
            g.step()
        made.append(g)
    return made


def resumed(parts, replicas, working, step=0):
    """Other generators, with the same weights, that load what was saved."""
    made = []
    for rank in range(replicas):
        g = generator(
            group=ExecutorGroup("generator", tuple(range(replicas)), rank, torch.device("cpu")),
            **LONG,
        )
        g.tickets.grants = 0
        g.tickets.working = working
        g.tickets.resumed_step = step
        g.load_state_dict(stored(part) for part in parts)
        assert not g.outputs.of(Completion) and g.step() is False, (
            "nothing is decoded before there are weights"
        )
        g.weights.arrive(step)
        made.append(g)
    return made


def sent_by(generators):
    """Return {(ticket, sample_index): (tokens, finish_reason)} of what they have sent."""
    sent = []
    for g in generators:
        sent += g.outputs.of(Completion)
    found = {(c.ticket, c.sample_index): (c.token_ids.tolist(), c.finish_reason) for c in sent}
    assert len(found) == len(sent), "a completion was sent twice"
    return found


def finish(generators):
    """Step generators to the end of their work; return all that they sent, as `sent_by` does."""
    for g in generators:
        while g.step():
            pass
    return sent_by(generators)


LONG = {"new_tokens": 14, "least": 1, "temperature": 2.5, "chunk": 1}


@pytest.mark.parametrize("steps, before, after", [(0, 1, 1), (5, 1, 3), (2, 2, 1)])
def test_unfinished_groups_go_on_token_for_token_in_any_number_of_generators(steps, before, after):
    expected = finish(begun(0))
    assert len({len(tokens) for tokens, _ in expected.values()}) > 3, "lengths that differ"
    first = begun(steps, before)
    parts = [g.state_dict() for g in first]
    working = set()
    for part in parts:
        working |= set(part["in_work"])
    whole = {key: value for key, value in sent_by(first).items() if key[0] not in working}
    num_sent = Counter(ticket for ticket, _ in whole)
    assert all(number == GROUP for number in num_sent.values())
    is_partly_sent = not working.isdisjoint(ticket for ticket, _ in sent_by(first))
    assert is_partly_sent == (steps > 0), "else nothing would be sent again"
    again = finish(resumed(parts, after, working))
    assert not again.keys() & whole.keys() and again | whole == expected


def test_the_leader_is_told_which_tickets_go_on_and_can_have_them_ended():
    (first,) = begun(1)
    (g,) = resumed([first.state_dict()], 1, working={1, 2})
    assert g.tickets.went_on == [1, 2]
    g.tickets.orders = [2]
    reasons = {ticket: set() for ticket in (1, 2)}
    for (ticket, _), (_, reason) in finish([g]).items():
        reasons[ticket].add(reason)
    assert "aborted" in reasons[2] and "aborted" not in reasons[1]


def test_a_checkpoint_right_after_a_resume_holds_the_same():
    (first,) = begun(2)
    part = first.state_dict()
    (g,) = resumed([part], 1, working=set(part["in_work"]))
    once_more = g.state_dict()
    assert once_more["in_work"] == part["in_work"]
    expected = finish(begun(0))
    again = finish(resumed([once_more], 1, working=set(part["in_work"])))
    assert again == {key: value for key, value in expected.items() if key[0] in part["in_work"]}


def test_held_out_prompts_are_no_work_in_hand():
    g = generator(chunk=1)
    g.tickets.grants = 0
    g.weights.arrive(0, evaluate=True)
    g.step()
    assert g.engine.num_live and g.state_dict() == {"in_work": []}


def test_ranks_that_share_a_model_save_once_and_go_on_together(replica):
    leader, peer = replica(**LONG)
    for g in (leader, peer):
        g.weights.arrive(0)
    for _ in range(6):
        peer.step(), leader.step()
    leader.tickets.grants = 0
    peer.step()
    part, nothing = leader.state_dict(), peer.state_dict()
    assert part["in_work"] and nothing == {"in_work": []}
    leader, peer = replica(**LONG)
    leader.tickets.grants = 0
    for g in (leader, peer):
        g.tickets.working = frozenset(part["in_work"])
        g.load_state_dict([stored(part), nothing])
        g.weights.arrive(0)
    assert leader.engine.num_waiting == peer.engine.num_waiting > 0
    settle(leader, peer)
    assert leader._sampled == peer._sampled > 0 and not peer.outputs.of(Completion)
    mine = sorted(part["in_work"])[1::2]  # the second of two replicas
    sent = sorted((c.ticket, c.sample_index) for c in leader.outputs.of(Completion))
    assert sent == list(itertools.product(mine, range(GROUP)))


# -- completions that end where they are


def finish_all(g):
    """ticket -> its completions, once nothing is in work any more."""
    g.tickets.grants = 0
    while g.step():
        pass
    assert not g.engine.num_live and not g._begun
    out = {}
    for completion in g.outputs.of(Completion):
        out.setdefault(completion.ticket, []).append(completion)
    return out


def with_tickets(tickets, **options):
    """A generator that has sampled a chunk of each of so many tickets."""
    g = generator(**options)
    g.tickets.grants = tickets
    g.weights.staged = Staged(0)
    g.step()
    return g


def test_at_an_order_a_tickets_completions_end_with_the_tokens_so_far_and_no_others():
    whole = finish_all(with_tickets(2))
    g = with_tickets(2)
    g.tickets.grants, g.tickets.orders = 0, [1]
    assert g.step() and {c.ticket for c in g.outputs.of(Completion)} == {1}
    cut = finish_all(g)
    assert [c.token_ids.tolist() for c in cut[0]] == [c.token_ids.tolist() for c in whole[0]]
    assert len(cut[1]) == GROUP
    for mine, uncut in zip(cut[1], whole[1]):
        n = len(mine.token_ids)
        assert mine.finish_reason == "aborted" and 0 < n < len(uncut.token_ids)
        assert mine.token_ids.tolist() == uncut.token_ids[:n].tolist()
        torch.testing.assert_close(
            mine.generator_logprobs, uncut.generator_logprobs[:n], rtol=0, atol=NATS
        )


def test_an_order_in_the_turn_of_its_tickets_grant_is_not_lost():
    g = generator()
    g.tickets.grants, g.tickets.orders = 2, [0]
    g.weights.staged = Staged(0)
    g.step()
    done = finish_all(g)
    assert [c.finish_reason for c in done[0]] == ["aborted"] * GROUP
    assert [c.finish_reason for c in done[1]] == ["length"] * GROUP


def test_an_order_for_a_ticket_that_has_ended_changes_nothing():
    g = with_tickets(1)
    done = finish_all(g)
    g.tickets.orders = [0]
    assert (
        not g.step()
        and g.tickets.orders == []
        and len(g.outputs.of(Completion)) == len(done[0]) == GROUP
    )


def test_after_max_seconds_a_completion_ends_but_no_evaluation(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("executors.generator.time", SimpleNamespace(monotonic=lambda: now[0]))
    g = generator(max_seconds=5.0, chunk=1)
    g.weights.staged = Staged(0, must_load=True, evaluate=True)
    g.tickets.grants = 1
    g.step()
    g.tickets.grants = 0
    now[0] += 5.0
    assert g._expired() == [], "the limit has not passed"
    now[0] += 0.1
    assert not g.outputs.of(EvalCompletion), "all of it is at work when it does"
    g.step()
    assert [c.finish_reason for c in g.outputs.of(Completion)] == ["aborted"] * GROUP
    finish_all(g)
    assert len(g.outputs.of(EvalCompletion)) == EVALS and all(
        c.finish_reason != "aborted" for c in g.outputs.of(EvalCompletion)
    )


# -- replicas of several ranks: two generators in one process, each with the whole model, where
# ranks of a group would share it --


@pytest.fixture
def replica(monkeypatch):
    """Makes a leader on rank 4 and a peer on rank 5, the second replica of ranks 2 to 5, and steps
    them in turn.
    """
    # No collectives: each computes all.
    monkeypatch.setattr("llamarl.models.tp.TensorParallel.of", lambda *_, **__: None)

    def make(**options):
        boxes, ranks = {}, (2, 3, 4, 5)
        groups = [
            ExecutorGroup("generator", ranks, r, torch.device("cpu"), tensor_parallel=2)
            for r in (4, 5)
        ]
        return [generator(group=g, control=FakeMail(boxes, g.rank), **options) for g in groups]

    return make


def settle(leader, peer):
    """Step both until neither has had anything to do for a while."""
    idle = 0
    for _ in range(200):
        idle = 0 if peer.step() | leader.step() else idle + 1
        if idle == 3:
            return
    raise AssertionError("they find no rest")


def test_a_replica_of_one_rank_posts_nothing():
    g = generator()
    g.weights.staged = Staged(0, must_load=True, evaluate=True)
    for _ in range(5):
        g.step()
    g.teardown()
    assert g.control.posts == [] and g.outputs.of(Completion)


def test_weights_are_swapped_when_every_rank_has_them_and_not_before(replica):
    leader, peer = replica()
    leader.weights.arrive(0)
    settle(leader, peer)
    assert leader.version == peer.version == -1 and leader.waiting_for().startswith("weights:")
    peer.weights.arrive(0)
    peer.step(), leader.step(), peer.step()
    assert leader.version == peer.version == 0
    peer.weights.arrive(1)
    for _ in range(3):
        peer.step(), leader.step()
    assert leader.version == peer.version == 0 and leader.engine.num_live, (
        "work goes on while weights are awaited"
    )
    leader.weights.arrive(1)
    leader.tickets.grants = 0
    settle(leader, peer)
    assert leader.version == peer.version == 1


def test_while_a_replica_is_pinned_newer_versions_overtake_each_other_on_all_its_ranks(replica):
    leader, peer = replica(new_tokens=20, chunk=1, eval_samples=1)
    both = (leader, peer)
    for g in both:
        g.weights.arrive(0, evaluate=True)
    for _ in range(4):
        peer.step(), leader.step()
    assert leader.version == 0 and leader._evaluating
    for version in (1, 2, 3):
        assert all(g.weights.arrive(version) for g in both), "a pinned replica holds up a version"
        assert not leader.weights.arrive(version + 1)
        for _ in range(3):
            peer.step(), leader.step(), peer.step()
        assert leader._evaluating and leader.weights.staged is None and peer.weights.staged is None
    for g in both:
        assert g.weights.arrive(4, evaluate=True) and not g.weights.arrive(5)
    for _ in range(3):
        peer.step(), leader.step()
    assert (
        leader._evaluating and leader.weights.staged.version == peer.weights.staged.version == 4
    ), "4 must be evaluated"
    leader.tickets.grants = 0
    settle(leader, peer)
    assert leader.version == peer.version == 4


def test_a_peer_samples_what_its_leader_samples_and_sends_nothing(replica):
    leader, peer = replica(chunk=3)
    for g in (leader, peer):
        g.weights.arrive(0, evaluate=True)
    finished = []
    pop = peer.engine.pop_finished
    peer.engine.pop_finished = lambda: finished.extend(found := pop()) or found
    peer.step()
    for version in range(1, 5):
        for _ in range(4):
            leader.step(), peer.step()
        for g in (leader, peer):
            g.weights.arrive(version)
    leader.tickets.grants = 0
    settle(leader, peer)
    sent = [*leader.outputs.of(Completion), *leader.outputs.of(EvalCompletion)]
    assert len(leader.outputs.of(Completion)) > GROUP
    assert len(versions_of(sent)) > 1

    def key(completion):
        of_training = isinstance(completion, Completion)
        return (
            completion.ticket if of_training else completion.prompt_index,
            completion.sample_index,
            len(completion.token_ids),
            completion.policy_versions.tolist(),
            completion.token_ids.tolist(),
        )

    made = [c if stream == TRAIN else eval_completion(stream, c) for stream, c in finished]
    assert sorted(map(key, sent)) == sorted(map(key, made))
    assert (
        not peer.outputs.of(Completion)
        and not peer.outputs.of(EvalCompletion)
        and peer.tickets.asked == []
    )
    assert "generator/tokens" in leader.metrics and "generator/tokens" not in peer.metrics
    assert {topic for _, topic in peer.control.posts} == {"held/generator"} and {
        rank for rank, _ in leader.control.posts
    } == {5}


def test_a_replica_takes_its_share_of_the_held_out_prompts(replica):
    leader, peer = replica()
    leader.tickets.grants = 0
    for g in (leader, peer):
        g.weights.arrive(0, evaluate=True)
    settle(leader, peer)
    # The second of two replicas, three prompts.
    assert [c.prompt_index for c in leader.outputs.of(EvalCompletion)] == [1]


def test_a_peer_ends_what_its_leader_ends(replica):
    leader, peer = replica()
    leader.tickets.grants = 2
    for g in (leader, peer):
        g.weights.arrive(0)
    peer.step(), leader.step(), peer.step()
    peer.step(), leader.step(), peer.step()
    leader.tickets.grants, leader.tickets.orders = 0, [1]
    leader.step(), peer.step()
    assert 1 not in leader._begun and not peer._begun, "the leader alone looks at the clock"
    settle(leader, peer)
    assert peer._sampled == leader._sampled
    assert {c.ticket: c.finish_reason for c in leader.outputs.of(Completion)}[1] == "aborted"


def test_an_idle_leader_posts_nothing(replica):
    leader, peer = replica()
    leader.tickets.grants = 0
    for g in (leader, peer):
        g.weights.arrive(0)
    settle(leader, peer)
    before = len(leader.control.posts)
    for _ in range(5):
        assert not leader.step() | peer.step()
    assert len(leader.control.posts) == before


def test_ranks_that_have_come_apart_say_so(replica):
    leader, peer = replica()
    for g in (leader, peer):
        g.weights.arrive(0)
    peer.step(), leader.step(), peer.step()
    peer._sampled += 1
    leader.step()
    with pytest.raises(
        RuntimeError, match="generator ranks 4 and 5 share a model but have sampled"
    ):
        peer.step()


def test_a_leader_needs_its_peers_until_the_last_version_has_nothing_in_work(replica):
    leader, peer = replica()
    assert leader.partners(0) == [5] and not peer.partners(0)
    for g in (leader, peer):
        g.weights.arrive(0)
    peer.step(), leader.step(), peer.step()
    assert leader.version == 0 and leader.engine.num_live
    assert leader.partners(0) == [5] and not peer.partners(0)
    leader.tickets.grants = 0
    settle(leader, peer)
    assert not leader.partners(0) and leader.partners(1) == [5]


def test_a_peer_ends_after_what_its_leader_had_begun(replica):
    leader, peer = replica()
    assert peer.follows and not leader.follows
    for g in (leader, peer):
        g.weights.arrive(0)
    peer.step(), leader.step()  # a swap and a chunk are on their way
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
    peer.control.failure = RuntimeError("rank 4 failed")
    began = time.monotonic()
    peer.teardown()
    assert time.monotonic() - began < 10


# --- stretches ---


class Narrow(Outbox):
    """A channel that has room when a test says so."""

    room = True

    def has_room(self):
        return self.room


def streaming_generator(num_readers=1, **options):
    readers = [Narrow() for _ in range(num_readers)]
    g = generator(chunk=1, outputs=[(Stretch, reader) for reader in readers], **options)
    g.weights.staged = Staged(0)
    return g, readers


def heard(stretches):
    """What stretches say of each completion, which must follow each other without a gap."""
    told, ended = {}, set()
    for stretch in stretches:
        place = (stretch.ticket, stretch.sample_index)
        had = told.setdefault(place, [])
        assert stretch.begin == len(had) and place not in ended
        had += stretch.token_ids.tolist()
        ended |= {place} if stretch.has_ended else set()
    return told, ended


def test_what_is_sampled_is_told_after_every_chunk_and_is_the_completions():
    g, (stretches, second) = streaming_generator(num_readers=2)
    g.step()
    live = [s for s in stretches if not s.has_ended]
    assert live and all(s.begin == 0 and s.token_ids.numel() == 1 for s in live)
    while len(g.outputs.of(Completion)) < 2 * GROUP:
        g.step()
    told, ended = heard(stretches)
    for completion in g.outputs.of(Completion):
        place = (completion.ticket, completion.sample_index)
        assert place in ended and told[place] == completion.token_ids.tolist()
    assert second == stretches


@pytest.mark.parametrize("in_flight", [True, False])
def test_weights_that_come_meanwhile_leave_true_what_was_told(in_flight):
    g, (stretches,) = streaming_generator(in_flight=in_flight)
    for version in range(1, 4):
        g.step()
        g.step()
        g.weights.staged = Staged(version)
    while len(g.outputs.of(Completion)) < 2 * GROUP:
        g.step()
    told, ended = heard(stretches)
    is_mixed = []
    for completion in g.outputs.of(Completion):
        place = (completion.ticket, completion.sample_index)
        assert place in ended and told[place] == completion.token_ids.tolist()
        is_mixed.append(completion.policy_versions.unique().numel() > 1)
    assert any(is_mixed) == in_flight


def test_without_room_for_stretches_it_decodes_on_and_tells_more_at_once():
    g, (stretches,) = streaming_generator()
    g.step()
    stretches.room = False
    before = len(stretches)
    for _ in range(3):
        assert g.step()
    assert len(stretches) == before
    stretches.room = True
    g.step()
    first = stretches[before]
    assert first.token_ids.numel() == 4
    stretches.room = False
    while len(g.outputs.of(Completion)) < GROUP:
        g.step()  # what ends meanwhile is told by its completion alone
    stretches.room = True
    for _ in range(20):
        g.step()
    _, ended = heard(stretches)
    first_group = {(c.ticket, c.sample_index) for c in g.outputs.of(Completion)[:GROUP]}
    assert ended and not ended & first_group


def test_what_is_ended_by_an_order_is_told_as_ended():
    g, (stretches,) = streaming_generator()
    g.step()
    g.step()
    (ticket, *_) = {s.ticket for s in stretches}
    g.tickets.orders = [ticket]
    g.step()
    told, ended = heard(stretches)
    assert ended >= {(ticket, index) for index in range(GROUP)}
    aborted = [c for c in g.outputs.of(Completion) if c.finish_reason == "aborted"]
    assert {c.ticket for c in aborted} == {ticket}
    for completion in aborted:
        assert told[ticket, completion.sample_index] == completion.token_ids.tolist()
