"""Reads preference pairs from JSON lines: a prompt, the better completion and the worse one,
as texts or as chat messages.

    {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    {"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 0.5}
    {"prompt": [{"role": "user", "content": "1+1?"}],
     "chosen": [{"role": "assistant", "content": "2"}], "rejected": [...]}

A completion that is a list of messages may repeat the prompt's before its reply. Prompts and
completions are tokenised apart, as in RL, where the prompt is tokens before the completion is text.
A completion ends with the end token, as a sampled one that was not cut does.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from llamarl.learning.preference import Preference
from llamarl.learning.sft import check_end_token
from llamarl.learning.supervised import RowsToRead
from llamarl.tasks.base import (
    PromptMaker,
    check_chat_template,
    refused_by_template,
)
from llamarl.tasks.build import hold_out_prompts
from llamarl.tasks.conversation import messages_of, shown
from llamarl.tasks.jsonl import check_keys, read_jsonl
from llamarl.tasks.special import Spelled, chat_ids, reply_ids
from llamarl.types import Message

SIDES = ("chosen", "rejected")
Messages = tuple[Message, ...]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreferenceData:
    """Training pairs and those held out."""

    train: list[Preference]
    held_out: list[Preference]

    @property
    def fingerprints(self) -> dict[str, str]:
        """SHA-256 over token ids and margins, by which two runs can tell whether they have the same
        data.
        """
        return {"training pairs": _digest(self.train), "held-out pairs": _digest(self.held_out)}


def read_preference_data(task: RowsToRead, tokenizer) -> PreferenceData:
    """Read the pairs of task.path, and hold out the first num_eval of eval_path; without that,
    pairs of `path` itself are held out, one of each prompt that is.

    FileNotFoundError, or ValueError naming FILE:LINE of each bad row (the first ten), or if nothing
    is left to train on. drop_long: pairs of more than max_tokens are left out, with a warning; else
    they are bad rows.
    """
    reader = _Reader(task, tokenizer)
    rows = reader.read(task.path)
    if task.eval_path:
        held_out = reader.read(task.eval_path)
        return PreferenceData(train=rows, held_out=held_out[: task.num_eval])
    split = hold_out_prompts((row.prompt_ids.numpy().tobytes() for row in rows), task.num_eval)
    if task.num_eval:
        split.warn(task.path, len(rows))
    return PreferenceData(
        train=[rows[i] for i in split.kept(len(rows))], held_out=[rows[i] for i in split.held]
    )


def _digest(pairs: Sequence[Preference]) -> str:
    digest = hashlib.sha256()
    for pair in pairs:
        for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids):
            digest.update(json.dumps(ids.tolist()).encode())
        digest.update(repr(pair.margin).encode())
    return digest.hexdigest()


class _Reader:
    """Makes pairs from rows."""

    def __init__(self, task: RowsToRead, tokenizer):
        check_end_token(tokenizer)
        self._tokenizer = tokenizer
        self._max_tokens = task.max_tokens
        self._drop_long = task.drop_long
        self._maker = PromptMaker(
            tokenizer,
            chat=task.chat,
            system_prompt=task.system_prompt,
            max_prompt_tokens=task.max_tokens,
        )

    def read(self, path: str | Path) -> list[Preference]:
        """Read all pairs of a file that are not too long."""
        self._spelled = Spelled(self._tokenizer)
        pairs = read_jsonl(path, self._pair)
        self._spelled.warn(str(path), len(pairs))
        kept = [pair for pair in pairs if pair is not None]
        if len(kept) < len(pairs):
            log.warning(
                "%s: %d of %d pairs are longer than task.max_tokens=%d and left out",
                path,
                len(pairs) - len(kept),
                len(pairs),
                self._max_tokens,
            )
        if not kept:
            raise ValueError(f"{path}: no pair fits task.max_tokens={self._max_tokens}; raise it")
        return kept

    def _pair(self, row: dict) -> Preference | None:
        """Make the pair of a row; None for one that is too long and may be left out. ValueError."""
        for side in SIDES:
            check_keys(row, "prompt", side)
        margin = _margin(row.get("margin"))
        prompt = _prompt(row["prompt"])
        chosen, rejected = (_completion(row[side], prompt, side) for side in SIDES)
        asked = [prompt] if isinstance(prompt, str) else [turn.content for turn in prompt]
        self._spelled.note([*asked, chosen, rejected])
        if chosen == rejected:
            raise ValueError("both completions are equal: there is nothing to prefer; leave it out")
        prompt_ids = self._prompt_ids(prompt)
        reads_turns = self._maker.shows_turns or not isinstance(prompt, str)
        to_ids = partial(reply_ids, self._tokenizer, prompt_ids, chat=reads_turns)
        pair = Preference(
            prompt_ids=torch.tensor(prompt_ids),
            chosen_ids=torch.tensor(to_ids(chosen)),
            rejected_ids=torch.tensor(to_ids(rejected)),
            margin=margin,
        )
        if torch.equal(pair.chosen_ids, pair.rejected_ids):
            raise ValueError("both completions are the same tokens: there is nothing to prefer")
        longer = max(pair.chosen_ids.numel(), pair.rejected_ids.numel())
        length = pair.prompt_ids.numel() + longer
        if length <= self._max_tokens:
            return pair
        if self._drop_long:
            return None
        raise ValueError(
            f"{length} tokens, task.max_tokens={self._max_tokens}; shorten it, or leave out all "
            "such pairs with task.drop_long=true"
        )

    def _prompt_ids(self, prompt: str | Messages) -> list[int]:
        if isinstance(prompt, str):
            return self._maker.ids(prompt)
        check_chat_template(self._tokenizer)
        turns = [message.to_dict() for message in prompt]
        with refused_by_template():
            return chat_ids(self._tokenizer, turns, reply=True)


def _margin(value: object) -> float:
    if value is None:
        return 0.0
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise ValueError(f'"margin" must be a finite number, this is {value!r}')


def _prompt(value: object) -> str | Messages:
    if isinstance(value, list):
        return messages_of(value, "prompt")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'"prompt" must be text that is not empty, or messages: {shown(value)}')
    return value


def _completion(value: object, prompt: str | Messages, side: str) -> str:
    """Return the text of a completion; if it is messages, of the one reply behind the prompt's."""
    if isinstance(value, list):
        messages = messages_of(value, side)
        before = prompt
        if isinstance(prompt, str):
            before = (Message("user", prompt),)
        *repeated, reply = messages
        if repeated and tuple(repeated) != before:
            raise ValueError(
                f'"{side}" has {len(messages)} messages that do not begin with the '
                "prompt's; give the reply alone"
            )
        if reply.role != "assistant":
            raise ValueError(f'"{side}" ends with a message of {reply.role!r}, not assistant')
        value = reply.content
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'"{side}" must be text that is not empty, or messages: {shown(value)}')
    return value
