"""Fakes for what is on both sides of an executor, which a test steps alone."""

from __future__ import annotations

import json
import time
from collections import Counter, deque

from llamarl.ddma.receiver import Staged
from llamarl.models.config import tiny_directory
from llamarl.models.directory import SafetensorsDir
from llamarl.models.sharding import Box
from llamarl.types import Ticket


class FakeReceiver:
    """The end of a channel that an executor reads: a test fills `records`."""

    def __init__(self):
        self.records = deque()

    def take(self, limit=None):
        count = len(self.records) if limit is None else min(limit, len(self.records))
        return [self.records.popleft() for _ in range(count)]


class FakeSender:
    """The end of a channel that an executor writes, which has room for so many `records`."""

    room = 10**6

    def __init__(self, name="scored"):
        self.name = name
        self.records = []

    def has_room(self):
        return len(self.records) < self.room

    def put(self, record):
        assert self.has_room()
        self.records.append(record)


class FakeStream:
    """The prompts of tickets, each by the function that a test gives."""

    def __init__(self, prompt_of):
        self.prompt_of = prompt_of

    def __getitem__(self, ticket):
        return self.prompt_of(ticket)


class FakeMetrics:
    """Metrics that keep all that they are given; of spans the names, and the tracks."""

    def __init__(self):
        self.counters = Counter()
        self.reports = []
        self.means: dict[str, list[float]] = {}
        self.sums = Counter()
        self.spans = []
        self.tracks = set()

    def add(self, counter, amount):
        self.counters[counter] += amount

    def add_mean(self, name, value):
        self.means.setdefault(name, []).append(value)

    def add_sum(self, name, value):
        self.sums[name] += value

    def report(self, step, values):
        self.reports.append((step, values))

    def span(self, track, name, start_s, end_s):
        assert start_s <= end_s
        self.tracks.add(track)
        self.spans.append(name)


class FakeControl:
    """A control that counts how often it was woken."""

    num_wakes = 0

    def wake(self):
        self.num_wakes += 1


class FakeWeights:
    """Stages the same tiny weights under whatever version a test says."""

    def __init__(self, in_order):
        self.in_order = in_order
        self.staged = None
        self.overtakable = False
        self.from_local = None  # a version that the trainer on this rank has published

    def bind(self, config, parameters):
        source = SafetensorsDir(tiny_directory())
        for name, parameter in parameters:
            parameter.data.copy_(source.get_slice(name)[...])
        self.parameters = dict(parameters)

    def held(self):
        return {
            name: (Box.whole(tuple(p.shape)), p.detach()) for name, p in self.parameters.items()
        }

    def arrive(self, version, evaluate=False):
        """A version comes whole; says whether there was room for it."""
        kept = self.staged is not None and (self.staged.must_load or self.in_order)
        self.overtakable = kept and not self.staged.must_load
        if not kept:
            self.staged = Staged(version, must_load=evaluate, evaluate=evaluate)
        return not kept

    def wait_for_local(self):
        if self.from_local is not None and self.staged is None:
            self.staged, self.from_local = Staged(self.from_local), None

    def skip(self, version):
        assert self.staged.version == version
        self.staged, self.overtakable = None, False

    def swap(self):
        taken, self.staged = self.staged, None
        return taken

    def close(self):
        pass


class FakeMail:
    """Control between generators in one process: boxes is rank -> topic -> [(sender, payload)],
    posts all that was sent.
    """

    failure = None

    def __init__(self, boxes, rank):
        self.boxes = boxes
        self.rank = rank
        self.posts = []

    def post(self, rank, topic, payload):
        self.posts.append((rank, topic))
        self.boxes.setdefault(rank, {}).setdefault(topic, []).append(
            (self.rank, json.loads(json.dumps(payload)))
        )

    def take(self, topic):
        return self.boxes.get(self.rank, {}).pop(topic, [])

    def wait(self, timeout_s):
        time.sleep(0.001)


class Totals(dict):
    """Metrics that are the sum of each name."""

    def add(self, name, amount):
        self[name] = self.get(name, 0) + amount

    add_mean = add_sum = add


class Outbox(list):
    """A sender that is the list of what was put into it."""

    name = "completions"

    def has_room(self):
        return True

    put = list.append


class FakeTickets:
    """Grants `grants` tickets to each ask and remembers what was asked. resumed_step, working: what
    a ledger says after a resume.
    """

    resumed_step, working = 0, frozenset()

    @property
    def is_refused(self):
        return self.grants == 0

    has_batch = False

    def in_work(self):
        return set(self.working)

    def resumed_choices(self):
        return {}

    def __init__(self, synchronous):
        self.synchronous = synchronous
        self.grants = 1
        self.next = 0
        self.asked = []
        self.orders = []
        self.went_on = []

    def go_on(self, tickets):
        self.went_on += tickets

    def ask(self, generator, count, version, *, is_idle=False):
        self.asked.append((count, version))
        out = [Ticket(self.next + i, version) for i in range(min(count, self.grants))]
        self.next += len(out)
        return out

    def granted(self):
        return []

    def to_truncate(self):
        orders, self.orders = self.orders, []
        return orders
