"""JobInputs: everything that a job reads, from tokenizers to prompts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from operator import itemgetter
from pathlib import Path

from llamarl.config.command_line import Config
from llamarl.config.placement import TINY_MODEL
from llamarl.config.sections.victim import ATTACK, NoVictimSettings, placed_victim
from llamarl.errors import NoWeights
from llamarl.launch.tasks import TaskBuilder
from llamarl.models.config import ModelConfig
from llamarl.models.given import read_tokenizer, template_file
from llamarl.models.hf import weights_of
from llamarl.models.shape import Lora
from llamarl.scoring.embedding import EmbedderSettings, check_sentence_encoder
from llamarl.scoring.kinds.kind import ScoredText
from llamarl.tasks.base import PromptMaker, Task
from llamarl.tasks.list_task import Remembered, here
from llamarl.tasks.parts import EvalSet, HeldOut, MixtureTask
from llamarl.tasks.special import stop_tokens
from llamarl.tickets.prompts import AnyPrompts, fixed, prompts_of
from llamarl.types import Prompt
from llamarl.words.choices import START


class JobInputs:
    """What a job reads. It is the same on every rank.

        inputs = JobInputs(config)
        inputs.task.train_prompt(0).text       # "What is 17 + 25?"
        inputs.decode(completion.token_ids)

    Each part is read when it is first asked for. remembered: reads the rows of files. is_told:
    whether this rank warns of what it finds.
    """

    def __init__(self, config: Config, remembered: Remembered = here, *, is_told: bool = True):
        self.config = config
        self.is_told = is_told
        self._remembered = remembered
        self.model_path = Path(config.model.path) if config.model.path else TINY_MODEL
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

    def embedder(self, given: str) -> EmbedderSettings:
        """Return the settings of an embedder that is given as START or a directory."""
        is_policy = given == START
        return EmbedderSettings(
            path=str(self.model_path) if is_policy else given,
            is_policy=is_policy,
            dtype=self.config.model.dtype,
            microbatch_tokens=self.config.trainer.microbatch_tokens,
        )

    def check_embedder(self, given: str, key: str) -> None:
        """Check the directory and the tokenizer of an encoder; START is checked elsewhere.
        ValueError that names the key and what is wrong.
        """
        if given == START:
            return
        try:
            with self.weights_may_wait():
                check_sentence_encoder(given)
            read_tokenizer(Path(given), chat=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{key}: {error}") from error

    @property
    def reproducible(self) -> bool:
        """Whether the run promises the same bits from run to run."""
        return self.config.reproducible

    @property
    def groups_per_step(self) -> int:
        """Prompts of a training step."""
        return self.config.groups_per_step

    @property
    def environment_paths(self) -> list[str]:
        """The import paths of the environments that play."""
        return [one.environment for one in self.config.environments.values()]

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
        options = self.config.model.template_options
        return read_tokenizer(self.model_path, chat=self.config.shows_turns, options=options)

    @property
    def victim_path(self) -> Path | None:
        """The directory of the victim; None without one."""
        victim = self.config.victim
        return None if isinstance(victim, NoVictimSettings) else Path(victim.path or TINY_MODEL)

    @property
    def reference_paths(self) -> list[Path]:
        """The directories of the reference's models, each once."""
        given = dict.fromkeys(self.config.reference.given.values())
        if not given:
            return [self.model_path]
        return list(map(Path, given))

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

    @contextmanager
    def chat_template_of(self, path: Path) -> Iterator[None]:
        """Turn errors of a directory's chat template into a ValueError that names its file."""
        from jinja2 import TemplateError

        try:
            yield
        except TemplateError as error:
            file = template_file(path)
            what = " ".join(f"{type(error).__name__}: {error}".split())
            remedy = "unset task.system_prompt" if self.config.task.system_prompt else "correct it"
            raise ValueError(
                f"{file}: its chat template failed ({what}); {remedy}, or set task.chat=false"
            ) from error

    def lacking(self, path: Path, rows: int) -> str:
        """Return the first of the policy's tokens that a model of so many rows does not have at its
        id, in words; "" if it has all. Without a tokenizer in its directory the rows alone say it.
        """
        theirs = ours = self.tokenizer.get_vocab()
        if (path / "tokenizer_config.json").is_file():
            theirs = read_tokenizer(path, chat=False).get_vocab()
        for token, index in sorted(ours.items(), key=itemgetter(1)):
            if theirs.get(token) != index:
                there = "no id"
                if token in theirs:
                    there = f"id {theirs[token]}"
                return f"token {token!r} has id {index}, and {there} in {path}"
            if index >= rows:
                return f"token {token!r} has id {index}, and {path} has {rows} rows"
        return ""

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
