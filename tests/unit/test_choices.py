"""The words of llamarl.words.choices are the names in the tables that act on them."""

from typing import get_args, get_type_hints

from llamarl.config.conversion import known_keys
from llamarl.config.schema import Config
from llamarl.learning.advantages import ADVANTAGES
from llamarl.learning.optim import SCHEDULES
from llamarl.models.quantize import QUANTIZED
from llamarl.observe.compare import TELLING
from llamarl.tasks.build import KINDS
from llamarl.tickets.governors import GOVERNORS
from llamarl.words import choices


def test_words_that_name_functions_and_classes_have_one_each():
    assert set(get_args(choices.Schedule)) == set(SCHEDULES)
    assert set(get_args(choices.Governor)) == set(GOVERNORS)
    # gae needs a value head, turns the rewards of turns.
    assert set(get_args(choices.Advantages)) == {*ADVANTAGES, "gae", "turns"}
    assert set(get_args(choices.Quantized)) == {*QUANTIZED, "none"}


def test_every_kind_of_task_is_in_the_schema():
    schemas = get_args(get_type_hints(Config)["task"])
    kinds = []
    for schema in schemas:
        kinds += get_args(get_type_hints(schema)["kind"])
    assert sorted(kinds) == sorted(KINDS)


def test_keys_that_name_a_variant_are_keys():
    assert set(TELLING) <= set(known_keys())
