"""Finds the executor that dropped records, when nothing moves and the trainer waits for them.

    message   from -> to          handled by   meaning
    lacks     a rank -> leader    the loop     "an executor waits for records of this evaluation"
    held?     leader -> all       the loop     "what have your executors done with this subject?"
    held      a rank -> leader    the loop     the answer: an Account of each executor

Every end of a channel counts the records that pass it, by subject: a ticket or an evaluation. An
executor may keep records while `waiting_for` says what it lacks. If it lacks nothing and has sent
fewer records than it took, it dropped the others, and the ticket or the evaluation can never end.
The leader asks about a ticket while the trainer waits for it, and about an evaluation otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from llamarl.comm.channel import Receiver, Sender, Subject, evaluation_of
from llamarl.comm.control import Control
from llamarl.errors import RecordsDropped
from llamarl.executor import Executor
from llamarl.types import Policy

STILL_S = 10.0  # nothing may have moved for so long on any rank

# What an executor may wait for while nothing moves. Other causes, such as scores, name work that
# goes on outside the loop.
_OTHERS_TURN = ("data", "tickets", "arrivals", "room")
_REMEDY = (
    "An executor sends on every record that it takes. To leave a completion out of training, send "
    "it with finish_reason='aborted'; to leave a group out, send it with trained=False. An "
    "executor that still works on records says so in waiting_for()"
)


class Clock:
    """Measures an executor's idle time. `now`, and all times, by time.monotonic()."""

    def __init__(self, now: float):
        self.idle_since = now  # when it last worked
        self.reason: str | None = None  # what it waits for
        self.reason_since = now


@dataclass(frozen=True, slots=True)
class Account:
    """What one executor on one rank has done with the records of one subject. Counts by the name of
    a record's type.
    """

    executor: str
    rank: int
    idle_s: float  # since it last worked
    waits_for: str | None
    version: int | None  # of the policy that it holds; None if it takes none
    taken: Mapping[str, int]
    sent: Mapping[str, int]
    untaken: Mapping[str, int]  # have come and wait for it


