"""Job: everything that the executors of one run are built from, and the way to run their graph."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from llamarl.checkpoint.checkpointer import LATEST
from llamarl.comm.channel import Channel
from llamarl.comm.groups import World
from llamarl.config.command_line import Config
from llamarl.config.conversion import to_values
from llamarl.config.placement import TINY_MODEL, placement_of
from llamarl.config.sections.buffer import ReplayBufferSettings
from llamarl.config.sections.victim import ATTACK, NoVictimSettings, placed_victim
from llamarl.controller import ExecutorController, RunLimits
from llamarl.errors import NoWeights
from llamarl.executor import Executor
from llamarl.launch.graph import channels_between
from llamarl.launch.outcome import has_finished, recorded
from llamarl.launch.run_directory import RunDirectory
from llamarl.launch.tasks import TaskBuilder
from llamarl.launch.templates import check_template_ends
from llamarl.learning.losses import resolve_loss
from llamarl.learning.losses.common import has_mark
from llamarl.learning.replay import lag_bound
from llamarl.learning.samples import SampleMaker
from llamarl.memory import MicrobatchSize, longest_microbatch
from llamarl.models.attention import rotary_of
from llamarl.models.config import Lora, ModelConfig, check_sizes, read_config
from llamarl.models.directory import check_files, read_json
from llamarl.models.hf import load_tokenizer, weights_of
from llamarl.models.resolved import check_as_transformers_reads
from llamarl.observe import RowWriter, build_sinks
from llamarl.observe.expected import expectation_of, verdict
from llamarl.observe.samples import SampleFile
from llamarl.tasks.base import PromptMaker, Task
from llamarl.tasks.held_out import EvalSet, HeldOut
from llamarl.tasks.list_task import Remembered, here
from llamarl.tasks.mixture import MixtureTask
from llamarl.tasks.special import turn_end
from llamarl.tickets.governors import Constants
from llamarl.tickets.ledger import TicketLedger, free_overcommit
from llamarl.tickets.prompts import AnyPrompts, fixed, prompts_of
from llamarl.tickets.sampler import DifficultySampler, PromptSampler
from llamarl.types import Prompt

# What a tokenizer is made of, of these the JSON.
_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.json",
)


def read_tokenizer(path: Path, *, chat: bool):
    """Return transformers' tokenizer of a model directory. chat: try its chat template, because it
    will be used. FileNotFoundError or ValueError names the file that is wrong.
    """
    tokenizer = _loaded_tokenizer(path)
    if chat:
        check_template_ends(tokenizer, path)
    return tokenizer


def _loaded_tokenizer(path: Path):
    try:
        return load_tokenizer(path)
    except FileNotFoundError:
        raise
    except Exception as error:  # transformers and tokenizers raise anything, and name no file
        check_files(path)
        for name in _TOKENIZER_FILES:
            file = path / name
            if file.is_file():
                read_json(file)  # raises, with the reason, if the file is no JSON
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{path / 'tokenizer_config.json'}: the tokenizer is code in this directory "
                "(auto_map), which is never run; need a tokenizer.json that transformers reads"
            ) from error
        file = path / "tokenizer.json"
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"{file}: transformers makes no tokenizer from it ({what}); fetch it again"
        ) from error


def read_model(path: str | Path) -> ModelConfig:
    """Read a model directory's config.json, for a decoder that will be computed, and compare it
    with what transformers reads. ValueError or FileNotFoundError names the file.
    """
    model = read_config(path)
    try:
        check_sizes(model)
        rotary_of(model)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{Path(path) / 'config.json'}: {error}") from error
    if Path(path) != TINY_MODEL:  # which a test compares: transformers takes a second to load
        check_as_transformers_reads(Path(path), model)
    return model


def ranges(ranks: Collection[int]) -> str:
    """Return ascending numbers with runs of more than two as first-last: "0-255,511"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = []
    for run in runs:
        if len(run) > 2:
            words.append(f"{run[0]}-{run[-1]}")
        else:
            words += map(str, run)
    return ",".join(words)


