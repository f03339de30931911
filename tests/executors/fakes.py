"""Fakes for what is on both sides of an executor, which a test steps alone."""

from __future__ import annotations

import json
import time
from collections import Counter, deque

import torch

from llamarl.ddma.receiver import Staged
from llamarl.executor import ExecutorGroup
from llamarl.models.config import tiny_directory
from llamarl.models.directory import SafetensorsDir
from llamarl.models.sharding import Box
from llamarl.scoring.scorer import Scorer
from llamarl.types import Outcome, Ticket


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

    def __init__(self, name="groups"):
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
    """Control among ranks of one process, which share `boxes`: rank -> topic -> messages. Counts
    how often it was woken, and keeps in `posts` where it has posted what.
    """

    failure = None
    num_wakes = 0

    def __init__(self, rank=0, boxes=None):
        self.rank = rank
        self.boxes = {} if boxes is None else boxes
        self.posts = []

    def wake(self):
        self.num_wakes += 1

    def post(self, rank, topic, payload):
        self.posts.append((rank, topic))
        payload = json.loads(json.dumps(payload))
        self.boxes.setdefault(rank, {}).setdefault(topic, []).append((self.rank, payload))

    def take(self, topic):
        return self.boxes.get(self.rank, {}).pop(topic, [])

    def has(self, topic):
        return topic in self.boxes.get(self.rank, {})

    def check(self):
        pass

    def wait(self, timeout_s):
        time.sleep(0.001)


class FakeWeights:
    """Stages the same tiny weights under whatever version a test says."""

    def __init__(self, in_order=False):
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

    def arrive(self, version, evaluate=False, **fields):
        """A version comes whole; says whether there was room for it."""
        kept = self.staged is not None and (self.staged.must_load or self.in_order)
        self.overtakable = kept and not self.staged.must_load
        if not kept:
            self.staged = Staged(version, must_load=evaluate, evaluate=evaluate, **fields)
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


class FakeTickets:
    """Grants `grants` tickets to each ask and remembers what was asked. resumed_step, working: what
    a ledger says after a resume.
    """

    resumed_step, working = 0, frozenset()
    synchronous = False
    has_batch = False

    def __init__(self):
        self.grants = 1
        self.next = 0
        self.asked = []
        self.orders = []
        self.went_on = []

    @property
    def is_refused(self):
        return self.grants == 0

    def in_work(self):
        return set(self.working)

    def resumed_choices(self):
        return {}

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


class FakeScorer(Scorer):
    """Knows the outcome of an item as soon as it is submitted, and says so at the next poll: that
    of its `score`, but of the texts "error" and "abstain" what they say.
    """

    name = "fake"

    def __init__(self, site=None):
        self.known = []
        self.released = []
        self.is_closed = False

    @property
    def pending(self):
        return len(self.known)

    def score(self, item):
        return float(len(item.text))

    def outcome(self, item):
        if item.text == "error":
            return Outcome.error("it broke")
        if item.text == "abstain":
            return Outcome.abstain("nothing to say")
        return Outcome.score(self.score(item))

    def submit(self, key, item):
        self.known.append((key, self.outcome(item)))

    def release(self, keys):
        self.released.append(list(keys))

    def poll(self):
        known, self.known = self.known, []
        return known

    def wait(self, timeout_s):
        return True

    def close(self):
        self.is_closed = True


def seat(executor, *, group=None, inputs=None, outputs=(), control=None, tickets=None):
    """Attach an executor to fakes and set it up. Returns it.

    inputs: record -> what it reads in the place of a FakeReceiver. outputs: further ends.
    """
    group = group or ExecutorGroup(executor.name, (0,), 0, torch.device("cpu"))
    given = inputs or {}
    executor.attach(
        group,
        [(record, given.get(record) or FakeReceiver()) for record in executor.consumes],
        [*((record, FakeSender()) for record in executor.produces), *outputs],
        control or FakeControl(group.rank),
        FakeMetrics(),
        tickets,
    )
    executor.setup()
    return executor


def give(executor, *records):
    """Put records into the channels that carry them."""
    for record in records:
        executor.inputs.of(type(record)).records.append(record)
