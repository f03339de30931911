"""The schema of a run's configuration: its sections, as pydantic reads them.

Each section is a file of llamarl/config/sections/: its keys as fields, the sentence of each under
it (docs/keys.md is made of these), and what must hold between values. llamarl/config/rules.py has
all of it checked. No field has a default, so that every value of a run is in conf/ or on its
command line.

A section of several kinds is a union of dataclasses. Its key `kind`, which the file of conf/ that
was chosen for the section sets, says which of them it is:

    buffer=fifo      buffer.kind                                          FifoBufferSettings
    buffer=replay    buffer.kind, buffer.sync_period, buffer.max_size     ReplayBufferSettings

If only some kinds offer a setting, the others give it as a class constant, so that readers need not
ask which kind it is. A field that decides more than its own value has a Mark
(llamarl/words/fields.py).
"""

from __future__ import annotations

from llamarl.config.files import EVAL_SETS, TASK_PARTS
from llamarl.config.sections.buffer import AnyBufferSettings, ReplayBufferSettings
from llamarl.config.sections.evaluation import EvalSettings
from llamarl.config.sections.generator import AnyGeneratorSettings
from llamarl.config.sections.loss import AnyLossSettings
from llamarl.config.sections.model import ModelSettings
from llamarl.config.sections.placement import PlacementSettings, WeightsSettings
from llamarl.config.sections.reference import AnyReferenceSettings
from llamarl.config.sections.reward import AnyRewardSettings, gold_of, parts_of
from llamarl.config.sections.run import CheckpointSettings, RunMetricsSettings, RunSettings
from llamarl.config.sections.task import (
    AnyTaskSettings,
    HeldOutTaskSettings,
    MixtureSettings,
    PlayedSettings,
)
from llamarl.config.sections.tickets import TicketsSettings
from llamarl.config.sections.trainer import TrainerSettings
from llamarl.config.sections.victim import AnyVictimSettings
from llamarl.scoring.kinds.kind import Given, KindSettings
from llamarl.tickets.governors import GovernorSettings
from llamarl.words.fields import marked, settings_dataclass

HEAD_LR = 1e-3  # a value head's learning rate if trainer.value_lr is null