def stop_tokens(path: Path, tokenizer, *, chat: bool = True) -> tuple[int, ...]:
    """Return every token that ends a completion: the tokenizer's, those of generation_config.json
    or without that of config.json, as transformers has it, and with `chat` the one that the chat
    template ends a reply with. ValueError for a token that is no number.
    """
    ids = [tokenizer.eos_token_id]
    if chat:
        ids.append(turn_end(tokenizer))
    file = end_tokens_file(path)
    if file.is_file():
        more = read_json(file).get("eos_token_id")
        ids += more if isinstance(more, list) else [more]
        if not all(i is None or type(i) is int for i in ids):
            raise ValueError(
                f"{file}: eos_token_id={more!r}: need a token id, or a list of token ids"
            )
    return tuple(sorted({i for i in ids if i is not None}))


def end_tokens_file(path: Path) -> Path:
    """Return the file of a model directory that lists end tokens beside the tokenizer's."""
    own = path / "generation_config.json"
    return own if own.is_file() else path / "config.json"


@dataclasses.dataclass(frozen=True)
class ScoredText:
    """Text and tokens that a model may be asked to score.

    tokenizer: that of the model that sampled them. longest: the most tokens of a prompt and what
    follows it; longest_keys: the keys that set it. chat, system_prompt: how that model reads
    prompts.
    """

    tokenizer: Any
    longest: int
    longest_keys: str
    chat: bool
    system_prompt: str | None

    @property
    def conversation(self) -> dict[str, Any]:
        """How the model read a prompt, for RewardPool: chat and system_prompt."""
        has_template = bool(getattr(self.tokenizer, "chat_template", None))
        return {"chat": self.chat and has_template, "system_prompt": self.system_prompt}


