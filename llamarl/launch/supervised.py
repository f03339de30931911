"""Supervised jobs: one executor, which holds its examples, under the same controller as the main
job.

    with launch_supervised(config, read_data) as job:
        job.run(build_trainer(config, job))

OUT/config.json, model.safetensors, tokenizer.json, ...    the model, once the run has ended well
    config.yaml, metrics.jsonl, checkpoints/, ...          as a run of the main job has them
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import OmegaConf

from llamarl.comm.groups import World
from llamarl.config.conversion import to_values
from llamarl.config.supervised import RewardModelConfig, SFTConfig, SupervisedRows, as_run
from llamarl.controller import ExecutorController
from llamarl.ending import remembered_stops
from llamarl.errors import NoWeights, RunDirectoryError
from llamarl.executor import Executor
from llamarl.launch.checks import bad_input, check_inputs, check_vocabulary
from llamarl.launch.identity import Identity
from llamarl.launch.inputs import JobInputs
from llamarl.launch.job import limits_of
from llamarl.launch.run_directory import RunDirectory, open_run
from llamarl.launch.run_files import recorded
from llamarl.launch.sources import check_sources
from llamarl.launch.start import announce_world, explained, joined_world
from llamarl.learning.preference import Preference
from llamarl.learning.sft import SFTPair, read_answers
from llamarl.learning.supervised import ExampleOrder, SupervisedData
from llamarl.memory import (
    GIB,
    ITEMSIZES,
    MOMENTS,
    MicrobatchSize,
    Training,
    UpdateBytes,
    update_bytes,
)
from llamarl.models.config import ModelConfig, as_scorer, read_config
from llamarl.models.given import parts_of, read_model, read_tokenizer
from llamarl.models.hf import weights_of
from llamarl.models.scorer import SCORE
from llamarl.observe import RowWriter, build_sinks
from llamarl.observe.console import SUPERVISED_COLUMNS
from llamarl.tickets.ledger import TicketLedger

TRAINER = "trainer"  # the name of the one executor
TARGET_MISSED = 1  # exit status

AnyConfig = RewardModelConfig | SFTConfig

log = logging.getLogger("llamarl")


class SupervisedJob:
    """The job of one supervised run. It is the same on every rank, except for `world.rank`.

    inputs: the task whose held-out prompts are completed, and its model; None without a task.
    """

    def __init__(
        self,
        config: AnyConfig,
        world: World,
        data: SupervisedData,
        inputs: JobInputs | None = None,
    ):
        self.config = config
        self.world = world
        self.data = data
        self.inputs = inputs
        self._reward: float | None = None  # the last mean reward that was measured
        self.directory = RunDirectory(Path(config.out or "runs/(new)"), None)
        epochs = config.epochs
        if epochs is None:
            assert config.max_steps is not None, "the config sets epochs or max_steps"
            epochs = config.max_steps * config.examples_per_step / len(data.train)
        self.order = ExampleOrder(
            num_examples=len(data.train),
            examples_per_step=config.examples_per_step,
            epochs=epochs,
            seed=config.seed,
        )
        self._writer: RowWriter | None = None

    @property
    def target(self) -> float | None:
        """The mean reward of held-out completions that ends the run."""
        return self.config.target_accuracy if isinstance(self.config, SFTConfig) else None

    @property
    def has_reached_target(self) -> bool:
        """Whether the last mean reward has reached the target."""
        if self.target is None or self._reward is None:
            return False
        return self._reward >= self.target

    def ends_run(self, reward: float) -> bool:
        """Note the mean reward of the held-out completions. Return whether it ends the run."""
        self._reward = reward
        return self.has_reached_target

    @property
    def max_steps(self) -> int:
        if self.config.max_steps is None:
            return self.order.num_steps
        return min(self.config.max_steps, self.order.num_steps)

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up, fewer than all steps."""
        steps = math.ceil(self.config.trainer.warmup_fraction * self.max_steps)
        return min(steps, self.max_steps - 1)

    @property
    def identity(self) -> Identity:
        """The identity of this run."""
        return Identity(
            config=to_values(self.config),
            prompts=self.data.fingerprints,
            reward="",
            models={"model.path": parts_of(self.config.model.path)},
            kept=["model.path"],
            adapters={},
        )

    def eval_due(self, version: int) -> bool:
        """Whether this version is evaluated: the first, the last, and others when due."""
        if not self.data.held_out:
            return False
        every = self.config.eval.every
        is_end = version in (0, self.max_steps)
        return is_end or (every > 0 and version % every == 0)

    def checkpoint_due(self, version: int) -> bool:
        """Whether a checkpoint is made of this version."""
        every = self.config.checkpoint.every
        return every > 0 and version % every == 0

    def run(self, trainer: Executor) -> None:
        """Run the job to its end or to a stop request. At its end put the model into its place.
        SystemExit if a target was not reached.
        """
        # No prompt is ever asked for, because the ledger grants no ticket.
        ledger = TicketLedger(
            groups_per_step=1, max_lag=0, overcommit=0, num_pools=1, num_generators=1
        )
        controller = ExecutorController(
            executors=[trainer],
            channels=[],
            placement={TRAINER: tuple(range(self.world.size))},
            ledger=ledger,
            world=self.world,
            settings=limits_of(self.config, self.directory),
            make_writer=self._make_writer,
        )
        with recorded(controller, self.directory.path, max_steps=self.max_steps):
            controller.run()
            controller.end.reached_target = self.has_reached_target
        is_whole = self.has_reached_target or trainer.version >= self.max_steps
        if self.world.rank == 0:
            self._conclude(trainer.version, is_whole)
        if is_whole and self.target is not None and not self.has_reached_target:
            raise SystemExit(TARGET_MISSED)

    def _make_writer(self) -> RowWriter:
        sinks = build_sinks(
            self.directory.path,
            max_steps=self.max_steps,
            metrics=self.config.metrics,
            columns=SUPERVISED_COLUMNS,
            config=to_values(self.config),
        )
        self._writer = RowWriter(
            self.directory.path, sinks, eval_due=lambda version: False, first_step=0
        )
        return self._writer

    def announce(self) -> None:
        """Print what runs; on rank 0, when the run's directory is open."""
        c = self.config
        examples = f"{len(self.data.train)} examples, {len(self.data.held_out)} held out"
        rows = rows_of(c)
        source = c.task.kind if rows is None else Path(rows.path).name
        print(f"llamarl  {Path(c.model.path).name} on {source}: {examples}")
        print(f"steps    {self.max_steps} of {c.examples_per_step}, {self.order.epochs:g} epochs")
        announce_world(self.world, self.world.size)
        if not c.dry_run:
            print(f"run      {self.directory}", flush=True)

    def memory(self) -> UpdateBytes:
        """Predict what the trainer holds, and works with, on the rank that holds most."""
        c = self.config
        t = c.trainer
        model = read_config(c.model.path)
        if c.scores and not model.labels:
            model = as_scorer(model)
        rows = rows_of(c)
        if rows is None:
            assert self.inputs is not None, "without rows there is a task"
            longest = self.inputs.config.longest
        else:
            longest = rows.max_tokens
        sequences = max(1, t.microbatch_tokens // longest)
        size = MicrobatchSize(
            prompts=sequences,
            completions=sequences,
            prompt_tokens=1,
            completion_tokens=longest - 1,
        )
        training = Training(
            itemsize=ITEMSIZES[t.compute_dtype],
            checkpointing=t.activation_checkpointing,
            several=c.examples_per_step > sequences * self.world.size,
            shards=self.world.size // t.replicate,
            moment_bytes=MOMENTS[t.optimizer],
            on_cpu=self.world.device.type == "cpu",
        )
        return update_bytes(model, size, training)

    def _conclude(self, version: int, is_whole: bool) -> None:
        """On rank 0: print how the run went. If it made all its steps, first put the model into its
        place.
        """
        assert self._writer is not None, "rank 0 has the writer"
        print(f"\n{self._writer.summary()}")
        out = self.directory.path
        if not is_whole:
            print(f"stopped    after step {version} of {self.max_steps}: resume=auto goes on")
            return
        _put_in_place(out / "checkpoints" / f"step_{version}" / "hf", out)
        if self.target is not None and self._reward is not None:
            steps = f"after {version} steps: {self._reward:.1%} of held-out completions are right"
            reached = "reached" if self.has_reached_target else "not reached"
            print(f"target     {self.target:.1%} {reached} {steps}")
        print(f"model      {out} is a Hugging Face directory", flush=True)


def _dry_run(job: SupervisedJob, tokenizer) -> None:
    """Print what a run would be: its values, memory and first three examples."""
    c = job.config
    print(OmegaConf.to_yaml(OmegaConf.create(to_values(c))))
    job.announce()
    taken = job.memory()
    print(
        f"memory   trainer: {taken.held / GIB:.2f} GiB held and {taken.working / GIB:.2f} at the "
        "peak of a step, a rank"
    )
    for example in job.data.train[:3]:
        print(f"sample   {_shown(example, tokenizer)}")
    print("dry run: nothing was started and nothing written")


def _shown(example: SFTPair | Preference, tokenizer) -> str:
    """Return an example in a line: what is given, and what is learned from."""
    if isinstance(example, Preference):
        prompt = tokenizer.decode(example.prompt_ids.tolist())
        chosen = tokenizer.decode(example.chosen_ids.tolist())
        rejected = tokenizer.decode(example.rejected_ids.tolist())
        size = f"{example.num_tokens} tokens"
        return f"{size}  {prompt[:60]!r}  chosen {chosen[:40]!r}  rejected {rejected[:40]!r}"
    given = tokenizer.decode(example.token_ids[~example.learned].tolist())
    learned = tokenizer.decode(example.token_ids[example.learned].tolist())
    return f"{example.token_ids.numel()} tokens  {given[:60]!r}  learned {learned[:60]!r}"


def _put_in_place(made: Path, out: Path) -> None:
    """Copy the files of a directory, each whole at any moment; what says that a model is there
    comes last.
    """
    files = sorted(made.iterdir(), key=lambda file: file.name == "config.json")
    for file in files:
        draft = out / f"{file.name}.new"
        shutil.copyfile(file, draft)
        os.replace(draft, out / file.name)


def rows_of(config: AnyConfig) -> SupervisedRows | None:
    """Return the rows that a job learns from; None if it learns the targets of a task."""
    return config.rows if isinstance(config, SFTConfig) else config.task


@contextmanager
def launch_supervised(
    config: AnyConfig, read_rows: Callable[[SupervisedRows, object], SupervisedData]
) -> Iterator[SupervisedJob]:
    """Join the world, read the data, open the directory, and yield the job. Afterwards print how it
    ended.

    read_rows(config.task, tokenizer): reads them; unused if the task is one of the main job. Bad
    input (data, model, directory) is one clear message and exit code 2; a failure of the run is
    exit code 1.
    """
    with explained() as ending:
        world = joined_world(config, reproducible=True)
        if config.ranks is not None:
            world = world.imagined(config.ranks)
        with bad_input():
            tokenizer = _checked_tokenizer(config)
            config = within_context(config, is_told=world.rank == 0)
        rows = rows_of(config)
        if rows is None:
            job = _job_of_task(config, world, tokenizer)
        else:
            with bad_input():
                data = read_rows(rows, tokenizer)
            job = SupervisedJob(config, world, data)
        if config.dry_run:
            if world.rank == 0:
                _dry_run(job, tokenizer)
            raise SystemExit(0)
        try:
            identity = job.identity if world.rank == 0 else None
            job.directory = open_run(config, world, job.data.fingerprints, identity)
        except RunDirectoryError as error:
            raise RunDirectoryError(_in_own_words(str(error))) from error
        ending.callback(job.directory.release)
        ending.enter_context(remembered_stops())
        if world.rank == 0:
            job.announce()
        yield job


def _job_of_task(config: AnyConfig, world: World, tokenizer) -> SupervisedJob:
    """Check all that the user gave; return the job that learns the targets of the main job's task.
    BadInput.
    """
    assert isinstance(config, SFTConfig), "other jobs have rows"
    inputs = JobInputs(as_run(config), is_told=world.rank == 0)
    check_inputs(inputs)
    with bad_input():
        if config.target_accuracy is not None and world.rank == 0:
            check_sources(inputs)
        data = read_answers(
            inputs.task,
            tokenizer,
            max_tokens=read_model(config.model.path).max_position_embeddings,
            num_eval=config.eval.num_prompts,
            fingerprints=inputs.prompt_fingerprints,
            chat=inputs.sampled.conversation["chat"],
        )
    return SupervisedJob(config, world, data, inputs)


def _in_own_words(message: str) -> str:
    """Rewrite a message about the main job's key run_dir as one about `out`. Directories named
    run_dir stay as they are.
    """
    return re.sub(r"(?<![\w./-])run_dir(?![\w/-])", "out", message)


def _check_head(config: AnyConfig, model: ModelConfig) -> None:
    """Raise ValueError for a model that this kind of job cannot start from."""
    what = f"{Path(config.model.path) / 'config.json'}: {model.architecture} gives"
    if not config.scores and model.labels:
        raise ValueError(f"{what} scores and no tokens; model.path must be a language model")
    if len(model.labels) > 1:
        raise ValueError(
            f"{what} {len(model.labels)} scores ({', '.join(model.labels)}); a reward model gives "
            "one (num_labels=1)"
        )


def within_context(config: AnyConfig, *, is_told: bool) -> AnyConfig:
    """Return the config with task.max_tokens within the model's context. If that lowers it, print a
    line, once.
    """
    rows = rows_of(config)
    context = read_model(config.model.path).max_position_embeddings
    if rows is None or rows.max_tokens <= context:
        return config
    given = rows.max_tokens
    if is_told:
        log.warning(
            "task.max_tokens=%d, but the context of %s is %d tokens: only rows of at most %d "
            "tokens are used",
            given,
            config.model.path,
            context,
            context,
        )
    return dataclasses.replace(config, task=dataclasses.replace(rows, max_tokens=context))


def _checked_tokenizer(config: AnyConfig):
    """Return the model directory's tokenizer, once its weights and ids are checked. ValueError or
    FileNotFoundError.
    """
    path = Path(config.model.path)
    model = read_model(path)
    _check_head(config, model)
    trained = as_scorer(model) if config.scores else model
    may_lack = () if model.labels else (SCORE,)
    try:
        weights_of(path, trained, may_lack=may_lack)
    except NoWeights as error:
        if not config.dry_run:
            raise
        log.warning("a run needs the weights: %s", error)
    tokenizer = read_tokenizer(path, chat=True, options=config.model.template_options)
    check_vocabulary(tokenizer, model.vocab_size, path)
    return tokenizer
