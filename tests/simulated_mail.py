"""Control messages of several ranks in one process: they have arrived once they are posted."""

from __future__ import annotations

from collections.abc import Callable


class SimulatedMail:
    """A rank's control messages, simulated.

    world: the mail of every rank, this one's too, in rank order. wake: called when a message has
    come.
    """

    leader = 0
    stopping = False

    def __init__(self, rank: int, world: list[SimulatedMail], wake: Callable[[], None]):
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
        self._world[rank].deliver(self.rank, topic, payload)

    def deliver(self, sender: int, topic: str, payload: dict) -> None:
        """Take a message in."""
        handler = self._handlers.get(topic)
        if handler is not None:
            handler(sender, payload)
            return
        self._boxes.setdefault(topic, []).append((sender, payload))
        self._wake()

    def take(self, topic: str) -> list[tuple[int, dict]]:
        """Return the messages of a topic that have come."""
        return self._boxes.pop(topic, [])

    def has(self, topic: str) -> bool:
        """Whether any message of a topic has come."""
        return topic in self._boxes

    def check(self) -> None:
        """Do nothing: no rank fails by itself."""

    def wait(self, timeout_s: float) -> None:
        """Refuse to wait: whoever was asked has answered."""
        raise AssertionError("messages arrive at once, so no answer is to come")
