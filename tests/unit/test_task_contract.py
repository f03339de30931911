"""What every task promises (llamarl/tasks/base.py: Task), asked of each that there is."""

import importlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from llamarl.config.command_line import ConfigError, compose_config
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.tasks.base import Example, PromptMaker
from llamarl.tasks.environment import GIVEN
from tests.built_tasks import NAMES, build_task

MAX_PROMPT_TOKENS = 300
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
GSM8K_ROWS = [{"question": f"{n} + 1?", "answer": f"so\n#### {n + 1}"} for n in range(40)]


class CharTokenizer:
    """A token a character."""

    chat_template = None

    def encode(self, text):
        return list(map(ord, text))


class Doubling:
    """The example in Task's docstring."""

    name = "doubling"
    default_reward = "llamarl.tasks.rewards:exact_match"
    num_train = 1000
    num_eval = 100
    train_digest = eval_digest = ""

    def __init__(self, maker: PromptMaker):
        self._maker = maker

    def _prompt(self, n):
        return self._maker.prompt(Example(f"2*{n}=", {"answer": str(2 * n)}))

    def train_prompt(self, i):
        return self._prompt(self.num_eval + i)

    def eval_prompt(self, j):
        return self._prompt(j)


@dataclass(frozen=True)
class Made:
    """A task, and another one that was made in the same way."""

    task: object
    again: object


OWN_SETTINGS = {
    "python": {"fn": f"{__name__}:Doubling"},
    "questions": {"name": "sum"},
    "one_prompt": {"text": "say", "words": ["77", "Seven"]},
    "reasoning_gym": {"name": "chain_sum"},
    "environment": {"environment": "tests.games:Shop"},
}


def make(kind, folder):
    settings = {"max_prompt_tokens": MAX_PROMPT_TOKENS, "num_eval": 5, **OWN_SETTINGS.get(kind, {})}
    if kind in ("jsonl", "gsm8k", "environment"):
        rows = GSM8K_ROWS if kind == "gsm8k" else ROWS
        path = folder / f"{kind}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings |= {"path": path}
    if kind == "hf_dataset":
        datasets = pytest.importorskip("datasets")
        path = folder / "dataset"
        if not path.exists():
            datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
        settings |= {"path": path}
    return build_task(kind, CharTokenizer(), **settings)


@pytest.fixture(scope="module", params=NAMES)
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    return Made(make(request.param, folder), make(request.param, folder))


def some_prompts(task):
    """The first, the last and one between, of both splits."""
    train, held_out = task.num_train, task.num_eval
    found = [task.train_prompt(i) for i in (0, train // 2, train - 1)]
    return found + [task.eval_prompt(j) for j in (0, held_out // 2, held_out - 1)]


def test_a_prompt_is_ids_text_and_json(made):
    assert isinstance(made.task.name, str) and made.task.name
    for prompt in some_prompts(made.task):
        assert prompt.prompt_ids.dtype == torch.int64 and prompt.prompt_ids.dim() == 1
        assert 1 <= prompt.prompt_ids.numel() <= MAX_PROMPT_TOKENS
        assert isinstance(prompt.text, str) and prompt.text
        assert json.loads(json.dumps(prompt.meta)) == prompt.meta


def test_a_prompt_is_a_function_of_its_number_in_every_process(made):
    for once, twice in zip(some_prompts(made.task), some_prompts(made.again)):
        assert torch.equal(once.prompt_ids, twice.prompt_ids)
        assert (once.text, once.meta) == (twice.text, twice.meta)
    # Whatever was asked before: backwards, and again.
    last = made.task.num_train - 1
    numbers = [last, 0, last]
    texts = [made.task.train_prompt(i).text for i in numbers]
    assert texts == [made.again.train_prompt(i).text for i in numbers]


def test_no_held_out_prompt_is_a_training_prompt(made):
    held_out = {made.task.eval_prompt(j).text for j in range(made.task.num_eval)}
    if made.task.name == "one_prompt":  # which has no other
        assert held_out == {made.task.train_prompt(0).text}
        return
    num_asked = min(made.task.num_train, 8000)
    assert not held_out & {made.task.train_prompt(i).text for i in range(num_asked)}


def test_digests_tell_rows_apart_or_say_that_there_are_none(made):
    digests = (made.task.train_digest, made.task.eval_digest)
    assert digests == (made.again.train_digest, made.again.eval_digest)
    if made.task.name in ("chain_sum", "doubling"):  # made on demand
        assert digests == ("", "")
    else:
        assert all(len(digest) == 64 and int(digest, 16) for digest in digests)
        assert (digests[0] == digests[1]) == (made.task.name == "one_prompt")


def test_its_own_reward_takes_the_answer_for_right_and_another_text_for_wrong(made):
    if made.task.name == "environment":
        assert made.task.default_reward == GIVEN, "no function: the environment gives it"
        return
    module, _, function = made.task.default_reward.partition(":")
    reward = getattr(importlib.import_module(module), function)
    for prompt in some_prompts(made.task):
        right = prompt.meta.get("answer", "it is SEVEN")
        assert reward(prompt.text, str(right), prompt.meta) == 1.0
        assert reward(prompt.text, "no such answer", prompt.meta) <= 0.0


# --- Tasks of a user's own ---

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
        ("class Numbers", "raise MemoryError('big')\nclass Numbers", "it failed: MemoryError: big"),
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
