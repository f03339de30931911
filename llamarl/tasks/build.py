"""Tasks by kind: what `task=gsm8k` on the command line becomes.

    kind            prompts                                             held out for evaluation            reward
    addition        "12+34="; needs no files                            500 pairs, always the same         exact_match
    jsonl           path: a JSONL file; prompt_key, answer_key          eval_path, or a part of path       exact_match
    gsm8k           path: JSONL with "question" and "answer"            eval_path, or a part of path       numeric_match
    hf_dataset      path: a dataset directory; prompt_key, answer_key   eval_path, its test or validation  exact_match
                                                                        split, or a part of path
    reasoning_gym   name: such as chain_sum; seed                       questions of a seed of their own   reasoning_gym_score

"A part of path" is min(num_eval, a tenth) of its rows, at random but the same in every run, and
taken out of training.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from llamarl.tasks.addition import addition_examples
from llamarl.tasks.base import Example, ListTask, PromptMaker, Task, Tokenizer
from llamarl.tasks.jsonl import GSM8K_INSTRUCTION, gsm8k_row, read_jsonl, row_to_example

KINDS = ("addition", "jsonl", "gsm8k", "hf_dataset", "reasoning_gym")
EXACT_MATCH = "llamarl.tasks.rewards:exact_match"
NUMERIC_MATCH = "llamarl.tasks.rewards:numeric_match"


def build_task(
    kind: str,
    tokenizer: Tokenizer,
    *,
    path: str | Path | None = None,
    eval_path: str | Path | None = None,
    prompt_key: str = "prompt",
    answer_key: str | None = "answer",
    name: str | None = None,
    chat: bool = True,
    system_prompt: str | None = None,
    max_prompt_tokens: int = 512,
    num_eval: int = 500,
    seed: int = 0,
) -> Task:
    """The task of a kind (see the table above). num_eval: the most prompts to hold out where no
    evaluation data is given.

    ValueError or FileNotFoundError, saying what to change, for an unknown kind, missing settings or
    bad data.
    """
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, n=1, cutoff=0.3)
        raise ValueError(
            f"task.kind={kind}: unknown; did you mean {near[0] if near else 'one of ' + ', '.join(KINDS)}?"
        )
    if path is None and kind in ("jsonl", "gsm8k", "hf_dataset"):
        raise ValueError(f"task.kind={kind} needs task.path")
    instruction = GSM8K_INSTRUCTION if kind == "gsm8k" else ""
    maker = PromptMaker(
        tokenizer,
        chat=chat,
        system_prompt=system_prompt,
        max_prompt_tokens=max_prompt_tokens,
        instruction=instruction,
    )
    if kind == "reasoning_gym":
        from llamarl.tasks.procedural import ReasoningGymTask

        return ReasoningGymTask(name, maker, num_eval=num_eval, seed=seed)

    def read_rows(file: str | Path) -> tuple[Sequence[Example], Sequence[Example] | None]:
        if kind == "hf_dataset":
            from llamarl.tasks.hf_dataset import read_hf_dataset

            return read_hf_dataset(file, prompt_key, answer_key)
        return read_jsonl(
            file,
            gsm8k_row
            if kind == "gsm8k"
            else lambda row: row_to_example(row, prompt_key, answer_key),
        ), None

    if kind == "addition":
        train, held_out = addition_examples()
    else:
        train, held_out = read_rows(path)
        if eval_path is not None:
            first, evaluation_split = read_rows(eval_path)
            held_out = first if evaluation_split is None else evaluation_split
        elif held_out is None:
            select = (
                train.select if kind == "hf_dataset" else lambda places: [train[i] for i in places]
            )
            train, held_out = map(select, hold_out(len(train), num_eval))
    return ListTask(
        kind,
        train,
        held_out,
        maker,
        default_reward=NUMERIC_MATCH if kind == "gsm8k" else EXACT_MATCH,
    )


def hold_out(num_rows: int, num_eval: int) -> tuple[list[int], list[int]]:
    """(training rows, evaluation rows), each in file order: min(num_eval, a tenth) are held out,
    the same for every seed.
    """
    size = min(num_eval, max(1, num_rows // 10)) if num_rows > 1 else 0
    held = set(random.Random(0).sample(range(num_rows), size))
    return [i for i in range(num_rows) if i not in held], sorted(held)
