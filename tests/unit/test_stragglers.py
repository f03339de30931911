"""Which tickets take too long: by given times."""

from llamarl.tickets.stragglers import TicketTimes


def finished_in(seconds: list[float], factor: float) -> TicketTimes:
    """Tickets 100, 101, ... of rank 1 have taken these times; now is 0."""
    times = TicketTimes(factor)
    for ticket, s in enumerate(seconds, 100):
        times.granted([ticket], 1, -s)
        times.finished([ticket], 0.0)
    return times


def test_a_ticket_is_a_straggler_once_when_it_has_taken_factor_times_the_median():
    times = finished_in([1, 1, 2, 2, 2, 3, 3, 90], factor=5)  # median 2
    times.granted([0, 1], 1, 0.0)
    times.granted([2], 3, 4.0)
    assert times.new_stragglers(10.0) == {}
    assert times.new_stragglers(10.5) == {1: [(0, 10.5), (1, 10.5)]}
    assert times.new_stragglers(14.0) == {}
    assert times.new_stragglers(14.5) == {3: [(2, 10.5)]}


def test_what_has_finished_is_no_straggler_and_a_few_times_say_nothing():
    times = finished_in([1] * 7, factor=5)
    times.granted([0, 1], 1, 0.0)
    assert times.new_stragglers(1000.0) == {}
    times.finished([0], 1.0)
    assert times.new_stragglers(1000.0) == {1: [(1, 1000.0)]}
    times.finished([77], 1.0)  # of an earlier process
    assert 0 not in times.work


def test_what_a_resumed_run_goes_on_with_can_be_a_straggler_but_its_time_says_nothing_of_others():
    times = finished_in([2] * 8, factor=5)
    times.granted([0, *range(20, 60)], 1, 0.0, is_resumed=True)
    times.finished(range(20, 60), 0.1)
    assert times.median_s == 2
    assert times.new_stragglers(10.5) == {1: [(0, 10.5)]}
