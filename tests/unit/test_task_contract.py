"""What every task promises (llamarl/tasks/base.py: Task), asked of each that there is."""

import importlib
import json
from dataclasses import dataclass

import pytest
import torch

from llamarl.tasks.base import Example, PromptMaker
from llamarl.tasks.environment import GIVEN
from tests.built_tasks import build_task

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


def make(kind, folder):
    settings = {"max_prompt_tokens": MAX_PROMPT_TOKENS, "num_eval": 5}
    if kind == "doubling":
        no_chat = {"chat": False, "system_prompt": None}
        return Doubling(
            PromptMaker(CharTokenizer(), max_prompt_tokens=MAX_PROMPT_TOKENS, **no_chat)
        )
    if kind == "python":
        settings |= {"fn": f"{__name__}:Doubling"}
    if kind == "questions":
        settings |= {"name": "sum"}
    if kind == "one_prompt":
        settings |= {"text": "say", "words": ["77", "Seven"]}
    if kind == "reasoning_gym":
        settings |= {"name": "chain_sum"}
    if kind == "environment":
        settings |= {"environment": "tests.games:Shop"}
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


KINDS = (
    "addition",
    "facts",
    "questions",
    "one_prompt",
    "jsonl",
    "gsm8k",
    "hf_dataset",
    "reasoning_gym",
    "python",
    "environment",
    "doubling",
)


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    return Made(make(request.param, folder), make(request.param, folder))


def some_prompts(task):
    """The first, the last and one between, of both splits."""
    train, held_out = task.num_train, task.num_eval
    found = [task.train_prompt(i) for i in (0, train // 2, train - 1)]
    return found + [task.eval_prompt(j) for j in (0, held_out // 2, held_out - 1)]


def test_it_says_who_it_is_and_how_much_it_has(made):
    assert isinstance(made.task.name, str) and made.task.name
    assert made.task.num_train >= 1 and made.task.num_eval >= 1


def test_a_prompt_is_ids_text_and_json(made):
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
