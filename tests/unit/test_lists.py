"""Long lists in messages say how much of them is left out."""

import pytest

from llamarl.words.texts import first_of


@pytest.mark.parametrize("items", [[], ["a"], ["a", "b"]])
def test_a_short_list_is_shown_whole(items):
    assert first_of(items, 2) == items


def test_a_long_list_ends_with_the_count_of_the_rest():
    assert first_of(["a", "b", "c", "d"], 2) == ["a", "b", "and 2 more"]
