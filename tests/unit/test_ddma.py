"""Weights in one process: the transaction over links that damage what they carry, forwarding,
transports, and the bound ends.
"""

import itertools
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from llamarl.comm.groups import RankInfo
from llamarl.ddma import links
from llamarl.ddma.links import Header, HeaderKind, make_slots
from llamarl.ddma.protocol import MAX_RETRIES
from llamarl.ddma.receiver import Staged, WeightsReceiver
from llamarl.ddma.route import choose_transports
from llamarl.ddma.sender import LOOK_S, WeightsSender
from llamarl.disk.shared_memory import path_of
from llamarl.errors import ParityError, TimedOut, WeightsError
from llamarl.models.parity import check_marks, marks_of
from llamarl.models.sharded_state import Shard
from llamarl.models.sharding import Box, num_parameters, parameter_shapes
from tests.build.routes import PATIENCE_S, control_of, route_of
from tests.weight_links import (
    CONFIG,
    LINKS,
    WHOLE,
    Ends,
    Follower,
    SpyLink,
    StreamLink,
    bytes_of,
    corrupting,
    failure_of,
    forwarded,
    is_end,
    until,
    weights_of,
)


@LINKS
def test_versions_arrive_whole_and_in_turn(kind):
    ends = Ends(kind())
    assert len(ends.buckets[0]) > 5
    for v in range(3):
        ends.publish(v, evaluate=v == 1)
        assert ends.receive(v) == Staged(v, v == 1, v == 1, {"canary of": v})
    assert ends.swap() is None
    ends.close()
    assert ends.links[0].forward[-1].kind == HeaderKind.CLOSE


def committed(ends, version):
    """Wait until the source knows that a version has arrived."""
    until(lambda: ends.publishers[0].committed_version == version, ends.sending)


def gated(is_held):
    """(change of a link that lets a header wait for a gate, the gate)."""
    gate = threading.Event()

    def wait(header):
        if is_held(header):
            assert gate.wait(PATIENCE_S)
        return [header]

    return wait, gate


def with_wrong_digest(header, *buckets):
    """The END that says something else of these places in its list."""
    digests = [d ^ 1 if i in buckets else d for i, d in enumerate(header.more["digests"])]
    return Header(header.kind, header.version, header.more | {"digests": digests})


@LINKS
def test_the_old_version_serves_while_a_new_one_is_damaged_and_the_run_then_ends(kind):
    def wrong(h):  # bucket 2: the third of the first delivery, then alone
        if not is_end(1)(h):
            return [h]
        return [with_wrong_digest(h, 2 if len(h.more["digests"]) > 1 else 0)]

    link = kind(wrong)
    ends = Ends(link)
    ends.publish(0), ends.receive(0)
    ends.publish(1)
    where = r"on rank 0, from trainer rank 0: buckets \[2\] of version 1 .* version in use is"
    with pytest.raises(WeightsError, match=where):
        raise failure_of(ends.receiving)
    # In one process either end may be the first to say so.
    with pytest.raises(WeightsError, match=r"from rank 0: .*\[2\].* version 1 .* 3 times"):
        raise failure_of(ends.sending)
    assert link.verdicts(1) == [[2]] * MAX_RETRIES and MAX_RETRIES == 3
    assert ends.subscriber.staged is None and ends.swap() is None and ends.holds(0)


@pytest.mark.parametrize(
    "came, instead_of, expected",
    [
        (Header(HeaderKind.END, 0), HeaderKind.END, "END of version 1"),
        (Header(HeaderKind.END, 1), HeaderKind.BEGIN, "BEGIN or CLOSE"),
    ],
)
def test_a_header_out_of_turn_is_named_with_its_sender(came, instead_of, expected):
    def out_of_turn(header):
        return [came if (header.kind, header.version) == (instead_of, 1) else header]

    ends = Ends(SpyLink(out_of_turn))
    ends.publish(0), ends.receive(0)
    ends.publish(1)
    said = f"from trainer rank 0: END of version {came.version} came where {expected} was"
    with pytest.raises(WeightsError, match=said):
        raise failure_of(ends.receiving)
    assert ends.swap() is None and ends.holds(0)


