"""How a run ends: a step that never ends is left after a loss, and signals stop a run in time."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch

from llamarl import ending
from llamarl.controller import ExecutorController
from llamarl.ending import BreakableSteps, RunEnd, heard_stops, remembered_stops

CPU = torch.device("cpu")
WAIT_S = 30.0


@pytest.fixture
def over():
    return threading.Event()


@pytest.fixture
def steps(over, monkeypatch):
    monkeypatch.setattr(ending, "LAST_S", 0.2)
    monkeypatch.setattr(ending, "LOOK_S", 0.01)
    return BreakableSteps("reward", device=CPU, is_over=over.is_set)


def test_steps_are_made_one_after_another_in_one_other_thread(steps):
    made = []

    def step():
        made.append(threading.current_thread())
        return len(made) < 3

    assert [steps.make(step) for _ in range(3)] == [True, True, False]
    assert len(set(made)) == 1 and made[0] is not threading.current_thread()
    assert not steps.left


def test_a_step_computes_with_as_many_threads_as_the_loop(steps):
    wanted = torch.get_num_threads()
    assert steps.make(lambda: torch.get_num_threads() == wanted)


@pytest.mark.parametrize("error", [ValueError("bad"), TimeoutError("of its own")], ids=repr)
def test_what_a_step_raises_is_raised_by_the_loop(steps, error):
    def step():
        raise error

    with pytest.raises(type(error), match=str(error)) as raised:
        steps.make(step)
    assert raised.value is error and not steps.left
    assert steps.make(lambda: True)


def test_a_step_that_hangs_is_left_once_the_run_ends_and_no_sooner(steps, over):
    """As one does in a collective with a rank that is stopped."""
    peer_answers = threading.Event()
    has_begun = threading.Event()

    def step():
        has_begun.set()
        return peer_answers.wait(WAIT_S)

    ends = threading.Timer(0.3, over.set)
    ends.start()
    assert steps.make(step) is False
    assert has_begun.is_set() and over.is_set() and steps.left
    peer_answers.set()


def test_a_step_that_ends_soon_after_a_loss_is_not_left(steps, over, monkeypatch):
    monkeypatch.setattr(ending, "LAST_S", WAIT_S)
    over.set()
    goes_on = threading.Event()
    threading.Timer(0.1, goes_on.set).start()
    assert steps.make(lambda: goes_on.wait(WAIT_S)) and not steps.left


# --- which steps, and what becomes of a station whose step was left ---


class Station:
    """An executor that says nothing of itself but what the controller asks."""

    leads = False
    finishes_on_stop = False
    state_is_optional = True

    def __init__(self, name, ranks):
        self.name = name
        self.group = SimpleNamespace(ranks=ranks)
        self.torn_down = False

    def has_state(self):
        return False

    def waiting_for(self):
        pytest.fail("asked in the middle of a step")

    def teardown(self):
        self.torn_down = True


def controller(rank, placement, control):
    made = object.__new__(ExecutorController)
    made.world = SimpleNamespace(rank=rank, device=CPU)
    made.placement = placement
    made.local = [Station(name, ranks) for name, ranks in placement.items() if rank in ranks]
    made.control = control
    made._keepers = frozenset({0, 1})
    return made


PLACEMENT = {"trainer": (0, 1), "reward": (1, 2), "reference": (0, 1), "generator": (2, 3)}


@pytest.mark.parametrize("rank, breakable_names", [(0, []), (1, ["reward"]), (2, []), (3, [])])
def test_a_keeper_can_leave_the_steps_that_it_shares_with_ranks_that_are_none(
    rank, breakable_names
):
    control = SimpleNamespace(loss=None, failure=None)
    found = controller(rank, PLACEMENT, control)._breakable_steps()
    assert list(found) == breakable_names


@pytest.mark.parametrize("follows", [True, False])
def test_after_a_loss_what_keepers_have_begun_among_themselves_is_ended(follows):
    """One that no longer followed would leave the first rank in a collective that nothing ends."""
    control = SimpleNamespace(loss=RuntimeError("rank 3 died"), stopping=True)
    end = object.__new__(RunEnd)
    end._control = control
    end._keepers = frozenset({0, 1})
    end._placement = PLACEMENT
    local = controller(1, PLACEMENT, control).local
    for executor in local:
        executor.finishes_on_stop = follows
    is_stepped = {executor.name: end.lets_step(executor) for executor in local}
    assert is_stepped == {"trainer": follows, "reward": False, "reference": follows}
    control.loss = None
    assert all(end.lets_step(executor) == follows for executor in local)


def test_a_station_whose_step_was_left_is_saved_asked_and_torn_down_no_more(steps, over, caplog):
    left_out = []
    made = controller(1, {"reward": (1, 2)}, SimpleNamespace(progressed_at=0.0))
    made._breakable = {"reward": steps}
    made.checkpoints = SimpleNamespace(leave_out=left_out.append, sealed_step=None)
    (reward,) = made.local
    hangs = threading.Event()
    reward.step = lambda: hangs.wait(WAIT_S)
    over.set()
    clock = SimpleNamespace(idle_since=0.0, reason=None, reason_since=0.0)
    assert made._step(reward, clock) is False
    assert left_out == [reward]
    assert "rank 1 leaves a step of reward, which does not end" in caplog.text
    made._endpoints = []
    made.metrics = SimpleNamespace(close=lambda sealed_step: None)
    made.settings = SimpleNamespace(trace=False)
    made.control = SimpleNamespace(let_go=lambda: None, close=lambda: None)
    made._close(ended_well=False)
    assert not reward.torn_down
    hangs.set()


# --- Requests to stop before, in and after the loop of a run ---


def sent() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_before_the_loop_is_heard_at_its_beginning_and_once():
    heard = []
    before = signal.getsignal(signal.SIGTERM)
    with remembered_stops():
        sent()
        with heard_stops(lambda: heard.append("stop")):
            assert heard == ["stop"]
            sent()
            assert heard == ["stop"] * 2
        assert signal.getsignal(signal.SIGTERM) is before, "what follows may be ended"
    assert signal.getsignal(signal.SIGTERM) is before


def test_after_an_error_of_the_loop_a_signal_does_not_end_the_process_before_it_is_printed(capfd):
    had = []
    interrupt = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGTERM, lambda number, frame: had.append(number))
    try:
        with remembered_stops():
            sent()  # as before the loop: it does not count after it
            with pytest.raises(ValueError), heard_stops(lambda: None):
                raise ValueError("a rank is gone")
            capfd.readouterr()
            assert signal.getsignal(signal.SIGINT) is interrupt, "whoever presses Ctrl-C is heard"
            sent()
            assert not had and capfd.readouterr().err == ""
            sent()
            assert had == [signal.SIGTERM], "who asks twice does not wait"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_same_signal_twice_goes_to_whoever_had_it_before(capfd):
    had = []
    before = signal.signal(signal.SIGINT, lambda number, frame: had.append(number))
    try:
        with remembered_stops():
            sent()
            os.kill(os.getpid(), signal.SIGINT)
            assert not had, "torchrun sends one of each"
            assert "stops before its first step" in capfd.readouterr().err
            os.kill(os.getpid(), signal.SIGINT)
            assert had == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_loop_without_a_memory_hears_its_own_signals_alone():
    heard = []
    before = signal.getsignal(signal.SIGINT)
    with remembered_stops():
        sent()
    with heard_stops(lambda: heard.append("stop")):
        assert heard == []
        sent()
    assert heard == ["stop"]
    assert signal.getsignal(signal.SIGINT) is before
