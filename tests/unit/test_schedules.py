"""beta by step, against TBA's own words (tables 2 and 3)."""

import pytest

from llamarl.learning.optim import value_at


def test_table_2_falls_along_a_line_to_step_500():
    def at(step):
        return value_at(step, 0.012, kind="linear", final=0.004, end_step=500)

    assert [at(0), at(250), at(500), at(999)] == pytest.approx(
        [0.012, 0.008, 0.004, 0.004], rel=1e-12
    )
    assert at(125) == pytest.approx(0.01, rel=1e-12)


def test_table_3_is_cut_at_an_eighth_of_a_line_to_half_of_the_steps():
    def at(step):
        return value_at(step, 1.0, kind="cut", final=0.05, end_step=128, cut_step=32)

    assert [at(0), at(16), at(31)] == pytest.approx(
        [1.0, 1 - 0.95 / 8, 1 - 0.95 * 31 / 128], rel=1e-12
    )
    assert at(32) == at(200) == 0.05


def test_a_cut_after_the_end_is_a_line():
    cut = [value_at(s, 1.0, kind="cut", final=0.0, end_step=4, cut_step=9) for s in range(12)]
    assert (
        cut
        == [value_at(s, 1.0, kind="linear", final=0.0, end_step=4) for s in range(12)]
        == [1.0, 0.75, 0.5, 0.25] + [0.0] * 8
    )
