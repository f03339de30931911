"""The schema of a run's configuration: what may be set, its type and its range.

Keys are explained where their values are, in conf/. No field has a default here, so that every
value of a run is found in conf/ or on its command line. What must hold between values is checked in
llamarl/config/rules.py.

A section of several kinds is a union of dataclasses. Its key `kind`, which the file of conf/ that
was chosen for the section sets, says which of them the section is; a key that only one kind has is
a field of that kind alone:

    buffer=fifo      buffer.kind                                          FifoBufferSettings
    buffer=replay    buffer.kind, buffer.sync_period, buffer.max_size     ReplayBufferSettings

What a kind does not let anyone choose, and its readers ask of every kind, is a constant of the
class.

A field that decides more than its own value says so by a Mark (llamarl/config/marks.py). The
sections of what scores are in llamarl/config/rewards.py, those of tasks in llamarl/config/tasks.py,
those of the buffer and of schedules in llamarl/config/search.py.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from llamarl.config.files import EVAL_SETS
from llamarl.config.loss_options import LOSS_OPTIONS
from llamarl.config.marks import marked, settings_dataclass
from llamarl.config.ranges import (
    Beta,
    Count,
    Natural,
    NonNegative,
    Positive,
    PositiveInterval,
    PositiveShare,
    Range,
    Share,
    Text,
)
from llamarl.config.rewards import (
    AnyRewardSettings,
    AnySourceSettings,
    FunctionSourceSettings,
    ModelSourceSettings,
    NoveltySourceSettings,
    PartsRewardSettings,
)
from llamarl.config.search import (
    AnyTemperatureSettings,
    ConstantBetaSettings,
    CutBetaSettings,
    FifoBufferSettings,
    LinearBetaSettings,
    ReplayBufferSettings,
)
from llamarl.config.tasks import AnyEvalSetSettings, AnyTaskSettings, MixtureSettings
from llamarl.config.victim import AnyVictimSettings
from llamarl.words.choices import (
    Advantages,
    Estimator,
    Governor,
    Quantized,
    Schedule,
    Transport,
    Whiten,
)

HEAD_LR = 1e-3  # of a value head, where trainer.value_lr is null
# Of a gold scorer that is a function: an answer, and the memory of its one worker.
GOLD_TIMEOUT_S = 30.0
GOLD_MEMORY_MB = 4096
START = "start"  # as an embedder: the model that training starts from
Seed = Annotated[int, Range(0, 2**63 - 1)]  # what torch and the counters of sampling hold


@settings_dataclass
class ModelSettings:
    # None: the tiny model that comes with the package.
    path: str | None = marked("data")
    dtype: Literal["float32", "bfloat16"] = marked("answers")


@settings_dataclass
class GeneratorSettings:
    """What every kind of generator has."""

    kind: str
    max_slots: Count
    chunk_tokens: Count
    # None: Config.temperature.
    temperature: PositiveInterval | None = marked("identity")
    top_k: Natural
    top_p: PositiveShare
    min_new_tokens: Natural
    stop: list[str]
    in_flight_updates: bool | None
    max_seconds: Positive | None


@settings_dataclass
class NativeGeneratorSettings(GeneratorSettings):
    kind: Literal["native"]
    tensor_parallel: Count
    recompute_kv: bool
    resume_partials: bool | None
    cache_tokens: Count | None
    prefill_chunk: Count
    quantize: Quantized
    quantize_exclude: list[str]
    max_quantization_kl: Positive


@settings_dataclass
class VLLMGeneratorSettings(GeneratorSettings):
    kind: Literal["vllm"]
    gpu_memory_utilization: PositiveShare

    tensor_parallel: ClassVar[int] = 1  # a vLLM here has one rank
    recompute_kv: ClassVar[bool] = False  # vLLM keeps its cache over new weights
    resume_partials: ClassVar[bool] = False  # it starts unfinished completions again
    cache_tokens: ClassVar[None] = None  # gpu_memory_utilization bounds its cache
    quantize: ClassVar[str] = "none"  # it takes weights as they are
    quantize_exclude: ClassVar[tuple[str, ...]] = ()


@settings_dataclass
class ReferenceSettings:
    """No reference, or one that the trainer itself asks before its update."""

    kind: Literal["none", "adapters_off", "sharded"]

    reset_every: ClassVar[None] = None
    placed: ClassVar[bool] = False  # whether it is an executor, on ranks of its own or shared
    replicate: ClassVar[int] = 1
    tensor_parallel: ClassVar[int] = 1
    stream: ClassVar[bool] = False
    chunk_tokens: ClassVar[None] = None
    cache_tokens: ClassVar[None] = None


@settings_dataclass
class FrozenReferenceSettings:
    kind: Literal["frozen"]
    replicate: Count
    tensor_parallel: Count
    stream: bool
    chunk_tokens: Count | None
    cache_tokens: Count | None

    reset_every: ClassVar[None] = None
    placed: ClassVar[bool] = True


@settings_dataclass
class ResettingReferenceSettings:
    kind: Literal["reset"]
    reset_every: Count
    replicate: Count
    tensor_parallel: Count
    stream: bool

    placed: ClassVar[bool] = True


@settings_dataclass
class LoraSettings:
    rank: Natural
    alpha: Positive
    targets: list[
        Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    ]


@settings_dataclass
class CriticModelSettings:
    trunk: Literal["shared", "own"]
    path: str | None  # None: an own trunk starts as the policy


@settings_dataclass
class ShardedTrainerSettings:
    """What every trainer has that shards a decoder."""

    replicate: Count
    microbatch_tokens: Count
    max_grad_norm: Positive | None
    optimizer: Literal["adamw", "adamw8bit"]
    weight_decay: NonNegative
    beta1: Beta
    beta2: Beta
    eps: Positive
    schedule: Schedule
    compute_dtype: Literal["float32", "bfloat16"]
    activation_checkpointing: bool
    cpu_offload: bool


@settings_dataclass
class TrainerSettings(ShardedTrainerSettings):
    tensor_parallel: Count
    warmup_steps: Natural
    decay_steps: Count | None
    advantages: Advantages
    lora: LoraSettings
    ema_decay: Annotated[float, Range(0, 0.9999999)] | None
    parity_tolerance: Positive
    skip_zero_advantage: bool
    filter_groups: bool
    minibatches_per_step: Count
    updates_per_batch: Count
    missing_eos_penalty: float | None
    reward_kl_coef: NonNegative
    reward_kl_estimator: Estimator
    whiten: Whiten
    gamma: Share
    gae_lambda: Share
    critic: CriticModelSettings
    value_lr: Positive | None
    value_coef: NonNegative
    value_clip: Positive | None


@settings_dataclass
class LossSettings:
    fn: str  # a loss of the package, or module:function
    name: str  # of the chosen file in conf/loss; fn where another function has taken its place
    kl_coef: NonNegative
    kl_estimator: Estimator
    entropy_coef: NonNegative
    options: dict[str, object]  # every further key of loss.*, for the function alone

    def options_for(self, taken: set[str]) -> dict[str, object]:
        """The options for a function that takes these: one of the user's own need not take those
        that the package's losses have.
        """
        return {
            key: value
            for key, value in self.options.items()
            if key in taken or key not in LOSS_OPTIONS
        }


@settings_dataclass
class GovernorSettings:
    start: Natural | None
    least: Natural
    most: Natural | None
    window: Count
    increase: Natural
    decrease: Natural


@settings_dataclass
class EvalSettings:
    every: Natural
    num_prompts: Natural = marked("data")
    num_samples: Natural
    sets: dict[str, AnyEvalSetSettings] = marked("data")  # by names of the user's own
    target: float | None = marked("outward")
    gold: str | None
    gold_label: str | None
    reference_key: str | None
    base: str | None
    embedder: Text | None
    save_samples: bool = marked("outward")


@settings_dataclass
class CheckpointSettings:
    every: Natural
    keep: Count


@settings_dataclass
class PlacementSettings:
    trainer: list[int] | None
    generator: list[int] | None
    reward: list[int] | None
    reference: list[int] | None
    victim: list[int] | None
    colocate: list[str] | None


@settings_dataclass
class WeightsSettings:
    transport: Transport


@settings_dataclass
class MetricsSettings:
    tensorboard: bool
    wandb: bool
    trace: bool


@settings_dataclass
class Config:
    max_steps: Natural
    run_dir: str | None = marked("outward")
    resume: str = marked("outward")
    resume_with_other: list[Literal["data", "reward", "model"]] = marked("outward")
    seed: Seed = marked("identity", "data", "answers", "outward")
    dry_run: bool = marked("outward")
    ranks: Count | None = marked("outward")
    max_lag: Natural | None = marked("identity", "answers")
    overcommit: Natural | Governor
    on_deadline: Literal["wait", "truncate"]
    straggler_factor: Annotated[float, Range(1)] = marked("outward")
    groups_per_step: Count = marked("identity")
    group_size: Count = marked("identity", "answers")
    max_new_tokens: Count = marked("identity", "answers")
    temperature: Positive = marked("identity", "answers")
    lr: Positive
    threads: Count | None = marked("answers", "outward")
    timeout_s: Positive = marked("outward")
    heartbeat_timeout_s: Positive = marked("outward")
    stop_s: Positive
    offload: bool
    governor: GovernorSettings
    beta_schedule: ConstantBetaSettings | LinearBetaSettings | CutBetaSettings
    log_reward_schedule: AnyTemperatureSettings
    reference_schedule: AnyTemperatureSettings
    eval: EvalSettings = marked("answers")
    checkpoint: CheckpointSettings = marked("outward")
    weights: WeightsSettings
    metrics: MetricsSettings = marked("outward")
    model: ModelSettings
    task: AnyTaskSettings = marked("data", "answers")
    generator: NativeGeneratorSettings | VLLMGeneratorSettings = marked("answers")
    reward: AnyRewardSettings = marked("answers")
    victim: AnyVictimSettings = marked("answers")
    reference: ReferenceSettings | FrozenReferenceSettings | ResettingReferenceSettings
    buffer: FifoBufferSettings | ReplayBufferSettings = marked("answers")
    trainer: TrainerSettings
    loss: LossSettings
    placement: PlacementSettings

    @property
    def trained_per_prompt(self) -> int:
        """Completions of a prompt that a step trains on."""
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
        tasks = [self.task, *self.eval.sets.values()]
        if isinstance(self.task, MixtureSettings):
            tasks += self.task.parts.values()
        return any(task.chat for task in tasks)

    @property
    def longest(self) -> int:
        """Tokens of a prompt that is trained on and its completion at most."""
        return self.task.max_prompt_tokens + self.max_new_tokens

    @property
    def longest_asked(self) -> int:
        """Tokens of any prompt and its completion at most, those of eval.sets included."""
        return max(self._prompt_tokens.values()) + self.max_new_tokens

    @property
    def longest_keys(self) -> str:
        """What sets longest_asked."""
        most = self._prompt_tokens
        return f"{max(most, key=lambda section: most[section])}.max_prompt_tokens + max_new_tokens"

    @property
    def _prompt_tokens(self) -> dict[str, int]:
        """Tokens of a prompt at most, by the section that says so."""
        most = {"task": self.task.max_prompt_tokens}
        for name, one in self.eval.sets.items():
            most[f"{EVAL_SETS}.{name}"] = one.max_prompt_tokens
        return most

    @property
    def is_evaluated(self) -> bool:
        """Whether any held-out prompt is ever asked."""
        return self.eval.every > 0 and (self.eval.num_prompts > 0 or bool(self.eval.sets))

    @property
    def reward_parts(self) -> dict[str, AnySourceSettings]:
        """What scores, by key: "reward", or "reward.parts.NAME" of each part."""
        if not isinstance(self.reward, PartsRewardSettings):
            return {"reward": self.reward}
        return {f"reward.parts.{name}": part for name, part in self.reward.parts.items()}

    @property
    def scorers(self) -> dict[str, ModelSourceSettings]:
        """The models among what scores, by key."""
        parts = self.reward_parts.items()
        return {key: part for key, part in parts if isinstance(part, ModelSourceSettings)}

    @property
    def gold(self) -> FunctionSourceSettings | ModelSourceSettings | None:
        """What judges evaluations besides the reward: eval.gold as settings of a scorer."""
        gold = self.eval.gold
        if gold is None:
            return None
        if ":" in gold:
            return FunctionSourceSettings(
                kind="function",
                fn=gold,
                num_workers=1,
                timeout_s=GOLD_TIMEOUT_S,
                memory_mb=GOLD_MEMORY_MB,
            )
        return ModelSourceSettings(
            kind="model",
            path=gold,
            label=self.eval.gold_label,
            dtype=self.model.dtype,
            microbatch_tokens=self.trainer.microbatch_tokens,
            scale=1.0,
            shift=0.0,
        )

    @property
    def scheduled_options(self) -> dict[str, str]:
        """Options of a loss that may change from step to step -> the section of their schedule."""
        return {
            "beta": "beta_schedule",
            "log_reward_temperature": "log_reward_schedule",
            "reference_temperature": "reference_schedule",
        }

    @property
    def embedders(self) -> dict[str, str]:
        """What embeds texts, START or a directory, by key."""
        found = {} if self.eval.embedder is None else {"eval.embedder": self.eval.embedder}
        for key, part in self.reward_parts.items():
            if isinstance(part, NoveltySourceSettings):
                found[f"{key}.embedder"] = part.embedder
        return found

    @property
    def critic_lr(self) -> float:
        """The learning rate of the critic's own parameters: where none is set, that of the policy
        for a whole model, and much more for a head that starts at 0.
        """
        t = self.trainer
        if t.value_lr is not None:
            return t.value_lr
        return self.lr if t.critic.trunk == "own" else HEAD_LR

    @property
    def samples_as_trained(self) -> bool:
        """Whether every completion is sampled at the temperature at which it is trained on."""
        drawn = self.generator.temperature
        return drawn is None or drawn == [self.temperature] * 2

    @property
    def updates_in_flight(self) -> bool:
        """Whether a generator takes in new weights while completions are running."""
        if self.generator.in_flight_updates is None:
            return self.max_lag != 0
        return self.generator.in_flight_updates

    @property
    def resumes_partials(self) -> bool:
        """Whether a checkpoint's unfinished completions go on."""
        if self.generator.resume_partials is None:
            return self.max_lag != 0 and self.updates_in_flight
        return self.generator.resume_partials
