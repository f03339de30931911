"""An engine without a job: what was submitted is sampled to its end."""

from __future__ import annotations

from collections.abc import Iterator

from llamarl.inference.protocol import GenerationEngine
from llamarl.types import Completion


def completions_of(
    engine: GenerationEngine, chunk_tokens: int
) -> Iterator[list[tuple[int, Completion]]]:
    """After each step the (stream, completion) of what ended in it, until nothing is left.

    chunk_tokens: of a sample, between two looks at what has ended.
    """
    while engine.num_live or engine.num_waiting:
        engine.step(chunk_tokens)
        yield engine.pop_finished()
