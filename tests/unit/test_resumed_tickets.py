"""A ledger that is resumed, over and over, on other numbers of trainer ranks and generators, amid
random schedules.
"""

import json
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.pool import in_time

DP_RANKS, GENERATORS = (1, 2, 4), (1, 2, 3)
B = 4


class Run:
    """A run as the ledger sees it: generators with versions of their own, work that ends in any
    order, steps as they come.
    """

    def __init__(self, max_lag, overcommit, truncate, dp_ranks, generators):
        self.max_lag = max_lag
        self.overcommit = overcommit
        self.truncate = truncate
        self.started_at, self.consumed = {}, []
        self.set_up(dp_ranks, generators)

    def set_up(self, dp_ranks, generators):
        self.dp_ranks = dp_ranks
        self.ledger = TicketLedger(
            groups_per_step=B,
            max_lag=self.max_lag,
            overcommit=self.overcommit,
            num_pools=dp_ranks,
            num_generators=generators,
            resume_in_work=self.max_lag > 0,
        )
        self.held = [self.ledger.step] * generators
        self.working, self.finished = [], set()

    def ask(self, generator, count):
        for ticket in self.ledger.start(count, self.held[generator], generator):
            assert ticket.deadline == self.held[generator] + self.max_lag
            self.started_at[ticket.index] = self.held[generator]
            self.working.append(ticket.index)

    def finish(self, ticket):
        self.working.remove(ticket)
        self.finished.add(ticket)
        self.ledger.finish([ticket])

    def take(self) -> bool:
        step = self.ledger.step
        for ticket in self.ledger.overdue() if self.truncate else ():
            self.finish(ticket)
        taken = self.ledger.take(step)
        for ticket in taken or ():
            assert step - self.started_at[ticket] <= self.max_lag, "trained on when it was too old"
        self.finished.difference_update(taken or ())
        self.consumed += taken or []
        return taken is not None

    def resume(self, dp_ranks, generators, saved, lost):
        """Killed, and gone on from its checkpoint, which has `saved` partial completions and all
        finished groups but `lost`.
        """
        state = json.loads(json.dumps(self.ledger.state_dict()))
        buffered, same = self.finished - lost, dp_ranks == self.dp_ranks
        in_work = saved & set(self.working) if self.max_lag else set()
        deadlines = dict(state["finished"])
        self.set_up(dp_ranks, generators)
        self.ledger.load_state_dict(state, saved)
        self.working = sorted(self.ledger.in_work())
        kept = {t for t, _ in self.ledger.state_dict()["finished"]}
        self.finished = self.ledger.reconcile(sorted(buffered))
        assert self.finished == kept & buffered and set(self.working) <= in_work
        if same:
            assert kept == set(deadlines) and set(self.working) == in_work, (
                "what obeyed the rules does so still"
            )
        for ticket in set(deadlines) - kept:
            beside = [deadlines[t] for t in kept if t % dp_ranks == ticket % dp_ranks]
            assert not in_time(
                Counter([*beside, deadlines[ticket]]), self.ledger.step, B // dp_ranks
            ), "one more could have been kept"

    def go_on(self, steps):
        """With the newest weights everywhere, and with all work ending: steps must follow."""
        target = self.ledger.step + steps
        for _ in range(4 * (steps + self.max_lag + 2)):
            self.held = [self.ledger.step] * len(self.held)
            for generator in range(len(self.held)):
                self.ask(generator, 100)
            for ticket in list(self.working):
                self.finish(ticket)
            while self.ledger.step < target and self.take():
                pass
            if self.ledger.step == target:
                return
        raise AssertionError(
            f"step {self.ledger.step} can never be taken; its ledger: {self.ledger.state_dict()}"
        )


# Several moves of a kind make it likelier: half of them are asks and ends, and a step needs four of
# those.
MOVES = st.tuples(
    st.sampled_from(["ask", "ask", "finish", "finish", "finish", "take", "take", "swap", "resume"]),
    st.integers(0, 10**6),
)


@settings(max_examples=150)
@given(
    max_lag=st.integers(0, 3),
    overcommit=st.sampled_from([0, 2, 4, 8, "auto"]),
    truncate=st.booleans(),
    moves=st.lists(MOVES, min_size=20, max_size=200),
)
def test_after_every_resume_on_any_ranks_the_next_step_can_be_taken_each_ticket_once_and_in_time(
    max_lag, overcommit, truncate, moves
):
    run = Run(
        max_lag, overcommit if max_lag else 0, truncate and max_lag > 0, dp_ranks=1, generators=2
    )
    for move, number in moves:
        one, more = divmod(number, 97)
        if move == "ask":
            run.ask(one % len(run.held), 1 + more % 3)
        elif move == "finish" and run.working:
            run.finish(run.working[one % len(run.working)])
        elif move == "take":
            run.take()
        elif move == "swap":
            generator = one % len(run.held)
            run.held[generator] = max(run.held[generator], run.ledger.step - more % 2)
        elif move == "resume":
            saved = {t for t in run.working if (number >> t % 19) & 1}
            lost = {t for t in run.finished if more % 5 == 0 and (number >> t % 13) & 1}
            run.resume(DP_RANKS[one % 3], GENERATORS[more % 3], saved, lost)
            run.go_on(steps=more % 2)
    run.go_on(steps=max_lag + 2)
    state = run.ledger.state_dict()
    unfinished = set(state["again"]) | {t for t, _ in state["finished"]}
    assert len(run.consumed) == len(set(run.consumed)), "a ticket was trained on twice"
    assert set(run.consumed) | unfinished == set(range(state["frontier"])), "a ticket was lost"
    assert not set(run.consumed) & unfinished


def test_of_more_groups_than_a_lane_can_train_on_in_time_the_rest_starts_again():
    def make(dp_ranks):
        return TicketLedger(
            groups_per_step=4, max_lag=1, overcommit=4, num_pools=dp_ranks, resume_in_work=True
        )

    state = make(1).state_dict() | {
        "step": 13,
        "frontier": 60,
        "again": [50, 52, 56, 58],
        "finished": [[51, 13], [53, 13], [54, 13], [55, 13], [57, 14], [59, 14]],
        "in_work": [[58, 14], [56, 14]],
    }
    alone, two = make(1), make(2)
    assert alone.load_state_dict(state, {56, 58}) == [] and alone.in_work() == {56, 58}
    assert two.load_state_dict(state, {56, 58}) == [55], (
        "51, 53 and 55 are due now, of one data-parallel rank, which trains on two a step"
    )
    assert two.in_work() == {56, 58} and [d for _, d in two.state_dict()["finished"]] == [
        13,
        13,
        13,
        14,
        14,
    ]
    two.finish([56])
    assert two.take(13) == [54, 56, 51, 53]
    assert [t.index for t in two.start(100, 14)] == [50, 52, 55, 60, 61], (
        "what starts again comes before what is new"
    )
