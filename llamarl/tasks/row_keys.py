"""Keys of a prompt's meta that llamarl writes beside the row's own. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from llamarl.words.texts import answer_text

SAMPLED = "sampled"  # what was sampled, for a scorer
MESSAGES = "prompt_messages"  # the turns of a conversation: llamarl.types.MESSAGES_KEY
PART_KEY = "part"  # the name of the prompt's part of a mixture
SET_KEY = "eval_set"  # the name of the prompt's set of eval.sets
REWARD_KEY = "part_reward"  # the default reward of that part or set
# Keys that no row may have. A row may have PART_KEY, unless it is of a mixture's part.
_MEANINGS = {
    SAMPLED: "what was sampled",
    MESSAGES: "the turns of a conversation",
    SET_KEY: "the name of a prompt's set",
    REWARD_KEY: "a prompt's own reward",
}


def with_sampled(
    meta: Mapping[str, object], *, token_ids: list[int], raw_text: str, ended: bool
) -> dict[str, object]:
    """Return a row's meta with what was sampled, under the key SAMPLED.

        {"answer": "46", "sampled": {"num_tokens": 3, "ended": True, "raw_text": "46</s>",
                                     "token_ids": [19, 21, 2]}}

    token_ids: [L], with the stop token of a completion that ended by itself (`ended`), and not for
    want of room. raw_text: their text with special tokens. ValueError if the row has the key.
    """
    _check_free(SAMPLED, meta)
    sampled = {
        "num_tokens": len(token_ids),
        "ended": ended,
        "raw_text": raw_text,
        "token_ids": token_ids,
    }
    return {**meta, SAMPLED: sampled}


def answer_in(meta: Mapping[str, object]) -> str:
    """Return a row's answer as a text. ValueError if it has none, or no text or number."""
    if meta.get("answer") is None:
        remedy = "set task.answer_key, or use a reward that needs none"
        raise ValueError(f"the prompt's meta has no 'answer'; {remedy}")
    return answer_text(meta["answer"])


def check_row_keys(keys: Collection[str]) -> None:
    """Raise ValueError if a row has a key that is llamarl's own."""
    for key in _MEANINGS:
        _check_free(key, keys)


def _check_free(key: str, keys: Collection[str]) -> None:
    if key in keys:
        raise ValueError(
            f'the key "{key}" is where a reward finds {_MEANINGS[key]}; rename the column'
        )
