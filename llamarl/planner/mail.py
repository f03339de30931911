"""Control messages between simulated ranks: what is posted has arrived, or will after a delay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

_OF_TICKETS = ("ask", "grant")

# (sender, receiver, what delivers it) of a message that takes its time
PostLater = Callable[[int, int, Callable[[], None]], None]


class SimulatedMail:
    """A rank's control messages (llamarl.tickets.service.Mail), in one process.

    world: the mail of every rank, this one's too, in rank order. wake: called when something came.
    post_later: delivers what is between a generator and the ledger; None: at once.
    """

    leader = 0
    stopping = False

    def __init__(
        self,
        rank: int,
        world: list[SimulatedMail],
        wake: Callable[[], None],
        post_later: PostLater | None = None,
    ):
        self._post_later = post_later
        self.rank = rank
        self.is_leader = rank == self.leader
        self._world = world
        self._wake = wake
        self._handlers: dict[str, Callable[[int, dict], None]] = {}
        self._boxes: dict[str, list[tuple[int, dict]]] = {}

    def on(self, topic: str, handler: Callable[[int, dict], None]) -> None:
        """Have a topic's messages handled at once."""
        self._handlers[topic] = handler

    def post(self, rank: int, topic: str, payload: dict) -> None:
        """Put a message into a rank's box, or have it handled there."""
        deliver = partial(self._world[rank].deliver, self.rank, topic, payload)
        if self._post_later is None or topic not in _OF_TICKETS:
            deliver()
        else:
            self._post_later(self.rank, rank, deliver)

    def deliver(self, sender: int, topic: str, payload: dict) -> None:
        """Take a message in."""
        handler = self._handlers.get(topic)
        if handler is not None:
            handler(sender, payload)
            return
        self._boxes.setdefault(topic, []).append((sender, payload))
        self._wake()

    def take(self, topic: str) -> list[tuple[int, dict]]:
        """Return what has come of a topic."""
        return self._boxes.pop(topic, [])

    def has(self, topic: str) -> bool:
        """Whether anything has come of a topic."""
        return topic in self._boxes

    def check(self) -> None:
        """Do nothing: a simulated rank does not fail by itself."""

    def wait(self, timeout_s: float) -> None:
        """Refuse to wait: whoever was asked has answered."""
        raise AssertionError("messages arrive at once, so no answer is to come")
