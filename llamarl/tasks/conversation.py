"""Conversations: prompts that are lists of messages, as data sets for chat models have them.

    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]}

    row --messages_of--> messages --text_of--> the text that a reward function sees

Of a message its role and its content are read; the content is a text. Other keys are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from llamarl.types import Message

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
