"""Task: numbered training and evaluation prompts, and the reward that goes with them.

    tokenizer --PromptMaker--> prompt ids
    examples  --ListTask-----> train_prompt(i), eval_prompt(j)

A prompt is a text or a conversation, a list of {"role": ..., "content": ...}. Only the role and the
content of a message are read. `text_of` turns a conversation into the text that rewards see.
"""

from __future__ import annotations

import hashlib
import json
import logging
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from llamarl.tasks.special import (
    Shown,
    chat_ids,
    special_tokens,
    text_ids,
)
from llamarl.types import Message, Prompt
from llamarl.words.names import NoFunction
from llamarl.workers.guard import describe

ROLES = ("system", "user", "assistant", "tool")


def messages_of(value: object, key: str) -> tuple[Message, ...]:
    """Return the messages that a row has under a key. ValueError names the first that is none."""
    if not isinstance(value, list):
        raise ValueError(
            f'"{key}" must be a list of {{"role": ..., "content": ...}}, this is {shown(value)}'
        )
    if not value:
        raise ValueError(f'"{key}" is an empty list; give messages, or a text')
    messages = []
    for number, message in enumerate(value, start=1):
        is_message = isinstance(message, dict) and isinstance(message.get("role"), str)
        if is_message and isinstance(message.get("content"), list):
            raise ValueError(
                f'"{key}", message {number}: its content is a list of parts, this is '
                f"{shown(message)}; give its text alone: images and sounds are not read"
            )
        if not is_message or not isinstance(message.get("content"), str):
            raise ValueError(
                f'"{key}", message {number}: need {{"role": ..., "content": text}}, this is '
                f"{shown(message)}"
            )
        if message["role"] not in ROLES:
            raise ValueError(
                f'"{key}", message {number} has role {message["role"]!r}; there is '
                f"{', '.join(ROLES)}"
            )
        messages.append(Message(message["role"], message["content"]))
    if not any(message.content.strip() for message in messages):
        raise ValueError(f'"{key}" has no text in any message')
    return tuple(messages)


def conversation_of(value: object, key: str) -> tuple[Message, ...]:
    """Return the messages that a policy answers: the last is the user's, and system turns come
    first. ValueError says what is wrong.
    """
    messages = messages_of(value, key)
    for number, message in enumerate(messages, start=1):
        where = f'"{key}", message {number}'
        if message.role == "tool":
            raise ValueError(
                f"{where} is a tool's; prompts have system, user and assistant turns alone"
            )
        if message.role == "system" and number > 1:
            raise ValueError(f"{where} is a system turn; there is one at most, and it is the first")
    last = messages[-1]
    if last.role != "user":
        raise ValueError(
            f'"{key}" ends with a turn of the {last.role}; the last turn must be the user\'s, '
            "which the policy answers"
        )
    if not last.content:
        raise ValueError(f'"{key}", message {len(messages)}: the user\'s last turn is empty')
    return messages


def text_of(messages: Sequence[Message]) -> str:
    """Return a conversation as one text, for readers of texts: each turn as "role: content" with a
    blank line between. A single turn of a user is its content alone.

        text_of((Message("system", "Be brief."), Message("user", "1+1?")))
        "system: Be brief.\\n\\nuser: 1+1?"
    """
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


def with_system(messages: tuple[Message, ...], system_prompt: str | None) -> tuple[Message, ...]:
    """Put the messages behind a system prompt, unless they begin with a system turn of their
    own.
    """
    if not system_prompt or messages[0].role == "system":
        return messages
    return (Message("system", system_prompt), *messages)


def shown(value: object) -> str:
    """Return the beginning of a value, for a message."""
    return json.dumps(value, default=str)[:60]


log = logging.getLogger(__name__)

