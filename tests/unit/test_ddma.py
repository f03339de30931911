"""Weights in one process: the transaction over links that damage what they carry, forwarding,
transports, and the bound ends.
"""

import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from llamarl.comm.control import Control
from llamarl.comm.groups import RankInfo
from llamarl.ddma import links
from llamarl.ddma.layout import Destination, Source, buffer_of, parameters_to_send
from llamarl.ddma.links import Header, HeaderKind, make_slots
from llamarl.ddma.payload import buckets_of
from llamarl.ddma.protocol import MAX_RETRIES, LinkContext, Outgoing
from llamarl.ddma.receiver import Incoming, Staged, Subscriber, WeightsReceiver
from llamarl.ddma.route import WeightsRoute, choose_transports
from llamarl.ddma.sender import LOOK_S, WeightsSender
from llamarl.disk.shared_memory import path_of
from llamarl.errors import ParityError, TimedOut, WeightsError
from llamarl.models.parity import check_marks, marks_of
from llamarl.models.quantize import QUANTIZED, quantize_rows
from llamarl.models.sharded_state import Shard
from llamarl.models.sharding import Box, num_parameters, parameter_shapes
from tests.weight_links import (
    BUCKET,
    CONFIG,
    COPIER,
    LINKS,
    PARAMETERS,
    PATIENCE_S,
    Ends,
    SpyLink,
    StreamLink,
    alone,
    bytes_of,
    corrupting,
    failure_of,
    is_end,
    until,
    weights_of,
)


@LINKS
def test_versions_arrive_whole_and_in_turn(kind):
    ends = Ends(kind())
    assert len(ends.buckets[0]) > 5
    for v in range(5):
        ends.publish(v, evaluate=v == 3)
        assert ends.receive(v) == Staged(v, v == 3, v == 3, {"canary of": v})
    assert ends.swap() is None
    ends.close()
    assert ends.links[0].forward[-1].kind == HeaderKind.CLOSE


def with_wrong_digest(header, *buckets):
    """The END that says something else of these places in its list."""
    digests = [d ^ 1 if i in buckets else d for i, d in enumerate(header.more["digests"])]
    return Header(header.kind, header.version, header.more | {"digests": digests})


class Once:
    """Damages the first header that `pick` takes."""

    def __init__(self, pick, into):
        self.pick = pick
        self.into = into
        self.done = False

    def __call__(self, header):
        if self.done or not self.pick(header):
            return [header]
        self.done = True
        return self.into(header)


@LINKS
def test_a_wrong_digest_is_a_damaged_bucket_and_it_alone_is_sent_again(kind):
    ends = Ends(kind(Once(is_end(1), lambda h: [with_wrong_digest(h, 2, 4)])))
    ends.publish(0), ends.receive(0)
    ends.publish(1), ends.receive(1)
    assert ends.links[0].verdicts(1) == [[2, 4], []]
    assert ends.links[0].bucket_sends(1) == [*range(len(ends.buckets[0])), 2, 4]
    ends.close()


@LINKS
def test_damaged_bytes_are_named_and_sent_again(kind):
    link = corrupting(kind, lambda start: start > 0, times=2)
    ends = Ends(link)
    ends.publish(0), ends.receive(0)
    first, second = link.verdicts(0)
    assert (
        len(first) == 2
        and second == []
        and link.bucket_sends(0) == [*range(len(ends.buckets[0])), *first]
    )
    ends.close()


@LINKS
def test_the_old_version_serves_while_a_new_one_is_damaged_and_the_run_then_ends(kind):
    def wrong(h):  # bucket 2: the third of the first delivery, then alone
        if not is_end(1)(h):
            return [h]
        which = 2 if len(h.more["digests"]) > 1 else 0
        return [with_wrong_digest(h, which)]

    link = kind(wrong)
    ends = Ends(link)
    ends.publish(0), ends.receive(0)
    ends.publish(1)
    error = failure_of(ends.receiving)
    assert isinstance(error, WeightsError)
    text = (
        r"weights 'policy' on rank 0, from trainer rank 0: buckets \[2\] of version 1 .* 3 times; "
        r"the version in use is unchanged"
    )
    with pytest.raises(WeightsError, match=text):
        ends.receiving.check()
    # In one process either end may be the first to say so.
    with pytest.raises(
        WeightsError, match=r"weights 'policy' from rank 0: .*\[2\].* version 1 .* 3 times"
    ):
        raise failure_of(ends.sending)
    assert link.verdicts(1) == [[2]] * MAX_RETRIES and MAX_RETRIES == 3
    assert ends.subscriber.staged is None and ends.swap() is None
    assert torch.equal(ends.live, bytes_of(0))


