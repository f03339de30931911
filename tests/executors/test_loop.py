"""The algorithm that stands at the head of llamarl/controller.py, run as it stands there, and the
example of the ticket ledger.
"""

import doctest
import random
import textwrap
from dataclasses import dataclass, field
from itertools import chain

import pytest

import llamarl.controller
import llamarl.tickets.ledger
from llamarl.tickets.ledger import TicketLedger

GROUP_SIZE = 3
BATCH = 4
STEPS = 30


@dataclass
class FakeCompletion:
    ticket: int
    oldest: int  # policy version of its first token
    newest: int
    chunks_left: int


@dataclass
class FakeGroup:
    ticket: int
    completions: list[FakeCompletion]


@dataclass
class FakeGenerator:
    """Samples one chunk of every running completion a step; some are many chunks long."""

    lengths: random.Random
    max_groups: int
    version: int = 0
    running: list[FakeCompletion] = field(default_factory=list)

    @property
    def num_free_groups(self):
        return self.max_groups - len({one.ticket for one in self.running})

    def add(self, ticket, prompt):
        assert prompt == f"prompt {ticket.index}"
        for _ in range(GROUP_SIZE):
            chunks = 1 if self.lengths.random() < 0.8 else self.lengths.randrange(2, 40)
            self.running.append(FakeCompletion(ticket.index, self.version, self.version, chunks))

    def step(self):
        for one in self.running:
            one.newest = self.version
            one.chunks_left -= 1
        ended = [one for one in self.running if not one.chunks_left]
        self.running = [one for one in self.running if one.chunks_left]
        return ended

    def load(self, policy):
        self.version = policy


class FakeReward:
    """Hands a group on once all its completions have come."""

    def __init__(self):
        self.waiting = {}

    def add(self, completion):
        self.waiting.setdefault(completion.ticket, []).append(completion)

    def step(self):
        whole = [t for t, completions in self.waiting.items() if len(completions) == GROUP_SIZE]
        return [FakeGroup(ticket, self.waiting.pop(ticket)) for ticket in whole]


class FakeTrainer:
    def __init__(self):
        self.version = 0
        self.batches = []

    def step(self, groups):
        self.batches.append(groups)
        self.version += 1
        return self.version


class AllPrompts:
    def __getitem__(self, index):
        return f"prompt {index}"


def shown_loop():
    """Return the lines of code in the head of llamarl/controller.py."""
    lines = llamarl.controller.__doc__.splitlines()
    first = lines.index("    finished = {}  # ticket -> scored group that no step has taken")
    last = next(n for n, line in enumerate(lines) if "generator.load(policy)" in line)
    return textwrap.dedent("\n".join(lines[first : last + 1]))


def run_loop(*, max_lag, overcommit, seed):
    """Return the trainer's batches, each a list of groups, after STEPS steps of the shown loop."""
    trainer = FakeTrainer()
    names = {
        "ledger": TicketLedger(
            groups_per_step=BATCH, max_lag=max_lag, overcommit=overcommit, max_steps=STEPS
        ),
        "prompts": AllPrompts(),
        "generator": FakeGenerator(random.Random(seed), max_groups=BATCH + 3),
        "reward": FakeReward(),
        "trainer": trainer,
        "max_steps": STEPS,
    }
    exec(shown_loop(), names)
    return trainer.batches


def tickets_of(batches):
    """Return the tickets of all batches, in the order in which they were trained on."""
    return [group.ticket for group in chain.from_iterable(batches)]


def completions_of(groups):
    return list(chain.from_iterable(group.completions for group in groups))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("max_lag", "overcommit"), [(0, 0), (1, 4), (3, 2), (8, 8)])
def test_the_shown_loop_keeps_the_bound_and_trains_on_every_ticket_once(max_lag, overcommit, seed):
    batches = run_loop(max_lag=max_lag, overcommit=overcommit, seed=seed)
    assert [len(batch) for batch in batches] == [BATCH] * STEPS
    assert sorted(tickets_of(batches)) == list(range(BATCH * STEPS))
    for step, batch in enumerate(batches):
        oldest = min(one.oldest for one in completions_of(batch))
        assert 0 <= step - oldest <= max_lag


def test_without_lag_the_shown_loop_is_on_policy_and_in_order():
    batches = run_loop(max_lag=0, overcommit=0, seed=1)
    for step, batch in enumerate(batches):
        assert [group.ticket for group in batch] == list(range(BATCH * step, BATCH * (step + 1)))
        assert {one.newest for one in completions_of(batch)} == {step}


def test_with_lag_short_groups_overtake_long_ones_and_completions_span_versions():
    batches = run_loop(max_lag=8, overcommit=8, seed=1)
    assert tickets_of(batches) != sorted(tickets_of(batches))
    completions = completions_of(chain.from_iterable(batches))
    assert any(one.newest > one.oldest for one in completions)


def test_the_example_of_the_ledger_is_true():
    result = doctest.testmod(llamarl.tickets.ledger)
    assert result.attempted > 5 and not result.failed
