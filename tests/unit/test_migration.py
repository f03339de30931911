"""docs/migration.md, which `python -m tests.migration_table` makes: what its rows name is here."""

import pytest
import yaml

from llamarl.config.conversion import known_keys
from llamarl.config.files import CONF_DIR
from llamarl.config.schema import Config
from llamarl.tasks import rewards
from llamarl.words.fields import all_keys, fits
from tests.documents import SPAN
from tests.house import ROOT
from tests.migration_table import TRL, VERL, page

GROUPS = {folder.name for folder in CONF_DIR.iterdir() if folder.is_dir()}
OF_USERS = ("my_module:", "${", "PATH")  # values that only a run can check


def complaint(span: str) -> str:
    """Why a code span of a row cannot be written on a command line; "" if it can."""
    key, is_set, value = span.partition("=")
    if is_set and key in GROUPS and "." not in key:
        return "" if (CONF_DIR / key / f"{value}.yaml").is_file() else "no such choice"
    if key.startswith("model.template_options."):
        return ""  # a variable of the chat template
    if key not in known_keys():
        return "no such key"
    if not is_set or key == "resume" or value.startswith(OF_USERS):
        return ""
    module, colon, function = value.partition(":")
    if colon:
        is_there = module == "rewards" and hasattr(rewards, function)
        return "" if is_there else "no such function"
    return "" if fits(yaml.safe_load(value), all_keys(Config)[key].hint) else "no such value"


def test_the_page_is_what_the_table_says():
    assert (ROOT / "docs/migration.md").read_text() == page()


@pytest.mark.parametrize("one", [*TRL, *VERL], ids=lambda one: one.theirs)
def test_a_row_names_what_is_here_or_says_none(one):
    spans = SPAN.findall(one.ours)
    assert spans or one.ours == "none" and one.note, "a setting that is not here has the nearest"
    wrong = {}
    for span in [*spans, *SPAN.findall(one.note)]:
        if complaint(span):
            wrong[span] = complaint(span)
    assert not wrong


@pytest.mark.parametrize(
    "span, said",
    [
        ("loss=gspoo", "no such choice"),
        ("loss.clip", "no such key"),
        ("trainer.whiten=reward", "no such value"),
        ("reward.fn=rewards:soft", "no such function"),
        ("trainer.whiten=rewards", ""),
    ],
)
def test_a_wrong_span_is_seen(span, said):
    assert complaint(span) == said
