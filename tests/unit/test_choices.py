"""The words of llamarl.words.choices are the names in the tables that act on them."""

from typing import get_args

from llamarl.config.conversion import known_keys
from llamarl.learning.advantages import ADVANTAGES
from llamarl.learning.optim import SCHEDULES
from llamarl.models.quantize import QUANTIZED
from llamarl.observe.compare import TELLING
from llamarl.tickets.governors import GOVERNORS
from llamarl.words import choices


def test_words_that_name_functions_and_classes_have_one_each():
    assert set(get_args(choices.Schedule)) == set(SCHEDULES)
    assert set(get_args(choices.Governor)) == set(GOVERNORS)
    # gae needs a value head, turns the rewards of turns.
    assert set(get_args(choices.Advantages)) == {*ADVANTAGES, "gae", "turns"}
    assert set(get_args(choices.Quantized)) == {*QUANTIZED, "none"}


def test_keys_that_name_a_variant_are_keys():
    assert set(TELLING) <= set(known_keys())
