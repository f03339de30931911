"""Checks the environments of a job before it starts, and says what they are."""

from __future__ import annotations

import logging
import re

from llamarl.config.tasks import PlayedSettings
from llamarl.environments.contracts import Answer
from llamarl.environments.dialogues import row_of, seed_of
from llamarl.environments.pool import EnvironmentPool, Failure
from llamarl.launch.job import Job
from llamarl.tasks.environment import makes_prompts, turn_tokens
from llamarl.tasks.held_out import section_of
from llamarl.tasks.mixture import MixtureTask
from llamarl.types import Prompt

_TASK = re.compile(r"(?<![\w.=])task\.")  # where a message names a key of the section task

log = logging.getLogger("llamarl")


def check_environments(job: Job) -> None:
    """Check the environments' modules, their tools and the chat template, on every rank.
    ValueError, also for what cannot read dialogues whose template rewrites history.
    """
    how = ""
    for section, task in job.config.environments.items():
        try:
            turns = turn_tokens(
                task.environment, job.tokenizer, chat=task.chat, system_prompt=task.system_prompt
            )
        except ValueError as error:
            raise ValueError(_TASK.sub(f"{section}.", str(error))) from error
        how = how or turns.appends()
    if how:
        _check_readers(job, how)


def _check_readers(job: Job, how: str) -> None:
    """Check that nothing reads a dialogue as one text if the chat template rewrites earlier turns.
    how: in which way it does.
    """
    c = job.config
    readers = [f"{section}.path" for section in c.scorers]
    readers += ["reference"] if c.reference.kind != "none" else []
    readers += ["eval.base"] if c.eval.base is not None else []
    if readers:
        raise ValueError(
            f"{job.model_path}: its chat template rewrites earlier turns ({how}), and "
            f"{', '.join(readers)} would read each completion as one text; give the directory a "
            "chat template that leaves history as it is, or go without"
        )
    if job.world.rank == 0:
        log.info(
            "%s: its chat template rewrites earlier turns (%s): where it does, a turn is sampled "
            "behind the whole dialogue as it is shown then",
            job.model_path,
            how,
        )


def try_environments(job: Job) -> list[str]:
    """Begin each environment with its first prompt, in a worker. Return a line about each.
    ValueError if one fails.
    """
    lines = []
    for section, task in job.config.environments.items():
        where = "" if section == "task" else f"{section}: "
        lines.append(where + _tried(job, section, task, _first_prompt(job, section)))
    return lines


def _first_prompt(job: Job, section: str) -> Prompt:
    """Return the first prompt of the task, of a mixture's part, or of a set."""
    firsts = [job.held_out.prompt(one.first) for one in job.held_out.sets]
    if isinstance(job.task, MixtureTask):
        for name, part in job.task.parts.items():
            firsts.append(job.task.prompt_of(name, part.train_prompt(0)))
    else:
        firsts.append(job.task.train_prompt(0))
    return next(prompt for prompt in firsts if section_of(prompt) == section)


def _tried(job: Job, section: str, task: PlayedSettings, prompt: Prompt) -> str:
    """Begin an environment with a prompt. Return a line about it."""
    play = task.play
    pool = EnvironmentPool(
        task.environment,
        num_workers=1,
        timeout_s=play.timeout_s,
        memory_mb=play.memory_mb,
        section=section,
    )
    try:
        pool.start()
        pool.begin(0, row_of(prompt, task.prompt_key), seed_of(job.config.seed, prompt))
        found: list[tuple[int, Answer | Failure]] = []
        while not found:
            pool.wait(play.timeout_s)
            found = pool.poll()
    finally:
        pool.close()
    ((_, answer),) = found
    if not isinstance(answer, Answer):
        raise ValueError(
            f"{section}.environment={task.environment}: with the first prompt it fails as it "
            f"begins: {answer.reason}"
        )
    turns = turn_tokens(
        task.environment, job.tokenizer, chat=task.chat, system_prompt=task.system_prompt
    )
    tools = [tool["function"]["name"] for tool in answer.tools or turns.tools]
    has_own_messages = makes_prompts(task.environment)
    if task.path is None or has_own_messages:
        context = turns.own_opening(answer.messages, answer.tools or turns.tools, turns.first())
    else:
        context = turns.opening(answer.messages, turns.prompt("a")[1])
    most = job.config.max_new_tokens
    if len(context) >= most:
        raise ValueError(
            f"{section}.environment={task.environment}: its first dialogue begins with "
            f"{len(context)} tokens behind the prompt (with the tools' schemas, if it makes its "
            f"own prompts), and max_new_tokens={most} counts them: no room is left for a turn; "
            "raise it"
        )
    kind = "dialogue" if has_own_messages else "tools"
    said = " ".join(turn["content"] for turn in answer.messages)
    return (
        f"{task.environment} ({kind}: {', '.join(tools) or 'none'}), at most {play.max_turns} "
        f"turns; it begins with {said[:60]!r}, {len(context)} of max_new_tokens={most}"
    )
