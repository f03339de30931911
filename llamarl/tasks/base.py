"""Task: numbered training and evaluation prompts, and the reward that goes with them.

    tokenizer --PromptMaker--> prompt ids
    examples  --ListTask-----> train_prompt(i), eval_prompt(j)

To add a task, read its data into Examples and hand them to ListTask (see addition.py), or write a
class of your own with Task's members (see procedural.py), and give it a name in build.py.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import unicodedata
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import torch

from llamarl.tasks.conversation import text_of, with_system
from llamarl.tasks.special import (
    Shown,
    chat_ids,
    special_tokens,
    text_ids,
    warn_of_spelled,
)
from llamarl.types import Message, Prompt

log = logging.getLogger(__name__)

# Per task and split; a prompt is asked for group_size times, soon after one another.
CACHED_PROMPTS = 65_536
SAMPLED = 100  # prompts whose token ids a fingerprint looks at; some tasks make 75 a second
BATCH = 1024  # examples that are encoded together
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


class Rows(Protocol):
    """Rows of a file or a dataset as examples, read when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Example: ...

    def __iter__(self) -> Iterator[Example]: ...

    def where(self, i: int) -> str:
        """Return where row i is, for messages."""

    def select(self, rows: Sequence[int]) -> Rows:
        """Return the rows at these places, in this order."""


Examples = list[Example] | Rows


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
    def shown(self) -> dict[str, object]:
        """What a prompt shows besides its question and the settings, as JSON values by name."""
        return {}

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
        texts = [self.turns(question) for question in questions]
        usual = [place for place, text in enumerate(texts) if not self._is_suspect(text)]
        lengths = [0] * len(questions)
        for place in set(range(len(questions))).difference(usual):
            lengths[place] = len(self.ids(questions[place]))
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
        num_ends = 0 if self._chat else special_tokens(self.tokenizer).num_ends
        for place, ids in zip(usual, encoded["input_ids"]):
            lengths[place] = len(ids) - num_ends
        return lengths

    def _is_suspect(self, turns: str | list[dict[str, str]]) -> bool:
        """Whether what the model reads could hold spellings of special tokens."""
        special = special_tokens(self.tokenizer)
        if isinstance(turns, str):
            return special.spelling(turns) is not None
        return any(special.suspects(turn["content"]) for turn in turns)

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


class ListTask:
    """A Task over two sequences of examples. It tokenises on demand; prompts over the limit are
    dropped with one warning.

    fittings: which of both are short enough; None: they are looked at here. trains: whether there
    must be training prompts. ValueError if none of these is left, or naming an example that the
    chat template refuses.
    """

    def __init__(
        self,
        name: str,
        train: Examples,
        held_out: Examples,
        maker: PromptMaker,
        *,
        default_reward: str,
        fittings: tuple[Fitting, Fitting] | None = None,
        trains: bool = True,
    ):
        self.name = name
        self.default_reward = default_reward
        self.maker = maker
        self.train = train  # also the examples whose prompts are too long
        self.held_out = held_out
        limit = maker.max_prompt_tokens
        fitting, fitting_eval = fittings or (fitting_of(maker, train), fitting_of(maker, held_out))
        self.num_train = len(fitting.places)
        self.num_eval = len(fitting_eval.places)
        self.where_train = lambda i: _place_of(train, 0, fitting.places[i])
        self.train_digest = fitting.digest
        self.eval_digest = fitting_eval.digest
        self.train_prompt = _cached_prompts(maker, train, fitting)
        self.eval_prompt = _cached_prompts(maker, held_out, fitting_eval)
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
        first = None
        if fitting.first_spelled is not None:
            first = _place_of(train, 0, fitting.first_spelled)
        elif fitting_eval.first_spelled is not None:
            first = _place_of(held_out, 0, fitting_eval.first_spelled)
        if first is not None:
            spelled = fitting.spelled + fitting_eval.spelled
            warn_of_spelled(f"task {name}", spelled, len(train) + len(held_out), first=first)
        if trains and not self.num_train:
            raise ValueError(
                f"task {name}: none of {len(train)} training prompts fits "
                f"task.max_prompt_tokens={limit}; raise it"
            )


def _cached_prompts(
    maker: PromptMaker, examples: Examples, fitting: Fitting
) -> Callable[[int], Prompt]:
    """Return a function that gives the i-th of the examples that fit, tokenised."""
    places = fitting.places
    return lru_cache(CACHED_PROMPTS)(lambda i: maker.prompt(examples[places[i]]))


@dataclass(frozen=True, slots=True)
class Fitting:
    """Says which of a sequence of examples have prompts that are short enough."""

    places: array  # of int64, ascending
    digest: str  # SHA-256 over those examples
    spelled: int = 0  # how many of all the examples spell a special token
    first_spelled: int | None = None  # the first of these, by place


def fitting_of(
    maker: PromptMaker,
    examples: Examples,
    on_batch: Callable[[int], None] = lambda count: None,
) -> Fitting:
    """Find which examples have prompts that are short enough, a batch at a time. on_batch(n): n
    more are done. ValueError names the example that the chat template refuses.
    """
    places = array("q")
    digest = hashlib.sha256()
    walk = iter(examples)
    begin = 0
    spelled: list[int] = []
    batch = list(itertools.islice(walk, BATCH))
    while batch:
        own = [place for place, row in enumerate(batch) if maker.spells_special(row.prompt)]
        spelled += [begin + place for place in own]
        where = partial(_place_of, examples, begin)
        for place in _fitting_places(maker, batch, frozenset(own), where):
            places.append(begin + place)
            digest.update(json_of(*batch[place].values))
        begin += len(batch)
        on_batch(len(batch))
        batch = list(itertools.islice(walk, BATCH))
    return Fitting(places, digest.hexdigest(), len(spelled), next(iter(spelled), None))


def _fitting_places(
    maker: PromptMaker,
    batch: Sequence[Example],
    spelled: Collection[int],
    place_of: Callable[[int], str],
) -> list[int]:
    """Return which examples of a batch fit, by place. spelled: those that spell a special token.
    place_of: where an example is, for messages.
    """
    from jinja2.exceptions import TemplateError

    # A conversation is always looked at: a template may refuse it. So is a text that spells a
    # special token, which may have no other tokens.
    doubtful = []
    fitting = []
    for place, example in enumerate(batch):
        question = example.prompt
        is_plain = isinstance(question, str) and place not in spelled
        if isinstance(question, str) and is_plain and maker.surely_fits(question):
            fitting.append(place)
        else:
            doubtful.append(place)
    if not doubtful:
        return fitting
    try:
        lengths = maker.num_tokens([batch[place].prompt for place in doubtful])
    except (ValueError, TemplateError):
        for place in doubtful:
            question = batch[place].prompt
            if not isinstance(question, str) or place in spelled:
                _check_question(maker, question, place_of(place))
        raise
    for place, length in zip(doubtful, lengths):
        if length <= maker.max_prompt_tokens:
            fitting.append(place)
    return sorted(fitting)


def _check_question(maker: PromptMaker, question: str | tuple[Message, ...], where: str) -> None:
    """Raise ValueError, naming the place, if a question can be put into no template."""
    try:
        with refused_by_template():
            maker.ids(question)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _place_of(examples: Examples, begin: int, place: int) -> str:
    """Return where an example is, for messages: FILE:LINE if it comes from a file."""
    number = begin + place
    return f"prompt {number}" if isinstance(examples, list) else examples.where(number)


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
