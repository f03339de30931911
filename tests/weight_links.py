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
from llamarl.models.sharding import Box
from tests.build.model_config import model_config
from tests.build.routes import PATIENCE_S, control_of

CONFIG = model_config(
    hidden_size=10, intermediate_size=14, num_attention_heads=6, attention_bias=True
)
PARAMETERS = parameters_to_send(CONFIG, torch.float32)
BUCKET = 1000  # bytes: a parameter is cut, small ones share a bucket
OF = buffer_of(CONFIG, PARAMETERS, Destination(), 0)
WHOLE = buckets_of(OF.held.values(), BUCKET)


def weights_of(version: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(version)
    return {p.name: torch.randn(p.shape, generator=made) for p in PARAMETERS}


def bytes_of(version: int) -> torch.Tensor:
    """What a replica's buffer must hold."""
    full = weights_of(version)
    flat = torch.zeros(OF.num_bytes, dtype=torch.uint8)
    for name, held in OF.held.items():
        flat[held.start : held.end] = full[name].view(-1).view(torch.uint8)
    return flat


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

    def has_begun(self, version):
        return bool(self.bucket_sends(version))

    def bucket_sends(self, version):
        found = []
        for h in self.forward:
            if h.kind == HeaderKind.BEGIN and h.version == version:
                found += h.more["buckets"]
        return found

    def verdicts(self, version):
        of_version = [h for h in self.back if h.version == version]
        return [h.more["wrong"] for h in of_version if h.kind == HeaderKind.VERDICT]


class StreamLink(SpyLink):
    """As gloo and NCCL: a bucket's bytes are sent, and nothing else reaches the receiver."""

    streams = True

    def __init__(self, change=lambda header: [header]):
        super().__init__(change)
        self.bytes = queue.Queue()

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


def corrupting(kind, times):
    """A link of this kind that flips a bit in its first `times` buckets but the first one."""

    class Corrupting(kind):
        left = times

        def fetch(self, slot, start, size, scratch=None, staged=0):
            whole = super().fetch(slot, start, size, scratch, staged)

            def arrived(timeout_s):
                flat = whole(timeout_s)
                if not self.left or start == 0:
                    return flat
                self.left -= 1
                damaged = flat if self.streams else flat.clone()
                damaged[size // 2] ^= 0x10
                return damaged

            return arrived

    return Corrupting()


LINKS = pytest.mark.parametrize("kind", [SpyLink, StreamLink])


class Replica:
    """The end of a generator rank, which takes what its links bring."""

    def __init__(self, incoming, *, timeout_s=PATIENCE_S, num_buffers=2, **options):
        self.receiving = control_of()
        buffers = [torch.zeros(OF.num_bytes, dtype=torch.uint8) for _ in range(num_buffers)]
        context = LinkContext("policy", self.receiving, timeout_s, Copier("xxh3"))
        self.subscriber = Subscriber(context, OF, buffers, incoming, **options)
        self.controls = [self.receiving]
        self.live = None

    def swap(self):
        with self.subscriber.handover() as (staged, buffer):
            if staged is not None:
                self.live = buffer
        return staged

    def holds(self, version):
        return torch.equal(self.live, bytes_of(version))

    def receive(self, version):
        """Swap until this version is in place; every version swapped in must be whole."""

        def taken():
            staged = self.swap()
            if staged:
                assert self.holds(staged.version), staged.version
                assert staged.canary == {"canary of": staged.version}
            return staged if staged and staged.version == version else None

        return until(taken, *self.controls)

    def staged(self, version):
        """Wait until the version is staged."""

        def found():
            staged = self.subscriber.staged
            return staged and staged.version == version

        return until(found, *self.controls)

    def close(self):
        self.subscriber.close()
        self.receiving.check()


class Follower(Replica):
    """A replica that gets everything through another one."""

    def __init__(self, link, follower=None):
        super().__init__([Incoming(link, WHOLE, "generator rank 0")], follower=follower)


def forwarded(link) -> Outgoing:
    return Outgoing(link, 0, WHOLE)


class Ends(Replica):
    """Sources with a shard each, and one replica; publishers and subscriber have a Control of their
    own each.
    """

    def __init__(self, *links: LocalLink, timeout_s=PATIENCE_S, **options):
        self.links = links = links or (SpyLink(),)
        self.sending = control_of()
        source = Source(fsdp=len(links))
        plan = make_plan(CONFIG, PARAMETERS, source, Destination(), feed="direct")
        self.buckets = [buckets_of(plan.regions(s, 0), BUCKET) for s in range(len(links))]
        self.publishers = []
        incoming = []
        context = LinkContext("policy", self.sending, timeout_s, Copier("xxh3"))
        for s, (link, buckets) in enumerate(zip(links, self.buckets)):
            slots = Slots([torch.zeros(buckets[-1].end, dtype=torch.uint8) for _ in range(2)])
            self.publishers.append(Publisher(context, slots, [Outgoing(link, 0, buckets)]))
            incoming.append(Incoming(link, buckets, f"trainer rank {s}"))
        super().__init__(incoming, timeout_s=timeout_s, **options)
        self.controls.append(self.sending)

    def publish(self, version, *, evaluate=False, must_differ=True, full=None, only=None):
        """full: the weights; by default the version's own. only: the source that publishes."""
        full = full or weights_of(version)
        for s, publisher in enumerate(self.publishers):
            if only in (None, s):
                queued = publisher.enqueue(
                    version, must_load=evaluate, evaluate=evaluate, must_differ=must_differ
                )
                for bucket in self.buckets[s]:  # which must not leave before it is whole
                    for region in bucket.regions:
                        index = region.box.within(Box.whole(region.parameter.shape))
                        time.sleep(0)
                        region.view_in(queued.data).copy_(full[region.name][index])
                    queued.progress.mark()
                queued.staged.set()
                queued.seal({"canary of": version})

    def close(self):
        for publisher in self.publishers:
            publisher.close()
        super().close()
        self.sending.check()


def is_end(version):
    return lambda header: header.kind == HeaderKind.END and header.version == version
