"""A reference that is reset, alone: which version scores a group, when it takes one in, and what a
checkpoint holds.
"""

import time
from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
import torch

from executors.reference import Reference
from llamarl.ddma.channel import RESET, send_reset
from llamarl.errors import TimedOut
from llamarl.executor import ExecutorGroup
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.hf import named_parameters_hf
from llamarl.types import Group, ReferencePolicy
from tests.tolerances import of_logprobs

LOGPROBS = of_logprobs(read_config(tiny_directory()), size=2.0)


class FakeChannel:
    name = "groups"

    def __init__(self):
        self.records, self.room = deque(), True

    def take(self, limit=None):
        return [
            self.records.popleft()
            for _ in range(min(limit or len(self.records), len(self.records)))
        ]

    def put(self, record):
        self.records.append(record)

    def has_room(self):
        return self.room


class FakeWeights:
    """Brings versions in order; version v has every parameter scaled by 1 + v / 1000."""

    def __init__(self):
        self.coming = deque()

    @property
    def staged(self):
        return SimpleNamespace(version=self.coming[0]) if self.coming else None

    def bind(self, config, parameters):
        self.parameters = [(p, p.detach().clone()) for _, p in parameters]

    def swap(self):
        version = self.coming.popleft()
        for p, start in self.parameters:
            p.data = start * (1 + version / 1000)
        return SimpleNamespace(version=version)

    def close(self):
        pass


class FakeControl:
    """rank: what others see as the sender of its posts. peers: the controls of other ranks."""

    def __init__(self, rank=0):
        self.mail, self.waited = defaultdict(list), None
        self.rank = rank
        self.peers = {}
        self.failure = None

    def take(self, topic):
        return self.mail.pop(topic, [])

    def has(self, topic):
        return bool(self.mail[topic])

    def post(self, rank, topic, payload):
        self.peers[rank].deliver(topic, payload, sender=self.rank)

    def deliver(self, topic, payload, *, sender=0):
        self.mail[topic].append((sender, payload))

    def check(self):
        pass

    def wait(self, timeout_s):
        if self.waited:
            self.waited()


@pytest.fixture
def executor():
    return make()


def make(reset_every=10, timeout_s=5.0, rank=0, ranks=(0,)):
    ours = Reference(
        model_path=str(tiny_directory()),
        model_dtype="float32",
        temperature=1.0,
        microbatch_tokens=500,
        reset_every=reset_every,
        timeout_s=timeout_s,
    )
    inputs = [(Group, FakeChannel()), (ReferencePolicy, FakeWeights())]
    ours.attach(
        ExecutorGroup("reference", ranks, rank, torch.device("cpu")),
        inputs,
        [(Group, FakeChannel())],
        FakeControl(rank),
        None,
    )
    ours.setup()
    return ours


def group(ticket, *versions):
    return Group(
        ticket=ticket,
        prompt_ids=torch.tensor([1, 5]),
        lengths=torch.tensor([len(versions)]),
        token_ids=torch.arange(3, 3 + len(versions)),
        generator_logprobs=torch.zeros(len(versions)),
        policy_versions=torch.tensor(versions, dtype=torch.int64),
        ref_logprobs=torch.empty(0),
        rewards=torch.ones(1),
        finish_reasons=("stop",),
        outcomes=("score",),
    )


def scored(ours, record):
    """The logprobs of a group that comes alone."""
    ours.inputs.of(Group).records.append(record)
    assert ours.step()
    return sent(ours)[record.ticket].ref_logprobs


def sent(ours):
    return {g.ticket: g for g in ours.outputs.of(Group).take()}


def reset(ours, version, *, told=True):
    ours.inputs.of(ReferencePolicy).coming.append(version)
    if told:
        ours.control.deliver(RESET, {"version": version})


def test_a_group_waits_for_the_reference_of_its_newest_token(executor):
    executor.inputs.of(Group).records.extend(
        [group(0, 3, 9), group(1, 9, 10), group(2), group(3, 25)]
    )
    assert executor.step() and sent(executor).keys() == {0, 2}
    assert (
        not executor.step()
        and "version 10 from the trainer, to score ticket 1" in executor.waiting_for()
    )
    reset(executor, 10)
    assert executor.step()
    (first,) = sent(executor).values()
    assert (first.ticket, first.ref_version) == (1, 10) and executor.version == 10
    reset(executor, 20)
    assert (
        executor.step() and sent(executor)[3].ref_version == 20 and executor.waiting_for() is None
    )


def test_scores_are_those_of_the_version_that_was_taken_in(executor):
    executor.inputs.of(Group).records.append(group(0, 0, 0))
    executor.step()
    before = sent(executor)[0].ref_logprobs
    reset(executor, 10)
    executor.inputs.of(Group).records.append(group(0, 11, 11))
    executor.step()
    after = sent(executor)[0].ref_logprobs
    alone = Reference(
        model_path=str(tiny_directory()),
        model_dtype="float32",
        temperature=1.0,
        microbatch_tokens=500,
    )
    alone.attach(executor.group, [(Group, FakeChannel())], [(Group, FakeChannel())], None, None)
    alone.setup()
    torch.testing.assert_close(scored(alone, group(0, 0, 0)), before, atol=LOGPROBS, rtol=0)
    for p in alone.decoder.parameters():
        p.data *= 1.01
    torch.testing.assert_close(scored(alone, group(0, 0, 0)), after, atol=LOGPROBS, rtol=0)
    assert (before - after).abs().max() > 10 * LOGPROBS


