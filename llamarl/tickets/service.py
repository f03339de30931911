"""The ledger as a service: one rank keeps the TicketLedger and answers while its executors compute;
the others ask by messages.

    message    from -> to            handled on                 meaning
    ask        generator -> leader   leader's listener thread   "I hold version g and have room for
                                                                n groups"
    grant      leader -> generator   taken by the generator     the answer: n tickets to start, or
                                                                fewer; or, later on: there is room,
                                                                ask again
    waits      generator -> leader   leader's listener thread   it has nothing to do; a share is
                                                                kept for it (shares.py)
    going_on   generator -> leader   leader's listener thread   tickets that a resumed run goes on
                                                                with
    finish     trainer -> leader     leader's listener thread   these groups have reached a trainer
                                                                rank; once they have reached all
                                                                ranks of its data-parallel rank,
                                                                the ledger counts them
    given_back leader -> trainer     taken by the trainer       of these the ledger has given back
                                                                the groups: they are not wanted
    taken      leader -> trainer     taken by the trainer       the batch of a step, of its own
                                                                data-parallel rank
    truncate   leader -> generator   taken by the generator     end these tickets' completions where
                                                                they are: the trainer would wait for
                                                                them (on_deadline=truncate)

The leader answers every ask at once, with fewer tickets or none if the rules forbid more. A
generator has one ask under way, so it never gets more than it has room for, nor more than its share
(shares.py). The leader owes nothing after a refusal. The generator asks again when it holds newer
weights, or when the leader tells it of room. A take makes room just when newer weights are on their
way, and tickets that wait for them start one version younger. Generators ask ahead, between chunks,
and do not wait for the answer. With max_lag 0 they wait, because batches must not depend on timing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from types import MappingProxyType

from llamarl.comm.channel import dp_rank_of
from llamarl.comm.control import Control
from llamarl.errors import TimedOut
from llamarl.tickets.choices import choices_of
from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.shares import FairShares
from llamarl.tickets.stragglers import TicketTimes
from llamarl.types import Ticket, Verdict
from llamarl.words.texts import first_of

log = logging.getLogger(__name__)

_SHOWN = 8  # stragglers in a line of the log


class TicketService:
    """Gives a rank access to the ledger.

    ledger: used on the leader only; each rank builds one, which costs nothing. tensor_parallel: so
    many trainer ranks, one after another, are one data-parallel rank of the ledger and train on the
    same groups. truncate: end a straggler whose deadline has come, rather than wait.
    straggler_factor: a ticket that takes so many times the median is named in the log.
    clock: seconds, which only grow.
    """

    def __init__(
        self,
        ledger: TicketLedger,
        control: Control,
        *,
        trainer_ranks: tuple[int, ...],
        timeout_s: float,
        tensor_parallel: int = 1,
        truncate: bool = False,
        straggler_factor: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.max_lag = ledger.max_lag
        self._ledger = ledger
        self._control = control
        self._trainer_ranks = trainer_ranks
        self._timeout_s = timeout_s
        self._tensor_parallel = tensor_parallel
        self._truncate = truncate
        self._clock = clock
        self._times = TicketTimes(straggler_factor)
        # Ticket -> ranks of its data-parallel rank that it has reached, while it is not all.
        self._arrivals: Counter[int] = Counter()
        # Messages of the leader to itself are handled on its own thread.
        self._lock = threading.Lock()
        self._offer: dict[int, list[int]] = {}  # step -> tickets, as sent
        self._resumed_choices: dict[int, int] = {}
        # On a generator: its newest ask.
        self._num_asked = 0  # groups that it asks for; 0: it is answered
        self._is_refused = False  # less was granted than asked for, and there is no news of room
        self._asked_version = -1
        self._has_told = False  # whether the leader knows that it has nothing to do
        # On the leader: ranks of generators that were granted less than asked for. A dict keeps
        # their order.
        self._refused: dict[int, None] = {}
        # With max_lag 0 the ledger deals tickets in turn.
        self._shares: FairShares | None = None
        if ledger.num_generators > 1 and not self.synchronous:
            self._shares = FairShares(ledger.num_generators)
        if control.is_leader:
            control.on("ask", self._on_ask)
            control.on("waits", self._on_waits)
            control.on("going_on", self._on_going_on)
            control.on("finish", self._on_finish)

    @property
    def synchronous(self) -> bool:
        """Whether asks wait for their answers: with max_lag 0."""
        return self._ledger.synchronous

    # --- Generators ---

    def ask(
        self, generator: int, count: int, version: int, *, is_idle: bool = False
    ) -> list[Ticket]:
        """Ask for up to `count` groups to start, for which there is room. is_idle: the generator
        has nothing to do until it gets some.

        Returns those that were granted since the last call, to this ask or an earlier one. Nothing
        is asked while an answer is under way, nor where the last one was a refusal and neither this
        generator's weights nor the ledger have changed since; where there are others, the leader is
        then told once that this one waits. Synchronous runs wait for the answer (TimedOut after
        timeout_s); others never do.
        """
        tickets = self.granted()
        room = count - len(tickets)
        may_succeed = version > self._asked_version or not self._is_refused
        if room > 0 and may_succeed and not self._num_asked:
            self._num_asked = room
            self._asked_version = version
            self._has_told = is_idle
            payload = {
                "generator": generator,
                "count": room,
                "version": version,
                "is_idle": is_idle,
            }
            self._control.post(self._control.leader, "ask", payload)
        elif is_idle and not (self._num_asked or self._has_told) and self._shares is not None:
            self._has_told = True
            self._control.post(self._control.leader, "waits", {})
        tickets += self.granted()
        until = self._clock() + self._timeout_s
        while self.synchronous and self._num_asked:
            if self._clock() > until:
                leader = self._control.leader
                raise TimedOut(
                    f"generator {generator} on rank {self._control.rank} waited "
                    f"{self._timeout_s:.0f} s for the ledger on rank {leader}; is that rank "
                    "stopped? Raise timeout_s if the machine is overloaded"
                )
            self._control.check()
            self._control.wait(0.05)
            tickets += self.granted()
        return tickets

    @property
    def is_refused(self) -> bool:
        """Whether the newest ask was granted less than it asked for, and no room is known of since.
        False while its answer is under way.
        """
        return self._is_refused and not self._num_asked

    def granted(self) -> list[Ticket]:
        """Return the tickets granted since the last call."""
        tickets = []
        for _, payload in self._control.take("grant"):
            granted = payload["tickets"]
            if granted is None:  # there is room again
                self._is_refused = False
                continue
            self._is_refused = len(granted) < self._num_asked
            self._has_told = self._has_told and not granted
            self._num_asked = 0
            for index, deadline, prompt in granted:
                tickets.append(Ticket(index, deadline, prompt))
        return tickets

    def ungranted(self, version: int) -> str:
        """Say what makes room for another ticket. The text begins with the cause."""
        if self.max_lag is None:
            return (
                f"arrivals: of groups at the trainer; as many as overcommit={self.overcommit} "
                "allows are on their way"
            )
        return (
            f"tickets: the ledger grants none at version {version} until the trainer takes a batch"
        )

    def go_on(self, tickets: list[int]) -> None:
        """After a resume: note that this rank's generator goes on with these tickets.

        They can then be named, or ended, as stragglers.
        """
        self._control.post(self._control.leader, "going_on", {"tickets": tickets})

    def to_truncate(self) -> list[int]:
        """Return the tickets that must end where they are, told since the last call.

        Their grants have come before.
        """
        tickets = []
        for _, payload in self._control.take("truncate"):
            tickets += payload["tickets"]
        return tickets

    # --- Trainers ---

    def finish(
        self, tickets: list[int], verdicts: Mapping[int, Verdict] = MappingProxyType({})
    ) -> None:
        """Note that these groups have reached this trainer rank, and what is known of them."""
        said = {str(ticket): verdict.to_json() for ticket, verdict in verdicts.items()}
        self._control.post(self._control.leader, "finish", {"tickets": tickets, "verdicts": said})

    def given_back(self) -> list[int]:
        """Return the tickets whose groups this rank need not keep, told since the last call."""
        tickets = []
        for _, payload in self._control.take("given_back"):
            tickets += payload["tickets"]
        return tickets

    def take(self, step: int, waited: bool = False) -> list[int] | None:
        """Return this data-parallel rank's batch of step `step`, or None if it must still wait.

        The leader's call decides for all data-parallel ranks.
        """
        # After a stop request no step is begun: ranks that heard of it first are at their last
        # checkpoint already.
        if self._control.is_leader and step not in self._offer and not self._control.stopping:
            taken = self._ledger.take(step, waited)
            self._name_stragglers()
            if taken is None:
                self._end_overdue()
                return None
            # A batch grows with the ranks: telling all of it to all would grow with their square.
            for rank, own in self._by_trainer_rank(taken):
                self._control.post(rank, "taken", {"step": step, "tickets": own})
            self._tell_of_room()
        for _, payload in self._control.take("taken"):
            self._offer[payload["step"]] = payload["tickets"]
        return self._offer.pop(step, None)

    def _by_trainer_rank(self, tickets: list[int]) -> Iterator[tuple[int, list[int]]]:
        """Yield each trainer rank, with the tickets of its data-parallel rank."""
        num_dp_ranks = len(self._trainer_ranks) // self._tensor_parallel
        batches: list[list[int]] = [[] for _ in range(num_dp_ranks)]
        for ticket in tickets:
            batches[dp_rank_of(ticket, num_dp_ranks)].append(ticket)
        for place, rank in enumerate(self._trainer_ranks):
            yield rank, batches[place // self._tensor_parallel]

    @property
    def has_batch(self) -> bool:
        """Whether this rank's trainer was told of a batch that it has not begun."""
        return bool(self._offer) or self._control.has("taken")

    def untake(self, step: int) -> None:
        """Give up the step just taken (leader only; others need do nothing)."""
        if self._control.is_leader:
            self._ledger.untake(step)

    def trained(self, reward: float) -> None:
        """Note that the step taken last was trained on, at this mean reward (NaN: none).

        The leader's call counts.
        """
        if self._control.is_leader:
            self._ledger.trained(reward)
            self._tell_of_room()  # the governor may have made some

    @property
    def overcommit(self) -> int:
        """How many groups beyond one batch may be started, as the governor has it now. Only the
        leader's value counts.
        """
        return self._ledger.overcommit

    def yield_row(self) -> dict[str, float | None]:
        """Return columns of what came of the groups that the last take was made of; none before
        the first. Only the leader's are right.
        """
        made_of = self._ledger.newest_yield
        return {} if made_of is None else made_of.row(refills=self._ledger.refills)

    def holding_up(self) -> list[int]:
        """Return the tickets in work that hold up the next step; none but on the leader."""
        return self._ledger.waits_for() if self._control.is_leader else []

    def waits_for(self) -> str:
        """Return which tickets hold up the next step, for messages."""
        if not self._control.is_leader:
            return f"the ledger on rank {self._control.leader}"
        tickets = self.holding_up()
        if not tickets:
            return "new tickets to start"
        more = "..." if len(tickets) > 4 else ""
        return f"tickets {tickets[:4]}{more} in work"

    # --- The leader's side ---

    def _on_ask(self, sender: int, payload: dict) -> None:
        count = payload["count"]
        with self._lock:
            allowed = count
            room = self._ledger.room
            if self._shares is not None:
                allowed = min(count, self._shares.share(sender, room))
            tickets = self._ledger.start(allowed, payload["version"], payload["generator"])
            values = [[ticket.index, ticket.deadline, ticket.prompt] for ticket in tickets]
            self._control.post(sender, "grant", {"tickets": values})
            self._times.granted([t.index for t in tickets], sender, self._clock())
            if len(tickets) < count:
                self._refused[sender] = None
            if self._shares is not None:
                is_held_back = len(tickets) == allowed < min(count, room)
                waits = payload["is_idle"] and not tickets
                may_ask = self._shares.answered(sender, waits=waits, is_held_back=is_held_back)
                self._tell_of_rest(may_ask)

    def _on_waits(self, sender: int, payload: dict) -> None:
        with self._lock:
            if self._shares is not None:
                self._shares.waits(sender)
                self._tell_of_rest([sender])

    def _tell_of_rest(self, ranks: list[int]) -> None:
        """Tell generators to ask again for what is no longer kept for others, if there is any."""
        if not self._ledger.room:
            return
        for rank in ranks:
            self._refused.pop(rank, None)
            self._control.post(rank, "grant", {"tickets": None})

    def _tell_of_room(self, *, in_step: bool = False) -> None:
        """Tell generators that were refused to ask again, in the order in which they were. in_step:
        with max_lag 0 too, where for the rest what a generator may start depends on its version
        alone.
        """
        if self.synchronous and not in_step:
            return
        with self._lock:
            for rank in self._refused:
                # By the topic of the refusal that it takes back, which it must not overtake.
                self._control.post(rank, "grant", {"tickets": None})
            self._refused.clear()
            if self._shares is not None:
                self._shares.told()

    def _on_going_on(self, sender: int, payload: dict) -> None:
        with self._lock:
            tickets = payload["tickets"]
            self._times.granted(tickets, sender, self._clock(), is_resumed=True)

    def _on_finish(self, sender: int, payload: dict) -> None:
        tickets = payload["tickets"]
        with self._lock:
            self._arrivals.update(tickets)
            whole = [t for t in tickets if self._arrivals[t] == self._tensor_parallel]
            for ticket in whole:
                del self._arrivals[ticket]
            self._times.finished(whole, self._clock())
        verdicts = {int(t): Verdict.from_json(said) for t, said in payload["verdicts"].items()}
        given_back = self._ledger.finish(whole, verdicts)
        for rank, own in self._by_trainer_rank(given_back):
            if own:
                self._control.post(rank, "given_back", {"tickets": own})
        if self.max_lag is None:
            self._tell_of_room()  # without a bound what has finished makes room
        elif given_back:
            self._tell_of_room(in_step=True)

    def _end_overdue(self) -> None:
        """Tell generators to end the stragglers that alone hold up the step, once each."""
        if not self._truncate:
            return
        orders: dict[int, list[int]] = {}  # generator's rank -> tickets
        with self._lock:  # no order may overtake the grant of its ticket
            for ticket in self._ledger.overdue():
                work = self._times.work.get(ticket)
                if work is not None and not work.is_ended:
                    work.is_ended = True
                    orders.setdefault(work.rank, []).append(ticket)
            for rank, tickets in orders.items():
                self._control.post(rank, "truncate", {"tickets": tickets})

    def _name_stragglers(self) -> None:
        with self._lock:
            found = self._times.new_stragglers(self._clock())
        for rank, late in found.items():
            named = [f"{ticket} ({seconds:.1f} s)" for ticket, seconds in late]
            log.warning(
                "stragglers of generator rank %d: tickets %s have taken more than %g x the median "
                "of %.2f s; on_deadline=truncate and generator.max_seconds bound what they may "
                "hold up",
                rank,
                ", ".join(first_of(named, _SHOWN)),
                self._times.factor,
                self._times.median_s,
            )

    # --- Checkpoints ---

    def state_dict(self) -> dict:
        """Return the ledger's state as JSON values."""
        return self._ledger.state_dict()

    def load_state_dict(self, state: dict, saved: Set[int] = frozenset()) -> None:
        """Go on from a checkpoint.

        On every rank, before the executors load their parts: each can then tell which groups are
        still wanted. saved: tickets whose partial completions the checkpoint holds. The leader
        warns of those that start again although they were finished, or begun, since this run has
        other trainer ranks.
        """
        self._resumed_choices = choices_of(state)
        dropped = self._ledger.load_state_dict(state, saved)
        if not (dropped and self._control.is_leader):
            return
        finished = {ticket for ticket, _ in state["finished"]}
        log.warning(
            "step %d: %d of %d finished groups start again, and %d that were begun: on another "
            "number of trainer ranks, more of them are due on one than it can train on within "
            "max_lag. Tickets %s",
            self._ledger.step,
            len(finished.intersection(dropped)),
            len(finished),
            len(set(dropped) - finished),
            ", ".join(map(str, dropped)),
        )

    @property
    def resumed_step(self) -> int:
        """The checkpoint's step, and so its policy version. Valid right after load_state_dict."""
        return self._ledger.step

    def resumed_choices(self) -> dict[int, int]:
        """Right after load_state_dict: return ticket -> prompt of the tickets that had not ended,
        where a sampler chose.
        """
        return self._resumed_choices

    def in_work(self) -> set[int]:
        """Right after load_state_dict: return the tickets that stay started, whose completions must
        go on.
        """
        return self._ledger.in_work()

    def reconcile(self, buffered: list[int]) -> set[int]:
        """Return those of the groups in a checkpoint that the ledger counts as finished."""
        return self._ledger.reconcile(buffered)