@pytest.mark.parametrize(
    "came, instead_of, expected",
    [
        (Header(HeaderKind.END, 0), HeaderKind.END, "END of version 1"),
        (Header(HeaderKind.VERDICT, 1), HeaderKind.END, "END of version 1"),
        (Header(HeaderKind.END, 1), HeaderKind.BEGIN, "BEGIN or CLOSE"),
    ],
)
def test_a_header_out_of_turn_is_named_with_its_sender(came, instead_of, expected):
    def out_of_turn(header):
        is_it = (header.kind, header.version) == (instead_of, 1)
        return [came if is_it else header]

    ends = Ends(SpyLink(out_of_turn))
    ends.publish(0), ends.receive(0)
    ends.publish(1)
    with pytest.raises(WeightsError) as raised:
        raise failure_of(ends.receiving)
    assert str(raised.value) == (
        f"weights 'policy' on rank 0, from trainer rank 0: {came.kind.name} of version "
        f"{came.version} came where {expected} was expected; the version in use is unchanged"
    )
    assert ends.swap() is None and torch.equal(ends.live, bytes_of(0))


@LINKS
def test_a_version_that_stops_on_its_way_ends_within_the_deadline(kind):
    class Cut(kind):
        sent = 0

        def send_bytes(self, flat):
            self.sent += 1
            return (
                None if self.sent == 2 * len(ends.buckets[0]) else super().send_bytes(flat)
            )  # the last of version 1

    ends = Ends(Cut(lambda h: [] if is_end(1)(h) else [h]), timeout_s=1.0)
    ends.publish(0), ends.receive(0)
    count = len(ends.buckets[0])
    began = time.monotonic()
    ends.publish(1)
    with pytest.raises(WeightsError) as raised:
        raise failure_of(ends.receiving)
    assert 0.9 < time.monotonic() - began < 2.0 + PATIENCE_S / 2
    # Memory that is read lacks nothing but the word that it is right.
    missing = [count - 1] if kind is StreamLink else list(range(count))
    assert (
        f"version 1 stopped on its way with buckets {missing} of {count} to come: nothing came "
        "for 1 s" in str(raised.value)
    )
    assert "from trainer rank 0" in str(raised.value)
    assert ends.swap() is None and torch.equal(ends.live, bytes_of(0))


def test_a_version_that_never_begins_is_named_by_the_sender_that_runs_out_of_slots():
    ends = Ends(SpyLink(lambda h: [] if h.version == 1 else [h]), timeout_s=0.5)
    ends.publish(0), ends.receive(0)
    ends.publish(1), ends.publish(2)
    with pytest.raises(
        TimedOut,
        match=r"rank 0, step 3: .* have not taken earlier ones for 0 s \(committed: version 0\)",
    ):
        ends.publish(3)
    assert ends.swap() is None and torch.equal(ends.live, bytes_of(0))


class Untaken:
    """A sender whose generators never take anything. staged, canaries: versions of which these were
    made.
    """

    def __init__(self, timeout_s):
        self.control = alone()
        self.staged = []
        self.canaries = []
        self.sender = WeightsSender(route_within(self.control, timeout_s=timeout_s))
        self.sender.bind(CONFIG, list(parameters_of().items()))
        self.fill = self.sender._staging.fill
        self.sender._staging.fill = self.stage

    def stage(self, slot, progress):
        self.staged.append(self.version)
        self.fill(slot, progress)

    def publish(self, version, *, must_arrive=False):
        def canary():
            self.canaries.append(version)
            return {}

        self.version = version
        self.sender.publish(version, must_differ=False, must_arrive=must_arrive, canary=canary)


def test_generators_that_never_take_weights_are_named_within_the_deadline():
    ours = Untaken(timeout_s=0.3)
    ours.publish(0), ours.publish(1)
    with pytest.raises(TimedOut, match="step 2.*have not taken"):
        ours.publish(2)


def test_a_trainer_that_waits_for_a_generator_hears_a_stop_and_takes_part_in_what_is_collective():
    ours = Untaken(timeout_s=PATIENCE_S)
    ours.publish(0), ours.publish(1)
    waiting = ours.control.thread("trainer", ours.publish, 2)
    assert ours.staged == [0, 1]
    ours.control.request_stop()
    waiting.join(PATIENCE_S / 2)
    assert not waiting.is_alive() and ours.control.failure is None
    assert ours.staged == [0, 1] and ours.canaries == [0, 1, 2]


