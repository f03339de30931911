"""Checks the environments of a job before it starts, and says what they are."""

from __future__ import annotations

import logging
import re

from llamarl.config.sections.task import PlayedSettings
from llamarl.environments.dialogues import row_of, seed_of
from llamarl.environments.pool import EnvironmentPool, Failure
from llamarl.environments.worker import Answer
from llamarl.launch.inputs import JobInputs
from llamarl.tasks.environment import makes_prompts, turn_tokens
from llamarl.tasks.parts import MixtureTask, section_of
from llamarl.types import Prompt

_TASK = re.compile(r"(?<![\w.=])task\.")  # where a message names a key of the section task

TRIED = 3  # prompts with which an environment is begun, until one leaves room

log = logging.getLogger("llamarl")


def check_environments(inputs: JobInputs) -> None:
    """Check the environments' modules, their tools and the chat template, on every rank.
    ValueError, also for what cannot read dialogues whose template rewrites history.
    """
    how = ""
    for section, task in inputs.config.environments.items():
        try:
            turns = turn_tokens(
                task.environment, inputs.tokenizer, chat=task.chat, system_prompt=task.system_prompt
            )
        except ValueError as error:
            raise ValueError(_TASK.sub(f"{section}.", str(error))) from error
        how = how or turns.appends()
    if how:
        _check_readers(inputs, how)


def _check_readers(inputs: JobInputs, how: str) -> None:
    """Check that nothing reads a dialogue as one text if the chat template rewrites earlier turns.
    how: in which way it does.
    """
    c = inputs.config
    readers = [f"{section}.path" for section in c.scorers]
    readers += ["reference"] if c.reference.kind != "none" else []
    readers += ["eval.base"] if c.eval.base is not None else []
    if readers:
        raise ValueError(
            f"{inputs.model_path}: its chat template rewrites earlier turns ({how}), and "
            f"{', '.join(readers)} would read each completion as one text; give the directory a "
            "chat template that leaves history as it is, or go without"
        )
    if inputs.is_told:
        log.info(
            "%s: its chat template rewrites earlier turns (%s): where it does, a turn is sampled "
            "behind the whole dialogue as it is shown then",
            inputs.model_path,
            how,
        )


def try_environments(inputs: JobInputs) -> list[str]:
    """Begin each environment with its first prompt, in a worker; with further ones, until one
    leaves room for a turn. Return a line about each. ValueError if one fails, or if none does.
    """
    lines = []
    for section, task in inputs.config.environments.items():
        where = "" if section == "task" else f"{section}: "
        lines.append(where + _tried(inputs, section, task, _first_prompts(inputs, section)))
    return lines


def _first_prompts(inputs: JobInputs, section: str) -> list[Prompt]:
    """Return the first TRIED prompts of the task, of a mixture's part, or of a set."""
    firsts = []
    for one in inputs.held_out.sets:
        firsts += [inputs.held_out.prompt(number) for number in one.numbers[:TRIED]]
    if isinstance(inputs.task, MixtureTask):
        for name, part in inputs.task.parts.items():
            for i in range(min(TRIED, part.num_train)):
                firsts.append(inputs.task.prompt_of(name, part.train_prompt(i)))
    else:
        firsts += [inputs.task.train_prompt(i) for i in range(min(TRIED, inputs.task.num_train))]
    return [prompt for prompt in firsts if section_of(prompt) == section][:TRIED]


def _tried(inputs: JobInputs, section: str, task: PlayedSettings, prompts: list[Prompt]) -> str:
    """Begin an environment with the first prompt that leaves room for a turn. Return a line about
    it.
    """
    turns = turn_tokens(
        task.environment, inputs.tokenizer, chat=task.chat, system_prompt=task.system_prompt
    )
    most = inputs.config.max_new_tokens
    sizes: list[int] = []
    for prompt in prompts:
        answer = _begun(inputs, section, task, prompt)
        if task.path is None or makes_prompts(task.environment):
            tools = answer.tools or turns.tools
            context = turns.own_opening(answer.messages, tools, turns.first())
        else:
            context = turns.opening(answer.messages, turns.prompt("a")[1])
        sizes.append(len(context))
        if sizes[-1] < most:
            break
    else:
        raise ValueError(
            f"{section}.environment={task.environment}: its first dialogues begin "
            f"with {', '.join(map(str, sizes))} tokens behind the prompt (with the tools' schemas, "
            f"if it makes its own prompts), and max_new_tokens={most} counts them: no room is left "
            "for a turn; raise it"
        )
    if len(sizes) > 1:
        log.warning(
            "%s.environment=%s: %d of its first %d dialogues begin with %d or more tokens behind "
            "the prompt, and leave no room for a turn: raise max_new_tokens=%d",
            section,
            task.environment,
            len(sizes) - 1,
            len(sizes),
            min(sizes[:-1]),
            most,
        )
    names = [tool["function"]["name"] for tool in answer.tools or turns.tools]
    kind = "dialogue" if makes_prompts(task.environment) else "tools"
    said = " ".join(turn["content"] for turn in answer.messages)
    return (
        f"{task.environment} ({kind}: {', '.join(names) or 'none'}), at most {task.play.max_turns} "
        f"turns; it begins with {said[:60]!r}, {sizes[-1]} of max_new_tokens={most}"
    )


def _begun(inputs: JobInputs, section: str, task: PlayedSettings, prompt: Prompt) -> Answer:
    """Begin an environment with a prompt, in a worker. Return what it says. ValueError if it
    fails.
    """
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
        pool.begin(0, row_of(prompt, task.prompt_key), seed_of(inputs.config.seed, prompt))
        found: list[tuple[int, Answer | Failure]] = []
        while not found:
            pool.wait(play.timeout_s)
            found = pool.poll()
    finally:
        pool.close()
    ((_, answer),) = found
    if not isinstance(answer, Answer):
        raise ValueError(
            f"{section}.environment={task.environment}: with one of its first prompts it fails "
            f"as it begins: {answer.reason}"
        )
    return answer
