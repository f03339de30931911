"""The reference of all keys, docs/keys.md, which `python -m llamarl.config` makes."""

from llamarl.config.__main__ import page
from llamarl.config.command_line import RL
from llamarl.config.evaluation import EVALUATION
from llamarl.config.keys import sentence_of
from llamarl.config.preferences import PREFERENCES
from llamarl.config.sft import SFT
from llamarl.config.supervised import REWARD_MODEL
from llamarl.words.fields import all_keys, schemas_of
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
