"""From a config to a job that can run: world, run directory, data, tokenizer, and what is said at start and end.

with launch(config) as job:
    ...                     # build executors from job, run the controller
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import logging
import os
import sys
from contextlib import contextmanager
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Iterator

import torch
import torch.distributed as dist

from llamarl.checkpoint import CheckpointError
from llamarl.config import Config, placement_of, to_values
from llamarl.control import DeadlineExceeded, PeerDied
from llamarl.controller import RunSettings
from llamarl.conversion import did_you_mean
from llamarl.ddma.links import WeightsError
from llamarl.governors import Constants
from llamarl.learning.replay import lag_bound
from llamarl.learning.update import NotFinite
from llamarl.models.config import ModelConfig, read_config, read_json
from llamarl.models.hf import load_tokenizer
from llamarl.observe import RowWriter, build_sinks
from llamarl.parity import ParityError
from llamarl.placement import World, init_world, threads_per_rank
from llamarl.ranks import TINY_MODEL
from llamarl.run import RunDirectory, RunDirectoryError, open_run
from llamarl.tasks.base import Task
from llamarl.tasks.build import build_task
from llamarl.tasks.pool import RewardError
from llamarl.tickets import PromptStream, TicketLedger
from llamarl.types import Prompt

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1

# Ends that explain themselves: a message, no traceback.
RUN_ENDS = (PeerDied, DeadlineExceeded, ParityError, NotFinite, RewardError, WeightsError, CheckpointError)

_MAKE_NAMES = {"globals", "vars", "locals", "exec", "eval", "setattr", "modules", "__dict__"}

log = logging.getLogger("llamarl")


class Job:
    """What the stations of one run share. Everything is the same on every rank but `world.rank`."""

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
            file, what = self.model_path / "tokenizer.json", f"{type(error).__name__}: {error}".split("\n")[0]
            raise ValueError(f"{file}: no tokenizer can be made of it ({what}); fetch it again") from error

    @cached_property
    def task(self) -> Task:
        t = self.config.task
        return build_task(
            t.kind, self.tokenizer, path=t.path, eval_path=t.eval_path, prompt_key=t.prompt_key, answer_key=t.answer_key,
            name=t.name, chat=t.chat, system_prompt=t.system_prompt, max_prompt_tokens=t.max_prompt_tokens,
            num_eval=self.config.eval.num_prompts or 1, seed=self.config.seed,
        )  # fmt: skip

    @cached_property
    def prompts(self) -> PromptStream:
        return PromptStream(self.task, self.config.seed)

    @cached_property
    def eval_prompts(self) -> list[Prompt]:
        count = min(self.config.eval.num_prompts, self.task.num_eval) if self.config.eval.every else 0
        return [self.task.eval_prompt(j) for j in range(count)]

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a completion: the tokenizer's eos and those of generation_config.json."""
        ids = [self.tokenizer.eos_token_id]
        file = self.model_path / "generation_config.json"
        if file.is_file():
            more = read_json(file).get("eos_token_id")
            ids += more if isinstance(more, list) else [more]
            if not all(i is None or type(i) is int for i in ids):
                raise ValueError(f"{file}: eos_token_id={more!r}: need a token id, or a list of them")
        return tuple(sorted({i for i in ids if i is not None}))

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def eval_due(self, version: int) -> bool:
        every = self.config.eval.every
        return bool(every and self.eval_prompts) and (version % every == 0 or version == self.config.max_steps)

    def snapshot_due(self, version: int) -> bool:
        every = self.config.checkpoint.every
        return bool(every) and version % every == 0

    @property
    def settings(self) -> RunSettings:
        c = self.config
        return RunSettings(
            self.run.path,
            self.run.resume_from,
            c.checkpoint.keep,
            c.deadline_s,
            c.heartbeat_timeout_s,
            c.stop_s,
            offload=tuple(c.placement.colocate or ()) if c.offload else (),
            target_accuracy=c.eval.target,
            trace=c.metrics.trace,
            truncate=c.on_deadline == "truncate",
            straggler_factor=c.straggler_factor,
        )

    def ledger(self) -> TicketLedger:
        c = self.config
        return TicketLedger(
            groups_per_step=c.groups_per_step, max_lag=c.max_lag, overcommit=c.overcommit,
            constants=Constants(**dataclasses.asdict(c.governor)),
            num_lanes=len(self.placement["trainer"]) // c.trainer.tensor_parallel,
            num_generators=len(self.placement["generator"]) // c.generator.tensor_parallel,
            resume_in_work=c.resumes_partials,
            initial_groups=self.initial_groups,
        )  # fmt: skip

    @property
    def initial_groups(self) -> int:
        """Groups that a replay buffer holds before the first step."""
        completions, size = self.config.buffer.initial_completions, self.config.group_size
        return self.config.groups_per_step if completions is None else -(-completions // size)

    def reference_due(self, version: int) -> bool:
        """Whether the reference is reset to this version."""
        every = self.config.reference.reset_every
        return bool(every) and version > 0 and version % every == 0

    def writer(self) -> RowWriter:
        """The leader's book of metrics, with the console and what else the config asks for."""
        m = self.config.metrics
        sinks = build_sinks(
            self.run.path, max_steps=self.config.max_steps, tensorboard=m.tensorboard, wandb=m.wandb, config=to_values(self.config)
        )  # fmt: skip
        self._writer = RowWriter(self.run.path, sinks, eval_due=self.eval_due, first_step=0)
        return self._writer

    @property
    def hosts(self) -> str:
        """Which ranks host what, for people."""
        m = self.config.generator.tensor_parallel
        shared = {"generator": f" (tensor parallel {m})"} if m > 1 else {}
        return "  ".join(f"{name} {','.join(map(str, ranks))}{shared.get(name, '')}" for name, ranks in self.placement.items())

    def announce(self) -> None:
        c = self.config
        overcommit = "synchronous" if c.max_lag == 0 else f"overcommit {c.overcommit}"
        if c.buffer.kind == "replay":
            overcommit += f", replay of the newest {c.buffer.max_size:,} completions"
            lanes = len(self.placement["trainer"]) // c.trainer.tensor_parallel
            if c.max_lag is not None:
                most = lag_bound(
                    max_lag=c.max_lag, completions_per_step=c.groups_per_step // lanes * c.group_size, group_size=c.group_size,
                    sync_period=c.buffer.sync_period, max_size=c.buffer.max_size // lanes,
                )  # fmt: skip
                overcommit += f", at most {most:,} steps old"
        print(
            f"llamarl  {self.model_path.name} on {c.task.kind}, {c.groups_per_step} x {c.group_size} completions a step, {c.loss.fn}"
        )
        print(f"ranks    {self.hosts}  ({self.world.device.type}, {torch.get_num_threads()} thread(s) each)")
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

    Bad input (data, model, run directory) is one clear message and exit code 2; a failure of the run is exit code 1.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s", force=True)
    threads = threads_per_rank(config.threads, synchronous=config.max_lag == 0)
    world = init_world(threads=threads, deadline_s=config.deadline_s)
    torch.manual_seed(config.seed)
    code = 0
    try:
        job = Job(config, world, RunDirectory(Path(config.run_dir or "runs/(new)"), None))
        check_inputs(job)  # before there is a directory
        if config.dry_run:
            from llamarl.dry_run import dry_run

            with bad_input():
                dry_run(job)
            raise SystemExit(0)
        job.run = open_run(config, world)
        if world.rank == 0:
            job.announce()
        yield job
        job.conclude()
    except (RunDirectoryError, BadInput) as error:
        if world.rank == 0:
            print(f"llamarl: {error}", file=sys.stderr, flush=True)
        code = EXIT_BAD_INPUT
    except RUN_ENDS as error:
        print(f"llamarl: rank {world.rank}: {error}", file=sys.stderr, flush=True)
        code = EXIT_FAILED
    finally:
        # A failed peer cannot take part in an orderly end; the process ends with its sockets.
        if code == 0:
            dist.destroy_process_group()
    if code:
        sys.stdout.flush()
        os._exit(code)


class BadInput(ValueError):
    """Something that the user gave cannot be used."""


@contextmanager
def bad_input() -> Iterator[None]:
    """What is raised inside is the user's to mend: BadInput."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(str(error)) from error


def check_inputs(job: Job) -> None:
    """Model directory, tokenizer, reward and data, on every rank, before any weight is read. BadInput."""
    c = job.config
    with bad_input():
        model = read_config(job.model_path)
        _check_model(job, model)
        _check_tokens(job, model.vocab_size)
        if c.reward.fn:
            check_reward_path(c.reward.fn)
        _check_task(job)
        longest = c.task.max_prompt_tokens + c.max_new_tokens
        if longest > model.max_position_embeddings:
            raise ValueError(
                f"task.max_prompt_tokens + max_new_tokens = {longest}, but the model's context is {model.max_position_embeddings}; lower one of them"
            )


def _check_model(job: Job, model: ModelConfig) -> None:
    """By config.json and the headers of the weights."""
    from llamarl.inference.quantize import quantize_decoder
    from llamarl.models.attention import Rotary
    from llamarl.models.build import build_decoder
    from llamarl.models.hf import SafetensorsDir, check_weights
    from llamarl.models.sharding import parameter_shapes

    try:
        Rotary(model.head_dim, model.rope_theta, model.rope_scaling)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{job.model_path / 'config.json'}: {error}") from error
    check_weights(SafetensorsDir(job.model_path), parameter_shapes(model))
    g = job.config.generator
    if g.kind == "native" and g.quantize != "none":
        try:
            quantize_decoder(build_decoder(model), g.quantize, tuple(g.quantize_keep))  # on the meta device
        except ValueError as error:
            raise ValueError(f"generator.quantize_keep={g.quantize_keep}: {error}") from error


def _check_tokens(job: Job, vocab_size: int) -> None:
    """The tokenizer's ids and the stop tokens are rows of the embedding."""
    but = f"but config.json says vocab_size={vocab_size}; fetch both again"
    vocabulary = job.tokenizer.get_vocab()
    last = max(vocabulary, key=vocabulary.get, default=None)
    if last is not None and vocabulary[last] >= vocab_size:
        raise ValueError(f"{job.model_path / 'tokenizer.json'}: token {last!r} has id {vocabulary[last]}, {but}")
    if wrong := [i for i in job.stop_token_ids if not 0 <= i < vocab_size]:
        raise ValueError(f"{job.model_path / 'generation_config.json'}: eos_token_id={wrong[0]}, {but}")
    if not job.stop_token_ids and job.world.rank == 0:
        log.warning(
            "%s: no eos token in tokenizer_config.json or generation_config.json; completions take max_new_tokens", job.model_path
        )


def _check_task(job: Job) -> None:
    """The data, and the chat template on a prompt of it."""
    from jinja2 import TemplateError

    try:
        job.task.train_prompt(0)
    except TemplateError as error:
        own = job.model_path / "chat_template.jinja"
        file = own if own.is_file() else job.model_path / "tokenizer_config.json"
        what = " ".join(f"{type(error).__name__}: {error}".split())
        remedy = "unset task.system_prompt" if job.config.task.system_prompt else "correct it"
        raise ValueError(f"{file}: its chat template failed ({what}); {remedy}, or set task.chat=false") from error


def check_reward_path(fn: str) -> None:
    """That the module of "module:function" is there and has the name. ValueError if not; silent where only an import can tell.

    Imports nothing: a reward function, unlike a loss, runs in its workers alone.
    """
    where = f"reward.fn={fn}"
    module, _, name = fn.partition(":")
    if not (all(module.split(".")) and name):
        raise ValueError(f'{where}: need an import path "module:function"')
    try:
        spec = _find_module(module, where)
        names = _names_of(spec) if spec and isinstance(spec.loader, SourceFileLoader) else None
    except SyntaxError as error:
        raise ValueError(f"{where}: {error.filename}:{error.lineno}: {error.msg}; correct it") from error
    if names is not None and name not in names:
        shown = ", ".join(sorted(n for n in names if not n.startswith("_"))[:8])
        hint = did_you_mean(name, sorted(names)) or f"; it has {shown or 'no functions'}"
        raise ValueError(f"{where}: {spec.origin} has no function {name}{hint}")


def _find_module(module: str, where: str) -> ModuleSpec | None:
    """Where a reward worker looks: this directory, then sys.path. ValueError if nowhere, None if only an import can tell."""
    path, parent, name = [os.getcwd(), *sys.path], None, ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        try:
            spec = PathFinder.find_spec(name, path) or (None if parent else importlib.util.find_spec(name))
            path = list(spec and spec.submodule_search_locations or [])
        except (KeyError, ValueError):  # a namespace within another; a module without a spec
            return None
        if spec is None:
            made = _names_of(parent) if parent and isinstance(parent.loader, SourceFileLoader) else set()
            if parent and (parent.submodule_search_locations is None or made is None or "__path__" in made):
                return None
            raise ValueError(f"{where}: no module {name} in {os.getcwd()} or on sys.path; correct the name, or install it")
        parent = spec
    return parent


def _names_of(spec: ModuleSpec) -> set[str] | None:
    """What the statements of a module name, by its source; None where it may make names as it runs."""
    tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    names: set[str] = set()
    for node in ast.walk(tree):
        if {getattr(node, "id", None), getattr(node, "attr", None)} & _MAKE_NAMES:
            return None
        names |= set(node.names) if isinstance(node, ast.Global) else set()
    todo = list(tree.body)
    while todo:
        node = todo.pop()
        stored = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None
        named = getattr(node, "asname", None) or getattr(node, "name", None) or stored  # an import, a definition, a variable
        names |= {named.split(".")[0]} if named else set()
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            todo += ast.iter_child_nodes(node)
    return None if names & {"*", "__getattr__"} else names
