"""The two ends of a channel of weights in one process, over links that watch or damage what they
carry.
"""

import queue
import time

import pytest
import torch

from llamarl.comm.control import Control
from llamarl.ddma.layout import Destination, Source, buffer_of, parameters_to_send
from llamarl.ddma.links import HeaderKind, LocalLink, Slots
from llamarl.ddma.payload import Copier, buckets_of
from llamarl.ddma.plan import make_plan
from llamarl.ddma.protocol import LinkContext, Outgoing
from llamarl.ddma.receiver import Incoming, Subscriber
from llamarl.ddma.sender import Publisher
from llamarl.errors import LinkTimeout
from llamarl.models.config import ModelConfig
from llamarl.models.sharding import Box

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=23,
    hidden_size=10,
    intermediate_size=14,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    attention_bias=True,
)
PARAMETERS = parameters_to_send(CONFIG, torch.float32)
BUCKET = 1000  # bytes: a parameter is cut, small ones share a bucket
COPIER = Copier("xxh3")
PATIENCE_S = 20  # for what must come; a busy machine is slow


def weights_of(version: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(version)
    return {p.name: torch.randn(p.shape, generator=made) for p in PARAMETERS}


def bytes_of(version: int) -> torch.Tensor:
    """What a replica's buffer must hold."""
    of, full = buffer_of(CONFIG, PARAMETERS, Destination(), 0), weights_of(version)
    flat = torch.zeros(of.num_bytes, dtype=torch.uint8)
    for name, held in of.held.items():
        flat[held.start : held.start + held.num_bytes] = full[name].view(-1).view(torch.uint8)
    return flat


def alone() -> Control:
    return Control(None, rank=0, world_size=1, leader=0, names=["everything"])


def until(predicate, *controls: Control):
    """Wait for predicate() and return what it gave; raises what a thread of the controls ended
    with.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (value := predicate()):
        for control in controls:
            control.check()
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)
    return value


def failure_of(control: Control) -> Exception:
    return until(lambda: control.failure)


# -- links that damage what they carry


class SpyLink(LocalLink):
    """Remembers every header. change(header) -> what is sent to the receiver instead."""

    def __init__(self, change=lambda header: [header]):
        super().__init__()
        self.change = change
        self.forward = []
        self.back = []

    def send(self, header, to_receiver=True):
        (self.forward if to_receiver else self.back).append(header)
        for h in self.change(header) if to_receiver else [header]:
            super().send(h, to_receiver)

    def bucket_sends(self, version):
        found = []
        for h in self.forward:
            if h.kind == HeaderKind.BEGIN and h.version == version:
                found += h.more["buckets"]
        return found

    def verdicts(self, version):
        return [
            h.more["wrong"]
            for h in self.back
            if h.kind == HeaderKind.VERDICT and h.version == version
        ]


class StreamLink(SpyLink):
    """As gloo and NCCL: a bucket's bytes are sent, and nothing else reaches the receiver."""

    def __init__(self, change=lambda header: [header]):
        super().__init__(change)
        self.bytes = queue.Queue()

    streams = True

    def send_bytes(self, flat):
        self.bytes.put(flat.clone())
        return lambda: None

    def fetch(self, slot, start, size, scratch=None, staged=0):
        def arrived(timeout_s):
            try:
                flat = self.bytes.get(timeout=timeout_s)
            except queue.Empty:
                raise LinkTimeout(f"nothing came for {timeout_s:.0f} s") from None
            assert flat.numel() == size == scratch.numel()
            return scratch.copy_(flat)

        return arrived


def corrupting(kind, bad, times):
    """A link of this kind that flips a bit in the first `times` deliveries of the bytes of buckets
    that begin at bad(start).
    """

    class Corrupting(kind):
        left = times

        def fetch(self, slot, start, size, scratch=None, staged=0):
            whole = super().fetch(slot, start, size, scratch, staged)

            def arrived(timeout_s):
                flat = whole(timeout_s)
                if not self.left or not bad(start):
                    return flat
                self.left -= 1
                damaged = flat if self.streams else flat.clone()
                damaged[size // 2] ^= 0x10
                return damaged

            return arrived

    return Corrupting()


LINKS = pytest.mark.parametrize("kind", [SpyLink, StreamLink])


class Ends:
    """Sources with a shard each, and one replica; publishers and subscriber have a Control of their
    own each.
    """

    def __init__(
        self,
        *links: LocalLink,
        num_buffers=2,
        timeout_s=PATIENCE_S,
        follower: Outgoing | None = None,
        late=False,
        in_order=False,
    ):
        self.links = links = links or (SpyLink(),)
        self.sending, self.receiving = alone(), alone()
        self.plan = make_plan(
            CONFIG, PARAMETERS, Source(fsdp=len(links)), Destination(), feed="direct"
        )
        self.buckets = [buckets_of(self.plan.regions(s, 0), BUCKET) for s in range(len(links))]
        self.publishers = []
        for link, buckets in zip(links, self.buckets):
            slots = Slots([torch.zeros(buckets[-1].end, dtype=torch.uint8) for _ in range(2)])
            context = LinkContext("policy", self.sending, timeout_s, COPIER)
            self.publishers.append(Publisher(context, slots, [Outgoing(link, 0, buckets)]))
        self.of = buffer_of(CONFIG, PARAMETERS, Destination(), 0)
        buffers = [torch.zeros(self.of.num_bytes, dtype=torch.uint8) for _ in range(num_buffers)]
        incoming = [
            Incoming(link, b, f"trainer rank {s}")
            for s, (link, b) in enumerate(zip(links, self.buckets))
        ]
        self.subscriber = Subscriber(
            LinkContext("policy", self.receiving, timeout_s, COPIER),
            self.of,
            buffers,
            incoming,
            follower=follower,
            in_order=in_order,
        )
        self.live = None

    def publish(
        self, version, *, evaluate=False, must_differ=True, content=None, only=None, canary=None
    ):
        full = weights_of(version if content is None else content)

        def stage(s):
            def put(slot, progress):
                for bucket in self.buckets[s]:  # which must not leave before it is whole
                    for region in bucket.regions:
                        part = full[region.name][
                            region.box.within(Box.whole(region.parameter.shape))
                        ]
                        time.sleep(0)
                        slot[region.start : region.end] = part.reshape(-1).view(torch.uint8)
                    progress.mark()

            return put

        for s, publisher in enumerate(self.publishers):
            if only in (None, s):
                said = {"canary of": version} if canary is None else canary
                queued = publisher.enqueue(
                    version, must_load=evaluate, evaluate=evaluate, must_differ=must_differ
                )
                if queued is not None:
                    stage(s)(queued.data, queued.progress)
                    queued.staged.set()
                    queued.seal(said)

    def swap(self):
        with self.subscriber.handover() as (staged, buffer):
            if staged is not None:
                self.live = buffer
        return staged

    def receive(self, version):
        """Swap until this version is in place; every version swapped in must be whole."""

        def taken():
            staged = self.swap()
            if staged:
                assert torch.equal(self.live, bytes_of(staged.version)), staged.version
                assert staged.canary == {"canary of": staged.version}
            return staged if staged and staged.version == version else None

        return until(taken, self.sending, self.receiving)

    def staged(self, version):
        """Wait until the version is staged."""
        return until(
            lambda: (s := self.subscriber.staged) and s.version == version,
            self.sending,
            self.receiving,
        )

    def close(self):
        for publisher in self.publishers:
            publisher.close()
        self.subscriber.close()
        self.sending.check(), self.receiving.check()


def is_end(version):
    return lambda header: header.kind == HeaderKind.END and header.version == version