@LINKS
def test_a_version_that_stops_on_its_way_ends_within_the_deadline(kind):
    class Cut(kind):
        sent = 0

        def send_bytes(self, flat):
            self.sent += 1
            is_last = self.sent == 2 * len(ends.buckets[0])
            return None if is_last else super().send_bytes(flat)

    ends = Ends(Cut(lambda h: [] if is_end(1)(h) else [h]), timeout_s=1.0)
    ends.publish(0), ends.receive(0)
    count = len(ends.buckets[0])
    ends.publish(1)
    # Memory that is read lacks nothing but the word that it is right.
    missing = [count - 1] if kind is StreamLink else list(range(count))
    with pytest.raises(WeightsError) as raised:
        raise failure_of(ends.receiving)
    said = f"version 1 stopped on its way with buckets {missing} of {count} to come"
    assert "from trainer rank 0" in str(raised.value) and said in str(raised.value)
    assert ends.swap() is None and ends.holds(0)


def test_a_version_that_never_begins_is_named_by_the_sender_that_runs_out_of_slots():
    ends = Ends(SpyLink(lambda h: [] if h.version == 1 else [h]), timeout_s=0.5)
    ends.publish(0), ends.receive(0)
    ends.publish(1), ends.publish(2)
    with pytest.raises(TimedOut, match=r"rank 0, step 3: .* \(committed: version 0\)"):
        ends.publish(3)
    assert ends.swap() is None and ends.holds(0)


class Untaken:
    """A sender whose generators never take anything. staged, canaries: versions of which these were
    made.
    """

    def __init__(self):
        self.control = control_of()
        self.staged = []
        self.canaries = []
        self.sender = WeightsSender(route_of(control=self.control))
        self.sender.bind(CONFIG, list(parameters_of().items()))
        self.fill = self.sender._staging.fill
        self.sender._staging.fill = self.stage
        self.publish(0)

    def stage(self, slot, progress):
        self.staged.append(self.version)
        self.fill(slot, progress)

    def publish(self, version, *, must_arrive=False):
        def canary():
            self.canaries.append(version)
            return {}

        self.version = version
        self.sender.publish(version, must_differ=False, must_arrive=must_arrive, canary=canary)


def test_a_trainer_that_waits_for_a_generator_hears_a_stop_and_takes_part_in_what_is_collective():
    ours = Untaken()
    ours.control.request_stop()
    ours.publish(1)
    assert ours.staged == [0, 1], "it has a slot"
    waiting = ours.control.thread("trainer", ours.publish, 2)
    waiting.join(PATIENCE_S / 2)
    assert not waiting.is_alive() and ours.control.failure is None
    assert ours.staged == [0, 1] and ours.canaries == [0, 1, 2]


def test_a_version_that_must_arrive_is_not_given_up_for_a_stop():
    ours = Untaken()
    ours.publish(1)
    ours.control.request_stop()
    waiting = ours.control.thread("trainer", partial(ours.publish, must_arrive=True), 2)
    waiting.join(3 * LOOK_S)
    assert waiting.is_alive() and ours.staged == [0, 1]
    ours.sender._bound._free.put(0)  # version 0 was taken
    waiting.join(PATIENCE_S / 2)
    assert not waiting.is_alive() and ours.control.failure is None and ours.staged == [0, 1, 2]


def test_a_payload_equal_to_the_last_is_an_error_after_an_optimizer_step():
    ends = Ends()
    full = weights_of(0)
    ends.publish(0, must_differ=False), ends.receive(0)
    ends.publish(1, full=full, must_differ=False)
    ends.staged(1)
    moved = full["model.norm.weight"].clone()
    moved[3] = torch.nextafter(moved[3], torch.tensor(9.0))
    changed = full | {"model.norm.weight": moved}
    ends.publish(2, full=changed)
    committed(ends, 2)
    ends.publish(3, full=changed)
    with pytest.raises(WeightsError, match="from rank 0: weights of version 3 equal .*before"):
        raise failure_of(ends.sending)


# --- which version is served ---


