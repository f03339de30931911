"""Control: mail, handlers, stop, failure and liveness. Several ranks in one process, over a c10d
store of their own.
"""

import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from llamarl.comm import control as control_module
from llamarl.comm.control import Control
from llamarl.controller import ExecutorController
from llamarl.ending import RunEnd
from llamarl.errors import PeerDied, TimedOut, cause_of
from tests.build.control import lone_control

WAIT_S = 10.0  # for what should come at once
BEAT_S, SILENCE_S = 0.02, 1.0  # a busy machine must not look like a silent rank
NAMES = ["trainer", "generator, reward", "reference"]


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch):
    monkeypatch.setattr(control_module, "BEAT_S", BEAT_S)


@pytest.fixture
def ranks():
    """make(n, ...) builds n ranks; all are closed at the end."""
    made, stores = [], []  # a store serves for as long as it is referred to

    def make(count=2, start=True, heartbeat_timeout_s=60.0):
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        stores.append(store)
        world = {"world_size": count, "leader": 0, "names": NAMES[:count]}
        world["heartbeat_timeout_s"] = heartbeat_timeout_s
        out = [Control(store.clone(), rank=r, **world) for r in range(count)]
        made.extend(out)
        for rank in out if start else ():
            rank.start()
        return out

    yield make
    for rank in made:
        rank.close()


@pytest.fixture
def alone():
    return lone_control()


@pytest.fixture
def exits(monkeypatch):
    """The codes with which this process would have ended."""
    codes = []
    monkeypatch.setattr(control_module.os, "_exit", codes.append)
    return codes


def eventually(predicate, timeout_s=WAIT_S):
    deadline = time.monotonic() + timeout_s
    while not (value := predicate()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)
    return value


def fall_silent(rank, watcher):
    """Beat once, so that it is known, and then no more; not as one that closes."""
    rank.start()
    eventually(lambda: watcher._store.check([f"beat/{rank.rank}"]))
    rank._closing.set()


def failure_of(control):
    eventually(lambda: control.failure)
    with pytest.raises(type(control.failure)) as raised:
        control.check()
    return raised.value


# --- mail ---


def test_mail_to_oneself_is_kept_by_topic_in_order_and_taken_once(alone):
    for i in range(3):
        alone.post(0, "a", {"i": i})
    alone.post(0, "b", {"i": 9})
    assert alone.take("a") == [(0, {"i": 0}), (0, {"i": 1}), (0, {"i": 2})]
    assert alone.take("a") == [] and alone.take("b") == [(0, {"i": 9})]


def test_mail_from_many_threads_of_many_ranks_arrives_once_and_in_order_per_sender(ranks):
    receiver, *senders = ranks(3)

    def post_all(sender):
        for i in range(100):
            sender.post(0, "n", {"i": i})

    for sender in senders:
        threading.Thread(target=post_all, args=(sender,)).start()
    got = []
    eventually(lambda: got.extend(receiver.take("n")) or len(got) == 200)
    for sender in senders:
        assert [p["i"] for rank, p in got if rank == sender.rank] == list(range(100))
        assert sender.take("n") == []


def test_post_all_reaches_every_rank_and_the_poster(ranks):
    everyone = ranks(3)
    everyone[1].post_all("hello", {"x": 1})
    for control in everyone:
        assert eventually(lambda: control.take("hello")) == [(1, {"x": 1})]


def test_a_handler_answers_while_its_rank_computes_and_leaves_no_mail(ranks):
    leader, other = ranks(2, start=False)

    def double(sender, payload):
        leader.post(sender, "answer", {"double": 2 * payload["x"]})

    leader.on("ask", double)
    leader.start(), other.start()
    other.post(0, "ask", {"x": 21})  # nobody turns the leader's loop
    assert eventually(lambda: other.take("answer")) == [(0, {"double": 42})]
    assert leader.take("ask") == []


def test_mail_posted_before_a_rank_listens_is_not_lost(ranks):
    leader, other = ranks(2, start=False)
    other.post(0, "early", {})
    leader.start()
    assert eventually(lambda: leader.take("early")) == [(1, {})]