class DroppedRecords:
    """The search for dropped records, on one rank.

    executors: all of the graph, in flow order. local: those of this rank. num_ranks: of the world.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        local: Sequence[Executor],
        control: Control,
        num_ranks: int,
    ):
        self._executors = executors
        self._trainer = next(executor for executor in executors if executor.leads)
        self._local = local
        self._control = control
        self._num_ranks = num_ranks
        self._answers: dict[int, list[Account]] = {}
        self._told_at = float("-inf")  # when this rank last told the leader what it lacks
        self._asked_for: Subject | None = None  # on the leader: the subject of the newest question
        self._asked_at = float("-inf")
        self._suspicion: tuple[Subject, str] | None = None  # and who dropped its records

    def look(self, clocks: Mapping[str, Clock], holding_up: Callable[[], Sequence[int]]) -> None:
        """Tell the leader what is lacked here, and answer its questions. On the leader: ask where
        an executor has long waited for data, and lose the executor that dropped records, once all
        ranks have answered.

        clocks: of this rank's executors. holding_up: the tickets that hold up the next step.
        """
        now = time.monotonic()
        self._tell(clocks, now)
        self._answer(clocks, now)
        lacked = [told["subject"] for _, told in self._control.take("lacks")]
        if not self._control.is_leader or self._control.stopping:
            return
        if _waits_for_data(clocks[self._trainer.name], now, since=self._asked_at):
            lacked = [*holding_up()]
        if now - self._asked_at > STILL_S:
            for subject in lacked[:1]:
                self._ask(subject, now)
        error = self._verdict(now)
        if error is not None:
            self._control.lose(error)  # between two steps all state is whole

    def _tell(self, clocks: Mapping[str, Clock], now: float) -> None:
        for executor in self._local:
            lacks = executor.lacks_of_evaluation()
            if lacks is None or not _waits_for_data(clocks[executor.name], now, self._told_at):
                continue
            self._told_at = now
            self._control.post(self._control.leader, "lacks", {"subject": evaluation_of(lacks)})

    def _answer(self, clocks: Mapping[str, Clock], now: float) -> None:
        for leader, question in self._control.take("held?"):
            subject = question["subject"]
            accounts = [self._account(e, clocks[e.name], subject, now) for e in self._local]
            said = {"subject": subject, "accounts": [asdict(account) for account in accounts]}
            self._control.post(leader, "held", said)

    def _ask(self, subject: Subject, now: float) -> None:
        self._asked_at = now
        self._asked_for = subject
        self._answers.clear()
        for rank in range(self._num_ranks):
            self._control.post(rank, "held?", {"subject": subject})

    def _verdict(self, now: float) -> RecordsDropped | None:
        """Return the error, or None while answers are missing, something moves or nobody dropped
        anything. The ranks answer a question at different moments, so two questions must agree.
        """
        for rank, said in self._control.take("held"):
            if said["subject"] == self._asked_for:
                self._answers[rank] = [Account(**account) for account in said["accounts"]]
        if len(self._answers) < self._num_ranks:
            return None
        accounts: list[Account] = []
        for rank in sorted(self._answers):
            accounts += self._answers[rank]
        self._answers.clear()
        subject = self._asked_for
        assert subject is not None, "there are answers to a question"
        is_of_ticket = isinstance(subject, int)
        found = who_dropped(accounts, self._executors, self._trainer, becomes_others=is_of_ticket)
        before = self._suspicion
        self._suspicion = None if found is None else (subject, found)
        if self._suspicion is None:
            return None
        if self._suspicion != before:
            self._ask(subject, now)
            return None
        what = f"ticket {subject}" if is_of_ticket else subject
        waits = "the run waits for its end"
        if is_of_ticket:
            waits = f"step {self._trainer.version} of {self._trainer.name} waits for that ticket"
        return RecordsDropped(
            f"{found} of {what}. Nothing has moved for {STILL_S:.0f} s, and {waits}. {_REMEDY}"
        )

    def _account(self, executor: Executor, clock: Clock, subject: Subject, now: float) -> Account:
        taken: dict[str, int] = {}
        untaken: dict[str, int] = {}
        sent: dict[str, int] = {}
        for record, inbox in executor.inputs.by_record:
            if isinstance(inbox, Receiver):
                taken[record.__name__] = inbox.counts.of(subject)
                untaken[record.__name__] = inbox.untaken(subject)
        for record, outbox in executor.outputs.by_record:
            if isinstance(outbox, Sender):
                sent[record.__name__] = outbox.counts.of(subject)
        return Account(
            executor=executor.name,
            rank=executor.group.rank,
            idle_s=now - clock.idle_since,
            waits_for=clock.reason,
            version=executor.version if Policy in executor.consumes else None,
            taken=taken,
            sent=sent,
            untaken=untaken,
        )


def who_dropped(
    accounts: Sequence[Account],
    executors: Sequence[Executor],
    trainer: Executor,
    *,
    becomes_others: bool = True,
) -> str | None:
    """Return who dropped how many records, as the beginning of a sentence; None if nobody did or
    something still moves.

    accounts: of every executor on every rank, about one subject. executors: in flow order.
    becomes_others: whether records of the subject become records of other types that are counted.
    """
    if not all(_is_still(account, trainer.version) for account in accounts):
        return None
    suspects = []  # executors that owe nothing by their own word, in flow order
    for executor in executors:
        own = [account for account in accounts if account.executor == executor.name]
        # With copies of each record on several ranks, what came cannot be compared with what went.
        has_copies = executor.takes_all or executor.tensor_parallel > 1
        if executor.leads or has_copies or any(account.waits_for for account in own):
            continue
        suspects.append((executor, own))
    for executor, own in suspects:
        for record in _owed(executor, executors):
            untaken = _sum(own, "untaken", record)
            if untaken:
                return f"{_place(own)} leaves {untaken} {record.__name__} records"
            taken = _sum(own, "taken", record)
            sent = _sum(own, "sent", record)
            if record in executor.produces and sent < taken:
                return f"{_place(own)} took {taken} {record.__name__} records and sent on {sent}"
    for executor, own in reversed(suspects if becomes_others else []):
        taken = sum(_sum(own, "taken", record) for record in _owed(executor, executors))
        sent = sum(_sum(own, "sent", record) for record in executor.produces)
        if executor.produces and taken and not sent:
            names = " and ".join(record.__name__ for record in executor.produces)
            return f"{_place(own)} took {taken} records and sent no {names}"
    return None


def _owed(executor: Executor, executors: Sequence[Executor]) -> list[type]:
    """Return the types of records of which an executor owes something: not those that it is only
    offered, such as a look at what is still sampled.
    """
    offered: set[type] = set()
    for other in executors:
        offered.update(other.offers)
    return [record for record in executor.consumes if record not in offered]


def _waits_for_data(clock: Clock, now: float, since: float) -> bool:
    """Whether an executor has waited for data for STILL_S, and so long after `since`."""
    waits = clock.reason is not None and clock.reason.startswith("data:")
    return waits and now - max(clock.idle_since, since) > STILL_S


def _is_still(account: Account, trainer_version: int) -> bool:
    """Whether this executor has stood still, and holds the newest weights: newer ones may be on
    their way for long, and let it go on.
    """
    if account.idle_s < STILL_S or account.version not in (None, trainer_version):
        return False
    reason = account.waits_for
    return reason is None or reason.split(":")[0] in _OTHERS_TURN


def _sum(accounts: Sequence[Account], side: str, record: type) -> int:
    return sum(getattr(account, side).get(record.__name__, 0) for account in accounts)


def _place(accounts: Sequence[Account]) -> str:
    ranks = [account.rank for account in accounts]
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
    return f"{accounts[0].executor} on {where}"