def test_a_newer_version_overtakes_one_that_nobody_took():
    ends = Ends()
    for v in range(4):
        ends.publish(v)
    ends.staged(3)
    assert ends.receive(3).version == 3 and ends.swap() is None
    ends.close()


def stays(ends, version):
    """The version is still staged a moment later, when the next one has begun to come and could
    have pushed it out.
    """
    link = ends.links[0]
    until(lambda: link.has_begun(version + 1), *ends.controls)
    time.sleep(0.1)
    return ends.subscriber.staged.version == version and not link.verdicts(version + 1)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_version_to_be_evaluated_is_not_overtaken(in_order):
    ends = Ends(in_order=in_order)
    ends.publish(0, evaluate=True), ends.publish(1)
    assert stays(ends, 0) and not ends.subscriber.overtakable
    assert ends.swap() == Staged(0, True, True, {"canary of": 0})
    ends.receive(1)
    ends.close()


def test_in_order_a_version_gives_way_when_it_is_skipped_alone():
    ends = Ends(in_order=True)
    ends.publish(0), ends.staged(0)
    assert not ends.subscriber.overtakable, "nothing newer waits"
    ends.publish(1)
    assert stays(ends, 0)
    until(lambda: ends.subscriber.overtakable, *ends.controls)
    ends.subscriber.skip(7)
    assert ends.subscriber.staged.version == 0, "another version was meant"
    ends.subscriber.skip(0)
    ends.staged(1)
    assert not ends.subscriber.overtakable
    assert ends.swap().version == 1 and ends.holds(1)
    ends.close()


def test_while_a_version_comes_there_is_nothing_to_swap_and_the_old_one_is_untouched():
    wait, gate = gated(is_end(2))
    ends = Ends(SpyLink(wait))
    ends.publish(0), ends.receive(0)
    ends.publish(1), ends.staged(1)
    ends.publish(2)
    until(lambda: ends.subscriber.staged is None, *ends.controls)  # 1 gave way to 2
    assert ends.swap() is None and ends.holds(0)
    gate.set()
    ends.receive(2)
    ends.close()


def test_two_sources_that_are_a_version_apart_make_whole_versions():
    wait, gate = gated(lambda h: h.kind == HeaderKind.BEGIN and h.version == 0)
    ends = Ends(SpyLink(), SpyLink(wait))
    ends.publish(0), ends.publish(1)
    until(lambda: ends.links[0].has_begun(1), *ends.controls)
    time.sleep(0.05)
    assert ends.subscriber.staged is None  # half of version 0, and 1 at the door
    gate.set()
    ends.receive(1)
    ends.publish(2), ends.receive(2)
    ends.close()


@pytest.mark.parametrize("seed", range(2))
def test_what_is_swapped_in_is_whole_however_the_threads_interleave(seed):
    dice = random.Random(seed)

    def jitter(header):
        time.sleep(dice.random() * 0.002)
        return [header]

    kinds = itertools.cycle([SpyLink, StreamLink])
    ends = Ends(*(next(kinds)(jitter) for _ in range(3)))
    thread = threading.Thread(target=lambda: [ends.publish(v) for v in range(12)], daemon=True)
    thread.start()
    ends.receive(11)  # checks every version that it swaps in on the way
    thread.join(PATIENCE_S)
    ends.close()


def test_one_buffer_is_copied_out_at_a_swap():
    ends = Ends(num_buffers=1)
    live = torch.zeros_like(bytes_of(0))
    buffers = set()

    def swap():
        with ends.subscriber.handover() as (staged, buffer):
            buffers.add(buffer.data_ptr())
            live.copy_(buffer)
        return staged

    for v in (0, 2):
        ends.publish(v, evaluate=True)
        ends.publish(v + 1)  # waits for the only buffer
        ends.staged(v)
        assert swap().version == v and torch.equal(live, bytes_of(v))
        ends.staged(v + 1)
        assert torch.equal(live, bytes_of(v))
        assert swap().version == v + 1 and torch.equal(live, bytes_of(v + 1))
    assert len(buffers) == 1
    ends.close()


# --- from replica to replica ---


