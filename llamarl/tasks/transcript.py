"""A question and its answer as the tokens of another model's tokenizer.

    Transcript(tokenizer, chat=True, system_prompt=None).ids("12+34=", "46", has_ended=True)

A scorer that has the policy's tokens reads those that were sampled. One that has not reads the text
anew, in its own chat template.
"""

from __future__ import annotations

from llamarl.tasks.base import Tokenizer


class Transcript:
    """Texts become token ids, as the turns of a user and of an assistant if `chat` is true and the
    tokenizer has a template, else end to end.

    End to end, a completion that has ended by itself is followed by the tokenizer's end token; a
    template closes the assistant's turn in its own way.
    """

    def __init__(self, tokenizer: Tokenizer, *, chat: bool, system_prompt: str | None):
        self._tokenizer = tokenizer
        self.chat = bool(chat and getattr(tokenizer, "chat_template", None))
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        end = getattr(tokenizer, "eos_token_id", None)
        self._end = [] if end is None else [end]

    def ids(self, prompt: str, completion: str, *, has_ended: bool) -> list[int]:
        """The token ids [P + L] of a prompt and its completion."""
        if not self.chat:
            ids = list(self._tokenizer.encode(prompt + completion))
            return ids + self._end if has_ended else ids
        turns = [
            *self._system,
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": completion},
        ]
        template = self._tokenizer.apply_chat_template
        return list(template(turns, tokenize=True, return_dict=False))


def same_tokens(one, other) -> bool:
    """Whether two tokenizers give their ids to the same tokens."""
    return one.get_vocab() == other.get_vocab()
