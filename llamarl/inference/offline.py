"""Sampling without a job: prompts in, whole completions out.

engine = Engine.from_hf(DIR)
params = SamplingParams(max_new_tokens=64, stop_token_ids=(2,), n=8)
for completions in generate(engine, [[1, 7, 14], [1, 9]], params):
    print(completions[0].token_ids, completions[0].generator_logprobs)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llamarl.inference.protocol import GenerationEngine, can_talk
from llamarl.inference.requests import TokenIds
from llamarl.inference.sampler import SamplingParams
from llamarl.types import Completion

CHUNK_TOKENS = 32
WAIT_S = 1.0  # for environments, between two looks at them


def generate(
    engine: GenerationEngine,
    prompts: Sequence[TokenIds],
    params: SamplingParams,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> list[list[Completion]]:
    """Returns params.n completions of each prompt, in the order of the prompts.

    prompts: token ids, each [P]. Prompt i is ticket i: its tokens depend on params.seed, on i and
    on the logits, and not on the other prompts. chunk_tokens: as in `completions_of`.

    ValueError for an engine that is at work, and for what `submit` refuses; then nothing is
    sampled. RuntimeError if the logits were not finite.
    """
    if engine.num_live or engine.num_waiting:
        raise ValueError(
            f"the engine is at work: {engine.num_live} samples run and {engine.num_waiting} wait; "
            "let it finish them, or abort them"
        )
    engine.pop_finished()
    try:
        for ticket, prompt_ids in enumerate(prompts):
            engine.submit(ticket, prompt_ids, params)
    except ValueError:
        engine.abort()
        engine.pop_finished()
        raise
    found: dict[tuple[int, int], Completion] = {}
    for finished in completions_of(engine, chunk_tokens):
        for _, completion in finished:
            found[completion.ticket, completion.sample_index] = completion
    groups = []
    for ticket in range(len(prompts)):
        groups.append([found[ticket, index] for index in range(params.n)])
    return groups


def completions_of(
    engine: GenerationEngine, chunk_tokens: int
) -> Iterator[list[tuple[int, Completion]]]:
    """Yields, after each step, the (stream, completion) of what ended in it, until nothing is left.

    chunk_tokens: tokens of a sample between two looks at what has ended.
    """
    while engine.num_live or engine.num_waiting:
        sampled = engine.step(chunk_tokens)
        yield engine.pop_finished()
        if not sampled and can_talk(engine) and engine.num_acting:
            engine.wait(WAIT_S)