@pytest.mark.parametrize("kind, sources", [(SpyLink, 3), (StreamLink, 1), (StreamLink, 3)])
def test_the_second_and_third_replica_get_everything_through_the_first(kind, sources):
    one = kind()
    two = kind()
    ends = Ends(*(kind() for _ in range(sources)), follower=forwarded(one))
    second, third = Follower(one, forwarded(two)), Follower(two)
    for v in range(4):
        ends.publish(v, evaluate=v == 3)
        if v % 2:  # the order in which they swap does not matter
            ends.receive(v)
        assert second.receive(v) == third.receive(v) == Staged(v, v == 3, v == 3, {"canary of": v})
        if not v % 2:
            ends.receive(v)
    ends.close()
    until(lambda: one.forward[-1].kind == two.forward[-1].kind == HeaderKind.CLOSE)
    second.close(), third.close()


def test_a_replica_that_comes_late_gets_the_version_that_was_swapped_in_meanwhile():
    ready = threading.Event()

    class Late(SpyLink):
        def offer(self, slots, base=0):
            assert ready.wait(PATIENCE_S)
            super().offer(slots, base)

    link = Late()
    ends = Ends(follower=forwarded(link))
    second = Follower(link)
    ends.publish(0), ends.receive(0)
    ready.set()
    second.receive(0)
    ends.publish(1), ends.receive(1), second.receive(1)
    ends.close(), second.close()


@LINKS
@pytest.mark.parametrize("on_its_way", [False, True])
def test_damaged_buckets_alone_are_named_and_sent_again_and_right_at_the_next_replica_too(
    kind, on_its_way
):
    first, link = kind(), corrupting(kind, times=2)
    if not on_its_way:
        first, link = link, first
    ends = Ends(first, follower=forwarded(link))
    second = Follower(link)
    for v in range(2):
        ends.publish(v), ends.receive(v), second.receive(v)
    damaged, num_buckets = (link, len(WHOLE)) if on_its_way else (first, len(ends.buckets[0]))
    wrong, then = damaged.verdicts(0)
    assert len(wrong) == 2 and then == []
    assert damaged.bucket_sends(0) == [*range(num_buckets), *wrong], "the damaged ones alone"
    assert link.verdicts(0)[-1] == [] and link.verdicts(1) == [[]]
    ends.close(), second.close()


def test_what_stays_damaged_on_its_way_on_names_the_replica_that_sent_it():
    link = corrupting(StreamLink, times=10_000)
    ends = Ends(follower=forwarded(link))
    second = Follower(link)
    ends.publish(0), ends.receive(0)
    with pytest.raises(WeightsError, match=r"from generator rank 0: buckets \[1, .* version 0 "):
        raise failure_of(second.receiving)
    with pytest.raises(WeightsError, match="forwarded by rank 0"):
        raise failure_of(ends.receiving)
    assert second.swap() is None


def test_a_replica_that_evaluates_holds_nobody_up_but_its_own_next_version():
    link = SpyLink()
    ends = Ends(follower=forwarded(link))
    second = Follower(link)
    ends.publish(0, evaluate=True), ends.receive(0)
    second.staged(0)
    ends.publish(1), ends.receive(1)  # while the second has not taken 0
    time.sleep(0.05)
    assert second.subscriber.staged.version == 0
    second.receive(1)
    ends.close(), second.close()


# --- a generator on a trainer's rank ---


def waits_for_local(ends):
    """Wait in a thread for the version of this rank's trainer: a Future of what is staged then."""

    def wait():
        ends.subscriber.wait_for_local()
        return ends.subscriber.staged

    return ThreadPoolExecutor(1).submit(wait)


def waited(ends):
    return waits_for_local(ends).result(PATIENCE_S)


def held(*kinds):
    """Two ends whose END of version 1 waits for a gate; version 0 is in place, and 1 published.
    Returns (ends, gate).
    """
    wait, gate = gated(is_end(1))
    first, *others = kinds or (SpyLink,)
    ends = Ends(first(wait), *(kind() for kind in others))
    ends.publish(0), ends.receive(0)
    committed(ends, 0)
    ends.publish(1)
    return ends, gate


