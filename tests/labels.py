"""Rewards that label pairs, in a module that a worker imports in no time."""


def closeness(prompt, completion, meta):
    """How near a sum is; None for what is no number, an error for what is above 90."""
    if not completion.isdigit():
        return None
    assert int(completion) <= 90
    return -float(abs(int(completion) - int(meta["answer"])))


def length(prompt, completion, meta):
    """The longer, and of two that are as long one of them."""
    return len(completion) + 0.0001 * sum(map(ord, completion))
