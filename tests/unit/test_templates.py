"""A chat template that does not come to an end is told by name, and one that does is left alone."""

import shutil
import signal

import pytest

from llamarl.models import given as given_model
from llamarl.models.config import tiny_directory
from llamarl.models.given import read_tokenizer

# 10^12 turns of a loop, each within jinja's own limit on ranges.
ENDLESS = (
    "{% for a in range(10000) %}{% for b in range(10000) %}{% for c in range(10000) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.fixture
def directory(tmp_path):
    return shutil.copytree(tiny_directory(), tmp_path / "model")


@pytest.mark.parametrize(
    "when", ["", "{% if messages|length > 2 %}", "{% if add_generation_prompt %}"]
)
def test_a_template_that_loops_for_ever_is_told_by_its_file(directory, monkeypatch, when):
    monkeypatch.setattr(given_model, "LIMIT_S", 0.2)
    file = directory / "chat_template.jinja"
    file.write_text(when + ENDLESS + ("{% endif %}" if when else ""))
    with pytest.raises(ValueError) as error:
        read_tokenizer(directory, chat=True)
    assert str(error.value).startswith(f"{file}: chat_template did not show a conversation of ")
    assert "within 0.2 s of CPU time" in str(error.value)


def test_a_template_that_ends_or_refuses_is_read_and_no_clock_is_left(directory):
    before = signal.getsignal(signal.SIGVTALRM)
    for template in (
        "{{ raise_exception('no') }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "a",
    ):
        (directory / "chat_template.jinja").write_text(template)
        assert read_tokenizer(directory, chat=True).chat_template == template
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == before
