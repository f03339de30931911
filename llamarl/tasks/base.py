"""What a task is: numbered training and evaluation prompts, and the reward that goes with them.

    tokenizer --PromptMaker--> prompt ids
    examples  --ListTask-----> train_prompt(i), eval_prompt(j)

To add a task, read its data into Examples and hand them to ListTask (see addition.py), or write a
class of your own with Task's members (see procedural.py), and give it a name in build.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import unicodedata
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from llamarl.types import Prompt

log = logging.getLogger(__name__)

# Per task and split; a prompt is asked for group_size times, soon after one another.
CACHED_PROMPTS = 65_536
SAMPLED = 100  # prompts whose token ids a fingerprint looks at; some tasks make 75 a second
BOUNDARY_TOKENS = 8  # that text may add where it meets the template, by breaking merges there


class Task(Protocol):
    """Prompts by number. Each is a pure function of its number: the same in every process.

    Questions that are made on demand are a task of a few lines:

        class Doubling:
            name = "doubling"
            default_reward = "llamarl.tasks.rewards:exact_match"
            num_train = 1000
            num_eval = 100
            train_digest = eval_digest = ""

            def __init__(self, maker: PromptMaker):
                self._maker = maker

            def _prompt(self, n: int) -> Prompt:
                return self._maker.prompt(Example(f"2*{n}=", {"answer": str(2 * n)}))

            def train_prompt(self, i: int) -> Prompt:
                return self._prompt(self.num_eval + i)

            def eval_prompt(self, j: int) -> Prompt:
                return self._prompt(j)

    tests/unit/test_task_contract.py holds every task to what is said here.
    """

    name: str
    default_reward: str  # "module:function", used where the config names none
    num_train: int
    num_eval: int
    # SHA-256 over all training rows; "" where rows are made on demand, as a function of the config.
    train_digest: str
    eval_digest: str  # the same of the held-out ones

    def train_prompt(self, i: int) -> Prompt:
        """Training prompt i, 0 <= i < num_train. `meta["answer"]` holds the reference answer where
        the task has one.
        """

    def eval_prompt(self, j: int) -> Prompt:
        """Evaluation prompt j, 0 <= j < num_eval: none of them is a training prompt."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that tasks need."""

    chat_template: str | None

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, messages: list[dict[str, str]], **options) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Example:
    """One question before tokenisation."""

    text: str  # as the reward function sees it
    meta: dict[str, object]  # JSON values that the reward needs


class PromptMaker:
    """Makes the prompt ids of a text: a user turn of the tokenizer's chat template if `chat` is
    true and it has one, else the text encoded as it is.

    max_prompt_tokens: what `fits` compares with. instruction: appended to what the model reads, and
    to nothing else. ValueError if a system prompt is given that no template could carry.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat: bool,
        system_prompt: str | None,
        max_prompt_tokens: int,
        instruction: str = "",
    ):
        if max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens={max_prompt_tokens}: need at least 1")
        self._chat = bool(chat and getattr(tokenizer, "chat_template", None))
        if system_prompt and not self._chat:
            why = "the tokenizer has no chat template" if chat else "task.chat is false"
            raise ValueError(
                f"task.system_prompt is set, but {why}; unset it, or put the text into the prompts"
            )
        self._tokenizer = tokenizer
        self._instruction = instruction
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self.max_prompt_tokens = max_prompt_tokens
        self._overhead = len(self.ids("")) + BOUNDARY_TOKENS

    def turns(self, text: str) -> str | list[dict[str, str]]:
        """What the model reads of a question: messages for the chat template, or a text."""
        text += self._instruction
        if not self._chat:
            return text
        return [*self._system, {"role": "user", "content": text}]

    def ids(self, text: str) -> list[int]:
        """The prompt ids [P] of a question."""
        turns = self.turns(text)
        if isinstance(turns, str):
            return list(self._tokenizer.encode(turns))
        ids = self._tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(ids)

    def fits(self, text: str) -> bool:
        """Whether the prompt is at most max_prompt_tokens long. Tokenises only what its size in
        bytes leaves in doubt.
        """
        # A token stands for a byte at least, of the text or of what normalization makes of it.
        forms = [text]
        if not text.isascii():
            forms.append(unicodedata.normalize("NFKD", text))
        most_tokens = max(len(form.encode("utf-8", "replace")) for form in forms)
        if self._overhead + most_tokens <= self.max_prompt_tokens:
            return True
        return len(self.ids(text)) <= self.max_prompt_tokens

    def prompt(self, example: Example) -> Prompt:
        """The prompt of an example, tokenised."""
        ids = torch.tensor(self.ids(example.text), dtype=torch.int64)
        return Prompt(ids, example.text, example.meta)


class ListTask:
    """A Task over two sequences of examples. Tokenises on demand; prompts over the limit are
    dropped with one warning.

    ValueError if no training prompt is left.
    """

    def __init__(
        self,
        name: str,
        train: Sequence[Example],
        held_out: Sequence[Example],
        maker: PromptMaker,
        *,
        default_reward: str,
    ):
        self.name = name
        self.default_reward = default_reward
        limit = maker.max_prompt_tokens
        fitting = _Fitting(maker, train)
        fitting_eval = _Fitting(maker, held_out)
        self.num_train = len(fitting.places)
        self.num_eval = len(fitting_eval.places)
        self.train_digest = fitting.digest
        self.eval_digest = fitting_eval.digest
        self.train_prompt = fitting.prompt
        self.eval_prompt = fitting_eval.prompt
        num_dropped = len(train) - self.num_train
        num_dropped_eval = len(held_out) - self.num_eval
        if num_dropped or num_dropped_eval:
            log.warning(
                "task %s: dropped %d of %d training and %d of %d evaluation prompts, "
                "longer than max_prompt_tokens=%d",
                name,
                num_dropped,
                len(train),
                num_dropped_eval,
                len(held_out),
                limit,
            )
        if not self.num_train:
            raise ValueError(
                f"task {name}: none of {len(train)} training prompts fits "
                f"task.max_prompt_tokens={limit}; raise it"
            )


class _Fitting:
    """The examples whose prompts are short enough; `prompt(i)` is the i-th of them, tokenised."""

    def __init__(self, maker: PromptMaker, examples: Sequence[Example]):
        self.places = array("q")  # among the examples
        digest = hashlib.sha256()
        for i, example in enumerate(examples):
            if maker.fits(example.text):
                self.places.append(i)
                digest.update(json_of(example.text, example.meta))
        self.digest = digest.hexdigest()  # SHA-256 over them
        cached = lru_cache(CACHED_PROMPTS)
        self.prompt = cached(lambda i: maker.prompt(examples[self.places[i]]))


def json_of(text: str, meta: dict[str, object]) -> bytes:
    """A question as bytes that are the same in every process, for a digest."""
    return json.dumps([text, meta], sort_keys=True, default=str).encode()


def sample_digest(prompt_of: Callable[[int], Prompt], count: int) -> str:
    """A SHA-256 over at most SAMPLED of `count` prompts, evenly apart: their token ids, texts and
    meta.
    """
    digest = hashlib.sha256()
    step = max(1, -(-count // SAMPLED))
    for i in range(0, count, step):
        prompt = prompt_of(i)
        digest.update(json.dumps(prompt.prompt_ids.tolist()).encode())
        digest.update(json_of(prompt.text, prompt.meta))
    return digest.hexdigest()
