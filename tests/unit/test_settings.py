"""Settings of a YAML file or of Python become the words of a command line that say the same."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as some

from llamarl.config.command_line import RED_TEAM, compose_config, words_from
from llamarl.config.conversion import ConfigError, escaped, save_config, to_values
from llamarl.config.supervised import REWARD_MODEL
from llamarl.config.values import literal, read_settings
from llamarl.tasks.rewards import exact_match

# Of Hydra's grammar: names in an object are words.
NAMES = some.from_regex(r"[a-z_]{1,8}", fullmatch=True)
# OmegaConf reads "${" as a reference, which a file may hold; control characters end Hydra's words.
TEXTS = some.text(some.characters(min_codepoint=32)).filter(lambda text: "${" not in text)
NUMBERS = some.integers() | some.floats(allow_nan=False)
LEAVES = some.none() | some.booleans() | NUMBERS | TEXTS
VALUES = some.recursive(
    LEAVES, lambda one: some.lists(one) | some.dictionaries(NAMES, one), max_leaves=8
)


def read_back(word):
    return OverridesParser.create().parse_override(word).value()


def plain(value):
    """A value of Hydra's parser without its marks of quotes."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    return getattr(value, "text", value)


@given(VALUES)
def test_every_value_is_read_back_as_it_was(value):
    assert plain(read_back(f"key={literal(value, 'key')}")) == value


@pytest.mark.parametrize(
    "text", ["it's", "\\", "\\'", "a\\\\", "a, b", "null", "1", "", "[x]", "="]
)
def test_texts_that_a_grammar_would_take_for_something_else_stay_texts(text):
    assert plain(read_back(f"key={literal(text, 'key')}")) == text


# --- Which words ---


def test_nested_and_dotted_keys_are_the_same_words():
    dotted = words_from({"trainer.lora.rank": 8, "loss": "grpo", "task.kind": "questions"})
    nested = words_from({"trainer": {"lora": {"rank": 8}}, "loss": "grpo"})
    assert dotted[:2] == ["loss=grpo", "trainer.lora.rank=8"] == nested
    assert words_from({"task": {"kind": "questions", "most": 9}}) == [
        "task=questions",
        "task.most=9",
    ]


def test_sections_of_names_that_the_user_gives_stay_whole():
    parts = {"a": {"kind": "addition"}, "b": {"kind": "questions", "weight": 3}}
    words = words_from({"task": {"kind": "mixture", "parts": parts}})
    assert words[0] == "task=mixture" and len(words) == 2
    assert set(compose_config(words).task.parts) == {"a", "b"}


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["loss=grpo", "loss.clip_high=0.3", "trainer.lora.rank=4", "max_lag=3"],
        ["buffer=replay", "max_lag=null"],
        ["loss.fn=policy_gradient", "loss.ratio_cap=2.0", "eval.sets.mine.kind=questions"],
        ["task=mixture", "task.parts={a: {kind: addition}, b: {kind: questions, weight: 3}}"],
        ["reward=parts", "reward.parts={a: {kind: function, fn: exact_match}}"],
        [
            "task=jsonl",
            "task.path=README.md",
            "task.chat=true",
            "task.system_prompt='1 \\${x} it\\'s'",
        ],
    ],
    ids=" ".join,
)
def test_a_config_written_as_words_is_the_same_config(words):
    config = compose_config(words)
    values = {key: escaped(value) for key, value in to_values(config).items()}
    assert compose_config(words_from(values)) == config


def test_the_config_file_of_a_run_starts_another_like_it(tmp_path):
    config = compose_config(["loss=dr_grpo", "num_epochs=2", "task=questions", "run_dir=old"])
    save_config(config, tmp_path / "config.yaml")
    again = compose_config(words_from(read_settings(tmp_path / "config.yaml")))
    assert again.run_dir is None and again.num_epochs == 2
    assert again.loss == config.loss and again.task == config.task


def test_other_jobs_have_their_own_keys_and_choices(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    given = {"model.path": "README.md", "task": {"path": rows}, "loss": {"center_coef": 0.1}}
    words = words_from(given, REWARD_MODEL)
    assert words == ["model.path='README.md'", f"task.path='{rows}'", "loss.center_coef=0.1"]
    assert words_from({"victim": "none"}, RED_TEAM) == ["victim=none"]


# --- What cannot be given ---


def test_a_function_is_given_by_its_import_path_if_other_processes_can_import_it():
    def inner():
        pass

    (word,) = words_from({"reward.fn": exact_match})
    assert word == "reward.fn='llamarl.tasks.rewards:exact_match'"
    for fn in (inner, lambda: None):
        with pytest.raises(ConfigError, match="reward.fn='my_functions:NAME'"):
            words_from({"reward": {"fn": fn}})


def test_a_value_without_a_form_is_refused_by_its_key():
    with pytest.raises(ConfigError, match="trainer.lora.rank +set: need a number"):
        words_from({"trainer": {"lora": {"rank": {1, 2}}}})


@pytest.mark.parametrize(
    "text, said",
    [
        ("a: [1", "expected"),
        ("- a", "this is a list"),
        ("format: 9", "format 9, where"),
        ("a: 1\na: 2", ""),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, text, said):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--config {file}.*{said}"):
        read_settings(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_settings(Path("no-such.yaml"))
