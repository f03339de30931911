"""Supervised jobs: one executor, which has its examples, under the same controller as the main job.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from llamarl.comm.groups import World, init_world, threads_per_rank
from llamarl.config.conversion import to_values
from llamarl.config.supervised import RowsSettings, SupervisedConfig
from llamarl.controller import ExecutorController, RunSettings
from llamarl.errors import RunDirectoryError
from llamarl.executor import Executor
from llamarl.launch.identity import Identity, parts_of
from llamarl.launch.inputs import bad_input, check_vocabulary
from llamarl.launch.job import read_model, read_tokenizer
from llamarl.launch.outcome import recorded
from llamarl.launch.run_directory import RunDirectory, open_run
from llamarl.launch.start import explained
from llamarl.learning.supervised import ExampleOrder
from llamarl.models.config import ModelConfig
from llamarl.models.hf import weights_of
from llamarl.models.scorer import SCORE
from llamarl.observe import RowWriter, build_sinks
from llamarl.observe.console import SUPERVISED_COLUMNS
from llamarl.tickets.ledger import TicketLedger

TRAINER = "trainer"  # the name of the one executor

log = logging.getLogger("llamarl")


class Data(Protocol):
    """Examples, for training and held out."""

    @property
    def train(self) -> Sequence: ...

    @property
    def held_out(self) -> Sequence: ...

    @property
    def fingerprints(self) -> dict[str, str]:
        """By what they are of ("training pairs"): what is equal for equal data alone."""
        ...


class SupervisedJob:
    """What the trainer of one supervised run is built from, and how it is run; the same on every
    rank but `world.rank`.
    """

    def __init__(self, config: SupervisedConfig, world: World, data: Data):
        self.config = config
        self.world = world
        self.data = data
        self.directory = RunDirectory(Path(config.out), None)
        self.order = ExampleOrder(
            num_examples=len(data.train),
            examples_per_step=config.examples_per_step,
            epochs=config.epochs,
            seed=config.seed,
        )
        self._writer: RowWriter | None = None

    @property
    def max_steps(self) -> int:
        if self.config.max_steps is None:
            return self.order.num_steps
        return min(self.config.max_steps, self.order.num_steps)

    @property
    def warmup_steps(self) -> int:
        """Fewer than all."""
        steps = math.ceil(self.config.trainer.warmup_fraction * self.max_steps)
        return min(steps, self.max_steps - 1)

    @property
    def identity(self) -> Identity:
        """What makes this run that run."""
        return Identity(
            config=to_values(self.config),
            prompts=self.data.fingerprints,
            reward="",
            models={"model.path": parts_of(self.config.model.path)},
            kept=["model.path"],
            adapters={},
        )

    def eval_due(self, version: int) -> bool:
        """Whether this version is evaluated: the first, the last, and those between as asked."""
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
        """Run it to its end, or to a stop request; then the model is in its place."""
        c = self.config
        # No prompt is asked for: the ledger stands still.
        ledger = TicketLedger(
            groups_per_step=1, max_lag=0, overcommit=0, num_pools=1, num_generators=1
        )
        controller = ExecutorController(
            executors=[trainer],
            channels=[],
            placement={TRAINER: tuple(range(self.world.size))},
            ledger=ledger,
            world=self.world,
            settings=RunSettings(
                run_dir=self.directory.path,
                resume_from=self.directory.resume_from,
                keep_checkpoints=c.checkpoint.keep,
                timeout_s=c.timeout_s,
                heartbeat_timeout_s=c.heartbeat_timeout_s,
                stop_s=c.stop_s,
                trace=c.metrics.trace,
                identity=self.directory.identity,
            ),
            make_writer=self._make_writer,
        )
        with recorded(controller, self.directory.path, max_steps=self.max_steps):
            controller.run()
        if self.world.rank == 0:
            self._conclude(trainer.version)

    def _make_writer(self) -> RowWriter:
        m = self.config.metrics
        sinks = build_sinks(
            self.directory.path,
            max_steps=self.max_steps,
            columns=SUPERVISED_COLUMNS,
            tensorboard=m.tensorboard,
            wandb=m.wandb,
            config=to_values(self.config),
        )
        self._writer = RowWriter(
            self.directory.path, sinks, eval_due=lambda version: False, first_step=0
        )
        return self._writer

    def announce(self) -> None:
        """Print what runs; on rank 0, when the run's directory is open."""
        c = self.config
        device = f"{self.world.device.type}, {torch.get_num_threads()} thread(s) each"
        examples = f"{len(self.data.train)} examples, {len(self.data.held_out)} held out"
        print(f"llamarl  {Path(c.model.path).name} on {Path(c.task.path).name}: {examples}")
        print(f"steps    {self.max_steps} of {c.examples_per_step}, {c.epochs:g} epochs")
        print(f"ranks    {self.world.size}  ({device})")
        print(f"float32  {self.world.products}")
        checkpoint = self.directory.resume_from
        resumed = f", resumed from {checkpoint.name}" if checkpoint else ""
        print(f"run      {self.directory.path}{resumed}", flush=True)

    def _conclude(self, version: int) -> None:
        """On rank 0: put the model into its place, and say how the run went."""
        assert self._writer is not None, "rank 0 writes rows"
        print(f"\n{self._writer.summary()}")
        out = self.directory.path
        if version < self.max_steps:
            print(f"stopped    after step {version} of {self.max_steps}: resume=auto goes on")
            return
        _put_in_place(out / "checkpoints" / f"step_{version}" / "hf", out)
        print(f"model      {out} is a Hugging Face directory", flush=True)


