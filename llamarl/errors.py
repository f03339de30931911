"""Errors that end a run and explain themselves: the message of each is all that a user needs."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Where in their source it was noticed, such as "[/pytorch/third_party/gloo/pair.cc:553] ".
_SOURCE_PLACE = re.compile(r"(in: )?\[?[^\s\[\]]+\.(c|cc|cpp|cu|h|hpp):\d+[\],]?\s*")


class PeerDied(RuntimeError):
    """Another rank stopped answering or failed; the message names it.

    ranks: those that are gone; empty if that is not known.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()):
        super().__init__(message)
        self.ranks = frozenset(ranks)


class TimedOut(TimeoutError):
    """Somebody waited too long; the message names executor, rank, step, what for and from whom."""


class WeightsError(RuntimeError):
    """A version of the weights was not delivered or is damaged; the old one is still in use."""


class LinkTimeout(WeightsError):
    """The other end said nothing for the whole of timeout_s."""


class ParityError(RuntimeError):
    """Trainer and generator do not compute the same model from the same weights."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or used; the message names the file and what to do."""


class OtherFormat(CheckpointError):
    """A checkpoint in a format that this commit does not read."""


class LagExceeded(RuntimeError):
    """A step would have trained on older tokens than max_lag allows; the ledger or a generator is
    at fault.
    """


class RecordsDropped(RuntimeError):
    """An executor took records and neither sent them on nor says that it still works on them. The
    message names the executor, its ranks and the ticket.
    """


class NotFinite(RuntimeError):
    """The loss or the gradient of an update, or a reference's logprobs, are NaN or infinite. They
    were not used for an update. The message names the weights.
    """


class RewardError(RuntimeError):
    """Scoring cannot go on: workers do not start, or too many of the outcomes are errors."""


class MetricsError(OSError):
    """A row could not be written; the message names the file and what to do."""


class RunDirectoryError(ValueError):
    """The run's directory cannot be used in this way; the message says what to do."""


class JobFailed(RuntimeError):
    """A job that was started from Python has ended with an error; the message holds its last
    lines.
    """


class BadInput(ValueError):
    """Something that the user gave cannot be used."""


class BadNetwork(ValueError):
    """This host's network, or what the environment says of it, cannot join the ranks. The message
    names the ranks or the port, and says what to do.
    """


class InUse(ValueError):
    """Another job has the directory; the message names it."""


class BadWeights(ValueError):
    """The user's weights hold NaN or infinite numbers, which only the executor that loads them
    finds. The message names the directory and the tensor.
    """


class NoWeights(FileNotFoundError, ValueError):
    """A model directory has no weights, or lacks some of their files; a dry run needs none."""


def cause_of(error: BaseException) -> str:
    """Return the first sentence of an error of gloo, NCCL or the store, without the lines of source
    that it came from.

    cause_of(RuntimeError("[/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:21. This ..."))
    # "Connection closed by peer [10.0.0.1]:21"
    """
    sentence, _, _ = str(error).partition(". ")
    line, _, _ = sentence.strip().partition("\n")
    cause = _SOURCE_PLACE.sub("", line).strip()
    return cause or type(error).__name__
