"""Weights: plans against the full-tensor oracle, checksums, and the transaction over links that damage what they carry."""

import queue
import threading

import pytest
import torch
from hypothesis import given, settings, strategies as st

from llamarl.control import Control, DeadlineExceeded
from llamarl.ddma.layout import ALIGN_BYTES, Parameter, RankLayout, fsdp, pack, replicated
from llamarl.ddma.plan import make_plan
from llamarl.ddma.transfer import BLOCK_BYTES, LocalLink, Publisher, Subscriber, WeightsError, checksum

shapes = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)


def stamp(parameters):
    """Every element of every global parameter is a distinct integer."""
    at, full = 1, {}
    for p in parameters:
        n = torch.Size(p.shape).numel()
        full[p.name] = torch.arange(at, at + n, dtype=torch.int32).view(p.shape)
        at += n
    return full


def fill(layout: RankLayout, full) -> torch.Tensor:
    flat = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    for s in layout.slices:
        box = full[s.name][tuple(slice(o, o + n) for o, n in zip(s.offsets, s.lengths))]
        flat[s.start_bytes : s.start_bytes + 4 * s.numel] = box.contiguous().view(-1).view(torch.uint8)
    return flat


def columns(parameters, num_ranks):
    """A tensor-parallel-like side: the last dim in uneven pieces."""
    ranks = []
    for r in range(num_ranks):
        boxes = []
        for p in parameters:
            cuts = [p.shape[-1] * i // num_ranks for i in range(num_ranks + 1)]
            boxes.append((p.name, (0,) * (len(p.shape) - 1) + (cuts[r],), (*p.shape[:-1], cuts[r + 1] - cuts[r])))
        ranks.append(pack(boxes, 4))
    return ranks


@settings(max_examples=120, deadline=None)
@given(shapes, st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_every_element_arrives_where_the_full_tensor_says(shapes, sources, destinations, column_wise):
    parameters = [Parameter(f"p{i}", s) for i, s in enumerate(shapes)]
    full = stamp(parameters)
    src = fsdp(parameters, sources, 4)
    dst = columns(parameters, destinations) if column_wise else replicated(parameters, destinations, 4)
    plan = make_plan(src, dst, 4)
    for d, layout in enumerate(dst):
        got = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        for s in range(sources):
            held = fill(src[s], full)
            for r in plan.link(s, d):
                got[r.destination_start : r.destination_start + r.size] = held[r.source_start : r.source_start + r.size]
        assert torch.equal(got, fill(layout, full))


def test_one_shard_to_one_replica_is_a_single_range():
    parameters = [Parameter("a", (3, 5)), Parameter("b", (7,)), Parameter("c", (2, 2))]
    plan = make_plan(fsdp(parameters, 1, 4), replicated(parameters, 1, 4), 4)
    assert len(plan.link(0, 0)) == 1


def test_bytes_cross_once_but_for_alignment():
    parameters = [Parameter("a", (64, 16)), Parameter("b", (64,))]
    plan = make_plan(fsdp(parameters, 2, 4), replicated(parameters, 3, 4), 4)
    floor = 3 * 4 * (64 * 16 + 64)
    assert floor <= sum(plan.bytes_per_link.values()) <= floor + 6 * 2 * ALIGN_BYTES


def test_a_gap_in_the_sources_is_an_error():
    parameters = [Parameter("a", (4, 2))]
    with pytest.raises(ValueError, match="the sources hold 4"):
        make_plan(fsdp(parameters, 2, 4)[:1], replicated(parameters, 1, 4), 4)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3 * BLOCK_BYTES), st.data())
def test_a_checksum_sees_any_changed_byte_and_any_swap(size, data):
    flat = torch.arange(size).mul_(2654435761).remainder_(251).to(torch.uint8)
    before = checksum(flat)
    i, j = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    flat[i] ^= data.draw(st.integers(1, 255))
    assert checksum(flat) != before
    flat = torch.arange(size).mul_(2654435761).remainder_(251).to(torch.uint8)
    if flat[i] != flat[j]:
        flat[i], flat[j] = flat[j].item(), flat[i].item()
        assert checksum(flat) != before


@given(st.integers(1, 200), st.integers(0, 70))
def test_a_checksum_does_not_depend_on_where_the_bytes_lie(size, start):
    flat = torch.arange(300).mul_(37).remainder_(251).to(torch.uint8)
    assert checksum(flat[start : start + size]) == checksum(flat[start : start + size].clone())