def _put_in_place(made: Path, out: Path) -> None:
    """Copy the files of a directory, each whole at any moment; what says that a model is there
    comes last.
    """
    files = sorted(made.iterdir(), key=lambda file: file.name == "config.json")
    for file in files:
        draft = out / f"{file.name}.new"
        shutil.copyfile(file, draft)
        os.replace(draft, out / file.name)


@contextmanager
def launch_supervised(
    config: SupervisedConfig, read_data: Callable[[RowsSettings, object], Data]
) -> Iterator[SupervisedJob]:
    """Join the world, read the data, open the directory, and yield the job; say how it ended.

    read_data(config.task, tokenizer). Bad input (data, model, directory) is one clear message and
    exit code 2; a failure of the run is exit code 1.
    """
    with explained() as ending:
        threads = threads_per_rank(config.threads, synchronous=True)
        world = init_world(threads=threads, timeout_s=config.timeout_s, reproducible=True)
        torch.manual_seed(config.seed)
        with bad_input():
            tokenizer = _checked_tokenizer(config)
            config = within_context(config, is_told=world.rank == 0)
            data = read_data(config.task, tokenizer)
        job = SupervisedJob(config, world, data)
        try:
            identity = job.identity if world.rank == 0 else None
            job.directory = open_run(config, world, data.fingerprints, identity)
        except RunDirectoryError as error:
            raise RunDirectoryError(_in_own_words(str(error))) from error
        ending.callback(job.directory.release)
        if world.rank == 0:
            job.announce()
        yield job


def _in_own_words(message: str) -> str:
    """What is said of the main job's key run_dir, said of `out`; directories of that name stay."""
    return re.sub(r"(?<![\w./-])run_dir(?![\w/-])", "out", message)


def _check_head(config: SupervisedConfig, model: ModelConfig) -> None:
    """ValueError for a model that this kind of job cannot begin with."""
    what = f"{Path(config.model.path) / 'config.json'}: {model.architecture} gives"
    if not config.scores and model.labels:
        raise ValueError(f"{what} scores, no tokens; model.path is a language model")
    if len(model.labels) > 1:
        raise ValueError(
            f"{what} {len(model.labels)} scores ({', '.join(model.labels)}); a reward model gives "
            "one (num_labels=1)"
        )


def within_context(config: SupervisedConfig, *, is_told: bool) -> SupervisedConfig:
    """With rows of no more tokens than the model's context, which is said once where it is less
    than task.max_tokens.
    """
    context = read_model(config.model.path).max_position_embeddings
    given = config.task.max_tokens
    if given <= context:
        return config
    if is_told:
        log.warning(
            "task.max_tokens=%d, but the context of %s is %d tokens: rows of at most %d are taken",
            given,
            config.model.path,
            context,
            context,
        )
    task = dataclasses.replace(config.task, max_tokens=context)
    return dataclasses.replace(config, task=task)


def _checked_tokenizer(config: SupervisedConfig):
    """The model directory's, whose weights and ids fit. ValueError or FileNotFoundError."""
    path = Path(config.model.path)
    model = read_model(path)
    _check_head(config, model)
    trained = model.as_scorer() if config.scores else model
    may_lack = () if model.labels else (SCORE,)
    weights_of(path, trained, may_lack=may_lack)
    tokenizer = read_tokenizer(path, chat=True)
    check_vocabulary(tokenizer, model.vocab_size, path)
    return tokenizer