# Per task and split; a prompt is asked for group_size times, soon after one another.
CACHED_PROMPTS = 65_536
SAMPLED = 100  # prompts whose token ids a fingerprint looks at; some tasks make 75 a second
_PROBE = "0<\"&'>\\\n\u00e9 0"  # a text with what a template may escape
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
    eval_digest: str  # likewise over the held-out rows

    def train_prompt(self, i: int) -> Prompt:
        """Return training prompt i, 0 <= i < num_train. `meta["answer"]` holds the row's own answer
        where the task has one.
        """

    def eval_prompt(self, j: int) -> Prompt:
        """Return evaluation prompt j, 0 <= j < num_eval; none of them is a training prompt."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that tasks need."""

    chat_template: str | None

    def __hash__(self) -> int:
        """Hash the tokenizer, by which what is known of it is kept."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""

    def apply_chat_template(self, messages: list[Any], **options: Any) -> Any:
        """Return the token ids of a conversation; with tokenize=False its text, or the texts of
        several.
        """


@dataclass(frozen=True, slots=True)
class Example:
    """One question before tokenisation."""

    prompt: str | tuple[Message, ...]  # a text, or a conversation whose last turn is the user's
    meta: dict[str, object]  # JSON values that the reward needs

    @property
    def text(self) -> str:
        """The prompt as the reward function sees it."""
        return self.prompt if isinstance(self.prompt, str) else text_of(self.prompt)

    @property
    def values(self) -> tuple[object, dict[str, object]]:
        """The prompt and its meta as JSON values, from which a digest is made."""
        if isinstance(self.prompt, str):
            return self.prompt, self.meta
        return [message.to_dict() for message in self.prompt], self.meta


class StoredExamples(Protocol):
    """Rows of files as examples, read when they are asked for."""

    digest: str  # SHA-256 of the files
    keys: tuple[str, str | None]  # of the prompt and the answer

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Example: ...

    def __iter__(self) -> Iterator[Example]: ...

    def where(self, i: int) -> str:
        """Return where row i is, for messages."""

    def select(self, rows: Sequence[int]) -> StoredExamples:
        """Return the rows at these places, in this order."""

    def check(self) -> None:
        """Read all rows. ValueError names the bad ones."""


Examples = list[Example] | StoredExamples


class PromptMaker:
    """Makes the prompt ids of a text: a user turn of the tokenizer's chat template if `chat` is
    true and it has one, else the text encoded as it is. A conversation is always put into the
    template, with system_prompt in front unless it has a system turn of its own.

    max_prompt_tokens: what `fits` compares with. instruction: appended to what the model reads of a
    text, and to nothing else. keeps_turns: the prompts of texts have their turns with them too.
    ValueError if a system prompt is given that no template could carry.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat: bool,
        system_prompt: str | None,
        max_prompt_tokens: int,
        instruction: str = "",
        keeps_turns: bool = False,
    ):
        if max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens={max_prompt_tokens}: need at least 1")
        self._chat = bool(chat and getattr(tokenizer, "chat_template", None))
        if system_prompt and not self._chat:
            why = "the tokenizer has no chat template" if chat else "task.chat is false"
            raise ValueError(
                f"task.system_prompt is set, but {why}; unset it, or put the text into the prompts"
            )
        self.tokenizer = tokenizer
        self._asks_chat = chat
        self.instruction = instruction
        self._keeps_turns = keeps_turns
        self._system_prompt = system_prompt
        self.max_prompt_tokens = max_prompt_tokens
        self._overhead = len(self.ids("")) + BOUNDARY_TOKENS
        self._shows_once = not self._chat or self._writes_once()

    @property
    def shows_turns(self) -> bool:
        """Whether a text is put into a chat template."""
        return self._chat

    @property
    def identity(self) -> dict[str, object]:
        """What a prompt depends on besides its question and the tokenizer, as JSON values."""
        return {
            "chat": self._asks_chat,
            "system_prompt": self._system_prompt,
            "instruction": self.instruction,
            "max_prompt_tokens": self.max_prompt_tokens,
        }

    def turns(self, question: str | tuple[Message, ...]) -> str | list[dict[str, str]]:
        """Return what the model reads of a question: messages for the chat template, or a text.
        ValueError for a conversation that can be put into no template.
        """
        if isinstance(question, str):
            question += self.instruction
            if not self._chat:
                return question
            question = (Message("user", question),)
        elif not self._asks_chat:
            raise ValueError("the prompt is a conversation, but task.chat is false; set it to true")
        else:
            check_chat_template(self.tokenizer)
        return [turn.to_dict() for turn in with_system(question, self._system_prompt)]

    def ids(self, question: str | tuple[Message, ...]) -> list[int]:
        """Return the prompt ids [P] of a question."""
        turns = self.turns(question)
        if isinstance(turns, str):
            return text_ids(self.tokenizer, turns, add_special_tokens=True)
        return chat_ids(self.tokenizer, turns, reply=True)

    def filled_ids(self, template: str, field: str, text: str) -> list[int]:
        """Return the prompt ids [P] of somebody's text that stands for `field` in a template. Only
        the template may write special tokens. ValueError as from `chat_ids`.
        """
        special = special_tokens(self.tokenizer)
        turns = self.turns(template)
        contents = [turns] if isinstance(turns, str) else [turn["content"] for turn in turns]
        own = contents[-1].split(field)  # a system prompt may be in front
        spans = []
        filled = own[0]
        for part in own[1:]:
            begin = len(filled)
            filled += text
            spans.append((begin, len(filled)))
            filled += part
        foreign = []
        for begin, end in spans:
            foreign += special.foreign_in(filled, begin, end)
        if isinstance(turns, str):
            return special.ids(Shown(filled, tuple(foreign)), add_special_tokens=True)
        *before, last = turns
        asked = [*before, {**last, "content": filled}]
        of_each = [special.foreign_in(turn["content"]) for turn in before]
        return chat_ids(self.tokenizer, asked, reply=True, foreign=[*of_each, foreign])

    def spells_special(self, question: str | tuple[Message, ...]) -> bool:
        """Whether a question spells a special token, which is read as plain text."""
        texts = [question] if isinstance(question, str) else [turn.content for turn in question]
        spelling = special_tokens(self.tokenizer).spelling
        return any(spelling(text) is not None for text in texts)

    def num_tokens(self, questions: Sequence[str | tuple[Message, ...]]) -> list[int]:
        """Return how long the prompts of questions are, in tokens. They are encoded together if the
        tokenizer can.
        """
        if not callable(self.tokenizer):
            return [len(self.ids(question)) for question in questions]
        special = special_tokens(self.tokenizer)
        texts = [self.turns(question) for question in questions]
        lengths = [0] * len(questions)
        usual = []
        for place, turns in enumerate(texts):
            # In a template a part of a spelling may be completed by what is around it.
            if isinstance(turns, str):
                is_suspect = special.spelling(turns) is not None
            else:
                is_suspect = any(special.foreign_in(turn["content"]) for turn in turns)
            if is_suspect:
                lengths[place] = len(self.ids(questions[place]))
            else:
                usual.append(place)
        if not usual:
            return lengths
        texts = [texts[place] for place in usual]
        if self._chat:
            texts = self.tokenizer.apply_chat_template(
                texts, add_generation_prompt=True, tokenize=False
            )
        # A template writes the special tokens that a text begins and ends with itself.
        encoded = self.tokenizer(
            texts, add_special_tokens=not self._chat, return_attention_mask=False, verbose=False
        )
        num_ends = 0 if self._chat else special.num_ends
        for place, ids in zip(usual, encoded["input_ids"]):
            lengths[place] = len(ids) - num_ends
        return lengths

    def _writes_once(self) -> bool:
        """Whether the chat template writes a text once and as it is. Others repeat or escape it, so
        that a prompt may be longer than its text.
        """

        def shown(text: str) -> str:
            turns = self.turns(text)
            assert not isinstance(turns, str), "there is a template"
            return self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )

        without = shown("")
        probed = shown(_PROBE)
        return probed.count(_PROBE) == 1 and probed.replace(_PROBE, "") == without

    def surely_fits(self, text: str) -> bool:
        """Whether the size in bytes of a text alone says that its prompt is short enough."""
        if not self._shows_once:
            return False
        # A token stands for a byte at least, of the text or of what normalization makes of it.
        forms = [text]
        if not text.isascii():
            forms.append(unicodedata.normalize("NFKD", text))
        most_tokens = max(len(form.encode("utf-8", "replace")) for form in forms)
        return self._overhead + most_tokens <= self.max_prompt_tokens

    def fits(self, text: str) -> bool:
        """Whether the prompt of a text is at most max_prompt_tokens long. Tokenises only what its
        size in bytes leaves in doubt.
        """
        return self.surely_fits(text) or len(self.ids(text)) <= self.max_prompt_tokens

    def prompt(self, example: Example) -> Prompt:
        """Return the prompt of an example, tokenised."""
        ids = torch.tensor(self.ids(example.prompt), dtype=torch.int64)
        return Prompt(ids, example.text, example.meta, self._messages(example.prompt))

    def _messages(self, question: str | tuple[Message, ...]) -> tuple[Message, ...]:
        """Return the turns that a prompt has with it, without the instruction; () if it is known as
        a text.
        """
        if isinstance(question, str):
            if not (self._chat and self._keeps_turns):
                return ()
            question = (Message("user", question),)
        return with_system(question, self._system_prompt)