@settings_dataclass
class Config(RunSettings):
    """The keys of a run, and its sections."""

    governor: GovernorSettings
    tickets: TicketsSettings
    eval: EvalSettings = marked("answers")
    checkpoint: CheckpointSettings = marked("outward")
    weights: WeightsSettings
    metrics: RunMetricsSettings = marked("outward")
    model: ModelSettings
    task: AnyTaskSettings = marked("data", "answers")
    generator: AnyGeneratorSettings = marked("answers")
    reward: AnyRewardSettings = marked("answers")
    victim: AnyVictimSettings = marked("answers")
    reference: AnyReferenceSettings
    buffer: AnyBufferSettings = marked("answers")
    trainer: TrainerSettings
    loss: AnyLossSettings
    placement: PlacementSettings

    @property
    def trained_per_prompt(self) -> int:
        """How many completions of a prompt a step trains on."""
        if isinstance(self.buffer, ReplayBufferSettings):
            return self.buffer.completions_per_prompt or self.group_size
        return self.group_size

    @property
    def draws_together(self) -> bool:
        """Whether all trainer ranks draw from one buffer."""
        return isinstance(self.buffer, ReplayBufferSettings) and self.buffer.draw != "local"

    @property
    def splits_prompts(self) -> bool:
        """Whether each trainer rank trains on a share of every prompt's completions."""
        return isinstance(self.buffer, ReplayBufferSettings) and self.buffer.draw == "split"

    @property
    def shows_turns(self) -> bool:
        """Whether prompts, trained on or held out, are shown to the policy by its chat template."""
        return any(prompts.chat for prompts in self._prompts_of.values())

    @property
    def environments(self) -> dict[str, PlayedSettings]:
        """The environments that play, by the sections that set them."""
        found: dict[str, PlayedSettings] = {}
        for section, prompts in self._prompts_of.items():
            if isinstance(prompts, PlayedSettings):
                found[section] = prompts
        return found

    @property
    def _prompts_of(self) -> dict[str, AnyTaskSettings | HeldOutTaskSettings]:
        """All settings of prompts, trained on or held out, by their sections."""
        found: dict[str, AnyTaskSettings | HeldOutTaskSettings] = {"task": self.task}
        if isinstance(self.task, MixtureSettings):
            for name, part in self.task.parts.items():
                found[f"{TASK_PARTS}.{name}"] = part.prompts
        for name, one in self.eval.sets.items():
            found[f"{EVAL_SETS}.{name}"] = one.prompts
        return found

    @property
    def longest(self) -> int:
        """Most tokens of a training prompt with its completion."""
        return self.task.max_prompt_tokens + self.max_new_tokens

    @property
    def longest_asked(self) -> int:
        """Most tokens of any prompt with its completion, prompts of eval.sets included."""
        return max(self._prompt_tokens.values()) + self.max_new_tokens

    @property
    def longest_keys(self) -> str:
        """The keys that determine longest_asked."""
        most = self._prompt_tokens
        return f"{max(most, key=lambda section: most[section])}.max_prompt_tokens + max_new_tokens"

    @property
    def _prompt_tokens(self) -> dict[str, int]:
        """Most tokens of a prompt, by the section that sets it."""
        most = {section: prompts.max_prompt_tokens for section, prompts in self._prompts_of.items()}
        if isinstance(self.task, MixtureSettings) and self.task.parts:
            del most["task"]  # its parts say it
        return most

    @property
    def kept_tokens(self) -> int:
        """How many places of keys and values a generator keeps while environments work: the most
        that one of these asks for.
        """
        cache_tokens = self.generator.cache_tokens
        if cache_tokens is None:
            cache_tokens = self.generator.max_slots * self.longest_asked
        kept = [0]
        for environment in self.environments.values():
            own = environment.play.kept_tokens
            kept.append(cache_tokens // 2 if own is None else own)
        return max(kept)

    @property
    def is_evaluated(self) -> bool:
        """Whether any held-out prompt is ever asked."""
        return self.eval.is_asked

    @property
    def reward_parts(self) -> tuple[Given, ...]:
        """The settings of what scores, by key: "reward", or "reward.parts.NAME" of each part."""
        return parts_of(self.reward)

    @property
    def scorers(self) -> dict[str, str]:
        """Directories of the models that the reward's ranks hold together, by their sections."""
        found = {part.section: part.settings.sharded_model for part in self.reward_parts}
        return {section: path for section, path in found.items() if path is not None}

    @property
    def given_gold(self) -> Given | None:
        """The scorer that judges evaluations beside the reward: eval.gold. None without one."""
        if self.eval.gold is None:
            return None
        return gold_of(
            self.eval.gold,
            self.eval.gold_label,
            dtype=self.model.dtype,
            microbatch_tokens=self.trainer.microbatch_tokens,
        )

    @property
    def gold(self) -> KindSettings | None:
        """The settings of the scorer that judges evaluations; None without one."""
        return None if self.given_gold is None else self.given_gold.settings

    @property
    def critic_lr(self) -> float:
        """The learning rate of the critic's own parameters. By default a whole model learns at the
        policy's rate, and a head, which starts at 0, at a much higher one.
        """
        t = self.trainer
        if t.value_lr is not None:
            return t.value_lr
        return self.lr if t.critic.trunk == "own" else HEAD_LR

    @property
    def samples_as_trained(self) -> bool:
        """Whether every completion is sampled at the temperature at which it is trained on."""
        return self.generator.samples_at(self.temperature)

    @property
    def samples_otherwise(self) -> str:
        """The key by which completions are sampled from another distribution than the trainer
        scores, so that the logprobs of fresh tokens are not compared. Empty: there is none.
        """
        g = self.generator
        if g.quantize != "none":
            return f"generator.quantize={g.quantize}"
        return "" if self.samples_as_trained else f"generator.temperature={g.temperature}"

    @property
    def updates_in_flight(self) -> bool:
        """Whether a generator takes in new weights while completions are running."""
        return self.generator.updates_in_flight(self.max_lag)

    @property
    def resumes_partials(self) -> bool:
        """Whether a checkpoint's unfinished completions go on."""
        if self.generator.resume_partials is None:
            return not self.synchronous and self.updates_in_flight
        return self.generator.resume_partials