def test_a_rank_waits_for_what_its_own_trainer_has_published():
    ends, gate = held()
    waiting = waits_for_local(ends)
    time.sleep(0.02)
    assert not waiting.done()
    gate.set()
    assert waiting.result(PATIENCE_S).version == 1
    assert waited(ends).version == 1, "it is here: nothing to wait for"
    ends.receive(1)
    assert waited(ends) is None
    ends.close()


def test_it_waits_for_no_version_behind_one_that_is_still_on_its_way():
    """To a rank that evaluates, say, which takes what comes later only then."""
    ends, gate = held()
    ends.links[0].peer = 1  # an imagined rank elsewhere
    ends.publish(2)
    assert ends.links[0].leaving == 1
    gate.set()
    ends.receive(2)
    committed(ends, 2)
    ends.publish(3)
    assert ends.links[0].leaving == 3
    ends.receive(3)
    ends.close()


def test_it_waits_for_no_version_that_would_not_come():
    """Not for one behind a version that must be loaded first, and not once all ends."""
    ends = Ends()
    ends.publish(0, evaluate=True), ends.publish(1)
    ends.staged(0)
    assert waited(ends).version == 0
    ends.swap()
    ends.staged(1)
    ends.close()
    for name in ("stopping", "loss", "is_closing"):
        ends, gate = held()
        of = ends.subscriber if name == "is_closing" else ends.receiving
        setattr(of, name, True)
        assert waited(ends) is None
        setattr(of, name, None)
        gate.set()
        ends.close()


@pytest.mark.parametrize("kinds", [(StreamLink,), (SpyLink, StreamLink)], ids=["sent", "in part"])
def test_it_does_not_wait_for_bytes_that_are_sent(kinds):
    ends, gate = held(*kinds)
    assert waited(ends) is None
    gate.set()
    ends.receive(1)
    ends.close()


def test_a_version_of_which_another_trainer_rank_owes_a_part_is_named():
    ends = Ends(SpyLink(), SpyLink(), timeout_s=1.0)
    ends.publish(0), ends.receive(0)
    committed(ends, 0)
    ends.publish(1, only=0)
    with pytest.raises(TimedOut, match=r"rank \d+: version 1, .* \(in use: version 0\)"):
        waited(ends)
    ends.publish(1, only=1)
    assert waited(ends).version == 1
    ends.close()


# --- transports ---

CPU = [RankInfo(rank, "host a", None) for rank in range(4)]
FAR_CPU = RankInfo(9, "host b", None)
GPU = [RankInfo(rank, "host a", f"gpu {rank}", nccl=True) for rank in range(2)]
FAR_GPU = RankInfo(8, "host b", "gpu 8", nccl=True)
SAME_GPU = RankInfo(7, "host a", "gpu 0", nccl=True)
WITHOUT_NCCL = RankInfo(6, "host a", "gpu 6", nccl=False)
FAR_WITHOUT_NCCL = RankInfo(5, "host b", "gpu 5", nccl=False)


@pytest.mark.parametrize(
    "asked, pairs, wanted",
    [
        ("auto", [(CPU[0], CPU[1]), (CPU[0], FAR_CPU), (CPU[0], CPU[0])], "shm gloo local"),
        ("auto", [(GPU[0], SAME_GPU)], "cuda_ipc"),
        ("auto", [(GPU[0], WITHOUT_NCCL)], "cuda_ipc"),
        ("auto", [(GPU[0], GPU[1]), (GPU[0], FAR_GPU), (GPU[0], GPU[0])], "cuda_ipc nccl local"),
        # One pair has no device in common, or no NCCL between hosts: all keep off the device.
        ("auto", [(GPU[0], CPU[3]), (GPU[0], GPU[1])], "shm shm"),
        ("auto", [(GPU[0], FAR_CPU)], "gloo"),
        ("auto", [(GPU[0], FAR_WITHOUT_NCCL), (GPU[0], GPU[1])], "gloo shm"),
        # What can join two ranks is taken as asked.
        ("gloo", [(GPU[0], GPU[1]), (GPU[0], GPU[0])], "gloo local"),
        ("shm", [(GPU[0], GPU[1]), (GPU[0], GPU[0])], "shm local"),
        ("nccl", [(GPU[0], FAR_GPU), (GPU[0], GPU[0])], "nccl local"),
        ("cuda_ipc", [(GPU[0], SAME_GPU), (GPU[0], GPU[0])], "cuda_ipc local"),
    ],
)
def test_a_transport_is_the_nearest_way_or_as_asked(asked, pairs, wanted):
    chosen = choose_transports(asked, pairs)
    assert chosen == {(a.rank, b.rank): way for (a, b), way in zip(pairs, wanted.split())}