class DamagingLink(LocalLink):
    """Flips a byte in the first `times` deliveries."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def read(self, begin, into, ranges):
        super().read(begin, into, ranges)
        if self.times:
            self.times -= 1
            into[ranges[0].destination_start] ^= 0xFF


def alone():
    return Control(None, rank=0, world_size=1, leader=0, names=["everything"])


def ends(link, control, size=1000, deadline_s=5.0):
    parameters = [Parameter("w", (size,))]
    plan = make_plan(fsdp(parameters, 1, 4), replicated(parameters, 1, 4), 4)
    bytes_ = fsdp(parameters, 1, 4)[0].size_bytes
    publisher = Publisher("policy", bytes_, [(link, plan.link(0, 0))], control, deadline_s)
    subscriber = Subscriber("policy", bytes_, [(link, plan.link(0, 0))], [bytes_], control)
    return publisher, subscriber


def staged(subscriber, control, version):
    for _ in range(500):
        control.check()
        if subscriber.staged and subscriber.staged[0] == version:
            return subscriber.swap()
        control.wait(0.01)
    raise AssertionError(f"version {version} never came")


def value(v):
    return lambda slot: slot.view(torch.float32).fill_(v)


def test_versions_arrive_whole_and_in_turn():
    control = alone()
    publisher, subscriber = ends(LocalLink(), control)
    for v in range(5):
        publisher.publish(v, value(float(v)), evaluate=False, must_differ=True)
        version, _, buffer = staged(subscriber, control, v)
        assert version == v and (buffer.view(torch.float32)[:1000] == v).all()
    publisher.close(), subscriber.close()


def test_a_damaged_version_is_sent_again():
    control = alone()
    publisher, subscriber = ends(DamagingLink(times=2), control)
    publisher.publish(0, value(7.0), evaluate=False, must_differ=False)
    assert (staged(subscriber, control, 0)[2].view(torch.float32)[:1000] == 7).all()
    publisher.close(), subscriber.close()


def test_a_version_that_stays_damaged_ends_the_run_and_is_never_handed_over():
    control = alone()
    publisher, subscriber = ends(DamagingLink(times=99), control)
    publisher.publish(0, value(7.0), evaluate=False, must_differ=False)
    with pytest.raises(WeightsError, match="damaged"):
        for _ in range(500):
            control.check()
            control.wait(0.01)
    assert subscriber.staged is None
    subscriber.close()


def test_a_payload_equal_to_the_last_is_an_error_after_an_optimizer_step():
    control = alone()
    publisher, subscriber = ends(LocalLink(), control)
    publisher.publish(0, value(1.0), evaluate=False, must_differ=False)
    staged(subscriber, control, 0)
    publisher.publish(1, value(1.0), evaluate=False, must_differ=True)
    with pytest.raises(WeightsError, match="changed nothing"):
        for _ in range(500):
            control.check()
            control.wait(0.01)
    subscriber.close()


def test_a_version_to_be_evaluated_is_not_overtaken_and_others_are():
    control = alone()
    publisher, subscriber = ends(LocalLink(), control)
    publisher.publish(0, value(0.0), evaluate=True, must_differ=False)
    publisher.publish(1, value(1.0), evaluate=False, must_differ=True)
    assert staged(subscriber, control, 0)[1] is True
    assert staged(subscriber, control, 1)[1] is False
    publisher.publish(2, value(2.0), evaluate=False, must_differ=True)
    publisher.publish(3, value(3.0), evaluate=False, must_differ=True)
    publisher.publish(4, value(4.0), evaluate=False, must_differ=True)
    assert staged(subscriber, control, 4)[0] == 4
    publisher.close(), subscriber.close()


def test_generators_that_never_take_weights_are_named_within_the_deadline():
    control = alone()

    class Deaf(LocalLink):
        def recv(self, at_subscriber):
            return queue.Queue().get() if at_subscriber is False and threading.current_thread() else None

    parameters = [Parameter("w", (10,))]
    plan = make_plan(fsdp(parameters, 1, 4), replicated(parameters, 1, 4), 4)
    publisher = Publisher("policy", 64, [(Deaf(), plan.link(0, 0))], control, deadline_s=0.3)
    publisher.publish(0, value(0.0), evaluate=False, must_differ=False)
    publisher.publish(1, value(1.0), evaluate=False, must_differ=False)
    with pytest.raises(DeadlineExceeded, match="step 2.*have not taken"):
        publisher.publish(2, value(2.0), evaluate=False, must_differ=False)
