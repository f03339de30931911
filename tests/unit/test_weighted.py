"""A reward of several parts: what it waits for, what it tells and what it goes on from. Rewards
that float32 does not tell apart are warned of.
"""

import logging

import pytest

from llamarl.scoring.assembly import Groups
from llamarl.scoring.scorer import Scorer, site_alone, text_item
from llamarl.scoring.weighted import Weighted, WeightedPart
from llamarl.types import Outcome
from tests.build.completion import build_completion


class Slow(Scorer):
    """A scorer whose items are scored when the test says so."""

    def __init__(self, value=1.0):
        self.name = "slow"
        self.keys = []
        self.waited = 0
        self.loaded = None
        self._value = value
        self._done = []

    @property
    def pending(self):
        return len(self.keys)

    def submit(self, key, item):
        self.keys.append(key)

    def finish(self, count):
        self._done += self.keys[:count]
        self.keys = self.keys[count:]

    def poll(self):
        keys, self._done = self._done, []
        return [(key, Outcome.score(self._value)) for key in keys]

    def wait(self, timeout_s):
        self.waited += 1
        return False

    def state_dict(self):
        return {"history": self._value}

    def load_state_dict(self, state):
        self.loaded = dict(state)


def weighted(**parts):
    """A reward of these scorers, each of weight 1."""
    makers = [WeightedPart(name, lambda site, one=one: one) for name, one in parts.items()]
    return Weighted(makers, site_alone("cpu"))


def test_what_one_part_has_not_scored_is_pending_whichever_part_that_is():
    fast, slow = Slow(), Slow(0.5)
    ours = weighted(fast=fast, slow=slow)
    for key in range(3):
        ours.submit(key, text_item("1+1=", "2", {}))
    fast.finish(3)
    slow.finish(1)
    assert [(key, outcome.value) for key, outcome in ours.poll()] == [(0, 1.5)]
    assert ours.pending == 2
    assert not ours.wait(0.0) and (fast.waited, slow.waited) == (0, 1)
    slow.finish(2)
    assert [key for key, _ in ours.poll()] == [1, 2] and ours.pending == 0


def test_parts_go_on_from_their_own_state():
    old, new = Slow(), Slow(0.5)
    ours = weighted(old=old, new=new)
    saved = ours.state_dict()
    assert saved == {"old/history": 1.0, "new/history": 0.5}
    ours.load_state_dict(saved)
    assert (old.loaded, new.loaded) == ({"history": 1.0}, {"history": 0.5})
    ours.load_state_dict({"new/history": 3.0, "another/history": 4.0})
    assert (old.loaded, new.loaded) == ({"history": 1.0}, {"history": 3.0})


def test_parts_that_are_outcomes_alone_say_whether_a_completion_succeeded():
    def scored(**options):
        right, short = Slow(), Slow(-0.5)
        parts = [
            WeightedPart("right", lambda site: right, 0.9),
            WeightedPart("short", lambda site: short),
        ]
        ours = Weighted(parts, site_alone("cpu"), **options)
        ours.submit(1, text_item("", "", {}))
        right.finish(1)
        short.finish(1)
        ((key, outcome),) = ours.poll()
        assert key == 1 and outcome.value == 0.9 - 0.5
        told = {"reward/right/mean": 1.0, "reward/short/mean": -0.5}
        assert outcome.columns == told, "before their weights"
        return outcome.achieved

    assert scored(outcomes=["right"]) == 0.9
    assert scored() == 0.9 - 0.5


@pytest.mark.parametrize(
    "rewards, are_rounded",
    [
        ((2.0**24, None, 2.0**24 + 3), True),  # 4 apart there
        ((1e9 + 0.1, 1e9 + 0.2, 1e9 + 10), True),
        ((2.0**24, 2.0**24 + 2, 2.0**24 + 4), False),
        ((0.1 + 0.2, 0.3, 0.3), False),  # rounding alone
        ((None, None, None), False),
    ],
)
def test_rewards_that_float32_rounds_by_what_they_differ_by_are_warned_of_once(
    caplog, rewards, are_rounded
):
    groups = Groups("mine", group_size=3)
    with caplog.at_level(logging.WARNING):
        for ticket, of_group in enumerate([(0.0, 1.0, 0.0), rewards, rewards]):
            for sample, reward in enumerate(of_group):
                outcome = Outcome.abstain("no") if reward is None else Outcome.score(reward)
                whole = groups.add(build_completion(ticket, sample), outcome)
            assert whole is not None and whole.ticket == ticket
    assert len(caplog.records) == are_rounded
    if are_rounded:
        assert "reward mine: the rewards of ticket 1 are from " in caplog.text
        assert "Subtract a constant" in caplog.text