@pytest.mark.parametrize(
    "asked, pairs, why, others",
    [
        ("shm", [(CPU[0], FAR_CPU)], "ranks 0 and 9 are on different hosts", "gloo"),
        ("cuda_ipc", [(GPU[0], GPU[1]), (GPU[0], FAR_GPU)], "ranks 0 and 8 are", "gloo or nccl"),
        ("cuda_ipc", [(GPU[0], CPU[1])], "ranks 0 and 1 do not both have a GPU", "shm or gloo"),
        ("nccl", [(CPU[0], FAR_CPU)], "ranks 0 and 9 do not both have a GPU", "gloo"),
        ("nccl", [(GPU[0], WITHOUT_NCCL)], "run a torch without NCCL", "shm or gloo or cuda_ipc"),
        ("nccl", [(GPU[0], SAME_GPU)], "ranks 0 and 7 share one GPU", "shm or gloo or cuda_ipc"),
        # Two of one side are no pair, but would be in one group with the third.
        ("nccl", [(GPU[0], GPU[1]), (SAME_GPU, GPU[1])], "one NCCL group", "shm or gloo or cuda"),
    ],
)
def test_a_transport_that_cannot_join_two_ranks_is_refused_with_what_can(asked, pairs, why, others):
    said = f"weights.transport={asked}: .*{why}.*; use {others}"
    with pytest.raises(WeightsError, match=said):
        choose_transports(asked, pairs)


def test_what_a_replica_forwards_lies_in_its_own_memory_so_it_goes_by_gloo_on_one_host_too():
    hosts = [CPU[0], RankInfo(1, "host b", None), RankInfo(2, "host b", None)]
    route = route_of(1, sources=(0,), destinations=(1, 2), ranks=hosts)
    assert route.plan(CONFIG).follower(0) == 1
    assert route.link_from(0).transport == route.link_to(2).transport == "gloo"


@pytest.mark.parametrize("on_host, transport", [(False, "cuda_ipc"), (True, "shm")])
def test_weights_that_are_staged_on_the_host_of_two_gpus_do_not_travel_between_devices(
    on_host, transport
):
    route = route_of(sources=(0,), destinations=(1,), ranks=GPU, on_host=on_host)
    assert route.link_to(1).transport == transport and route.on_device is not on_host


# --- the bound ends ---


class Bound:
    """Sender and receiver of one process, where the trainer's parameters are `trainer` and the
    generator's `generator`.
    """

    def __init__(self, trainer, generator, **what_travels):
        self.control = control_of()
        route = route_of(control=self.control, **what_travels)
        self.sender, self.receiver = WeightsSender(route), WeightsReceiver(route)
        self.sender.bind(CONFIG, list(trainer.items()))
        self.receiver.bind(CONFIG, list(generator.items()))

    def sync(self, version):
        self.sender.publish(version, must_differ=True, canary=lambda: {"v": version})
        assert until(self.receiver.swap, self.control) == Staged(version, canary={"v": version})

    def close(self):
        self.sender.close(), self.receiver.close()
        self.control.check()


def parameters_of(version=0, dtype=torch.float32):
    return {name: torch.nn.Parameter(t.to(dtype)) for name, t in weights_of(version).items()}


def test_parameters_arrive_in_the_generators_dtype_and_follow_the_trainer():
    trainer, generator = parameters_of(), parameters_of(99, torch.bfloat16)
    ends = Bound(trainer, generator, dtype=torch.bfloat16)
    assert ends.sender.bytes_per_sync == 2 * num_parameters(CONFIG)
    for version in range(1, 4):
        for name, new in weights_of(version).items():
            if version == 2:
                trainer[name].data = new.clone()  # a trainer that moves its parameters
            trainer[name].data.copy_(new)
        ends.sync(version)
        for name, new in weights_of(version).items():
            assert torch.equal(generator[name].data, new.bfloat16()), (name, version)
    ends.close()


