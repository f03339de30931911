"""Tasks by kind: what `task=gsm8k` on the command line becomes.

    kind           prompts                           held out for evaluation        reward
    addition       "12+34="; needs no files          500 pairs, always the same     exact_match
    jsonl          path: a JSONL file; prompt_key,   eval_path, or a part of path   exact_match
                   answer_key
    gsm8k          path: JSONL with "question" and   eval_path, or a part of path   numeric_match
                   "answer"
    hf_dataset     path: a dataset directory;        eval_path, its test or valid-  exact_match
                   prompt_key, answer_key            ation split, or a part of path
    facts          posts to summarise; needs no      500 posts, always the same     facts:gold
                   files; seed
    reasoning_gym  name: such as chain_sum; seed     questions of a seed of their   reasoning_gym
                                                     own                            _score

"A part of path" is min(num_eval, a tenth) of its rows, at random but the same in every run, and
taken out of training.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from llamarl.tasks.addition import addition_examples
from llamarl.tasks.base import Example, ListTask, PromptMaker, Task, Tokenizer
from llamarl.tasks.facts import facts_posts
from llamarl.tasks.jsonl import GSM8K_INSTRUCTION, gsm8k_row, read_jsonl, row_to_example
from llamarl.words.names import nearest

KINDS = ("addition", "jsonl", "gsm8k", "hf_dataset", "facts", "reasoning_gym")
EXACT_MATCH = "llamarl.tasks.rewards:exact_match"
NUMERIC_MATCH = "llamarl.tasks.rewards:numeric_match"
DEFAULT_REWARDS = {"gsm8k": NUMERIC_MATCH, "facts": "llamarl.tasks.facts:gold"}  # else EXACT_MATCH


def build_task(
    kind: str,
    tokenizer: Tokenizer,
    *,
    path: str | Path | None = None,
    eval_path: str | Path | None = None,
    prompt_key: str = "prompt",
    answer_key: str | None = "answer",
    name: str | None = None,
    options: Mapping[str, object] | None = None,
    chat: bool = True,
    system_prompt: str | None = None,
    max_prompt_tokens: int = 512,
    num_eval: int = 500,
    seed: int = 0,
) -> Task:
    """The task of a kind (see the table above). num_eval: the most prompts to hold out where no
    evaluation data is given. options: parameters of the reasoning_gym dataset.

    ValueError or FileNotFoundError, saying what to change, for an unknown kind, missing settings or
    bad data.
    """
    if kind not in KINDS:
        near = nearest(kind, KINDS, cutoff=0.3) or f"one of {', '.join(KINDS)}"
        raise ValueError(f"task.kind={kind}: unknown; did you mean {near}?")
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

        return ReasoningGymTask(name, maker, num_eval=num_eval, seed=seed, options=options or {})

    def read(path: str | Path) -> tuple[Sequence[Example], Sequence[Example] | None]:
        """(training examples, held-out examples or None) of a file or directory."""
        if kind == "hf_dataset":
            from llamarl.tasks.hf_dataset import read_hf_dataset

            return read_hf_dataset(path, prompt_key, answer_key)
        if kind == "gsm8k":
            return read_jsonl(path, gsm8k_row), None
        return read_jsonl(path, lambda row: row_to_example(row, prompt_key, answer_key)), None

    if kind == "addition":
        train, held_out = addition_examples()
    elif kind == "facts":
        train, held_out = (
            [Example(post.text, {"answer": post.summary}) for post in posts]
            for posts in facts_posts(seed)
        )
    else:
        train, held_out = read(path)
        if eval_path is not None:
            eval_train, eval_held_out = read(eval_path)
            held_out = eval_train if eval_held_out is None else eval_held_out
        elif held_out is None:
            kept, held = hold_out(len(train), num_eval)
            held_out = _select(train, held)
            train = _select(train, kept)
    default_reward = DEFAULT_REWARDS.get(kind, EXACT_MATCH)
    return ListTask(kind, train, held_out, maker, default_reward=default_reward)


def _select(examples: Sequence[Example], places: Sequence[int]) -> Sequence[Example]:
    """Those at these places; a dataset on disk stays there."""
    if isinstance(examples, list):
        return [examples[i] for i in places]
    return examples.select(places)


def hold_out(num_rows: int, num_eval: int) -> tuple[list[int], list[int]]:
    """(training rows, evaluation rows), by number and in file order: min(num_eval, a tenth) are
    held out, the same in every run.
    """
    num_held = min(num_eval, max(1, num_rows // 10)) if num_rows > 1 else 0
    held = set(random.Random(0).sample(range(num_rows), num_held))
    kept = [i for i in range(num_rows) if i not in held]
    return kept, sorted(held)
