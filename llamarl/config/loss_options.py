"""What the options of the package's losses may be, for a config that is checked before torch is
imported.

Which loss has which of them, and its published value, is in conf/loss/NAME.yaml; an option means
the same in every loss.
"""

from __future__ import annotations

from typing import Annotated, Literal

from llamarl.config.ranges import Count, NonNegative, Positive, Range

LOSS_OPTIONS: dict[str, object] = {
    "ratio_cap": Positive | None,
    "ratio_mask_low": NonNegative | None,
    "ratio_mask_high": Positive | None,
    "ratio_level": Literal["token", "sequence", "sequence_mean"],
    "normalize": Literal["tokens", "completions", "groups"],
    "max_tokens": Count | None,
    "clip_low": Annotated[float, Range(0, 1)],
    "clip_high": NonNegative,
    "beta": Positive,
    "tau": NonNegative,
    "length_normalize": bool,
}

NEED_REFERENCE = ("online_dpo", "tb", "tba")


def contradiction(options: dict[str, object]) -> tuple[str, str] | None:
    """(the keys, what is wrong and the remedy) of options that are each in range and cannot work
    together.
    """
    low, high = options.get("ratio_mask_low"), options.get("ratio_mask_high")
    if low is not None and high is not None and low >= high:
        return (
            "ratio_mask_low ratio_mask_high",
            "masks every ratio; the low bound must be below the high one",
        )
    cap, clip = options.get("ratio_cap"), options.get("clip_high")
    if cap is not None and clip is not None and cap <= 1 + clip:
        return (
            "ratio_cap clip_high",
            f"a cap at or below 1 + clip_high = {1 + clip:g} leaves nothing to clip; raise it, or null",
        )
    return None
