"""Options of a loss that change from step to step."""

from __future__ import annotations


def value_at(
    step: int,
    first: float,
    *,
    kind: str,
    final: float,
    end_step: int,
    cut_step: int | None = None,
) -> float:
    """Return an option's value at step `step`, from 0, in all of its updates, if it began as
    `first`.

    Source: beta of TBA, arXiv 2503.18929, tables 2 and 3; the temperatures of the log reward and of
    the language model, B.3.

    linear     first + (final - first) * step / end_step, then final from end_step on
    cut        the same line, but final from cut_step on: table 3 has end_step at half of the steps
               and cut_step at an eighth
    """
    is_cut = kind == "cut" and cut_step is not None and step >= cut_step
    if step >= end_step or is_cut:
        return final
    return first + (final - first) * step / end_step