def test_no_version_is_taken_in_that_the_trainer_has_not_told_of_or_ahead_of_a_snapshot(executor):
    reset(executor, 10, told=False)
    assert not executor.step() and executor.version == 0
    executor.control.deliver("save", {"step": 9, "is_last": False})
    executor.control.deliver(RESET, {"version": 10})
    assert not executor.step() and executor.version == 0
    executor.control.take("save")
    assert executor.may_checkpoint(9)
    assert executor.version == 0, "version 10 was made after step 9"
    assert executor.step() and executor.version == 10


def test_a_snapshot_waits_for_what_was_sent_before_it_and_takes_in_nothing_newer(executor):
    executor.control.deliver(RESET, {"version": 10})
    assert not executor.may_checkpoint(10) and not executor.step()
    reset(executor, 10, told=False)
    executor.control.deliver(RESET, {"version": 20})
    assert executor.step() and executor.version == 10
    reset(executor, 20, told=False)
    assert not executor.step() and executor.version == 10
    assert executor.may_checkpoint(10) and executor.state_dict()["version"] == 10
    assert executor.step() and executor.version == 20


def test_a_snapshot_does_not_wait_for_ever():
    ours = make(timeout_s=0.05)
    ours.control.deliver(RESET, {"version": 10})
    with pytest.raises(TimedOut, match="for version 10 from the trainer"):
        while not ours.may_checkpoint(10):
            time.sleep(0.01)


def test_a_resumed_reference_has_the_weights_of_its_version(executor):
    start = executor.state_dict()
    assert start == {"version": 0, "boxes": {}}, "the starting weights are where the model is"
    reset(executor, 10)
    executor.step()
    state, resumed = executor.state_dict(), make()
    resumed.load_state_dict(iter([state]))
    assert resumed.version == 10
    again, wanted = (scored(ours, group(0, 12, 12)) for ours in (resumed, executor))
    torch.testing.assert_close(again, wanted, atol=LOGPROBS, rtol=0)
    names = {f"model/{name}" for name, _ in named_parameters_hf(executor.decoder)}
    assert state.keys() == names | {"version", "boxes"}
    assert {f"model/{name}" for name in state["boxes"]} == names
    assert executor.has_state() and not make(reset_every=None).has_state()


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda state: state["boxes"].popitem(), "the checkpoint lacks "),
        (lambda state: state["boxes"].update(other=[[0], [1]]), "other does not fit"),
    ],
)
def test_a_state_that_is_not_this_references_is_refused(executor, spoil, said):
    reset(executor, 10)
    executor.step()
    state = executor.state_dict()
    spoil(state)
    with pytest.raises(ValueError, match=said):
        make().load_state_dict(iter([state]))


@pytest.fixture
def pair():
    """Two ranks of a reference, (the first, the other), that each hold the model whole."""
    made = [make(rank=rank, ranks=(0, 1)) for rank in (0, 1)]
    for ours, theirs in (made, made[::-1]):
        ours.control.peers[theirs.control.rank] = theirs.control
    return made


def test_a_version_is_swapped_in_once_it_has_come_to_all_ranks(pair):
    first, other = pair
    reset(first, 10)
    assert not first.step() and not other.step()
    reset(other, 10)
    assert not first.step() and first.version == 0, "the other has not said that it came"
    assert not other.step()
    assert first.step() and first.version == 10 and other.version == 0
    assert other.step() and other.version == 10


def test_the_other_ranks_checkpoint_is_of_its_step_though_the_first_is_past_it(pair):
    first, other = pair
    reset(first, 10)
    reset(other, 10, told=False)
    other.control.deliver("save", {"step": 9, "is_last": False})
    other.step()
    assert first.step() and first.version == 10
    assert not other.step() and other.version == 0, "nor has it heard of version 10"
    other.control.deliver(RESET, {"version": 10})
    assert not other.step() and other.version == 0, "it has not saved step 9"
    other.control.take("save")
    assert other.may_checkpoint(9)
    assert other.version == 0 and other.state_dict()["version"] == 0
    assert other.step() and other.version == 10


def test_every_rank_takes_in_what_was_sent_before_its_checkpoint(pair):
    first, other = pair
    for ours in pair:
        reset(ours, 10)
    # The first has not heard yet that the version has come to the other, nor the other of the swap.
    assert not first.may_checkpoint(10) and not other.may_checkpoint(10)
    assert first.may_checkpoint(10) and other.may_checkpoint(10)
    assert first.version == other.version == 10


@pytest.mark.parametrize("is_leader", [True, False])
def test_every_rank_of_the_trainer_sends_a_reset_and_the_leader_announces_it(is_leader):
    seen = []

    def publish(version, **options):
        seen.append(("sent", version, options))

    def post(rank, topic, payload):
        seen.append(("told", rank, topic, payload))

    sender = SimpleNamespace(publish=publish, receivers=(2, 3))
    send_reset(sender, 5, SimpleNamespace(is_leader=is_leader, post=post))
    # Nothing is announced that a stop keeps from coming.
    options = {"must_load": True, "must_arrive": True, "must_differ": False}
    told = [("told", rank, RESET, {"version": 5}) for rank in (2, 3)]
    assert seen == [("sent", 5, options), *(told if is_leader else [])]
