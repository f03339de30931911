"""A chat template that does not come to an end is told by name, and one that does is left alone."""

import shutil
import signal

import pytest
from transformers import AutoTokenizer

from llamarl.config.command_line import ConfigError, compose_config
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


# As Qwen3's: thoughts are asked for unless enable_thinking is false, also from inside a macro.
THINKING = """
{%- macro ending() %}{% if enable_thinking is defined and enable_thinking is false %}<no>{% endif %}
{%- endmacro %}
{%- for message in messages %}{{ message.content }}{{ ending() }}{% endfor %}{{ style }}"""


@pytest.mark.parametrize(
    "options",
    [
        {"enable_thinking": False},
        {"enable_thinking": True},
        {"style": "it's %} \\ {{ messages }} \u00e9\n", "enable_thinking": None},
        {"style": {"a": [1, 2.5, None, "b"]}},
    ],
)
def test_options_of_a_template_are_those_that_transformers_is_given(directory, options):
    (directory / "chat_template.jinja").write_text(THINKING)
    turns = [{"role": "user", "content": "1+1?"}]
    plain = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    want = plain.apply_chat_template(turns, tokenize=False, **options)
    own = read_tokenizer(directory, chat=True, options=options)
    assert own.apply_chat_template(turns, tokenize=False) == want
    assert ("<no>" in want) == (options.get("enable_thinking") is False)


@pytest.mark.parametrize(
    "options, said",
    [
        (
            {"enable_thinkin": False},
            "enable_thinkin: it reads no variable of that name; did you me",
        ),
        ({"thinking": False}, "thinking: it reads no"),  # a comment, and a part of the text
        ({"message": 1}, "message: it reads no"),  # its own
        ({"style": 1}, "style: it reads no"),
        ({"tools": None}, "tools: it reads no"),  # an environment gives them
        ({"enable_thinking": "No"}, "enable_thinking=No: a text, which is true; write true or"),
        ({"enable_thinking": float("inf")}, "need a finite number"),
    ],
)
def test_an_option_that_the_template_does_not_read_or_misreads_is_refused(directory, options, said):
    file = directory / "chat_template.jinja"
    more = (
        "{# thinking #}<thinking>{% set style = 1 %}{{ tools }}{% generation %}{% endgeneration %}"
    )
    file.write_text(more + THINKING)
    with pytest.raises(ValueError, match=said):
        read_tokenizer(directory, chat=False, options=options)


def test_options_need_one_template(directory):
    with pytest.raises(ValueError, match="need one chat template, and there is none"):
        read_tokenizer(directory, chat=False, options={"enable_thinking": False})
    (directory / "chat_template.jinja").write_text("a")
    more = directory / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("b")
    with pytest.raises(ValueError, match="there are several: default, tool_use"):
        read_tokenizer(directory, chat=False, options={"enable_thinking": False})
    (directory / "chat_template.jinja").write_text("{% if %}")
    shutil.rmtree(more)
    with pytest.raises(ValueError, match="chat_template.jinja: "):
        read_tokenizer(directory, chat=False, options={"enable_thinking": False})


@pytest.mark.parametrize(
    "word",
    [
        "model.template_options.enable_thinking=false",
        "model.template_options={enable_thinking: false}",
    ],
)
def test_the_command_line_sets_options(word):
    assert compose_config([word]).model.template_options == {"enable_thinking": False}


def test_options_of_another_section_are_no_keys():
    with pytest.raises(ConfigError, match="template_option.a   unknown key; did you mean"):
        compose_config(["model.template_option.a=1"])
