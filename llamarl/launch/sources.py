"""Tries the scorers that the user gave: a function in worker processes, a judge, an encoder."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from llamarl.launch.inputs import JobInputs
from llamarl.launch.scorers import gold_kind, reward_kinds
from llamarl.scoring.scorer import Item, text_item
from llamarl.tasks.environment import GIVEN
from llamarl.tasks.forms import REWARD_KEY
from llamarl.tasks.list_task import ListTask
from llamarl.tasks.parts import MixtureTask
from llamarl.tasks.special import reply_ids
from llamarl.types import Prompt
from llamarl.words.texts import answer_text, first_of

NUM_SAMPLES = 3
NUM_ROWS = 256  # that a reward's own check of rows looks at
CHECK_S = 20.0  # it looks at no further ones after that
QUIET_S = 3.0  # it says what it does after that
_NUM_ROUNDS = 16  # each goes through all of the rows, so that an early end leaves rows evenly apart

_MADE_HERE = ("addition", "facts", "one_prompt", "questions")  # tasks with rows of llamarl's own

log = logging.getLogger(__name__)


def samples_of(inputs: JobInputs) -> list[Item]:
    """Return what a reward is tried on: for each of the first NUM_SAMPLES training prompts the
    row's own answer, or the prompt's text without one, as a completion that ended by itself. Of a
    mixture only prompts that no environment plays, if there are any.
    """
    tokenizer = inputs.scored.tokenizer
    chat = inputs.scored.conversation["chat"]
    samples = []
    for prompt in _first_prompts(inputs):
        text = _known_answer(prompt) or prompt.text
        token_ids = reply_ids(tokenizer, prompt.prompt_ids.tolist(), text, chat=chat)
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


def _known_answer(prompt: Prompt) -> str:
    """Return the row's own answer as one would write it; "" without one."""
    answer = prompt.meta.get("answer", "")
    try:
        return answer_text(answer)
    except ValueError:  # a reward of the user's own may take it
        return str(answer)


def _first_prompts(inputs: JobInputs) -> list[Prompt]:
    task = inputs.task
    if isinstance(task, MixtureTask):
        found: list[Prompt] = []
        for name, part in task.parts.items():
            if part.default_reward != GIVEN:
                numbers = range(min(NUM_SAMPLES, part.num_train))
                found += [task.prompt_of(name, part.train_prompt(number)) for number in numbers]
        if found:
            return found[:NUM_SAMPLES]
    return [task.train_prompt(number) for number in range(min(NUM_SAMPLES, task.num_train))]


def check_sources(inputs: JobInputs) -> None:
    """Try the scorers, each kind as far as that is cheap: a user's function scores the samples, a
    judge is asked whether it is there. Called in one process of a job. ValueError if one cannot be
    used, or if a function fails on all samples in the same way, unless reward.max_error_rate is 1.
    """
    samples = samples_of(inputs)
    for kind in reward_kinds(inputs):
        kind.try_out(samples)
    check_rows(inputs)


def try_gold(inputs: JobInputs) -> None:
    """Try the gold scorer, as far as that is cheap. ValueError if it cannot be used."""
    gold = gold_kind(inputs)
    if gold is not None:
        gold.try_out(samples_of(inputs))


def check_rows(inputs: JobInputs) -> None:
    """Let the rewards that can say so check training rows, at most NUM_ROWS, evenly apart. Those
    that no completion could be scored for are counted and shown. ValueError where they are more
    than reward.max_error_rate allows. It ends after CHECK_S seconds.
    """
    asking = [kind for kind in reward_kinds(inputs) if kind.checks_rows]
    task = inputs.task
    parts = list(task.parts.values()) if isinstance(task, MixtureTask) else [task]
    is_made = [not part.train_digest or part.name in _MADE_HERE for part in parts]
    if not asking or all(is_made):
        return
    apart = max(1, -(-task.num_train // NUM_ROWS))
    items = []
    places = []
    numbers = range(0, task.num_train, apart)
    for number in sorted(numbers, key=lambda number: number // apart % _NUM_ROUNDS):
        prompt = task.train_prompt(number)
        if prompt.meta.get(REWARD_KEY) == GIVEN:  # an environment plays it
            continue
        items.append(text_item(prompt.text, "", prompt.reward_meta))
        place = f"training prompt {number}"
        places.append(task.where_train(number) if isinstance(task, ListTask) else place)
    for kind in asking:
        reasons = kind.row_problems(items, _patience(kind.identity, len(items)))
        num_seen = len(items) - reasons.count(None)
        if num_seen < len(items):
            log.warning(
                "%s: looked at %d of %d training rows in %g s, and stopped",
                kind.identity,
                num_seen,
                len(items),
                CHECK_S,
            )
        problems = [f"{place}: {why}" for place, why in zip(places, reasons, strict=True) if why]
        if not problems:
            continue
        looked_at = f"{num_seen} training rows" + (f", one in {apart}," if apart > 1 else "")
        what = f"{len(problems)} of {looked_at} get no score from {kind.identity}"
        most = inputs.config.reward.max_error_rate
        # The share is one of all rows, so that a slow machine refuses none that a quick one takes.
        if len(problems) > most * len(items):
            problems.append(
                f"above reward.max_error_rate={most:g}: correct the rows, leave them out, or "
                f"{kind.given.remedy}"
            )
            raise ValueError("\n  ".join([f"{what}:", *first_of(problems[:-1], 3), problems[-1]]))
        log.warning("%s", "\n  ".join([f"{what}:", *first_of(problems, 3)]))


def _patience(identity: str, num_rows: int) -> Callable[[], bool]:
    """Return a function that says whether a check of rows goes on, and tells the user about one
    that takes longer. Its time begins with its first call, when the workers are ready.
    """
    began: float | None = None
    has_told = False

    def wait_longer() -> bool:
        nonlocal began, has_told
        if began is None:
            began = time.monotonic()
        seconds = time.monotonic() - began
        if seconds >= QUIET_S and not has_told:
            has_told = True
            log.info("%s looks at %d training rows, for %g s at most", identity, num_rows, CHECK_S)
        return seconds < CHECK_S

    return wait_longer
