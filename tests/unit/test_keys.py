"""The reference of all keys, docs/keys.md, which `python -m llamarl.config` makes; and words that
keys may have.
"""

from typing import get_args

from llamarl.config.__main__ import page
from llamarl.config.command_line import RL
from llamarl.config.conversion import known_keys
from llamarl.config.evaluation import EVALUATION
from llamarl.config.keys import sentence_of
from llamarl.config.preferences import PREFERENCES
from llamarl.config.supervised import REWARD_MODEL, SFT
from llamarl.learning.optim import SCHEDULES
from llamarl.learning.targets import ADVANTAGES
from llamarl.models.quantize import QUANTIZED
from llamarl.observe.compare import TELLING
from llamarl.tickets.governors import GOVERNORS
from llamarl.words import choices
from llamarl.words.fields import all_keys, schemas_of
from llamarl.words.texts import first_of
from tests.launching import ROOT


def test_every_key_has_a_sentence_under_its_field():
    silent = set()
    for kind in (RL, EVALUATION, SFT, REWARD_MODEL, PREFERENCES):
        for name, key in all_keys(kind.schema).items():
            is_value = not schemas_of(key.hint) and not name.endswith("kind")
            if is_value and not sentence_of(key.schema, name.rpartition(".")[2]):
                silent.add(name)
    assert not silent


def test_the_page_of_keys_is_what_the_fields_say():
    assert (ROOT / "docs/keys.md").read_text() == page()


def test_words_that_name_functions_and_classes_have_one_each():
    assert set(get_args(choices.Schedule)) == set(SCHEDULES)
    assert set(get_args(choices.Governor)) == set(GOVERNORS)
    # gae needs a value head, turns the rewards of turns.
    assert set(get_args(choices.Advantages)) == {*ADVANTAGES, "gae", "turns"}
    assert set(get_args(choices.Quantized)) == {*QUANTIZED, "none"}


def test_keys_that_name_a_variant_are_keys():
    assert set(TELLING) <= set(known_keys())


def test_a_long_list_ends_with_the_count_of_the_rest():
    assert first_of(["a", "b"], 2) == ["a", "b"]
    assert first_of(["a", "b", "c", "d"], 2) == ["a", "b", "and 2 more"]