def test_a_version_that_must_arrive_is_not_given_up_for_a_stop():
    ours = Untaken(timeout_s=PATIENCE_S)
    ours.publish(0), ours.publish(1)
    ours.control.request_stop()
    waiting = ours.control.thread("trainer", partial(ours.publish, must_arrive=True), 2)
    waiting.join(3 * LOOK_S)
    assert waiting.is_alive() and ours.staged == [0, 1]
    ours.sender._bound._free.put(0)  # version 0 was taken
    waiting.join(PATIENCE_S / 2)
    assert not waiting.is_alive() and ours.control.failure is None and ours.staged == [0, 1, 2]


def test_after_a_stop_a_version_that_has_a_slot_is_sent_as_ever():
    ours = Untaken(timeout_s=PATIENCE_S)
    ours.publish(0)
    ours.control.request_stop()
    ours.publish(1)
    assert ours.staged == [0, 1]


def test_a_payload_equal_to_the_last_is_an_error_after_an_optimizer_step():
    ends = Ends()
    ends.publish(0, must_differ=False), ends.receive(0)
    ends.publish(1, content=0, must_differ=False)
    ends.staged(1)
    ends.publish(2, content=0, must_differ=True)
    with pytest.raises(
        WeightsError,
        match=(
            "from rank 0: weights of version 2 equal those of the version before.*changed nothing"
        ),
    ):
        raise failure_of(ends.sending)


def test_one_changed_number_is_no_equal_payload():
    ends = Ends()
    ends.publish(0, must_differ=True), ends.receive(0)
    full, changed = weights_of(0), 0

    def stage(slot, progress):
        nonlocal changed
        for bucket in ends.buckets[0]:
            for region in bucket.regions:
                whole = Box.whole(region.parameter.shape)
                part = full[region.name][region.box.within(whole)].reshape(-1).clone()
                if region.name == "model.norm.weight":
                    part[3] = torch.nextafter(part[3], torch.tensor(9.0))
                    changed += 1
                slot[region.start : region.end] = part.view(torch.uint8)
            progress.mark()

    queued = ends.publishers[0].enqueue(1, must_load=False, evaluate=False, must_differ=True)
    stage(queued.data, queued.progress)
    queued.staged.set()
    queued.seal({})
    ends.staged(1)
    until(lambda: ends.publishers[0].committed_version == 1, ends.sending)
    assert changed == 1
    ends.close()


# -- which version is served


def test_a_newer_version_overtakes_one_that_nobody_took():
    ends = Ends()
    for v in range(4):
        ends.publish(v)
    ends.staged(3)
    assert ends.receive(3).version == 3 and ends.swap() is None
    ends.close()


def begun(link, version):
    return lambda: any(h.kind == HeaderKind.BEGIN and h.version == version for h in link.forward)


def stays(ends, version):
    """The version is still staged a moment later, when the next one has begun to come and could
    have pushed it out.
    """
    link = ends.links[0]
    until(begun(link, version + 1), ends.sending, ends.receiving)
    time.sleep(0.1)
    return ends.subscriber.staged.version == version and not link.verdicts(version + 1)


def test_a_version_to_be_evaluated_is_not_overtaken():
    ends = Ends()
    ends.publish(0, evaluate=True), ends.publish(1)
    assert stays(ends, 0)
    assert ends.swap() == Staged(0, True, True, {"canary of": 0})
    ends.staged(1)
    ends.publish(2)
    assert ends.receive(2).version == 2
    ends.close()


def test_in_order_none_is_overtaken():
    ends = Ends(in_order=True)
    ends.publish(0), ends.publish(1)
    assert stays(ends, 0)
    for version in range(5):
        ends.staged(version)
        assert ends.swap().version == version and torch.equal(ends.live, bytes_of(version))
        if version < 3:
            ends.publish(version + 2)
    ends.close()


def test_in_order_a_version_gives_way_when_it_is_skipped():
    ends = Ends(in_order=True)
    ends.publish(0), ends.staged(0)
    assert not ends.subscriber.overtakable, "nothing newer waits"
    ends.publish(1)
    until(lambda: ends.subscriber.overtakable, ends.sending, ends.receiving)
    ends.subscriber.skip(7)
    assert ends.subscriber.staged.version == 0, "another version was meant"
    ends.subscriber.skip(0)
    ends.staged(1)
    assert (
        not ends.subscriber.overtakable
        and ends.swap().version == 1
        and torch.equal(ends.live, bytes_of(1))
    )
    ends.close()


def test_what_must_be_evaluated_is_never_overtakable():
    ends = Ends(in_order=True)
    ends.publish(0, evaluate=True), ends.publish(1)
    assert stays(ends, 0) and not ends.subscriber.overtakable
    ends.close()