def imported(key: str, find: Callable[[str], Callable], path: str) -> Callable:
    """Return what `find` imports from the user's path. ValueError begins with the configuration's
    key.
    """
    try:
        return find(path)
    except NoFunction as error:
        raise ValueError(f"{key}: {error}") from error
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ValueError(f"{key}: importing it failed: {describe(error)}") from error


def check_chat_template(tokenizer: Tokenizer) -> None:
    """Raise ValueError if a tokenizer cannot show a conversation."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the prompt is a list of messages, but the tokenizer has no chat template; give it as "
            "a text"
        )


@contextmanager
def refused_by_template() -> Iterator[None]:
    """Turn what a chat template raises about a conversation into a ValueError."""
    from jinja2.exceptions import TemplateError

    try:
        yield
    except TemplateError as error:
        raise ValueError(f"the chat template refuses it: {error}") from error


def json_of(prompt: object, meta: dict[str, object]) -> bytes:
    """Encode a question as bytes that are the same in every process, for a digest. prompt: a text,
    or the messages of a conversation as JSON values.
    """
    return json.dumps([prompt, meta], sort_keys=True, default=str).encode()


def sample_digest(prompt_of: Callable[[int], Prompt], count: int) -> str:
    """Return a SHA-256 over at most SAMPLED of `count` prompts, evenly apart: their token ids,
    texts and meta.
    """
    digest = hashlib.sha256()
    step = max(1, -(-count // SAMPLED))
    for i in range(0, count, step):
        prompt = prompt_of(i)
        digest.update(json.dumps(prompt.prompt_ids.tolist()).encode())
        digest.update(json_of(prompt.text, prompt.meta))
    return digest.hexdigest()
