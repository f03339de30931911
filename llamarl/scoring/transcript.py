"""A prompt and its completion as tokens of another model's tokenizer.

    Transcript(tokenizer, chat=True, system_prompt=None).ids("12+34=", "46", has_ended=True)

A scorer with the policy's tokenizer reads the sampled tokens. Any other scorer reads the text, in
its own chat template.
"""

from __future__ import annotations

from llamarl.tasks.base import Tokenizer, text_of, with_system
from llamarl.tasks.special import chat_ids, text_ids
from llamarl.types import Message


class Transcript:
    """Turns texts into token ids: as turns of a user and an assistant if `chat` is true and the
    tokenizer has a template, otherwise end to end.

    A conversation always goes through the template. Without a template it is read as a reward
    function reads it (text_of), with the completion as its last turn. End to end, the tokenizer's
    end token follows a completion that ended by itself; a template closes the assistant's turn in
    its own way.
    """

    def __init__(self, tokenizer: Tokenizer, *, chat: bool, system_prompt: str | None):
        self._tokenizer = tokenizer
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self.chat = chat and self._has_template
        self._system_prompt = system_prompt
        end = getattr(tokenizer, "eos_token_id", None)
        self._end = [] if end is None else [end]

    def ids(
        self, prompt: str | tuple[Message, ...], completion: str, *, has_ended: bool
    ) -> list[int]:
        """Return the token ids [P + L] of a prompt, a text or the turns of a conversation, and its
        completion. ValueError as from `chat_ids`.
        """
        answer = Message("assistant", completion)
        if isinstance(prompt, str) and self.chat:
            turns = with_system((Message("user", prompt), answer), self._system_prompt)
        elif isinstance(prompt, str):
            return self._end_to_end(prompt + completion, has_ended)
        elif not self._has_template:
            return self._end_to_end(text_of((*prompt, answer)), has_ended)
        else:
            turns = (*prompt, answer)
        return chat_ids(self._tokenizer, [turn.to_dict() for turn in turns], reply=False)

    def _end_to_end(self, text: str, has_ended: bool) -> list[int]:
        ids = text_ids(self._tokenizer, text, add_special_tokens=True)
        return ids + self._end if has_ended else ids


def same_tokens(one, other) -> bool:
    """Whether two tokenizers give their ids to the same tokens."""
    return one.get_vocab() == other.get_vocab()
