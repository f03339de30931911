"""A job that makes preference pairs: one process and one file. A job that was killed goes on with
it.

with launch_preferences(config) as job:
    job.run(make)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llamarl.config.conversion import to_values
from llamarl.config.preferences import PreferencesConfig, as_run
from llamarl.config.sections.task import GSM8KSettings, RowsSettings
from llamarl.disk.drafts import Draft
from llamarl.errors import MetricsError, RewardError, RunDirectoryError
from llamarl.launch.checks import bad_input, check_inputs
from llamarl.launch.identity import Identity, differences, reward_identity
from llamarl.launch.inputs import JobInputs
from llamarl.launch.sources import check_sources
from llamarl.launch.start import explained, joined_world
from llamarl.launch.tasks import TaskBuilder
from llamarl.models.config import read_config
from llamarl.models.directory import model_digest
from llamarl.observe.console import shown_left
from llamarl.scoring.pairs import PairCounts
from llamarl.tasks.base import Example, PromptMaker, sample_digest
from llamarl.tasks.files import (
    check_keys,
    check_text,
    gsm8k_row,
    read_jsonl,
    refuse,
    row_to_example,
)
from llamarl.types import Prompt

TOLD_EVERY_S = 5.0
INTERRUPTED = 130  # the exit code after Ctrl-C
DEFAULT_MAX_TOKENS = 1024  # of a reward model's pairs: task.max_tokens in conf/supervised.yaml

# Makes, for each batch of prompts by number, its lines and the counts of its outcomes.
Make = Callable[[Iterable[range]], Iterator[tuple[str, PairCounts]]]


class PreferencesJob:
    """A job that makes pairs, and the file that they go to.

    inputs: of the main job that samples and scores in the same way, on this device.
    """

    def __init__(self, config: PreferencesConfig, inputs: JobInputs, device: torch.device):
        self.config = config
        self.inputs = inputs
        self.device = device
        self._draft: Draft | None = None

    @property
    def draft(self) -> Draft:
        """The file with the pairs so far. Only once it has been opened."""
        assert self._draft is not None, "call `open` first"
        return self._draft

    @property
    def num_prompts(self) -> int:
        """How many prompts are completed. ValueError if there are none, or endlessly many."""
        task = self.inputs.task
        sizes = {
            "train": task.num_train,
            "held_out": task.num_eval,
            "all": task.num_train + task.num_eval,
        }
        size = sizes[self.config.split]
        asked = self.config.num_prompts
        if asked is None and not task.train_digest and self.config.split != "held_out":
            raise ValueError(
                f"task={task.name} makes prompts without end; give a number, such as "
                "num_prompts=1000"
            )
        if not size:
            raise ValueError(f"split={self.config.split}: the task has no such prompts")
        return size if asked is None else min(asked, size)

    def prompt(self, number: int) -> Prompt:
        """Return prompt `number` of the split. With split=all, held-out prompts come last."""
        task = self.inputs.task
        if self.config.split == "held_out":
            return task.eval_prompt(number)
        if number < task.num_train:
            return task.train_prompt(number)
        return task.eval_prompt(number - task.num_train)

    def references(self, prompt: Prompt) -> dict[str, str]:
        """Return the row's own answers that are candidates, by their keys."""
        return {key: str(prompt.meta[key]) for key in self.config.references}

    @property
    def prompt_maker(self) -> PromptMaker:
        """The PromptMaker that made the prompts."""
        return TaskBuilder(self.inputs.tokenizer).prompt_maker(self.config.task)

    @property
    def identity(self) -> Identity:
        """The identity of these pairs."""
        sample = sample_digest(self.prompt, self.num_prompts)
        task = self.inputs.task
        return Identity(
            config=to_values(self.config),
            prompts={
                "prompts": f"{self.num_prompts}, {task.train_digest}, {task.eval_digest}, {sample}",
            },
            reward=reward_identity(self.inputs),
            models={"model.path": {"files": model_digest(self.inputs.model_path)}},
            kept=[],
            adapters={},
        )

    def open(self) -> None:
        """Open the file, or the part of it that an earlier start made. ValueError or OSError."""
        identity = self.identity
        about = dataclasses.asdict(identity)
        anew = self.config.resume == "never"
        self._draft = Draft(Path(self.config.out), about=about, anew=anew)
        had: dict[str, Any] = self.draft.about
        try:
            begun = Identity(**had)
        except TypeError as error:
            self.draft.close()
            raise RunDirectoryError(
                f"{self.config.out}.part was written by another version of llamarl; go on with "
                "that version, or begin anew with resume=never"
            ) from error
        found = differences(begun, identity, PreferencesConfig, place="the file")
        if found:
            self.draft.close()
            lines = "\n".join(f"  {difference.what}" for difference in found)
            raise RunDirectoryError(
                f"{self.config.out}.part was begun for other pairs:\n{lines}\nGive the same "
                "values again, choose another out, or begin anew with resume=never"
            )

    def run(self, make: Make) -> None:
        """Make the pairs that the file lacks, and put the file into its place. RewardError if there
        are no pairs at all.
        """
        notes: dict[str, Any] = self.draft.notes
        tally = PairCounts(**notes)
        self._announce(tally.prompts)
        size = self.config.groups_per_step
        ends = [*range(tally.prompts, self.num_prompts, size), self.num_prompts]
        batches = [range(begin, end) for begin, end in zip(ends, ends[1:])]
        began = told = time.monotonic()
        try:
            for lines, made in make(batches):
                now = time.monotonic()
                made.seconds = now - began
                began = now
                tally.add(made)
                self._write(lines, tally)
                if now - told > TOLD_EVERY_S:
                    told = now
                    self._tell(tally)
        except KeyboardInterrupt:
            print(f"stopped  the same command goes on after {tally.prompts:,} prompts", flush=True)
            raise SystemExit(INTERRUPTED) from None
        if not tally.pairs:
            table = "\n  ".join(tally.table())
            raise RewardError(
                f"no pair of {tally.prompts:,} prompts; try more samples, a higher temperature or "
                f"another reward:\n  {table}"
            )
        self.draft.finish()
        self._conclude(tally)

    def _write(self, lines: str, tally: PairCounts) -> None:
        try:
            self.draft.add(lines, dataclasses.asdict(tally))
        except OSError as error:
            raise MetricsError(
                f"{self.config.out}.part cannot be written ({error.strerror}); once it can be, the "
                "same command goes on"
            ) from error

    def _announce(self, num_done: int) -> None:
        c = self.config
        own = "".join(f" and the row's {key}" for key in c.references)
        print(f"pairs    {c.samples} completions{own} of {self.num_prompts:,} prompts")
        print(f"model    {self.inputs.model_path}, {c.task.kind} ({c.split})")
        print(f"labels   reward={c.reward.kind}, pairing={c.pairing}")
        if num_done:
            print(f"resumed  {c.out}.part has {num_done:,} prompts")
        print("", end="", flush=True)

    def _tell(self, tally: PairCounts) -> None:
        of = f"{tally.prompts:,} of {self.num_prompts:,} prompts"
        rest = self.num_prompts - tally.prompts
        left = shown_left(rest * tally.seconds / max(1, tally.prompts))
        ending = f", left {left}" if left else ""
        print(f"{of}, {tally.pairs:,} pairs, {tally.seconds:.0f} s{ending}", flush=True)

    def _conclude(self, tally: PairCounts) -> None:
        """Print how it went, and the command that trains on the file."""
        print()
        for line in tally.table():
            print(line)
        c = self.config
        print(f"{'written':<14}{c.out}")
        more = ""
        context = read_config(self.inputs.model_path).max_position_embeddings
        if not tally.longest <= DEFAULT_MAX_TOKENS <= context:
            more += f" task.max_tokens={tally.longest}"
        if self.inputs.tokenizer.chat_template and not c.task.chat:
            more += " task.chat=false"
        data = f"model.path={c.model.path} task.path={c.out}"
        print(f"{'next':<14}python recipes/reward_model.py {data} out=RM_DIR{more}", flush=True)