def test_a_generator_that_fuses_gets_fused_tensors():
    full = weights_of(0)
    fused = {
        "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    }
    want = {}
    for name in parameter_shapes(CONFIG):
        module = name.split(".")[-2]
        if module in fused:
            whole, members = fused[module]
            parts = [full[name.replace(module, member)] for member in members]
            want[name.replace(module, whole)] = torch.cat(parts)
        elif module not in ("k_proj", "v_proj", "up_proj"):
            want[name] = full[name]
    generator = {name: torch.nn.Parameter(torch.zeros_like(t)) for name, t in want.items()}
    ends = Bound(parameters_of(), generator)
    ends.sync(1)
    for name, new in want.items():
        assert torch.equal(generator[name].data, new), name
    held = ends.receiver.held()
    assert held.keys() == full.keys()
    for name, (box, weights) in held.items():
        assert box == Box.whole(tuple(weights.shape)) and torch.equal(weights, full[name]), name
    ends.close()


@pytest.mark.parametrize("held_version", ["newest", "one before", "first"])
def test_a_generator_that_holds_an_older_version_is_seen_at_the_first_small_step(held_version):
    """A step of 3e-4 changes some 6 % of these numbers in bfloat16."""
    trainer, generator = parameters_of(), parameters_of(99, torch.bfloat16)
    ends = Bound(trainer, generator, dtype=torch.bfloat16)
    shards = [Shard(name, p, Box.whole(tuple(p.shape))) for name, p in trainer.items()]
    seen = []
    for version in range(6):
        ends.sync(version)
        seen.append({name: p.data.clone() for name, p in generator.items()})
        older = {"newest": version, "one before": max(0, version - 1), "first": 0}[held_version]
        for name, old in seen[older].items():
            generator[name].data.copy_(old)
        marks = marks_of(shards, version)
        if older == version:
            check_marks(marks, ends.receiver.held(), version=version, rank=0)
        else:
            with pytest.raises(ParityError, match=f"weights of version {version}, but others"):
                check_marks(marks, ends.receiver.held(), version=version, rank=0)
        for parameter in trainer.values():
            parameter.data += 3e-4
    ends.close()


FAT = {"model.norm.weight": torch.nn.Parameter(torch.zeros(11))}
MORE = {"other.weight": torch.nn.Parameter(torch.zeros(1))}


@pytest.mark.parametrize(
    "trainer, generator, said",
    [
        (FAT, {}, r"norm.weight: rank 0 holds \(11,\), the topology says \(10,\)"),
        ({}, FAT, r"norm.weight: the generator holds \(11,\) torch.float32, \(10,\)"),
        ({}, parameters_of(dtype=torch.bfloat16), r"embed_tokens.weight: .* torch.bfloat16"),
        ({}, MORE, "other.weight: the generator's model has it, the trainer's weights do not"),
    ],
    ids=["trainer's shape", "generator's shape", "dtype", "name"],
)
def test_parameters_that_are_not_what_the_topology_says_are_refused(trainer, generator, said):
    with pytest.raises(WeightsError, match=said):
        Bound(parameters_of() | trainer, parameters_of() | generator)


def test_shared_memory_is_one_to_who_maps_it_by_its_path_and_out_of_reach_is_said():
    slots = make_slots(256, torch.device("cpu"), shared=True)
    seen = [links._map_path(path, 256 + 64) for path in map(path_of, slots.files)]
    slots.tensors[0].fill_(7), slots.counters[1].fill_(3)
    assert seen[0][:256].eq(7).all() and seen[1][256:].view(torch.int64)[0] == 3
    # It has no name, so that nothing stays where its process is killed.
    assert not list(Path("/dev/shm").glob(f"llamarl-{os.getpid()}-*"))
    slots.close_files()
    with pytest.raises(WeightsError, match="cannot be opened .*; set weights.transport=gloo"):
        links._map_path("/proc/self/fd/none", 64)