class Job:
    """The job of a run: what its executors share. It is the same on every rank, except for
    `world.rank`.

    directory: the run's; until it is opened, the place where it will be. remembered: reads the rows
    of files.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        directory: RunDirectory,
        remembered: Remembered = here,
    ):
        self._remembered = remembered
        self.config = config
        self.world = world
        self.directory = directory
        self.placement = placement_of(config, world.size)
        self.model_path = Path(config.model.path) if config.model.path else TINY_MODEL
        self._writer: RowWriter | None = None
        self._stopped_after: int | None = None  # on the leader, if it was stopped
        self.without_weights: list[str] = []  # the weights that a dry run did not find, in words

    @contextmanager
    def weights_may_wait(self) -> Iterator[None]:
        """Let a dry run go on without the weights of a model directory, and note them in
        `without_weights`. A run needs them: NoWeights.
        """
        try:
            yield
        except NoWeights as error:
            if not self.config.dry_run:
                raise
            self.without_weights.append(str(error).partition(";")[0])

    def check_weights(
        self, path: str | Path, model: ModelConfig, *, may_lack: Collection[str] = ()
    ) -> None:
        """Check that a directory has the weights of its config.json; see weights_of and
        weights_may_wait.
        """
        with self.weights_may_wait():
            weights_of(path, model, may_lack=may_lack)

    @property
    def lora(self) -> Lora | None:
        """The adapters beside the policy's weights; None where the weights themselves are
        trained.
        """
        lora = self.config.trainer.lora
        if not lora.rank:
            return None
        return Lora(
            rank=lora.rank,
            alpha=lora.alpha,
            targets=tuple(lora.targets),
            seed=self.config.seed,
        )

    @cached_property
    def tokenizer(self):
        """The policy's tokenizer."""
        return read_tokenizer(self.model_path, chat=self.config.shows_turns)

    @property
    def victim_path(self) -> Path | None:
        """The directory of the victim; None without one."""
        victim = self.config.victim
        return None if isinstance(victim, NoVictimSettings) else Path(victim.path or TINY_MODEL)

    @cached_property
    def victim_tokenizer(self):
        """The victim's tokenizer. Only for a job with a victim."""
        victim = self.config.victim
        assert self.victim_path is not None, "there is no victim: victim=none"
        assert not isinstance(victim, NoVictimSettings), "there is no victim: victim=none"
        return read_tokenizer(self.victim_path, chat=victim.chat)

    @cached_property
    def task(self) -> Task:
        """The task, with its prompts."""
        return self._tasks.task(self.config.task, self.config.eval.num_prompts or 1)

    @property
    def _tasks(self) -> TaskBuilder:
        return TaskBuilder(self.tokenizer, self.config.seed, self._remembered)

    @cached_property
    def prompts(self) -> AnyPrompts:
        """The prompts of training, by ticket."""
        chosen = self.config.tickets.sampler != "uniform"
        return prompts_of(self.task, self.config.seed, chosen=chosen)

    @property
    def fixed_prompts(self) -> AnyPrompts:
        """Prompts that are a function of the ticket's number alone, whoever chooses."""
        return fixed(self.prompts)

    @cached_property
    def held_out(self) -> HeldOut:
        """The task's held-out prompts, and those of eval.sets."""
        c = self.config.eval
        return self._tasks.held_out(self.task, c.num_prompts, c.sets)

    @property
    def eval_sets(self) -> tuple[EvalSet, ...]:
        """The sets of held-out prompts that an evaluation asks."""
        return self.held_out.sets if self.config.eval.every else ()

    @property
    def set_rewards(self) -> list[str]:
        """The rewards of the kinds of eval.sets, each once."""
        return list(dict.fromkeys(self.held_out.rewards.values()))

    @property
    def part_rewards(self) -> list[str]:
        """The rewards of the kinds of a mixture's parts, each once; none for another task."""
        if not isinstance(self.task, MixtureTask):
            return []
        return list(dict.fromkeys(part.default_reward for part in self.task.parts.values()))

    @cached_property
    def eval_prompts(self) -> dict[int, Prompt]:
        """The prompts of those sets, by number; none if nothing is evaluated."""
        if not self.config.eval.every:
            return {}
        return self.held_out.asked(self.eval_sets)

    @cached_property
    def prompt_fingerprints(self) -> dict[str, str]:
        """Texts that are equal only if the prompts are equal."""
        # Also with eval.every=0, because the held-out prompts stay the same when a run goes on
        # without evaluations.
        return {
            "training prompts": self.prompts.fingerprint,
            "held-out prompts": self.held_out.fingerprint,
        }

    @property
    def scored(self) -> ScoredText:
        """The text and tokens that the reward scores: completions, or replies to them."""
        victim = self.config.victim
        if isinstance(victim, NoVictimSettings):
            return self.sampled
        return ScoredText(
            tokenizer=self.victim_tokenizer,
            longest=victim.longest,
            longest_keys="victim.max_prompt_tokens + victim.max_new_tokens",
            chat=victim.chat,
            system_prompt=victim.system_prompt,
        )

    @property
    def sampled(self) -> ScoredText:
        """The text and tokens that the policy samples."""
        task = self.config.task
        return ScoredText(
            tokenizer=self.tokenizer,
            longest=self.config.longest_asked,
            longest_keys=self.config.longest_keys,
            chat=task.chat,
            system_prompt=task.system_prompt,
        )

    def victim_prompt_ids(self, attack: str) -> list[int]:
        """Return the victim's prompt for an attack: token ids [P]. ValueError if the chat template
        refuses it.
        """
        template = placed_victim(self.config.victim).template
        return self._victim_maker.filled_ids(template, ATTACK, attack)

    @cached_property
    def _victim_maker(self) -> PromptMaker:
        victim = placed_victim(self.config.victim)
        return PromptMaker(
            self.victim_tokenizer,
            chat=victim.chat,
            system_prompt=victim.system_prompt,
            max_prompt_tokens=victim.max_prompt_tokens,
        )

    def decode_answer(self, token_ids: list[int]) -> str:
        """Return the text of a reply's tokens."""
        return self.victim_tokenizer.decode(token_ids, skip_special_tokens=True)

    def decode_answer_raw(self, token_ids: list[int]) -> str:
        """Return the text of a reply's tokens, with special tokens."""
        return self.victim_tokenizer.decode(token_ids, skip_special_tokens=False)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a completion, see stop_tokens."""
        return stop_tokens(self.model_path, self.tokenizer, chat=self.config.shows_turns)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of the policy's tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def decode_raw(self, token_ids: list[int]) -> str:
        """Return the text of the policy's tokens, with special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def eval_due(self, version: int) -> bool:
        """Whether this version is evaluated."""
        if not self.eval_prompts:
            return False
        return version % self.config.eval.every == 0 or version == self.config.max_steps

    def run(
        self,
        executors: list[Executor],
        channels: list[Channel] | None = None,
    ) -> None:
        """Run the graph to its end. ValueError if executors do not fit together.

        executors: in flow order; `placement` gives the ranks of each by name, also for one that the
        config does not place. channels: those between them; None: derive them from the records that
        executors consume and produce.
        """
        if channels is None:
            channels = channels_between(executors)
        c = self.config
        initial_groups = c.groups_per_step
        if c.buffer.kind == "replay" and c.buffer.initial_completions is not None:
            initial_groups = math.ceil(c.buffer.initial_completions / c.group_size)
        ledger = TicketLedger(
            groups_per_step=c.groups_per_step,
            max_lag=c.max_lag,
            overcommit=c.overcommit,
            constants=Constants(**dataclasses.asdict(c.governor)),
            num_pools=self.num_buffers,
            num_generators=self.num_generators,
            resume_in_work=c.resumes_partials,
            initial_groups=initial_groups,
            sync_period=self.sync_period,
            max_steps=c.max_steps,
            max_refill=c.tickets.max_refill if c.tickets.informative else 0,
            sampler=self._sampler(),
        )
        settings = RunLimits(
            run_dir=self.directory.path,
            resume_from=self.directory.resume_from,
            keep_checkpoints=c.checkpoint.keep,
            timeout_s=c.timeout_s,
            heartbeat_timeout_s=c.heartbeat_timeout_s,
            stop_s=c.stop_s,
            offload=tuple(c.placement.colocate or ()) if c.offload else (),
            eval_target=c.eval.target,
            trace=c.metrics.trace,
            truncate=c.on_deadline == "truncate",
            straggler_factor=c.straggler_factor,
            identity=self.directory.identity,
            stale_tickets=self.directory.stale_tickets,
        )
        controller = ExecutorController(
            executors=executors,
            channels=channels,
            placement=self.placement,
            ledger=ledger,
            world=self.world,
            settings=settings,
            make_writer=self.writer,
        )
        with recorded(controller, self.directory.path, max_steps=c.max_steps):
            controller.run()
        if not has_finished(controller, c.max_steps):
            self._stopped_after = controller.step

    def _sampler(self) -> PromptSampler | None:
        """Return what chooses prompts; None where they come in the stream's order."""
        c = self.config
        if c.tickets.sampler == "uniform":
            return None
        return DifficultySampler(
            num_prompts=self.task.num_train,
            group_size=c.group_size,
            seed=c.seed,
            half_life=c.tickets.half_life,
        )

    @property
    def num_generators(self) -> int:
        """How many replicas of the generator there are. The ranks that share a copy of the model
        are one.
        """
        return len(self.placement["generator"]) // self.config.generator.tensor_parallel

    @property
    def sync_period(self) -> int:
        """Steps after which new groups join the buffer."""
        buffer = self.config.buffer
        return buffer.sync_period if isinstance(buffer, ReplayBufferSettings) else 1

    @property
    def num_on_their_way(self) -> int:
        """How many groups may be between the ledger and the trainer, if nothing bounds the lag."""
        c = self.config
        overcommit = c.overcommit
        if isinstance(overcommit, str):
            overcommit = free_overcommit(c.groups_per_step, self.num_generators)
        return c.groups_per_step + overcommit

    @property
    def num_dp_ranks(self) -> int:
        """How many data-parallel ranks the trainer has."""
        return len(self.placement["trainer"]) // self.config.trainer.tensor_parallel

    @property
    def trained_group_size(self) -> int:
        """How many completions of one prompt a trainer rank trains on."""
        if self.config.splits_prompts:
            return self.config.trained_per_prompt // self.num_dp_ranks
        return self.config.group_size

    @property
    def groups_of_update(self) -> int:
        """How many groups a trainer rank has in one optimizer update."""
        c = self.config
        ranks = 1 if c.splits_prompts else self.num_dp_ranks
        return max(1, c.groups_per_step // (ranks * c.trainer.minibatches_per_step))

    @property
    def longest_microbatch(self) -> MicrobatchSize:
        """The longest microbatch of the trainer that the config allows."""
        c = self.config
        return longest_microbatch(
            prompt_tokens=c.longest - c.max_new_tokens,
            completion_tokens=c.max_new_tokens,
            group_size=self.trained_group_size,
            budget_tokens=c.trainer.microbatch_tokens,
            whole_groups=has_mark(resolve_loss(c.loss.fn), "whole_groups"),
            num_groups=self.groups_of_update,
        )

    @property
    def num_buffers(self) -> int:
        """How many buffers feed the trainer: one for each data-parallel rank, or one for all."""
        return 1 if self.config.draws_together else self.num_dp_ranks

    @property
    def replay_lag(self) -> int | None:
        """Most steps that a completion drawn from a replay buffer may be old.

        None if max_lag sets no bound.
        """
        c = self.config
        if c.max_lag is None:
            return None
        assert isinstance(c.buffer, ReplayBufferSettings), "called only with a replay buffer"
        return lag_bound(
            max_lag=c.max_lag,
            completions_per_step=c.groups_per_step // self.num_buffers * c.group_size,
            group_size=c.group_size,
            sync_period=c.buffer.sync_period,
            max_size=c.buffer.max_size // self.num_buffers,
        )

    def writer(self) -> RowWriter:
        """Make what writes the leader's metrics: the rows, the console, and what else the config
        asks for.
        """
        m = self.config.metrics
        samples = SampleFile(self.directory.path)
        sinks = build_sinks(
            self.directory.path,
            max_steps=self.config.max_steps,
            free_running=self.sync_period if self.config.max_lag is None else None,
            tensorboard=m.tensorboard,
            wandb=m.wandb,
            config=to_values(self.config),
            samples=samples,
            show_every=m.show_every if m.samples else 0,
        )
        self._writer = RowWriter(
            self.directory.path, sinks, eval_due=self.eval_due, first_step=0, samples=samples
        )
        return self._writer

    @property
    def sample_maker(self) -> SampleMaker | None:
        """What makes the samples that people look at; None where none are kept."""
        if not self.config.metrics.samples:
            return None
        return SampleMaker(
            num_groups=self.config.metrics.samples,
            decode=self.decode_raw,
            parts=[part.name for part in self.config.reward_parts],
        )

    @property
    def hosts(self) -> str:
        """Which ranks host which executors, in words."""
        tensor_parallel = self.config.generator.tensor_parallel
        hosts = {name: ranges(ranks) for name, ranks in self.placement.items()}
        if tensor_parallel > 1:
            hosts["generator"] += f" (tensor parallel {tensor_parallel})"
        return "  ".join(f"{name} {ranks}" for name, ranks in hosts.items())

    def conclude(self) -> None:
        """Print how the run went, on the leader."""
        if self._writer is None:
            return
        print(f"\n{self._writer.summary()}")
        if self._stopped_after is None:
            known = expectation_of(self.config)
            if known is not None:
                print(f"expected   {verdict(known, self._writer.file.read())}")
        if self._stopped_after is not None:
            steps = f"{self._stopped_after} of {self.config.max_steps}"
            print(f"stopped    after step {steps}: resume=auto goes on")
        checkpoints = self.directory.path / "checkpoints"
        latest = checkpoints / LATEST
        if latest.is_file():
            newest = checkpoints / latest.read_text().strip()
            print(f"model      {newest / 'hf'}, a Hugging Face directory", flush=True)
