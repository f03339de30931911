"""Dropped records: the executor that kept some back is named, and nobody who still works is."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from llamarl.comm.channel import RecordCounts, evaluation_of
from llamarl.comm.dropped import STILL_S, Account, DroppedRecords, who_dropped
from llamarl.executor import Executor
from llamarl.types import Completion, EvalCompletion, Group, Policy, Stretch


class Station(Executor):
    consumes = ()
    produces = ()
    offers = ()

    def __init__(self, name, consumes, produces, *, leads=False, takes_all=False):
        self.name = name
        self.consumes = consumes
        self.produces = produces
        self.leads = leads
        self.takes_all = takes_all


def row(**changes):
    """generator -> filter -> reward -> penalty -> trainer, which holds version 4."""
    trainer = Station("trainer", (Group,), (Policy,), leads=True)
    trainer.version = 4
    return [
        Station("generator", (Policy,), (Completion, EvalCompletion)),
        Station("filter", (Completion,), (Completion,), **changes),
        Station("reward", (Completion, EvalCompletion), (Group,)),
        Station("penalty", (Group,), (Group,)),
        trainer,
    ]


def account(executor, *, rank=0, waits_for=None, taken=(), sent=(), untaken=(), version=None):
    return Account(
        executor=executor,
        rank=rank,
        idle_s=STILL_S,
        waits_for=waits_for,
        version=version,
        taken=dict(taken),
        sent=dict(sent),
        untaken=dict(untaken),
    )


def still(**changes):
    """The accounts of a run in which the filter dropped one of eight completions."""
    accounts = {
        "generator": account("generator", waits_for="tickets: none", sent={"Completion": 8}),
        "filter": account("filter", rank=1, taken={"Completion": 8}, sent={"Completion": 7}),
        "reward": account("reward", waits_for="data: lacks one", taken={"Completion": 7}),
        "penalty": account("penalty"),
        "trainer": account("trainer", waits_for="data: groups"),
    }
    accounts["generator"] = dataclasses.replace(accounts["generator"], version=4)
    for name, fields in changes.items():
        accounts[name] = dataclasses.replace(accounts[name], **fields)
    return list(accounts.values())


def named(accounts, executors=None, **options):
    executors = executors or row()
    return who_dropped(accounts, executors, executors[-1], **options)


SENT_ALL = {"sent": {"Completion": 8}}
LOST = {"waits_for": None, "taken": {"Completion": 8}, "sent": {"Group": 0}}
LEFT = {"taken": {}, "sent": {}, "untaken": {"Completion": 8}}
OTHER = account("filter", rank=2, taken={"Completion": 3}, sent={"Completion": 3})


@pytest.mark.parametrize(
    "accounts, said",
    [
        # It is not the reward, which lacks them.
        (still(), "filter on rank 1 took 8 Completion records and sent on 7"),
        (
            [*still(), OTHER],
            "filter on ranks [1, 2] took 11 Completion records and sent on 10",
        ),
        (still(filter=SENT_ALL, reward=LOST), "reward on rank 0 took 8 records and sent no Group"),
        (still(filter=LEFT), "filter on rank 1 leaves 8 Completion records"),
    ],
    ids=["keeps some", "on two ranks", "sends nothing else", "takes nothing"],
)
def test_an_executor_is_named_that(accounts, said):
    assert named(accounts) == said


INNOCENT = {
    "somebody has worked just now": {"generator": {"idle_s": STILL_S / 2}},
    "scores are on their way": {"reward": {"waits_for": "scores: 3 by math"}},
    "an environment thinks": {"generator": {"waits_for": "environment: 2 answers"}},
    "newer weights are on their way": {"generator": {"version": 3}},
    "it says that it still works": {"filter": {"waits_for": "judge: an answer"}},
    "it says what it lacks": {"filter": {"waits_for": "data: a whole batch"}},
    "all was sent on": {"filter": SENT_ALL},
}


@pytest.mark.parametrize("changes", INNOCENT.values(), ids=INNOCENT)
def test_nobody_is_named_while(changes):
    assert named(still(**changes)) is None


def test_an_executor_is_not_named_for_looks_at_what_is_still_sampled():
    """The reference has read ahead, and the reward lost the group."""
    executors = row()
    executors[0].offers = (Stretch,)
    reference = Station("reference", (Group, Stretch), (Group,))
    executors.insert(3, reference)
    accounts = still(filter=SENT_ALL, reward=LOST)
    accounts.append(account("reference", taken={"Stretch": 20, "Group": 0}, sent={"Group": 0}))
    assert named(accounts, executors) == "reward on rank 0 took 8 records and sent no Group"


def test_copies_on_several_ranks_are_not_compared_with_what_was_sent():
    assert named(still(), row(takes_all=True)) is None


def test_counts_are_kept_for_the_newest_tickets(monkeypatch):
    monkeypatch.setattr("llamarl.comm.channel.COUNTED_TICKETS", 2)
    counts = RecordCounts()
    for ticket in (1, 1, 2, 3):
        counts.add(SimpleNamespace(ticket=ticket))
    counts.add(object())  # of no ticket
    assert [counts.of(ticket) for ticket in (1, 2, 3)] == [0, 1, 1]


class FakeControl:
    """The leader's control, which hears from no other rank but itself."""

    is_leader = True
    stopping = False

    def __init__(self):
        self.posted = []
        self.answers = []
        self.lost = []
        self.lacked = []

    def post(self, rank, kind, message):
        self.posted.append((kind, message["subject"]))

    def take(self, kind):
        if kind == "lacks":
            return [(0, {"subject": subject}) for subject in self.lacked]
        answers, self.answers = (self.answers, []) if kind == "held" else ([], self.answers)
        return answers

    def lose(self, error):
        self.lost.append(str(error))

    def answer(self, accounts, subject=7):
        said = [dataclasses.asdict(account) for account in accounts]
        self.answers = [(0, {"subject": subject, "accounts": said})]


