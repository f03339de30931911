"""A TicketLedger, and the desk of a world of one rank that hands out its tickets."""

from __future__ import annotations

from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.service import TicketService
from tests.build.control import lone_control

WAIT_S = 10.0  # the deadline of whoever waits at a desk


def build_ledger(**changes) -> TicketLedger:
    """Steps of four groups, max_lag 1 and two tickets above that, unless `changes` say otherwise.

    build_ledger(max_lag=0, overcommit=0)
    """
    return TicketLedger(**{"groups_per_step": 4, "max_lag": 1, "overcommit": 2, **changes})


def lone_desk(ledger: TicketLedger | None = None, **options) -> TicketService:
    """The TicketService of a rank that is generator and trainer. options: of the TicketService."""
    given = {"trainer_ranks": (0,), "timeout_s": WAIT_S, **options}
    return TicketService(ledger or build_ledger(), lone_control(), **given)
