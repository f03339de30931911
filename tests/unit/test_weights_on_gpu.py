"""Weights between GPUs that are not there: which stream does what, who waits for whom, and what
arrives, in a process, over CUDA IPC and over NCCL.
"""

import contextlib
import time

import pytest
import torch

from llamarl.comm.groups import RankInfo
from llamarl.ddma.layout import Destination, Source, parameters_to_send
from llamarl.ddma.receiver import WeightsReceiver
from llamarl.ddma.sender import WeightsSender
from llamarl.models.quantize import QUANTIZED, quantize_rows
from llamarl.models.sharding import parameter_shapes
from tests.build.routes import PATIENCE_S, control_of, route_of
from tests.decoding import EVEN_CONFIG as CONFIG
from tests.imagined_gpu import GPU, OnGpu, imagined_gpu
from tests.imagined_ranks import Office, Post

SHAPES = parameter_shapes(CONFIG)


@pytest.fixture
def gpu():
    with imagined_gpu() as made:
        yield made


def whole(version):
    """The trainer's weights, on the CPU."""
    random = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


class Ranks:
    """Trainer ranks first, then generator ranks, each with its end of the channel."""

    def __init__(self, infos, source, destination, *, post=None, quantize="none", on_host=False):
        count = source.num_ranks
        self.source = source
        self.destination = destination
        self.dtype = torch.bfloat16
        self.quantize = quantize
        together = len(infos) == 1
        trainers = (0,) if together else tuple(range(count))
        generators = (0,) if together else tuple(range(count, count + destination.num_ranks))
        self.routes = []
        for info in infos:
            route = route_of(
                sources=trainers,
                destinations=generators,
                source=source,
                destination=destination,
                dtype=self.dtype,
                quantize=quantize,
                exclude=("lm_head",) if quantize != "none" else (),
                ranks=infos,
                group=None if post is None else Office("gloo", info.rank),
                device_group=None if post is None else Office("nccl", info.rank),
                control=control_of(info.rank, len(infos)),
                on_host=on_host,
            )
            self.routes.append(route)
        self.held = [self._shard(i) for i in range(count)]
        self.senders = [WeightsSender(self.routes[rank]) for rank in trainers]
        self.receivers = [WeightsReceiver(self.routes[rank]) for rank in generators]
        kinds = parameters_to_send(CONFIG, self.dtype, QUANTIZED.get(quantize), ("lm_head",))
        self.targets = []
        for part in range(destination.num_ranks):
            of_rank = {}
            for p in kinds:
                box = destination.box(CONFIG, p, part % destination.parts)
                zeros = torch.zeros(box.lengths, device=GPU).to(p.dtype)
                of_rank[p.name] = torch.nn.Parameter(zeros, requires_grad=False)
            self.targets.append(of_rank)
        for sender, held in zip(self.senders, self.held):
            sender.bind(CONFIG, list(held.items()))
        for receiver, of_rank in zip(self.receivers, self.targets):
            receiver.bind(CONFIG, list(of_rank.items()))

    def _shard(self, rank):
        held = {}
        for name, full in whole(0).items():
            rows = -(-full.shape[0] // self.source.fsdp)
            held[name] = full[rank * rows : (rank + 1) * rows].to(GPU)
        return held

    def train(self, version):
        for rank, held in enumerate(self.held):
            for name, full in whole(version).items():
                rows = -(-full.shape[0] // self.source.fsdp)
                held[name].copy_(full[rank * rows : (rank + 1) * rows])

    def sync(self, version):
        """Publish on all, and swap in on all."""
        for sender in self.senders:
            sender.publish(version, must_differ=version > 0, evaluate=True)
        until = time.monotonic() + PATIENCE_S
        for receiver in self.receivers:
            while receiver.staged is None:
                for route in self.routes:
                    route.control.check()
                assert time.monotonic() < until, "it never came"
                self.routes[0].control.wait(0.01)
            assert receiver.swap().version == version

    def assert_received(self, version):
        full = whole(version)
        for held in self.targets:
            for name, parameter in held.items():
                if name in full and parameter.dtype == self.dtype:
                    assert torch.equal(parameter.cpu(), full[name].bfloat16()), name
                elif name in full:
                    q, _ = quantize_rows(full[name], self.quantize)
                    assert torch.equal(parameter.cpu().float(), q.float()), name

    def close(self):
        for end in (*self.senders, *self.receivers):
            end.close()


def info(rank, *, host="a", gpu="g0"):
    return RankInfo(rank, host, gpu, nccl=True)


def said(gpu, thread):
    return [done for done in gpu.streams.log if done.thread.startswith(thread)]


@pytest.mark.parametrize("on_host, quantize", [(False, "fp8"), (True, "none"), (True, "int8")])
def test_versions_arrive_in_one_process_and_each_copy_waits_for_what_it_reads(
    gpu, on_host, quantize
):
    ranks = Ranks([info(0)], Source(), Destination(), on_host=on_host, quantize=quantize)
    assert ranks.routes[0].on_device is not on_host
    addresses = [p.data_ptr() for p in ranks.targets[0].values()]
    for version in range(2):
        ranks.train(version)
        ranks.sync(version)
        ranks.assert_received(version)
    assert addresses == [p.data_ptr() for p in ranks.targets[0].values()]
    ranks.close()


def test_threads_that_move_weights_keep_out_of_the_models_stream(gpu):
    ranks = Ranks([info(0)], Source(), Destination())
    slots = ranks.senders[0]._bound._slots
    assert all(isinstance(t, OnGpu) for t in slots.tensors) and not slots.counters
    ranks.sync(0)
    # The swap is over before the buffer may be written again.
    main = [done.what for done in said(gpu, "MainThread")]
    assert "_foreach_copy_" in main[-2] and main[-1] == "synchronize"
    ranks.close()
    ours = {done.who for done in said(gpu, "publish-") + said(gpu, "subscribe-")} - {"host"}
    assert len(ours) == 2 and "default" not in ours
    staged = [done for done in said(gpu, "MainThread") if "_foreach_copy_" in done.what]
    assert {done.who for done in staged} == {"default"}
    recorded = [done for done in said(gpu, "MainThread") if done.what == "record"]
    waited = [done for done in said(gpu, "publish-") if done.what == "wait for an event"]
    assert len(recorded) == len(staged) - 1 and len(waited) >= len(recorded)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_sender_that_does_not_wait_for_its_staging_is_found(gpu, monkeypatch, on_host):
    monkeypatch.setattr("tests.imagined_streams.Event.synchronize", lambda event: None)
    ranks = Ranks([info(0)], Source(), Destination(), on_host=on_host)
    with pytest.raises(AssertionError, match="_foreach_copy_.* does not wait for it"):
        ranks.sync(0)
    with contextlib.suppress(AssertionError):
        ranks.close()


def test_a_process_opens_the_senders_device_memory_on_one_gpu(gpu):
    post = Post(gpu.streams)
    with post.patched():
        ranks = Ranks([info(0), info(1)], Source(), Destination(), post=post)
        link = ranks.routes[1].link_from(0)
        assert (link.transport, link.streams) == ("cuda_ipc", False)
        for version in range(3):
            ranks.train(version)
            ranks.sync(version)
            ranks.assert_received(version)
        ranks.close()
    assert len(gpu.shared) == 2, "its two slots"
    assert not post.sent, "no bytes of weights are sent"


# Hosts of the ranks, how many of them train, who sends to whom, and how many slots are shared.
TOPOLOGIES = {
    "two shards to two replicas": ("aabb", 2, {(0, 2), (1, 2), (0, 3), (1, 3)}, 0),
    "one to a replica that forwards on its host": ("abb", 1, {(0, 1)}, 1),
    "one to a replica that forwards to another host": ("abc", 1, {(0, 1), (1, 2)}, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("hosts, shards, expected, shared", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_gpus_of_several_hosts_send_in_the_order_in_which_the_others_receive(
    gpu, hosts, shards, expected, shared
):
    infos = []
    for rank, host in enumerate(hosts):
        infos.append(info(rank, host=host, gpu=f"g{rank}"))
    post = Post(gpu.streams)
    with post.patched():
        source = Source(fsdp=shards)
        destination = Destination(replicas=len(hosts) - shards)
        ranks = Ranks(infos, source, destination, post=post)
        assert ranks.routes[shards].link_from(0).transport == "nccl"
        for version in range(2):
            ranks.train(version)
            ranks.sync(version)
            ranks.assert_received(version)
        ranks.close()
    assert post.sent == post.received and post.sent
    assert {name for name, *_ in post.sent} == {"nccl"}
    assert {(sender, receiver) for _, sender, receiver in post.sent} == expected
    assert len(gpu.shared) == shared
