"""A reward of several parts: what it waits for, and what it goes on from."""

from llamarl.scoring.scorer import Scorer, site_alone, text_item
from llamarl.scoring.weighted import Weighted, WeightedPart
from llamarl.types import Outcome


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
        return outcome.achieved

    assert scored(outcomes=["right"]) == 0.9
    assert scored() == 0.9 - 0.5