@pytest.mark.parametrize("news", ["mail", "wake", "fail"])
def test_news_ends_a_wait_and_news_before_the_wait_does_too(alone, news):
    tell = {
        "mail": lambda: alone.post(0, "x", {}),
        "wake": alone.wake,
        "fail": lambda: alone.fail(RuntimeError()),
    }[news]
    began = time.monotonic()
    tell()
    alone.wait(WAIT_S)
    thread = threading.Thread(target=lambda: (time.sleep(0.05), tell()))
    thread.start()
    alone.wait(WAIT_S)
    thread.join()
    assert 0.04 < time.monotonic() - began < WAIT_S / 2


# --- stop and failure ---


def test_a_stop_request_reaches_every_rank(ranks):
    everyone = ranks(3)
    assert not any(c.stopping for c in everyone)
    everyone[2].request_stop()
    for control in everyone:
        eventually(lambda: control.stopping)


def test_a_failure_is_raised_on_every_other_rank_and_names_the_failed_one_and_its_stations(ranks):
    everyone = ranks(3)
    everyone[1].report_failure(ValueError("bad luck"))
    for control in (everyone[0], everyone[2]):
        error = failure_of(control)
        assert isinstance(error, PeerDied)
        assert "rank 1 (generator, reward) failed: ValueError: bad luck" in str(error)
    everyone[1].check()