def test_while_a_version_comes_there_is_nothing_to_swap_and_the_old_one_is_untouched():
    gate = threading.Event()

    def wait_in_the_middle(header):
        if is_end(2)(header):
            assert gate.wait(PATIENCE_S)
        return [header]

    ends = Ends(SpyLink(wait_in_the_middle))
    ends.publish(0), ends.receive(0)
    ends.publish(1), ends.staged(1)
    ends.publish(2)
    until(lambda: ends.subscriber.staged is None, ends.sending, ends.receiving)  # 1 gave way to 2
    assert ends.swap() is None and torch.equal(ends.live, bytes_of(0))
    gate.set()
    ends.receive(2)
    ends.close()


def test_two_sources_that_are_a_version_apart_make_whole_versions():
    gate = threading.Event()

    def wait(header):
        if header.kind == HeaderKind.BEGIN and header.version == 0:
            assert gate.wait(PATIENCE_S)
        return [header]

    ends = Ends(SpyLink(), SpyLink(wait))
    ends.publish(0), ends.publish(1)
    until(begun(ends.links[0], 1), ends.sending, ends.receiving)
    time.sleep(0.05)
    assert ends.subscriber.staged is None  # half of version 0, and 1 at the door
    gate.set()
    ends.receive(1)
    ends.publish(2), ends.receive(2)
    ends.close()


@pytest.mark.parametrize("seed", range(4))
def test_what_is_swapped_in_is_whole_however_the_threads_interleave(seed):
    dice = random.Random(seed)

    def jitter(header):
        time.sleep(dice.random() * 0.002)
        return [header]

    kinds = itertools.cycle([SpyLink, StreamLink])
    ends = Ends(*(next(kinds)(jitter) for _ in range(3)))
    finished = threading.Event()

    def train():
        for v in range(12):
            ends.publish(v)
        finished.set()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    ends.receive(11)  # checks every version that it swaps in on the way
    assert finished.wait(PATIENCE_S)
    ends.close()


def test_one_buffer_is_copied_out_at_a_swap():
    ends = Ends(num_buffers=1)
    live = torch.zeros(ends.of.num_bytes, dtype=torch.uint8)
    buffers = set()

    def swap():
        with ends.subscriber.handover() as (staged, buffer):
            buffers.add(buffer.data_ptr())
            live.copy_(buffer)
        return staged

    for v in range(0, 8, 2):
        ends.publish(v, evaluate=True)
        ends.publish(v + 1)  # waits for the only buffer
        ends.staged(v)
        assert swap().version == v and torch.equal(live, bytes_of(v))
        ends.staged(v + 1)
        assert torch.equal(live, bytes_of(v))
        assert swap().version == v + 1 and torch.equal(live, bytes_of(v + 1))
    assert len(buffers) == 1
    ends.close()


# -- from replica to replica


class Follower:
    """A replica that gets everything through another one."""

    def __init__(self, link, control, follower=None):
        self.control, of = control, buffer_of(CONFIG, PARAMETERS, Destination(), 0)
        whole = buckets_of(of.held.values(), BUCKET)
        buffers = [torch.zeros(of.num_bytes, dtype=torch.uint8) for _ in range(2)]
        self.subscriber = Subscriber(
            LinkContext("policy", control, PATIENCE_S, COPIER),
            of,
            buffers,
            [Incoming(link, whole, "generator rank 0")],
            follower=follower,
        )

    swap = Ends.swap
    receive = Ends.receive
    live = None
    staged = Ends.staged

    @property
    def sending(self):
        return self.control

    receiving = sending


def forwarded(link) -> Outgoing:
    of = buffer_of(CONFIG, PARAMETERS, Destination(), 0)
    return Outgoing(link, 0, buckets_of(of.held.values(), BUCKET))


@LINKS
@pytest.mark.parametrize("sources", [1, 3])
def test_the_second_and_third_replica_get_everything_through_the_first(kind, sources):
    one = kind()
    two = kind()
    control = alone()
    ends = Ends(*(kind() for _ in range(sources)), follower=forwarded(one))
    second, third = Follower(one, control, forwarded(two)), Follower(two, control)
    for v in range(6):
        ends.publish(v, evaluate=v == 3)
        if v % 2:  # the order in which they swap does not matter
            ends.receive(v)
        assert second.receive(v) == third.receive(v) == Staged(v, v == 3, v == 3, {"canary of": v})
        if not v % 2:
            ends.receive(v)
    assert len(forwarded(one).buckets) > 5
    ends.close()
    until(lambda: one.forward[-1].kind == two.forward[-1].kind == HeaderKind.CLOSE, control)
    second.subscriber.close(), third.subscriber.close()
    control.check()


