"""Supervised pairs from JSON lines: a prompt and its completion, or a conversation whose assistant
turns are learned.

    {"prompt": "1+1=", "completion": "2"}
    {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"},
    {"role": "user", ...}, ...]}

Text that is given and text that is learned are tokenised apart, as in RL, where the prompt is
tokens before the completion is text. A prompt may be empty where the tokenizer begins a text with a
token of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import overload

import torch

from llamarl.learning.sft import Pair, answered, check_end_token, make_pair
from llamarl.learning.supervised import RowsToRead
from llamarl.tasks.base import CACHED_PROMPTS, PromptMaker, Task, refused_by_template
from llamarl.tasks.build import hold_out_prompts
from llamarl.tasks.conversation import messages_of
from llamarl.tasks.jsonl import check_keys, read_jsonl
from llamarl.tasks.special import Spelled, end_token, shown_turns, special_tokens
from llamarl.words.answers import answer_text

ANSWER_KEYS = ("completion", "answer")  # where the row says nothing else

log = logging.getLogger(__name__)


def read_pairs(
    path: str | Path,
    tokenizer,
    *,
    max_tokens: int,
    prompt_key: str = "prompt",
    answer_key: str | None = None,
    messages_key: str = "messages",
    chat: bool = True,
    system_prompt: str | None = None,
    drop_long: bool = False,
) -> list[Pair]:
    """Read all rows of a file, tokenised; a row with `messages_key` is a conversation, any other
    has a prompt and an answer.

    tokenizer: transformers'. answer_key None: the first of ANSWER_KEYS that the row has. chat: a
    prompt is a user turn of the tokenizer's chat template, if it has one. drop_long: rows of more
    than max_tokens are left out, which is said; else they are bad rows. FileNotFoundError, or
    ValueError naming FILE:LINE of each bad row (the first ten), or if none fits.
    """
    check_end_token(tokenizer)
    maker = PromptMaker(
        tokenizer, chat=chat, system_prompt=system_prompt, max_prompt_tokens=max_tokens
    )

    spelled = Spelled(tokenizer)

    def to_pair(row: dict) -> Pair | None:
        if messages_key in row:
            pair = conversation_pair(row[messages_key], tokenizer)
            spelled.note([message["content"] for message in row[messages_key]])
        else:
            pair = _prompt_pair(row, tokenizer, maker, prompt_key, answer_key)
            spelled.note([str(row[prompt_key]), str(row[_key_of_answer(row, answer_key)])])
        if pair.token_ids.numel() > max_tokens and drop_long:
            return None
        if pair.token_ids.numel() > max_tokens:
            raise ValueError(
                f"{pair.token_ids.numel()} tokens, the model takes {max_tokens}; shorten the row "
                "or leave it out"
            )
        return pair

    pairs = read_jsonl(path, to_pair)
    spelled.warn(str(path), len(pairs))
    kept = [pair for pair in pairs if pair is not None]
    if len(kept) < len(pairs):
        num_dropped = len(pairs) - len(kept)
        log.warning(
            "%s: %d of %d rows have more than %d tokens and are left out",
            path,
            num_dropped,
            len(pairs),
            max_tokens,
        )
    if not kept:
        raise ValueError(f"{path}: no row has {max_tokens} tokens or fewer; allow more")
    return kept


@dataclass(frozen=True, slots=True)
class SFTData:
    """Rows to learn and those held out."""

    train: Sequence[Pair]
    held_out: Sequence[Pair]

    @property
    def fingerprints(self) -> dict[str, str]:
        """SHA-256 over tokens and what is learned of them, by which two runs can tell whether they
        have the same data.
        """
        return {"training rows": _digest(self.train), "held-out rows": _digest(self.held_out)}


def _digest(pairs: Sequence[Pair]) -> str:
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(json.dumps(pair.token_ids.tolist()).encode())
        digest.update(json.dumps(pair.learned.tolist()).encode())
    return digest.hexdigest()


def read_sft_data(task: RowsToRead, tokenizer) -> SFTData:
    """Read the rows of task.path and the first num_eval of eval_path; without that, rows of `path`
    itself are held out, one of each prompt that is. FileNotFoundError or ValueError as from
    `read_pairs`.
    """
    read = partial(
        read_pairs,
        tokenizer=tokenizer,
        max_tokens=task.max_tokens,
        chat=task.chat,
        system_prompt=task.system_prompt,
        drop_long=task.drop_long,
    )
    rows = read(task.path)
    if task.eval_path:
        return SFTData(train=rows, held_out=read(task.eval_path)[: task.num_eval])
    split = hold_out_prompts(map(_prompt_of, rows), task.num_eval)
    if task.num_eval:
        split.warn(task.path, len(rows))
    return SFTData(
        train=[rows[i] for i in split.kept(len(rows))], held_out=[rows[i] for i in split.held]
    )


def _prompt_of(pair: Pair) -> bytes:
    """Return what is given before the first token that is learned; all of a row where that is at
    most the token that begins a text.
    """
    given = int(pair.learned.long().argmax())
    ids = pair.token_ids[:given] if given > 1 else pair.token_ids
    return ids.numpy().tobytes()


@dataclass(frozen=True, slots=True)
class TargetsOfTask:
    """The answers that a task gives to its own prompts, to learn; and of its held-out prompts."""

    train: Sequence[Pair]
    held_out: Sequence[Pair]
    fingerprints: dict[str, str]  # of the task's prompts, see SFTData


def read_answers(
    task: Task,
    tokenizer,
    *,
    max_tokens: int,
    num_eval: int,
    fingerprints: dict[str, str],
    chat: bool = False,
) -> TargetsOfTask:
    """Return a task's prompts with their targets. All are checked now, unless the task makes them
    on demand: then only the first is, and each other one at its step. chat: prompts are turns of
    the chat template.

    ValueError for a prompt without a target, or with more than max_tokens.
    """

    def pair(i: int) -> Pair:
        return make_pair(task.train_prompt(i), tokenizer, max_tokens, chat=chat)

    train: Sequence[Pair] = PairsOnDemand(task.num_train, pair)
    if task.train_digest:
        train = [pair(i) for i in range(task.num_train)]
    assert train[0].learned.any(), "a pair has an answer"
    asked = range(min(num_eval, task.num_eval))
    return TargetsOfTask(
        train=train,
        held_out=[make_pair(task.eval_prompt(j), tokenizer, max_tokens, chat=chat) for j in asked],
        fingerprints=fingerprints,
    )


class PairsOnDemand(Sequence[Pair]):
    """Pairs by number, which are made when they are asked for; the last ones are kept."""

    def __init__(self, size: int, make: Callable[[int], Pair]):
        self._size = size
        self._make = lru_cache(CACHED_PROMPTS)(make)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, place: int) -> Pair: ...

    @overload
    def __getitem__(self, place: slice) -> list[Pair]: ...

    def __getitem__(self, place: int | slice) -> Pair | list[Pair]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(self._size))]
        return self._make(range(self._size)[place])


def conversation_pair(messages: object, tokenizer) -> Pair:
    """Make a pair of a conversation in the tokenizer's chat template; each assistant turn is
    learned, up to and with the token that ends it.

    ValueError, saying what is wrong, for messages that are not right, or a template that is absent
    or shows an earlier turn otherwise once later ones follow.
    """
    messages = _checked_messages(messages)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "a conversation, but the tokenizer has no chat template; give rows a prompt and a "
            "completion"
        )

    def shown(count: int, reply: bool) -> str:
        with refused_by_template():
            return tokenizer.apply_chat_template(
                messages[:count], tokenize=False, add_generation_prompt=reply
            )

    with refused_by_template():
        marked = shown_turns(tokenizer, messages, reply=False)
    whole = marked.text
    ids_of = special_tokens(tokenizer).ids
    end = end_token(tokenizer, chat=True)
    at = 0
    ids: list[int] = []
    learned: list[bool] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        given = shown(i, reply=True)
        done = shown(i + 1, reply=False)
        if not (given.startswith(whole[:at]) and done.startswith(given) and whole.startswith(done)):
            raise ValueError(
                f"the chat template shows message {i + 1} otherwise once others follow it, so its "
                "tokens are not those of a reply; split the conversation into one row a reply"
            )
        context = ids_of(marked.part(at, len(given)), behind=ids[-1] if ids else None)
        front = next(reversed([*ids, *context]), None)
        reply = ids_of(marked.part(len(given), len(done)), behind=front)
        # What the template puts behind the end token is never sampled: it belongs to the next
        # turn's context.
        ends = [place for place, token in enumerate(reply) if token == end]
        size = ends[-1] + 1 if ends else len(reply)
        ids += context + reply
        learned += [False] * len(context) + [True] * size + [False] * (len(reply) - size)
        at = len(done)
    last = len(learned) - learned[::-1].index(True)
    if learned[0]:
        raise ValueError(
            "the chat template begins with the reply: its first token has nothing before it"
        )
    return Pair(torch.tensor(ids[:last]), torch.tensor(learned[:last]))


def _prompt_pair(
    row: dict, tokenizer, maker: PromptMaker, prompt_key: str, answer_key: str | None
) -> Pair:
    key = _key_of_answer(row, answer_key)
    check_keys(row, prompt_key, key)
    for needed in (prompt_key, key):
        if not isinstance(row[needed], (str, int, float)):
            raise ValueError(f'"{needed}" must be text, this is {type(row[needed]).__name__}')
    answer = answer_text(row[key])
    if answer == "":
        raise ValueError(f'"{key}" must be text that is not empty')
    prompt_ids = maker.ids(str(row[prompt_key]))
    if not prompt_ids:
        raise ValueError(
            f'"{prompt_key}" is empty, and this tokenizer begins no text with a token of its own: '
            "the first token needs something to look at"
        )
    return answered(torch.tensor(prompt_ids), answer, tokenizer, chat=maker.shows_turns)


def _key_of_answer(row: dict, answer_key: str | None) -> str:
    return answer_key or next((key for key in ANSWER_KEYS if key in row), ANSWER_KEYS[0])


def _checked_messages(messages: object) -> list[dict]:
    """Returns them as they are, of which a template may read more. ValueError if there is no turn
    to learn.
    """
    roles = [message.role for message in messages_of(messages, "messages")]
    for one, other in itertools.pairwise(roles):
        if one == other == "assistant":
            raise ValueError("two assistant messages in a row; join them")
    if "assistant" not in roles:
        raise ValueError("no assistant message: there is nothing to learn")
    assert isinstance(messages, list), "messages_of refuses all else"
    return messages