def test_the_first_failure_is_the_one_that_is_raised(alone):
    alone.fail(ValueError("first"))
    alone.fail(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        alone.check()


def test_an_exception_in_a_thread_ends_the_loop(alone):
    def explode(text):
        raise KeyError(text)

    alone.thread("doomed", explode, "in a thread")
    error = failure_of(alone)
    assert isinstance(error, KeyError) and "in a thread" in str(error)


def test_an_exception_in_a_handler_ends_the_loop(ranks):
    leader, other = ranks(2, start=False)

    def explode(sender, payload):
        raise ValueError(f"from {sender}")

    leader.on("bad", explode)
    leader.start(), other.start()
    other.post(0, "bad", {})
    assert "from 1" in str(failure_of(leader))


# --- liveness ---


def test_a_silent_rank_is_named_on_all_others_and_only_there(ranks):
    everyone = ranks(3, start=False, heartbeat_timeout_s=SILENCE_S)
    everyone[0].start(), everyone[2].start()
    fall_silent(everyone[1], everyone[0])
    for control in (everyone[0], everyone[2]):
        error = failure_of(control)
        assert isinstance(error, PeerDied)
        assert "rank 1 (generator, reward) has not been heard of" in str(error)
        assert "rank 2" not in str(error) and "rank 0" not in str(error)


def test_a_silent_leader_is_named_by_the_others(ranks):
    leader, other = ranks(2, start=False, heartbeat_timeout_s=SILENCE_S)
    fall_silent(leader, other)
    other.start()
    error = failure_of(other)
    assert isinstance(error, PeerDied) and "rank 0 (trainer) has not been heard of" in str(error)


@pytest.mark.slow
def test_a_rank_that_has_not_begun_to_beat_is_not_dead(ranks):
    leader, other = ranks(2, start=False, heartbeat_timeout_s=SILENCE_S)
    leader.start()
    leader.wait(2 * SILENCE_S)  # no event: that nothing happens is the claim
    leader.check()
    fall_silent(other, leader)
    assert "rank 1 (generator, reward) has not been heard of" in str(failure_of(leader))


def test_a_rank_that_beats_or_has_closed_is_not_dead(ranks):
    everyone = ranks(3, heartbeat_timeout_s=SILENCE_S)
    everyone[1].close()
    everyone[2].wait(2 * SILENCE_S)  # no event: that nothing happens is the claim
    everyone[0].check(), everyone[2].check()


class HeldUp(threading.Event):
    """What a rank sleeps on, on a host that is held up once for seconds."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def wait(self, timeout=None):
        time.sleep(self.seconds)
        self.seconds = 0.0
        return super().wait(timeout)


@pytest.mark.slow
def test_a_host_that_was_held_up_as_a_whole_has_no_dead_ranks(ranks):
    leader, other = ranks(2, start=False, heartbeat_timeout_s=SILENCE_S)
    leader._closing = HeldUp(2 * SILENCE_S)
    other._closing = HeldUp(2.5 * SILENCE_S)  # so that the leader looks before it beats again
    other.start()
    eventually(lambda: leader._store.check(["beat/1"]))
    leader.start()
    eventually(lambda: leader._closing.seconds == 0.0)
    leader.wait(SILENCE_S)  # no event: that nothing happens is the claim
    leader.check(), other.check()


def test_a_rank_that_is_stuck_with_the_dead_is_ended_after_the_grace_and_says_why(
    ranks, monkeypatch, exits, capsys
):
    monkeypatch.setattr(control_module, "GRACE_S", 0.05)
    leader, _ = ranks(2)
    leader.fail(PeerDied("rank 1 is gone"))  # and its loop never turns again
    eventually(lambda: exits)
    assert exits == [control_module.EXIT_PEER_DIED]
    said = r"rank 0 is stuck at .*test_control\.py:\d+, in (test_a_rank_that_is_stuck|eventually)"
    assert re.search(said, capsys.readouterr().err)


def test_a_rank_that_ends_by_itself_is_not_ended(ranks, monkeypatch, exits):
    monkeypatch.setattr(control_module, "GRACE_S", 3.0)
    leader, _ = ranks(2)
    leader.fail(PeerDied("rank 1 is gone"))
    beat = next(t for t in leader._threads if t.name == "control-beat")
    leader.close()
    beat.join(WAIT_S)
    assert not beat.is_alive() and exits == []


class Hung:
    """A thread that never ends. Notes for how long it is waited for, on a clock of its own."""

    def __init__(self):
        self.now = 100.0
        self.waits = []

    def join(self, timeout):
        self.waits.append(timeout)
        self.now += min(timeout, 3.0)


def test_threads_that_hang_after_a_loss_are_waited_for_once_altogether(alone, monkeypatch):
    hung = Hung()
    monkeypatch.setattr(control_module.time, "monotonic", lambda: hung.now)
    alone.join(hung)
    alone.join(hung)
    alone.loss = PeerDied("rank 1 is gone")
    for _ in range(3):
        alone.join(hung)
    assert hung.waits == [5.0, 5.0, 5.0, 2.0, 0.0]


def test_a_rank_that_lets_go_has_said_its_last_words(ranks, monkeypatch, exits):
    monkeypatch.setattr(control_module, "GRACE_S", 2 * control_module.BEAT_S)
    leader, _ = ranks(2, start=False)
    leader.keep([0], last_words_s=control_module.BEAT_S)
    leader.lose(PeerDied("rank 1 is gone", [1]))
    leader.let_go()
    leader.start()
    eventually(lambda: leader.failure is leader.loss)
    assert getattr(leader.loss, "__notes__", []) == []


class HungStore:
    """Of a launcher that is stopped after a rank's first beat: every call waits."""

    def __init__(self):
        self.goes_on = threading.Event()

    def clone(self):
        return self

    def set_timeout(self, timeout):
        pass

    def set(self, key, value):
        pass

    def check(self, keys):
        self.goes_on.wait()
        return False

    def queue_push(self, key, value):
        self.goes_on.wait()

    def queue_pop(self, key):
        self.goes_on.wait()
        return b'[0, "close", {}]'


@pytest.mark.slow
def test_a_store_that_hangs_is_named_though_the_heartbeat_hangs_in_it(exits):
    store = HungStore()
    world = {"world_size": 2, "leader": 0, "names": NAMES[:2]}
    rank = Control(store, rank=1, **world, heartbeat_timeout_s=SILENCE_S)
    rank.start()
    text = str(failure_of(rank))
    said = r"the control store is gone \(it has not answered for \d+ s\)\. Was the launcher, "
    assert re.search(said + "which serves it, stopped", text)
    store.goes_on.set()
    rank.close()


GLOO = (
    "[third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1. "
    "This is typically caused by"
)


@pytest.mark.parametrize(
    "error", [RuntimeError(GLOO), dist.DistNetworkError("Broken pipe")], ids=["gloo", "store"]
)
def test_what_breaks_under_a_collective_is_said_with_rank_station_step_cause_and_remedy(
    alone, error
):
    alone.fail(PeerDied("rank 1 is gone", [1]))
    explained = alone.explained(error, "in trainer, step 3, among ranks [0, 1]")
    assert isinstance(explained, PeerDied) and explained.ranks == {1}
    where = "rank 0 (everything) in trainer, step 3, among ranks [0, 1]"
    for part in (where, "rank 1 is gone", "resume=auto"):
        assert part in str(explained)
    assert "typically" not in str(explained) and "pair.cc" not in str(explained)


def test_a_broken_collective_beside_the_trainer_does_not_say_that_no_checkpoint_was_made(alone):
    alone.keep([0], LAST_WORDS_S)
    alone.lose(PeerDied("rank 1 is gone", [1]))
    doing = "in reward, step 3, among ranks [0, 1]"
    without = "No checkpoint was made of the steps since the last one"
    assert without in str(alone.explained(RuntimeError(GLOO), doing))
    assert without not in str(alone.explained(RuntimeError(GLOO), doing, is_loss=True))


@pytest.mark.parametrize(
    "said, cause",
    [
        (
            "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection "
            "closed by peer [10.0.0.7]:21933. This is typically caused by a crash",
            "Connection closed by peer [10.0.0.7]:21933",
        ),
        (
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process "
            "exited\nframe #0: x (0x1 in lib.so)",
            "NCCL error remote process exited",
        ),
        ("", "RuntimeError"),
    ],
)
def test_a_cause_is_told_without_the_line_of_source_that_noticed_it(said, cause):
    assert cause_of(RuntimeError(said)) == cause


def test_a_rank_that_is_left_alone_in_a_collective_names_the_one_that_is_gone(ranks, monkeypatch):
    """Rank 1 follows in an executor that rank 2 led; rank 0, the trainer, alone has a link that
    broke.
    """
    monkeypatch.setattr(control_module, "NAMED_S", WAIT_S)
    everyone = ranks(3)
    for control in everyone:
        control.keep([0], LAST_WORDS_S)

    def step(executor, clock):
        everyone[0].fail(PeerDied("the link with rank 2 broke", [2]))
        everyone[0].report_loss()
        raise RuntimeError(GLOO)

    in_it = "in reference, step 0, among ranks [1, 2]"
    controller = SimpleNamespace(control=everyone[1], _step=step, _doing=in_it)
    executor = SimpleNamespace(leads=False, has_state=lambda: False)
    assert not ExecutorController._step_or_lose(controller, executor, clock=None)
    assert "the link with rank 2 broke" in str(eventually(lambda: everyone[1].loss))
    assert "the link with rank 2 broke" in str(everyone[0].loss)


@pytest.mark.parametrize("lost", [False, True])
def test_a_peer_that_was_told_of_the_end_first_and_is_gone_is_no_loss(alone, lost):
    alone.keep([0], LAST_WORDS_S)
    alone.lose(PeerDied("the link with rank 1 broke", [1]))
    alone.post(0, "end", {"of_checkpoint": "A checkpoint was sealed.", "lost": lost})
    end = object.__new__(RunEnd)
    end._control = alone
    if lost:
        with pytest.raises(PeerDied, match="the link with rank 1 broke") as raised:
            end.is_told()
        assert raised.value.__notes__ == ["A checkpoint was sealed."]
    else:
        assert end.is_told()


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError(GLOO), KeyboardInterrupt()], ids=repr
)
def test_other_errors_stay_as_they_are(alone, error):
    assert alone.explained(error, "in trainer") is error