@LINKS
def test_a_replica_that_comes_late_gets_the_version_that_was_swapped_in_meanwhile(kind):
    ready = threading.Event()

    class Late(kind):
        def offer(self, slots, base=0):
            assert ready.wait(PATIENCE_S)
            super().offer(slots, base)

    link, control = Late(), alone()
    ends = Ends(kind(), follower=forwarded(link))
    second = Follower(link, control)
    ends.publish(0), ends.receive(0)
    ready.set()
    second.receive(0)
    ends.publish(1), ends.receive(1), second.receive(1)
    ends.close()
    second.subscriber.close()


@LINKS
def test_what_was_damaged_on_its_way_on_is_sent_again(kind):
    link, control = corrupting(kind, lambda start: start > 0, times=2), alone()
    ends = Ends(kind(), follower=forwarded(link))
    second = Follower(link, control)
    for v in range(3):
        ends.publish(v), ends.receive(v), second.receive(v)
    assert [len(wrong) for wrong in link.verdicts(0)] == [2, 0] and link.verdicts(1) == [[]]
    ends.close()
    second.subscriber.close()


@LINKS
def test_what_was_damaged_before_it_was_forwarded_is_right_in_the_end(kind):
    link, control = kind(), alone()
    first = corrupting(kind, lambda start: start > 0, times=2)
    ends = Ends(first, follower=forwarded(link))
    second = Follower(link, control)
    for v in range(3):
        ends.publish(v), ends.receive(v), second.receive(v)
    assert [len(wrong) for wrong in first.verdicts(0)] == [2, 0]
    assert link.verdicts(0)[-1] == [] and link.verdicts(1) == [[]]
    ends.close()
    second.subscriber.close()


def test_what_stays_damaged_on_its_way_on_names_the_replica_that_sent_it():
    link, control = corrupting(StreamLink, lambda start: True, times=10_000), alone()
    ends = Ends(follower=forwarded(link))
    second = Follower(link, control)
    ends.publish(0), ends.receive(0)
    with pytest.raises(
        WeightsError, match=r"from generator rank 0: buckets \[0, .* of version 0 .* 3 times"
    ):
        raise failure_of(control)
    with pytest.raises(WeightsError, match="forwarded by rank 0"):
        raise failure_of(ends.receiving)
    assert second.swap() is None


def test_a_replica_that_evaluates_holds_nobody_up_but_its_own_next_version():
    link, control = SpyLink(), alone()
    ends = Ends(follower=forwarded(link))
    second = Follower(link, control)
    ends.publish(0, evaluate=True), ends.receive(0)
    second.staged(0)
    ends.publish(1), ends.receive(1)  # while the second has not taken 0
    time.sleep(0.05)
    assert second.subscriber.staged.version == 0
    second.receive(1)
    ends.close()
    second.subscriber.close()


# --- transports ---

CPU = [RankInfo(rank, "host a", None) for rank in range(4)]
FAR_CPU = RankInfo(9, "host b", None)
GPU = [RankInfo(rank, "host a", f"gpu {rank}", nccl=True) for rank in range(4)]
FAR_GPU = RankInfo(8, "host b", "gpu 8", nccl=True)
SAME_GPU = RankInfo(7, "host a", "gpu 0", nccl=True)
WITHOUT_NCCL = RankInfo(6, "host a", "gpu 6", nccl=False)


def chosen(*pairs, asked="auto"):
    return list(choose_transports(asked, list(pairs)).values())


def test_auto_takes_the_nearest_way():
    assert chosen((CPU[0], CPU[0])) == ["local"]
    assert chosen((CPU[0], CPU[1])) == ["shm"]
    assert chosen((CPU[0], FAR_CPU)) == ["gloo"]
    assert chosen((CPU[0], CPU[1]), (CPU[0], FAR_CPU), (CPU[0], CPU[0])) == ["shm", "gloo", "local"]
    assert chosen((GPU[0], SAME_GPU)) == ["cuda_ipc"]
    assert chosen((GPU[0], GPU[1])) == ["cuda_ipc"]
    assert chosen((GPU[0], FAR_GPU)) == ["nccl"]
    assert chosen((GPU[0], GPU[1]), (GPU[0], FAR_GPU), (GPU[0], GPU[0])) == [
        "cuda_ipc",
        "nccl",
        "local",
    ]
    assert chosen((GPU[0], WITHOUT_NCCL)) == ["cuda_ipc"]