@pytest.mark.parametrize(
    "second, num_questions, is_named",
    [
        (still(), 2, True),
        (still(generator={"idle_s": 0.0}), 2, False),
        (still(filter={"sent": {"Completion": 6}}), 3, False),
    ],
    ids=["the same", "others have moved", "another count"],
)
def test_an_executor_is_named_only_if_two_questions_agree(second, num_questions, is_named):
    """Ranks answer one question at different moments."""
    control = FakeControl()
    executors = row()
    search = DroppedRecords(executors, [], control, num_ranks=1)
    clocks = {"trainer": SimpleNamespace(idle_since=float("-inf"), reason="data: groups")}
    search.look(clocks, lambda: [7])
    for accounts in (still(), second):
        assert not control.lost
        control.answer(accounts)
        search.look(clocks, lambda: [7])
    assert len(control.lost) == is_named
    assert control.posted == [("held?", 7)] * num_questions


def test_an_executor_that_keeps_answers_of_an_evaluation_is_named():
    control = FakeControl()
    subject = evaluation_of(3)
    control.lacked = [subject]
    executors = row()
    executors[1].consumes = executors[1].produces = (EvalCompletion,)
    search = DroppedRecords(executors, [], control, num_ranks=1)
    clocks = {"trainer": SimpleNamespace(idle_since=float("-inf"), reason=None)}
    search.look(clocks, lambda: [])
    kept = {"taken": {"EvalCompletion": 8}, "sent": {"EvalCompletion": 7}}
    lacks = {"taken": {"EvalCompletion": 7}}
    accounts = still(filter=kept, reward=lacks, trainer={"waits_for": None})
    for _ in range(2):
        control.answer(accounts, subject)
        search.look(clocks, lambda: [])
    (error,) = control.lost
    assert "filter on rank 1 took 8 EvalCompletion records and sent on 7 of the evaluation" in error


def test_answers_of_an_evaluation_become_no_records_that_are_counted():
    """The reward has taken all of them, and sends groups of tickets alone."""
    accounts = still(
        filter={"taken": {}, "sent": {}},
        reward={"waits_for": None, "taken": {"EvalCompletion": 8}, "sent": {}},
    )
    assert named(accounts, becomes_others=False) is None


def test_records_of_an_evaluation_are_counted_by_its_version():
    versions = torch.tensor([3, 3])
    answer = EvalCompletion(0, True, 0, torch.tensor([5, 6]), versions, "stop")
    counts = RecordCounts()
    counts.add(answer)
    assert (counts.of(evaluation_of(3)), counts.of(evaluation_of(4)), counts.of(3)) == (1, 0, 0)
