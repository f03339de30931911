"""Tries the scorers that the user gave: a function in worker processes, a judge, an encoder."""

from __future__ import annotations

from functools import partial

import torch

from llamarl.launch.job import Job
from llamarl.launch.kinds import reward_kinds
from llamarl.scoring.scorer import Item
from llamarl.tasks.environment import GIVEN
from llamarl.tasks.mixture import MixtureTask
from llamarl.tasks.special import text_ids
from llamarl.types import Prompt

NUM_SAMPLES = 3


def samples_of(job: Job) -> list[Item]:
    """Return what a reward is tried on: for each of the first NUM_SAMPLES training prompts the
    row's own answer, or the prompt's text without one, as a completion that ended by itself. Of a
    mixture only prompts that no environment plays, if there are any.
    """
    tokenizer = job.scored.tokenizer
    samples = []
    for prompt in _first_prompts(job):
        text = str(prompt.meta.get("answer", "")) or prompt.text
        token_ids = text_ids(tokenizer, text)
        if tokenizer.eos_token_id is not None:
            token_ids.append(tokenizer.eos_token_id)
        sample = Item(
            prompt=prompt,
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            text=text,
            has_ended=True,
            is_held_out=False,
            decode_raw=partial(tokenizer.decode, skip_special_tokens=False),
        )
        samples.append(sample)
    return samples


def _first_prompts(job: Job) -> list[Prompt]:
    task = job.task
    if isinstance(task, MixtureTask):
        found: list[Prompt] = []
        for name, part in task.parts.items():
            if part.default_reward != GIVEN:
                numbers = range(min(NUM_SAMPLES, part.num_train))
                found += [task.prompt_of(name, part.train_prompt(number)) for number in numbers]
        if found:
            return found[:NUM_SAMPLES]
    return [task.train_prompt(number) for number in range(min(NUM_SAMPLES, task.num_train))]


def check_sources(job: Job) -> None:
    """Try the scorers, each kind as far as that is cheap: a user's function scores the samples, a
    judge is asked whether it is there. Called in one process of a job. ValueError if one cannot be
    used, or if a function fails on all samples in the same way, unless reward.max_error_rate is 1.
    """
    samples = samples_of(job)
    for kind in reward_kinds(job):
        kind.try_out(samples)