def test_auto_keeps_off_the_device_where_one_pair_has_no_device_in_common():
    assert chosen((GPU[0], CPU[3]), (GPU[0], GPU[1])) == ["shm", "shm"]
    assert chosen((GPU[0], FAR_CPU)) == ["gloo"]
    far_without = RankInfo(5, "host b", "gpu 5", nccl=False)
    assert chosen((GPU[0], far_without), (GPU[0], GPU[1])) == ["gloo", "shm"]


def test_keys_are_the_ranks_of_sender_and_receiver():
    assert choose_transports("auto", [(CPU[0], CPU[1]), (CPU[1], CPU[1])]) == {
        (0, 1): "shm",
        (1, 1): "local",
    }


@pytest.mark.parametrize(
    "asked, pairs, why",
    [
        ("shm", [(CPU[0], FAR_CPU)], "ranks 0 and 9 are on different hosts; use gloo, or auto"),
        (
            "shm",
            [(GPU[0], FAR_GPU)],
            "ranks 0 and 8 are on different hosts; use gloo or nccl, or auto",
        ),
        (
            "cuda_ipc",
            [(GPU[0], GPU[1]), (GPU[0], FAR_GPU)],
            "ranks 0 and 8 are on different hosts; use gloo or nccl, or auto",
        ),
        (
            "cuda_ipc",
            [(CPU[0], CPU[1])],
            "ranks 0 and 1 do not both have a GPU; use shm or gloo, or auto",
        ),
        (
            "cuda_ipc",
            [(GPU[0], CPU[1])],
            "ranks 0 and 1 do not both have a GPU; use shm or gloo, or auto",
        ),
        (
            "nccl",
            [(CPU[0], CPU[1])],
            "ranks 0 and 1 do not both have a GPU; use shm or gloo, or auto",
        ),
        ("nccl", [(CPU[0], FAR_CPU)], "ranks 0 and 9 do not both have a GPU; use gloo, or auto"),
        (
            "nccl",
            [(GPU[0], WITHOUT_NCCL)],
            "ranks 0 and 6 run a torch without NCCL; use shm or gloo or cuda_ipc, or auto",
        ),
        (
            "nccl",
            [(GPU[0], SAME_GPU)],
            "ranks 0 and 7 share one GPU, which NCCL refuses; use shm or gloo or cuda_ipc, or auto",
        ),
        ("nccl", [(GPU[0], GPU[0]), (GPU[0], SAME_GPU)], "ranks 0 and 7 share one GPU"),
    ],
)
def test_a_transport_that_cannot_join_two_ranks_is_refused_with_what_can(asked, pairs, why):
    with pytest.raises(WeightsError) as raised:
        choose_transports(asked, pairs)
    assert str(raised.value).startswith(f"weights.transport={asked}: {why}")


@pytest.mark.parametrize(
    "asked, pair",
    [
        ("gloo", (CPU[0], FAR_CPU)),
        ("gloo", (GPU[0], GPU[1])),
        ("shm", (GPU[0], GPU[1])),
        ("shm", (CPU[0], CPU[1])),
        ("nccl", (GPU[0], GPU[1])),
        ("nccl", (GPU[0], FAR_GPU)),
        ("cuda_ipc", (GPU[0], SAME_GPU)),
    ],
)
def test_a_transport_that_can_is_taken_as_asked(asked, pair):
    assert chosen(pair, (pair[0], pair[0]), asked=asked) == [asked, "local"]


def test_what_a_replica_forwards_lies_in_its_own_memory_so_it_goes_by_gloo_on_one_host_too():
    far = [CPU[0], RankInfo(1, "host b", None), RankInfo(2, "host b", None)]
    route = WeightsRoute(
        "policy",
        sources=(0,),
        destinations=(1, 2),
        source=Source(),
        destination=Destination(1, 2),
        dtype=torch.float32,
        quantize="none",
        exclude=(),
        transport="auto",
        ranks=far,
        group=None,
        device_group=None,
        control=Control(None, rank=1, world_size=3, leader=0, names=["a", "b", "c"]),
        timeout_s=PATIENCE_S,
    )
    assert route.plan(CONFIG).follower(0) == 1
    assert route.link_from(0).transport == route.link_to(2).transport == "gloo"