# --- losses ---


LAST_WORDS_S = 60.0


def test_a_death_that_spares_the_keepers_is_a_loss_to_all_who_wait_for_the_last_checkpoint(ranks):
    everyone = ranks(3)
    for control in everyone:
        control.keep([0, 2], LAST_WORDS_S)
    everyone[0].fail(PeerDied("rank 1 is gone", [1]))
    everyone[0].report_loss()
    for control in everyone:  # a launcher kills all soon after the first that ends
        assert "rank 1 is gone" in str(eventually(lambda: control.loss))
        control.check()
        assert control.ending


@pytest.mark.parametrize(
    "error", [PeerDied("rank 2", [1, 2]), PeerDied("somebody"), RuntimeError("a thread")], ids=repr
)
def test_what_may_concern_a_keeper_ends_the_rank_at_once(ranks, error):
    leader = ranks(3)[0]
    leader.keep([0, 2], LAST_WORDS_S)
    leader.fail(error)
    assert failure_of(leader) is error and leader.loss is None
    notes = "\n".join(getattr(error, "__notes__", ()))
    held = "rank 2 (reference) held a part of it" in notes
    assert held == (2 in getattr(error, "ranks", ()))


def test_last_words_have_an_end(ranks):
    leader = ranks(2)[0]
    leader.keep([0], 0.0)
    leader.fail(PeerDied("rank 1 is gone", [1]))
    error = failure_of(leader)
    assert "No checkpoint could be sealed within the 0 s of stop_s" in error.__notes__[0]


