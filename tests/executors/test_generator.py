"""The generator alone, with fakes on both sides: versions on tokens, pinned evaluations, what it asks for, and replicas in lockstep."""

import json
import threading
import time

import pytest
import torch

from executors.generator import Generator
from llamarl.ddma.subscriber import Staged
from llamarl.executor import ExecutorGroup
from llamarl.inference import SamplingParams
from llamarl.models.hf import SafetensorsDir
from llamarl.models.scratch import tiny_directory
from llamarl.parity import Canary, ParityError, Sequence
from llamarl.types import Prompt, Ticket

PROMPT = Prompt(torch.tensor([1, 5, 6, 14, 7, 8, 18]), "12+34=", {"answer": "46"})
GROUP, EVALS = 2, 3
TOLERANCE = 0.01
ONE = ExecutorGroup("generator", (0,), 0, torch.device("cpu"))


class Weights:
    """Stages the same tiny weights under whatever version a test says."""

    def __init__(self, in_order):
        self.staged, self.in_order = None, in_order

    def bind(self, config, parameters):
        source = SafetensorsDir(tiny_directory())
        for name, parameter in parameters:
            parameter.data.copy_(source.get(name))

    def arrive(self, version, evaluate=False):
        """A version comes whole; says whether there was room for it."""
        kept = self.staged is not None and (self.staged.evaluate or self.in_order)
        if not kept:
            self.staged = Staged(version, evaluate, {})
        return not kept

    def swap(self):
        taken, self.staged = self.staged, None
        return taken

    def close(self):
        pass


class Mail:
    """Control between generators in one process: boxes is rank -> topic -> [(sender, payload)], posts all that was sent."""

    failure = None

    def __init__(self, boxes, rank):
        self.boxes, self.rank, self.posts = boxes, rank, []

    def post(self, rank, topic, payload):
        self.posts.append((rank, topic))
        self.boxes.setdefault(rank, {}).setdefault(topic, []).append((self.rank, json.loads(json.dumps(payload))))

    def take(self, topic):
        return self.boxes.get(self.rank, {}).pop(topic, [])

    def wait(self, timeout_s):
        time.sleep(0.001)


class Metrics(dict):
    def add(self, name, amount):
        self[name] = self.get(name, 0) + amount

    add_mean = add


class Outbox(list):
    def has_room(self):
        return True

    put = list.append


class Tickets:
    """Grants `grants` tickets to each ask and remembers what was asked."""

    def __init__(self, synchronous):
        self.synchronous, self.grants, self.asked, self.next = synchronous, 1, [], 0

    def ask(self, generator, count, version):
        self.asked.append((count, version))
        out = [Ticket(self.next + i, version) for i in range(min(count, self.grants))]
        self.next += len(out)
        return out

    def granted(self):
        return []


def generator(synchronous=False, in_flight=True, new_tokens=6, chunk=2, group=ONE, control=None):
    made = Generator(
        model_path=str(tiny_directory()), model_dtype="float32", prompts=[PROMPT] * 100, eval_prompts=[PROMPT] * EVALS,
        sampling=SamplingParams(max_new_tokens=new_tokens, min_new_tokens=new_tokens, n=GROUP, stop_token_ids=(2,)), stop_token_ids=(2,),
        max_slots=8, max_len=32, chunk_tokens=chunk, in_flight_updates=in_flight,
        parity_tolerance=TOLERANCE, tensor_parallel=group.tensor_parallel,
    )  # fmt: skip
    made.attach(
        group,
        {"policy": Weights(in_order=group.tensor_parallel > 1)},
        {"completions": Outbox(), "evaluations": Outbox()},
        control or Mail({}, group.rank),
        Metrics(),
        Tickets(synchronous),
    )
    made.setup()
    return made


def test_without_weights_it_samples_nothing_and_says_what_it_waits_for():
    g = generator()
    assert g.step() is False and g.tickets.asked == [] and g.waiting_for().startswith("weights:")


def canary_of(difference: float) -> dict:
    """What a trainer would say of the prompt's second half, but for `difference` in one logprob."""
    source = generator()
    source.weights.staged = (0, False, {})
    source.step()
    ids = PROMPT.prompt_ids.tolist()
    logprobs = source.engine.score(ids[:3], ids[3:]).tolist()
    return Canary([Sequence(ids, 3)], [*logprobs[:-1], logprobs[-1] + difference], [], []).to_json()


def test_a_version_is_compared_with_its_canary_before_anything_is_sampled_from_it():
    g = generator()
    g.weights.staged = (0, False, canary_of(0.5 * TOLERANCE))
    g.step()
    assert g.outputs["completions"] or g.engine.num_live
    sampled = g.engine.num_live
    g.weights.staged = (3, False, canary_of(2 * TOLERANCE))
    with pytest.raises(ParityError, match="rank 0 and the trainer differ by 0.0.* under version 3"):
        g.step()
    assert g.engine.num_live == sampled and len(g.tickets.asked) == 1


def test_weights_that_come_in_flight_stamp_the_later_tokens():
    g = generator()
    g.weights.staged = Staged(3, False, {})
    g.step()
    g.tickets.grants = 0
    g.weights.staged = Staged(4, False, {})
    while g.engine.num_live:
        g.step()
    versions = [c.policy_versions.tolist() for c in g.outputs["completions"]]
    assert len(versions) == GROUP and all(v == sorted(v) and set(v) == {3, 4} for v in versions)