@contextmanager
def launch_preferences(config: PreferencesConfig) -> Iterator[PreferencesJob]:
    """Check all that the user gave, open the file and yield the job. Afterwards print how it ended.

    Bad input (data, model, file) is one clear message and exit code 2; a failure is exit code 1.
    """
    with explained() as ending:
        world = joined_world(config, reproducible=True)
        inputs = JobInputs(as_run(config), is_told=world.rank == 0)
        job = PreferencesJob(config, inputs, world.device)
        check_inputs(inputs)
        with bad_input():
            _check_prompts(job)
            check_sources(inputs)
            job.open()
        ending.callback(job.draft.close)
        yield job


def _check_prompts(job: PreferencesJob) -> None:
    """Check that each prompt can be a row, and has its references. ValueError names the first that
    cannot, as FILE:LINE if they are lines of a file.
    """
    count = job.num_prompts
    task = job.config.task
    if isinstance(task, RowsSettings | GSM8KSettings) and task.kind != "hf_dataset":
        _check_lines(task, job.config)
        return
    if not job.inputs.task.train_digest:
        count = 1  # a task on demand makes the others later, with the same keys
    problems = []
    for number in range(count):
        prompt = job.prompt(number)
        try:
            _check_prompt(prompt, job.config)
        except ValueError as error:
            problems.append(f"prompt {number}, {prompt.text[:40]!r}: {error}")
    refuse("prompts cannot be used", problems)


def _check_lines(task: RowsSettings | GSM8KSettings, config: PreferencesConfig) -> None:
    """Check the files that the prompts come from, in the same way."""
    files = [task.path]
    if task.eval_path is not None:
        by_split = {"train": [task.path], "held_out": [task.eval_path]}
        files = by_split.get(config.split, [task.path, task.eval_path])
    read = gsm8k_row
    if isinstance(task, RowsSettings):
        read = partial(row_to_example, prompt_key=task.prompt_key, answer_key=task.answer_key)

    def checked(row: dict) -> Example:
        example = read(row)
        _check_prompt(example, config)
        return example

    for file in files:
        read_jsonl(file, checked)


def _check_prompt(prompt: Prompt | Example, config: PreferencesConfig) -> None:
    if not prompt.text.strip():
        raise ValueError("the prompt is blank; leave it out")
    for key in config.references:
        check_keys(prompt.meta, key, None)
        value = prompt.meta[key]
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f'"{key}" is no text, or empty; references=[KEY] names answers')
        check_text(key, value)
