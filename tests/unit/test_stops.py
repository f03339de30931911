"""Requests to stop before, in and after the loop of a run."""

import os
import signal

from llamarl.ending import heard_stops, remembered_stops


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