def test_without_in_flight_updates_running_completions_keep_their_version():
    g = generator(in_flight=False)
    g.weights.staged = Staged(3, False, {})
    g.step()
    g.tickets.grants = 0
    g.weights.staged = Staged(4, False, {})
    while not g.outputs["completions"]:
        g.step()
    assert all(set(c.policy_versions.tolist()) == {3} for c in g.outputs["completions"])
    g.step()
    assert g.version == 4


def test_an_evaluated_version_is_pinned_until_its_prompts_are_done():
    g = generator(chunk=1)
    g.tickets.grants = 0
    g.weights.staged = Staged(5, True, {})
    g.step()
    g.weights.staged = Staged(6, False, {})
    while len(g.outputs["evaluations"]) < EVALS:
        assert g.version == 5
        g.step()
    assert all(set(c.policy_versions.tolist()) == {5} for c in g.outputs["evaluations"])
    assert sorted(c.ticket for c in g.outputs["evaluations"]) == list(range(EVALS))
    g.step()
    assert g.version == 6


def test_in_step_with_the_trainer_it_asks_for_nothing_while_it_evaluates():
    g = generator(synchronous=True, chunk=1)
    g.weights.staged = Staged(0, True, {})
    g.step()
    assert g.engine.num_live and g.tickets.asked == []
    while len(g.outputs["evaluations"]) < EVALS:
        g.step()
    g.step()
    assert g.tickets.asked[0] == (4, 0)  # eight free slots hold four groups of two


def test_a_full_channel_downstream_stops_it():
    g = generator()
    g.weights.staged = Staged(0, False, {})
    g.outputs["completions"].has_room = lambda: False
    g.step()
    assert g.tickets.asked == [] and g.waiting_for().startswith("room:")


@pytest.mark.parametrize("synchronous, asks", [(True, 1), (False, 3)])
def test_an_ask_in_vain_is_repeated_only_where_something_can_change_before_new_weights(synchronous, asks):
    g = generator(synchronous=synchronous)
    g.tickets.grants = 0
    g.weights.staged = Staged(0, False, {})
    for _ in range(3):
        g.step()
    assert len(g.tickets.asked) == asks


# -- replicas of several ranks: two generators in one process, each with the whole model, where ranks of a group would share it --


@pytest.fixture
def replica(monkeypatch):
    """Makes a leader on rank 4 and a peer on rank 5, the second replica of ranks 2 to 5, and steps them in turn."""
    monkeypatch.setattr("executors.generator.TensorParallel", lambda *_: None)  # no collectives: each computes all

    def make(**options):
        boxes, ranks = {}, (2, 3, 4, 5)
        groups = [ExecutorGroup("generator", ranks, r, torch.device("cpu"), tensor_parallel=2) for r in (4, 5)]
        return [generator(group=g, control=Mail(boxes, g.rank), **options) for g in groups]

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
    g.weights.staged = Staged(0, True, {})
    for _ in range(5):
        g.step()
    g.teardown()
    assert g.control.posts == [] and g.outputs["completions"]


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
    assert leader.version == peer.version == 0 and leader.engine.num_live, "work goes on while weights are awaited"
    leader.weights.arrive(1)
    leader.tickets.grants = 0
    settle(leader, peer)
    assert leader.version == peer.version == 1


def test_no_rank_skips_a_version_that_another_may_have_staged(replica):
    leader, peer = replica()
    leader.tickets.grants = 0
    for version in range(3):
        for g in (peer, leader):
            assert g.weights.arrive(version)
            assert not g.weights.arrive(version + 1), "a newer version overtakes what is not swapped"
        settle(leader, peer)
        assert leader.version == peer.version == version


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
    sent = [*leader.outputs["completions"], *leader.outputs["evaluations"]]
    assert len(leader.outputs["completions"]) > GROUP and len({v for c in sent for v in c.policy_versions.tolist()}) > 1
    key = lambda c: (c.ticket, c.sample_index, len(c.token_ids), c.policy_versions.tolist(), c.token_ids.tolist())  # noqa: E731
    assert sorted(map(key, sent)) == sorted(key(c) for _, c in finished)
    assert not peer.outputs["completions"] and not peer.outputs["evaluations"] and peer.tickets.asked == []
    assert "generator/tokens" in leader.metrics and "generator/tokens" not in peer.metrics
    assert {topic for _, topic in peer.control.posts} == {"held"} and {rank for rank, _ in leader.control.posts} == {5}


def test_a_replica_takes_its_share_of_the_held_out_prompts(replica):
    leader, peer = replica()
    leader.tickets.grants = 0
    for g in (leader, peer):
        g.weights.arrive(0, evaluate=True)
    settle(leader, peer)
    assert [c.ticket for c in leader.outputs["evaluations"]] == [1]  # the second of two replicas, three prompts


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
    with pytest.raises(RuntimeError, match="generator ranks 4 and 5 share a model but have sampled"):
        peer.step()


def test_a_peer_ends_after_what_its_leader_had_begun(replica):
    leader, peer = replica()
    assert peer.follows and not leader.follows
    for g in (leader, peer):
        g.weights.arrive(0)
    peer.step(), leader.step()  # a swap and a chunk are on their way
    ending = threading.Thread(target=peer.teardown)
    ending.start()
    time.sleep(0.1)
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
    assert time.monotonic() - began < 1
