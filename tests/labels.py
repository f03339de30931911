"""Rewards that label pairs, in a module that a worker imports in no time."""

import time


def closeness(prompt, completion, meta):
    """How near a sum is; None for what is no number, an error for what is above 90."""
    if not completion.isdigit():
        return None
    assert int(completion) <= 90
    return -float(abs(int(completion) - int(meta["answer"])))


def unhurried(prompt, completion, meta):
    """The same, and so late that there is time to interrupt it."""
    time.sleep(0.02)
    return closeness(prompt, completion, meta)


def length(prompt, completion, meta):
    """The longer, and of two that are as long one of them."""
    return len(completion) + 0.0001 * sum(map(ord, completion))


def tokens(prompt, completion, meta):
    """How many tokens were sampled; an error where the text with special tokens is another's."""
    sampled = meta["sampled"]
    assert len(sampled["token_ids"]) == sampled["num_tokens"]
    assert sampled["raw_text"].startswith(completion)
    return float(sampled["num_tokens"])


def broken(prompt, completion, meta):
    import a_package_that_is_not_there  # noqa: F401


def nearness(prompt, completion, meta):
    """How near a sum is; what is no number is further than all of them."""
    if not completion.isdigit():
        return -100.0
    return -float(min(99, abs(int(completion) - int(meta["answer"]))))
