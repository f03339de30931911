"""Checks the environment of task=environment before a run starts, and says what it is."""

from __future__ import annotations

import logging

from llamarl.config.tasks import EnvironmentSettings
from llamarl.environments.contracts import Answer
from llamarl.environments.dialogues import row_of, seed_of
from llamarl.environments.pool import EnvironmentPool, Failure
from llamarl.launch.job import Job
from llamarl.tasks.environment import makes_prompts, turn_tokens

log = logging.getLogger("llamarl")


def check_environment(job: Job) -> None:
    """Check the environment's module, its tools and the chat template, on every rank. ValueError,
    also for what cannot read dialogues whose template rewrites history.
    """
    task = job.config.task
    if not isinstance(task, EnvironmentSettings):
        return
    turns = turn_tokens(
        task.environment, job.tokenizer, chat=task.chat, system_prompt=task.system_prompt
    )
    how = turns.appends()
    if not how:
        return
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


def try_environment(job: Job) -> str:
    """Begin one environment with the first prompt, in a worker. Return a line about it; "" for a
    task without one. ValueError if it fails.
    """
    task = job.config.task
    if not isinstance(task, EnvironmentSettings):
        return ""
    play = task.play
    prompt = job.task.train_prompt(0)
    pool = EnvironmentPool(
        task.environment, num_workers=1, timeout_s=play.timeout_s, memory_mb=play.memory_mb
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
            f"task.environment={task.environment}: with the first prompt it fails as it begins: "
            f"{answer.reason}"
        )
    turns = turn_tokens(
        task.environment, job.tokenizer, chat=task.chat, system_prompt=task.system_prompt
    )
    tools = [tool["function"]["name"] for tool in answer.tools or turns.tools]
    kind = "dialogue" if makes_prompts(task.environment) else "tools"
    said = " ".join(turn["content"] for turn in answer.messages)
    return (
        f"{task.environment} ({kind}: {', '.join(tools) or 'none'}), at most {play.max_turns} "
        f"turns; it begins with {said[:60]!r}"
    )
