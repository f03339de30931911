"""Keys of a prompt's meta that llamarl writes beside the row's own. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Mapping

SAMPLED = "sampled"  # what was sampled, for a scorer
PART_KEY = "part"  # the name of the prompt's part of a mixture
SET_KEY = "eval_set"  # the name of the prompt's set of eval.sets
REWARD_KEY = "part_reward"  # the default reward of that part or set


def with_sampled(
    meta: Mapping[str, object], *, token_ids: list[int], raw_text: str, ended: bool
) -> dict[str, object]:
    """Return a row's meta with what was sampled, under the key SAMPLED.

        {"answer": "46", "sampled": {"num_tokens": 3, "ended": True, "raw_text": "46</s>",
                                     "token_ids": [19, 21, 2]}}

    token_ids: [L], with the stop token of a completion that ended by itself (`ended`), and not for
    want of room. raw_text: their text with special tokens. ValueError if the row has the key.
    """
    check_row_keys(meta)
    sampled = {
        "num_tokens": len(token_ids),
        "ended": ended,
        "raw_text": raw_text,
        "token_ids": token_ids,
    }
    return {**meta, SAMPLED: sampled}


def check_row_keys(keys: Collection[str]) -> None:
    """Raise ValueError if a row has the key that is llamarl's own."""
    if SAMPLED in keys:
        raise ValueError(
            f'the key "{SAMPLED}" is where a reward finds what was sampled; rename the row\'s own'
        )
