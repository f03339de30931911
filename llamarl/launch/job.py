"""From a config to a job that can run: world, run directory, data, tokenizer, and what is said at
start and end.

with launch(config) as job:
    ...                     # build executors from job, run the controller
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from llamarl.comm.groups import World, init_world, threads_per_rank
from llamarl.config.command_line import Config, placement_of, to_values
from llamarl.config.placement import TINY_MODEL
from llamarl.controller import RunSettings
from llamarl.errors import (
    BadInput,
    CheckpointError,
    LagExceeded,
    NotFinite,
    ParityError,
    PeerDied,
    RewardError,
    RunDirectoryError,
    TimedOut,
    WeightsError,
)
from llamarl.launch.identity import Identity
from llamarl.launch.inputs import bad_input, check_inputs
from llamarl.launch.run_directory import RunDirectory, open_run
from llamarl.learning.replay import lag_bound
from llamarl.models.config import read_json
from llamarl.models.hf import load_tokenizer
from llamarl.observe import MetricsError, RowWriter, build_sinks
from llamarl.tasks.base import Task, digest_of, sample_places
from llamarl.tasks.build import build_task
from llamarl.tasks.pool import check_reward
from llamarl.tickets.governors import Constants
from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.prompts import PromptStream
from llamarl.types import Prompt

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1

# Ends that explain themselves: a message, no traceback.
RUN_ENDS = (
    PeerDied,
    TimedOut,
    ParityError,
    NotFinite,
    LagExceeded,
    RewardError,
    WeightsError,
    CheckpointError,
    MetricsError,
)

log = logging.getLogger("llamarl")


class Job:
    """What the executors of one run share. Everything is the same on every rank but `world.rank`."""

    def __init__(self, config: Config, world: World, run: RunDirectory):
        self.config, self.world, self.run = config, world, run
        self.placement = placement_of(config, world.size)
        if not config.reference.enabled:
            self.placement.pop("reference", None)
        self.model_path = Path(config.model.path) if config.model.path else TINY_MODEL
        self._writer: RowWriter | None = None

    @cached_property
    def tokenizer(self):
        try:
            return load_tokenizer(self.model_path)
        except FileNotFoundError:
            raise
        except Exception as error:  # transformers and tokenizers raise anything, and name no file
            for name in ("tokenizer_config.json", "tokenizer.json"):
                if (file := self.model_path / name).is_file():
                    read_json(file)
            file, what = (
                self.model_path / "tokenizer.json",
                f"{type(error).__name__}: {error}".split("\n")[0],
            )
            raise ValueError(
                f"{file}: no tokenizer can be made of it ({what}); fetch it again"
            ) from error

    @cached_property
    def task(self) -> Task:
        return build_task(
            tokenizer=self.tokenizer,
            **dataclasses.asdict(self.config.task),
            num_eval=self.config.eval.num_prompts or 1,
            seed=self.config.seed,
        )

    @cached_property
    def prompts(self) -> PromptStream:
        return PromptStream(self.task, self.config.seed)

    @cached_property
    def eval_prompts(self) -> list[Prompt]:
        count = (
            min(self.config.eval.num_prompts, self.task.num_eval) if self.config.eval.every else 0
        )
        return [self.task.eval_prompt(j) for j in range(count)]

    @cached_property
    def identity(self) -> Identity:
        """What makes this run that run."""
        # Also with eval.every=0: the prompts that are held out stay the same when a run goes on
        # without evaluations.
        asked = min(self.config.eval.num_prompts, self.task.num_eval)
        sample = digest_of(self.task.eval_prompt(j) for j in sample_places(asked))
        return Identity(
            config=to_values(self.config),
            prompts={
                "training prompts": self.prompts.fingerprint,
                "held-out prompts": f"{asked}, rows {self.task.eval_digest}, sample {sample}",
            },
            reward=self.config.reward.fn or self.task.default_reward,
        )

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a completion: the tokenizer's eos and those of
        generation_config.json.
        """
        ids = [self.tokenizer.eos_token_id]
        file = self.model_path / "generation_config.json"
        if file.is_file():
            more = read_json(file).get("eos_token_id")
            ids += more if isinstance(more, list) else [more]
            if not all(i is None or type(i) is int for i in ids):
                raise ValueError(
                    f"{file}: eos_token_id={more!r}: need a token id, or a list of them"
                )
        return tuple(sorted({i for i in ids if i is not None}))

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def eval_due(self, version: int) -> bool:
        every = self.config.eval.every
        return bool(every and self.eval_prompts) and (
            version % every == 0 or version == self.config.max_steps
        )

    def checkpoint_due(self, version: int) -> bool:
        every = self.config.checkpoint.every
        return bool(every) and version % every == 0

    @property
    def settings(self) -> RunSettings:
        c = self.config
        return RunSettings(
            self.run.path,
            self.run.resume_from,
            c.checkpoint.keep,
            c.timeout_s,
            c.heartbeat_timeout_s,
            c.stop_s,
            offload=tuple(c.placement.colocate or ()) if c.offload else (),
            eval_target=c.eval.target,
            trace=c.metrics.trace,
            truncate=c.on_deadline == "truncate",
            straggler_factor=c.straggler_factor,
            identity=self.identity.to_json(),
            stale_tickets=self.run.stale_tickets,
        )

    def ledger(self) -> TicketLedger:
        c = self.config
        return TicketLedger(
            groups_per_step=c.groups_per_step,
            max_lag=c.max_lag,
            overcommit=c.overcommit,
            constants=Constants(**dataclasses.asdict(c.governor)),
            num_dp_ranks=len(self.placement["trainer"]) // c.trainer.tensor_parallel,
            num_generators=len(self.placement["generator"]) // c.generator.tensor_parallel,
            resume_in_work=c.resumes_partials,
            initial_groups=self.initial_groups,
        )

    @property
    def initial_groups(self) -> int:
        """Groups that a replay buffer holds before the first step."""
        buffer = self.config.buffer
        if buffer.kind == "fifo" or buffer.initial_completions is None:
            return self.config.groups_per_step
        return -(-buffer.initial_completions // self.config.group_size)

    @property
    def replay_lag(self) -> int | None:
        """Steps that a completion drawn from a replay buffer is old at most; None where max_lag
        sets no bound.
        """
        c = self.config
        if c.max_lag is None:
            return None
        dp_ranks = len(self.placement["trainer"]) // c.trainer.tensor_parallel
        return lag_bound(
            max_lag=c.max_lag,
            completions_per_step=c.groups_per_step // dp_ranks * c.group_size,
            group_size=c.group_size,
            sync_period=c.buffer.sync_period,
            max_size=c.buffer.max_size // dp_ranks,
        )

    def reference_due(self, version: int) -> bool:
        """Whether the reference is reset to this version."""
        every = self.config.reference.reset_every
        return bool(every) and version > 0 and version % every == 0

    def writer(self) -> RowWriter:
        """The leader's book of metrics, with the console and what else the config asks for."""
        m = self.config.metrics
        sinks = build_sinks(
            self.run.path,
            max_steps=self.config.max_steps,
            tensorboard=m.tensorboard,
            wandb=m.wandb,
            config=to_values(self.config),
        )
        self._writer = RowWriter(self.run.path, sinks, eval_due=self.eval_due, first_step=0)
        return self._writer

    @property
    def hosts(self) -> str:
        """Which ranks host what, for people."""
        m = self.config.generator.tensor_parallel
        shared = {"generator": f" (tensor parallel {m})"} if m > 1 else {}
        return "  ".join(
            f"{name} {','.join(map(str, ranks))}{shared.get(name, '')}"
            for name, ranks in self.placement.items()
        )

    def announce(self) -> None:
        c = self.config
        overcommit = "synchronous" if c.max_lag == 0 else f"overcommit {c.overcommit}"
        if c.buffer.kind == "replay":
            overcommit += f", replay of the newest {c.buffer.max_size:,} completions"
            if self.replay_lag is not None:
                overcommit += f", at most {self.replay_lag:,} steps old"
        print(
            f"llamarl  {self.model_path.name} on {c.task.kind}, {c.groups_per_step} x {c.group_size} completions a step, {c.loss.fn}"
        )
        print(
            f"ranks    {self.hosts}  ({self.world.device.type}, {torch.get_num_threads()} thread(s) each)"
        )
        print(f"float32  {self.world.products}")
        ends = ", stragglers end at their deadline" if c.on_deadline == "truncate" else ""
        print(f"async    max_lag {'none' if c.max_lag is None else c.max_lag}, {overcommit}{ends}")
        resumed = f", resumed from {self.run.resume_from.name}" if self.run.resume_from else ""
        print(f"run      {self.run.path}{resumed}", flush=True)

    def conclude(self) -> None:
        if self._writer is not None:
            print(f"\n{self._writer.summary()}")
            print(
                f"model      {self.run.path / 'checkpoints' / 'latest'} names the newest; its hf/ is a Hugging Face directory",
                flush=True,
            )


@contextmanager
def launch(config: Config) -> Iterator[Job]:
    """Join the world, open the run directory, and yield the job; say how it ended.

    Bad input (data, model, run directory) is one clear message and exit code 2; a failure of the
    run is exit code 1.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s", force=True
    )
    threads = threads_per_rank(config.threads, synchronous=config.max_lag == 0)
    rank = int(os.environ.get("RANK", 0))
    code = 0
    run: RunDirectory | None = None
    try:
        world = init_world(
            threads=threads, timeout_s=config.timeout_s, reproducible=config.max_lag == 0
        )
        torch.manual_seed(config.seed)
        job = Job(config, world, RunDirectory(Path(config.run_dir or "runs/(new)"), None))
        check_inputs(job)  # before there is a directory
        with bad_input():
            if config.dry_run:
                from llamarl.launch.dry_run import dry_run

                dry_run(job)
                raise SystemExit(0)
            if config.reward.fn and world.rank == 0:  # which makes the directory
                check_reward(config.reward.fn, [], memory_mb=config.reward.memory_mb)
            identity = job.identity
        job.run = run = open_run(config, world, identity, job.prompts)
        if world.rank == 0:
            job.announce()
        yield job
        job.conclude()
    except (RunDirectoryError, BadInput) as error:
        if rank == 0:
            print(f"llamarl: {error}", file=sys.stderr, flush=True)
        code = EXIT_BAD_INPUT
    except RUN_ENDS as error:
        said = "\n".join([str(error), *getattr(error, "__notes__", ())])
        print(f"llamarl: rank {rank}: {said}", file=sys.stderr, flush=True)
        code = EXIT_FAILED
    except dist.DistError as error:
        why = "the store through which the ranks meet and talk did not answer; was the launcher stopped, or another rank?"
        print(
            f"llamarl: rank {rank}: {why} ({str(error).splitlines()[0]})",
            file=sys.stderr,
            flush=True,
        )
        code = EXIT_FAILED
    finally:
        if run is not None:
            run.release()
        # A failed peer cannot take part in an orderly end; the process ends with its sockets.
        if code == 0 and dist.is_initialized():
            dist.destroy_process_group()
    if code:
        sys.stdout.flush()
        os._exit(code)
