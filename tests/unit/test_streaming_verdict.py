"""What the report says of reading completions while they are sampled."""

import numpy as np
import pytest

from llamarl.observe.report import facts, streaming_verdict


def columns(**changes):
    """Two rows: an answer of 100 tokens, at a millisecond a token."""
    given = {
        "step": [1, 2],
        "reward/prefilled_early": [0.9, np.nan],
        "reward/tail_s": [0.02, np.nan],
        "reward/evictions": [0, np.nan],
        "reward/model/seconds": [2, 4],
        "reward/model/tokens": [2000, 4000],
        "completion/length_mean": [100, 100],
    } | {name.replace("__", "/"): values for name, values in changes.items()}
    return {name: np.array(values, dtype=np.float64) for name, values in given.items()}


def test_without_streaming_nothing_is_said():
    without = columns()
    del without["reward/tail_s"]
    assert streaming_verdict(without) is None


def test_a_short_tail_has_paid():
    said = dict(facts(columns()))["streaming to the scorer"]
    assert said == "paid: 90% of a completion read before it ended; its score 0.02 s after " + (
        "(read alone: 0.1 s)"
    )


@pytest.mark.parametrize(
    "changes, knob",
    [
        ({"reward__prefilled_early": [0.2, 0.4]}, "lower reward.piece_tokens"),
        (
            {"reward__prefilled_early": [0.2, 0.4], "reward__evictions": [0, 3]},
            "raise reward.cache_tokens",
        ),
        ({"reward__tail_s": [0.3, 0.3]}, "a rank of its own in placement.reward"),
    ],
)
def test_what_did_not_pay_names_the_key_to_turn(changes, knob):
    said = streaming_verdict(columns(**changes))
    assert said.startswith("did not pay") and knob in said