def test_the_ranks_that_a_failing_one_names_count_too(ranks):
    everyone = ranks(3)
    everyone[0].keep([0, 2], LAST_WORDS_S)
    everyone[1].report_failure(PeerDied("rank 2 is gone", [2]))  # and so 1 ends: 2 was a keeper
    assert failure_of(everyone[0]).ranks == {1, 2}


def test_who_waits_for_the_last_checkpoint_of_others_waits_longer_than_they_may_take(
    ranks, monkeypatch
):
    monkeypatch.setattr(control_module, "GRACE_S", LAST_WORDS_S)
    leader, other = ranks(2)
    for control in (leader, other):
        control.keep([0], 0.0)
        control.lose(TimedOut("the generator waited too long"))
    assert failure_of(leader) is leader.loss
    other.check()


# --- writing a checkpoint ---


class Disk:
    """What a writer has written so far, which a test lets grow."""

    def __init__(self):
        self.written = 0
        self.looks = 0

    def measure(self):
        self.looks += 1
        return self.written


def test_progress_of_one_rank_is_known_to_all_and_a_standstill_is_none(ranks):
    everyone = ranks(3)
    leader, writing, _ = everyone
    disk = Disk()

    def all_know(since: list[float]) -> None:
        for control, last in zip(everyone, since):
            eventually(lambda: control.progressed_at > last)
        # The leader tells all ranks of it, the one that writes too.
        eventually(lambda: writing.progressed_at > leader.progressed_at)

    with writing.saving(disk.measure):
        all_know([0.0] * 3)
        for _ in range(2):
            before = [control.progressed_at for control in everyone]
            disk.written += 1
            all_know(before)
        settled = writing.progressed_at
        seen = disk.looks
        eventually(lambda: disk.looks > seen + 3)
        assert writing.progressed_at == settled
    seen = disk.looks
    writing.wait(10 * BEAT_S)  # no event: that nothing happens is the claim
    assert disk.looks <= seen + 1


@pytest.mark.slow
def test_last_words_that_get_on_have_no_end_and_a_standstill_ends_them(ranks, monkeypatch):
    monkeypatch.setattr(control_module, "GRACE_S", LAST_WORDS_S)
    leader, _ = ranks(2)
    last_words_s = 1.0
    leader.keep([0], last_words_s)
    disk = Disk()
    with leader.saving(disk.measure):
        leader.fail(PeerDied("rank 1 is gone", [1]))
        until = time.monotonic() + 2 * last_words_s
        while time.monotonic() < until:
            disk.written += 1
            time.sleep(BEAT_S)
        leader.check()
        assert "or after its writing last got on" in failure_of(leader).__notes__[0]


def test_a_rank_is_not_ended_while_it_writes_but_once_its_writing_stands_still(
    ranks, monkeypatch, exits, capsys
):
    grace_s = 0.5
    monkeypatch.setattr(control_module, "GRACE_S", grace_s)
    leader, _ = ranks(2)
    disk = Disk()
    with leader.saving(disk.measure):
        error = PeerDied("rank 1 is gone")
        error.add_note("No checkpoint was made of the steps since the last one.")
        leader.fail(error)
        until = time.monotonic() + 3 * grace_s
        while time.monotonic() < until:
            disk.written += 1
            time.sleep(BEAT_S)
        assert not exits
        eventually(lambda: exits)
    said = capsys.readouterr().err
    assert "rank 0 is stuck in the writing of a checkpoint" in said
    assert "rank 1 is gone\nNo checkpoint was made of the steps since the last one." in said