@pytest.mark.parametrize("on_host, transport", [(False, "cuda_ipc"), (True, "shm")])
def test_weights_that_are_staged_on_the_host_of_two_gpus_do_not_travel_between_devices(
    on_host, transport
):
    route = WeightsRoute(
        "policy",
        sources=(0,),
        destinations=(1,),
        source=Source(),
        destination=Destination(),
        dtype=torch.float32,
        quantize="none",
        exclude=(),
        transport="auto",
        on_host=on_host,
        ranks=GPU[:2],
        group=None,
        device_group=None,
        control=Control(None, rank=0, world_size=2, leader=0, names=["a", "b"]),
        timeout_s=PATIENCE_S,
    )
    assert route.link_to(1).transport == transport and route.on_device is not on_host


# --- the bound ends ---


def route_within(
    control, *, dtype=torch.float32, quantize="none", exclude=(), timeout_s=PATIENCE_S
):
    """The route from a process to itself."""
    return WeightsRoute(
        "policy",
        sources=(0,),
        destinations=(0,),
        source=Source(),
        destination=Destination(),
        dtype=dtype,
        quantize=quantize,
        exclude=exclude,
        transport="auto",
        ranks=[CPU[0]],
        group=None,
        device_group=None,
        control=control,
        timeout_s=timeout_s,
    )


def bound(trainer, generator, **what_travels):
    """Sender and receiver of one process, where the trainer's parameters are `trainer` and the
    generator's `generator`.
    """
    control = alone()
    route = route_within(control, **what_travels)
    sender, receiver = WeightsSender(route), WeightsReceiver(route)
    sender.bind(CONFIG, list(trainer.items()))
    receiver.bind(CONFIG, list(generator.items()))
    return sender, receiver, control


def parameters_of(version=0, dtype=torch.float32):
    return {name: torch.nn.Parameter(t.to(dtype)) for name, t in weights_of(version).items()}


def synced(sender, receiver, control, version):
    sender.publish(version, must_differ=True, canary=lambda: {"v": version})
    assert until(receiver.swap, control) == Staged(version, canary={"v": version})


def test_parameters_arrive_in_the_generators_dtype_and_follow_the_trainer():
    trainer, generator = parameters_of(), parameters_of(99, torch.bfloat16)
    sender, receiver, control = bound(trainer, generator, dtype=torch.bfloat16)
    assert sender.bytes_per_sync == 2 * num_parameters(CONFIG)
    for version in range(1, 5):
        for name, new in weights_of(version).items():
            if version == 3:
                trainer[name].data = new.clone()  # a trainer that moves its parameters
            trainer[name].data.copy_(new)
        synced(sender, receiver, control, version)
        for name, new in weights_of(version).items():
            assert torch.equal(generator[name].data, new.bfloat16()), (name, version)
    sender.close(), receiver.close()
    control.check()


@pytest.mark.parametrize("quantize", ["fp8", "int8"])
def test_quantised_weights_arrive_as_quantising_the_whole_makes_them(quantize):
    exclude = ("layers.1.mlp.down_proj",)
    travels = parameters_to_send(CONFIG, torch.bfloat16, QUANTIZED[quantize], exclude)
    trainer = parameters_of()
    generator = {
        p.name: torch.nn.Parameter(torch.zeros(p.shape, dtype=p.dtype), requires_grad=False)
        for p in travels
    }
    sender, receiver, control = bound(
        trainer, generator, dtype=torch.bfloat16, quantize=quantize, exclude=exclude
    )
    synced(sender, receiver, control, 1)
    for name, p in trainer.items():
        if f"{name}_scale" in generator:
            q, scale = quantize_rows(p.data, quantize)
            assert torch.equal(
                generator[name].view(torch.uint8), q.view(torch.uint8)
            ) and torch.equal(generator[f"{name}_scale"].data, scale)
        else:
            assert torch.equal(generator[name].data, p.data.bfloat16())
    assert (
        sum(name.endswith("_scale") for name in generator) == 2 * 7 - 1 + 1
    )  # the projections of two layers but one, the head
    sender.close(), receiver.close()
    control.check()


def test_a_generator_that_fuses_gets_fused_tensors():
    trainer, full = parameters_of(), weights_of(0)
    generator, want = {}, {}
    for name in parameter_shapes(CONFIG):
        if any(other in name for other in ("k_proj", "v_proj", "up_proj")):
            continue  # in the tensor of the first of them
        parts = [name]
        for first, fused, others in (
            ("q_proj", "qkv_proj", ("k_proj", "v_proj")),
            ("gate_proj", "gate_up_proj", ("up_proj",)),
        ):
            if first in name:
                parts += [name.replace(first, other) for other in others]
                name = name.replace(first, fused)
        want[name] = torch.cat([full[part] for part in parts])
        generator[name] = torch.nn.Parameter(torch.zeros_like(want[name]))
    sender, receiver, control = bound(trainer, generator)
    synced(sender, receiver, control, 1)
    for name, new in want.items():
        assert torch.equal(generator[name].data, new), name
    held = receiver.held()
    assert held.keys() == full.keys()
    for name, (box, weights) in held.items():
        assert box == Box.whole(tuple(weights.shape)) and torch.equal(weights, full[name]), name
    sender.close(), receiver.close()
    control.check()


