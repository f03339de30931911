"""A generator on a trainer's rank waits for what that has published, and for nothing else."""

import threading

import pytest

from llamarl.errors import TimedOut
from tests.weight_links import (
    PATIENCE_S,
    Ends,
    SpyLink,
    StreamLink,
    is_end,
    until,
)


class Waiting:
    """A rank that waits in a thread for the version of its own trainer, and what it found then."""

    def __init__(self, ends):
        self.found = self.error = None
        self._ends = ends
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            self._ends.subscriber.wait_for_local()
            self.found = self._ends.subscriber.staged
        except TimedOut as error:
            self.error = error

    def join(self):
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self


def held(*kinds, version=1, **settings):
    """Two ends whose END of a version waits for a gate; version 0 is in place, and the next one
    published. Returns (ends, gate).
    """
    gate = threading.Event()

    def wait(header):
        if is_end(version)(header):
            assert gate.wait(PATIENCE_S)
        return [header]

    first, *others = kinds or (SpyLink,)
    ends = Ends(first(wait), *(kind() for kind in others), **settings)
    ends.publish(0), ends.receive(0)
    until(lambda: ends.publishers[0].committed_version == 0, ends.sending)
    ends.publish(1)
    return ends, gate


def test_a_rank_waits_for_what_its_own_trainer_has_published():
    ends, gate = held()
    waiting = Waiting(ends)
    assert waiting.found is None
    gate.set()
    assert waiting.join().found.version == 1
    assert Waiting(ends).join().found.version == 1, "it is here: nothing to wait for"
    ends.receive(1)
    assert Waiting(ends).join().found is None
    ends.close()


def test_it_waits_for_no_version_behind_one_that_is_still_on_its_way():
    """To a rank that evaluates, say, which takes what comes later only then."""
    ends, gate = held()
    ends.links[0].peer = 1  # an imagined rank elsewhere
    ends.publish(2)
    assert ends.links[0].leaving == 1
    gate.set()
    ends.receive(2)
    until(lambda: ends.publishers[0].committed_version == 2, ends.sending)
    ends.publish(3)
    assert ends.links[0].leaving == 3
    ends.receive(3)
    ends.close()


def test_it_waits_for_no_version_that_would_not_come():
    """Not for one behind a version that must be loaded first, and not once all ends."""
    ends = Ends()
    ends.publish(0, evaluate=True), ends.publish(1)
    ends.staged(0)
    assert Waiting(ends).join().found.version == 0
    ends.swap()
    ends.staged(1)
    ends.close()
    for name in ("stopping", "loss", "is_closing"):
        ends, gate = held()
        of = ends.subscriber if name == "is_closing" else ends.receiving
        setattr(of, name, True)
        assert Waiting(ends).join().found is None
        setattr(of, name, None)
        gate.set()
        ends.close()


@pytest.mark.parametrize("kinds", [(StreamLink,), (SpyLink, StreamLink)], ids=["sent", "in part"])
def test_it_does_not_wait_for_bytes_that_are_sent(kinds):
    ends, gate = held(*kinds)
    assert Waiting(ends).join().found is None
    gate.set()
    ends.receive(1)
    ends.close()


def test_a_version_of_which_another_trainer_rank_owes_a_part_is_named():
    ends = Ends(SpyLink(), SpyLink(), timeout_s=0.3)
    ends.publish(0), ends.receive(0)
    until(lambda: ends.publishers[0].committed_version == 0, ends.sending)
    ends.publish(1, only=0)
    with pytest.raises(TimedOut, match=r"rank \d+: version 1, .* \(in use: version 0\)"):
        raise Waiting(ends).join().error
    ends.publish(1, only=1)
    assert Waiting(ends).join().found.version == 1
    ends.close()
