"""`task=python`: a task by import path, and what is said of one that is none."""

import re
import sys
from pathlib import Path

import pytest

from llamarl.config.command_line import ConfigError, compose_config
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from tests.built_tasks import build_task

DOCS = Path(__file__).resolve().parents[2] / "docs" / "data.md"


@pytest.fixture
def build(tmp_path, monkeypatch):
    """What builds the task of a function `make_task` in a module of this source."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_tasks", raising=False)
    monkeypatch.chdir(tmp_path)

    def build(source, fn="my_tasks:make_task", **given):
        (tmp_path / "my_tasks.py").write_text(source)
        sys.modules.pop("my_tasks", None)
        tokenizer = load_tokenizer(tiny_directory())
        return build_task("python", tokenizer, fn=fn, **given)

    yield build
    sys.modules.pop("my_tasks", None)


def the_example():
    """The module that docs/data.md shows."""
    (source,) = re.findall(r"```python\n(# my_tasks.py.*?)```", DOCS.read_text(), re.DOTALL)
    return source


def test_the_example_of_the_docs_is_a_task(build):
    task = build(the_example(), options={"most": 5})
    assert (task.name, task.num_train, task.num_eval) == ("doubling", 45, 5)
    prompt = task.train_prompt(0)
    assert (prompt.text, prompt.meta) == ("2*5=", {"answer": "10"})
    assert len(task.train_digest) == 64


GOOD = """
from llamarl.tasks.base import Example

class Numbers:
    name = "numbers"
    default_reward = "llamarl.tasks.rewards:exact_match"
    train_digest = eval_digest = ""
    num_train, num_eval = 3, 2
    def __init__(self, maker): self.maker = maker
    def train_prompt(self, i): return self.maker.prompt(Example(f"{i}", {"answer": "1"}))
    def eval_prompt(self, j): return self.maker.prompt(Example(f"{j}+", {"answer": "1"}))

def make_task(maker, seed, num_eval):
    task = Numbers(maker)
    task.given = (seed, num_eval)
    return task
"""


# Prompts that a user made by hand, in front of a method's name.
OTHER_IDS = """def train_prompt(self, i):
        import dataclasses
        made = self.made(i)
        return dataclasses.replace(made, prompt_ids=made.prompt_ids{})
    def made"""
OTHER_TEXT = """def train_prompt(self, i):
        import dataclasses
        return dataclasses.replace(self.made(i), text=None)
    def made"""


def test_a_function_is_given_the_seed_and_what_is_held_out_if_it_asks(build):
    assert build(GOOD, seed=7, num_eval=9).given == (7, 9)
    # What task.options says of the same name is nearer.
    assert build(GOOD, seed=7, num_eval=9, options={"seed": 3}).given == (3, 9)


@pytest.mark.parametrize(
    "was, now, what",
    [
        ("= 3, 2", "= 0, 2", "num_train must be a whole number of at least 1, is 0"),
        ('name = "numbers"', "name = None", "name must be a text, is None"),
        ("def eval_prompt", "def other_prompt", "eval_prompt must be a function of a number"),
        (
            '{"answer": "1"}))\n    def eval',
            '{"answer": {1}}))\n    def eval',
            "meta must be a dict",
        ),
        ("return task", "return 1 / 0", "it raised ZeroDivisionError: division by zero ("),
        (
            "def train_prompt(self, i): return ",
            "def train_prompt(self, i): return i < 2 and ",
            "train_prompt(2) is a bool, must be a Prompt; make it with maker.prompt(",
        ),
        (
            "def eval_prompt(self, j): return ",
            "def eval_prompt(self, j): return j < 1 and ",
            "eval_prompt(1) is a bool, must be a Prompt",
        ),
        ("def train_prompt", OTHER_IDS.format("[:0]"), "train_prompt(0): prompt_ids is empty"),
        ("def train_prompt", OTHER_IDS.format(".int()"), "must be a tensor of int64 with one"),
        ("def train_prompt", OTHER_IDS.format("[None]"), "must be a tensor of int64 with one"),
        ("def train_prompt", OTHER_IDS.format(".tolist()"), "must be a tensor of int64 with one"),
        ("def train_prompt", OTHER_TEXT, "train_prompt(0): text must be a text, is None"),
        ("(maker, seed, num_eval)", "(maker, level)", "argument: 'level'; it takes level"),
        ("class Numbers", "import no_such_module\nclass Numbers", "importing it failed: Module"),
    ],
)
def test_what_is_no_task_is_told_by_name(build, was, now, what):
    assert was in GOOD
    with pytest.raises(ValueError) as refused:
        build(GOOD.replace(was, now))
    assert str(refused.value).startswith("task.fn=my_tasks:make_task: ")
    assert what in str(refused.value)


def test_a_prompt_that_changes_is_told(build):
    changing = GOOD.replace('f"{i}"', 'f"{len(self.__dict__)}"').replace(
        "def train_prompt(self, i): ",
        "def train_prompt(self, i):\n        setattr(self, f'a{len(self.__dict__)}', 1)\n        ",
    )
    with pytest.raises(ValueError, match=r"train_prompt\(0\) gives another prompt"):
        build(changing)


def test_a_function_that_is_not_there_is_told_with_the_nearest(build):
    with pytest.raises(ValueError, match="no function make_tusk; did you mean make_task"):
        build(GOOD, fn="my_tasks:make_tusk")


def test_the_command_line_takes_it_and_asks_for_the_function():
    config = compose_config(["task=python", "task.fn=m:f", "task.options.most=9"])
    assert (config.task.fn, config.task.options) == ("m:f", {"most": 9})
    with pytest.raises(ConfigError, match="required: set task.fn"):
        compose_config(["task=python"])