def make_small_step(trainer):
    """Move each weight by 3e-4, which changes some 6 % of these numbers in bfloat16."""
    for parameter in trainer.values():
        parameter.data += 3e-4


def fault_of(kind, generator):
    """Return what changes the generator's parameters after each swap."""
    seen = []

    def put_back():
        seen.append({name: p.data.clone() for name, p in generator.items()})
        older = {"none": -1, "late": -2, "never": 0}[kind]
        for name, old in seen[max(older, -len(seen))].items():
            generator[name].data.copy_(old)

    return put_back


@pytest.mark.parametrize("kind", ["none", "late", "never"])
def test_a_generator_that_holds_an_older_version_is_seen_at_the_first_small_step(kind):
    trainer, generator = parameters_of(), parameters_of(99, torch.bfloat16)
    sender, receiver, control = bound(trainer, generator, dtype=torch.bfloat16)
    shards = [Shard(name, p, Box.whole(tuple(p.shape))) for name, p in trainer.items()]
    break_it = fault_of(kind, generator)
    for version in range(20):
        synced(sender, receiver, control, version)
        break_it()
        marks = marks_of(shards, version)
        if kind == "none" or version == 0:
            check_marks(marks, receiver.held(), version=version, rank=0)
        else:
            with pytest.raises(ParityError, match=f"weights of version {version}, but others"):
                check_marks(marks, receiver.held(), version=version, rank=0)
        make_small_step(trainer)
    sender.close(), receiver.close()
    control.check()


def test_parameters_that_are_not_what_the_topology_says_are_refused():
    fat = {**parameters_of(), "model.norm.weight": torch.nn.Parameter(torch.zeros(11))}
    with pytest.raises(
        WeightsError, match=r"model.norm.weight: rank 0 holds \(11,\), the topology says \(10,\)"
    ):
        bound(fat, parameters_of())
    with pytest.raises(
        WeightsError,
        match=(
            r"model.norm.weight: the generator holds \(11,\) torch.float32, \(10,\) torch.float32 "
            r"would come"
        ),
    ):
        bound(parameters_of(), fat)
    with pytest.raises(
        WeightsError,
        match=(
            r"embed_tokens.weight: the generator holds \(23, 10\) torch.bfloat16, .* "
            r"torch.float32 would"
        ),
    ):
        bound(parameters_of(), parameters_of(dtype=torch.bfloat16))
    with pytest.raises(
        WeightsError,
        match="other.weight: the generator's model has it, the trainer's weights do not",
    ):
        bound(
            parameters_of(), {**parameters_of(), "other.weight": torch.nn.Parameter(torch.zeros(1))}
        )


def test_nccl_is_refused_where_two_ranks_of_one_side_share_a_gpu():
    """They are no pair, but would be in one group with the others."""
    a, b, c = (RankInfo(rank, "one", gpu, nccl=True) for rank, gpu in enumerate(("x", "x", "y")))
    with pytest.raises(WeightsError, match="one NCCL group.*use shm or gloo or cuda_ipc"):
        choose_transports("nccl", [(a, c), (b, c)])


# --- shared memory ---

KILLED_WHILE_CONNECTING = """
import os, signal, torch
from llamarl.ddma.links import make_slots
slots = make_slots(4096, torch.device("cpu"), shared=True)
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_sender_killed_before_its_receivers_have_mapped_its_memory_leaves_nothing_behind():
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_CONNECTING], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not list(Path("/dev/shm").glob(f"llamarl-{int(done.stdout)}-*"))


def test_shared_memory_is_one_to_who_maps_it_by_its_path_and_out_of_reach_is_said():
    slots = make_slots(256, torch.device("cpu"), shared=True)
    seen = [links._map_path(path, 256 + 64) for path in map(path_of, slots.files)]
    slots.tensors[0].fill_(7), slots.counters[1].fill_(3)
    assert seen[0][:256].eq(7).all() and seen[1][256:].view(torch.int64)[0] == 3
    slots.close_files()
    with pytest.raises(WeightsError, match="cannot be opened .*; set weights.transport=gloo"):
        links._map_path("/proc/self/fd/none", 64)
