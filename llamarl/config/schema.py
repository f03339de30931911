"""The schema of a run's configuration: what may be set, its type and its range.

Keys are explained where their values are, in conf/. No field has a default here, so that every
value of a run is found in conf/ or on its command line. What must hold between values is checked in
llamarl/config/rules.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from llamarl.config.loss_options import LOSS_OPTIONS
from llamarl.config.ranges import Beta, Count, Natural, NonNegative, Positive, Range

Seed = Annotated[int, Range(0, 2**63 - 1)]  # what torch and the counters of sampling hold


@dataclass(frozen=True, slots=True)
class ModelSettings:
    path: str | None  # None: the tiny model that comes with the package
    dtype: Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class TaskSettings:
    kind: Literal["addition", "gsm8k", "jsonl", "hf_dataset", "reasoning_gym"]
    path: str | None
    eval_path: str | None
    prompt_key: str
    answer_key: str | None  # None: no reference answer
    name: str | None
    chat: bool
    system_prompt: str | None
    max_prompt_tokens: Count


@dataclass(frozen=True, slots=True)
class GeneratorSettings:
    kind: Literal["native", "vllm"]
    max_slots: Count
    chunk_tokens: Count
    top_k: Natural
    top_p: Annotated[float, Range(0, 1, open=True)]
    min_new_tokens: Natural
    tensor_parallel: Count
    in_flight_updates: bool | None
    recompute_kv: bool
    resume_partials: bool | None
    cache_tokens: Count | None
    prefill_chunk: Count
    max_seconds: Positive | None
    quantize: Literal["none", "fp8", "int8"]
    quantize_exclude: list[str]
    max_quantization_kl: Positive
    gpu_memory_utilization: (
        Annotated[float, Range(0, 1, open=True)] | None
    )  # None: the native engine


@dataclass(frozen=True, slots=True)
class RewardSettings:
    fn: str | None
    num_workers: Count
    timeout_s: Positive
    memory_mb: Count
    max_error_rate: Annotated[float, Range(0, 1)]


@dataclass(frozen=True, slots=True)
class ReferenceSettings:
    enabled: bool
    reset_every: Count | None


@dataclass(frozen=True, slots=True)
class BufferSettings:
    kind: Literal["fifo", "replay"]
    sync_period: Count | None  # the rest is replay's; None: fifo
    most_on_policy: Annotated[float, Range(0, 1)] | None
    priority: Literal["softmax", "uniform"] | None
    temperature: Positive | None
    completions_per_prompt: Count | None
    max_size: Count | None
    initial_completions: Natural | None


@dataclass(frozen=True, slots=True)
class BetaScheduleSettings:
    kind: Literal["constant", "linear", "cut"]
    final: NonNegative | None
    end_step: Count | None
    cut_step: Natural | None


@dataclass(frozen=True, slots=True)
class LoraSettings:
    rank: Natural
    alpha: Positive
    targets: list[
        Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    ]


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    replicate: Count
    tensor_parallel: Count
    microbatch_tokens: Count
    max_grad_norm: Positive | None
    optimizer: Literal["adamw", "adamw8bit"]
    weight_decay: NonNegative
    beta1: Beta
    beta2: Beta
    eps: Positive
    schedule: Literal["constant", "linear", "cosine", "wsd"]
    warmup_steps: Natural
    decay_steps: Count | None
    advantages: Literal["group_mean", "group_mean_std", "leave_one_out", "gae"]
    compute_dtype: Literal["float32", "bfloat16"]
    activation_checkpointing: bool
    cpu_offload: bool
    lora: LoraSettings
    ema_decay: Annotated[float, Range(0, 0.9999999)] | None
    parity_tolerance: Positive
    skip_zero_advantage: bool
    filter_groups: bool
    minibatches_per_step: Count
    updates_per_batch: Count
    missing_eos_penalty: float | None
    reward_kl_coef: NonNegative
    reward_kl_estimator: Literal["k1", "k2", "k3"]
    whiten: Literal["none", "rewards", "advantages", "both", "completions"]
    gamma: Annotated[float, Range(0, 1)]
    gae_lambda: Annotated[float, Range(0, 1)]
    value_lr: Positive
    value_coef: NonNegative
    value_clip: Positive | None


@dataclass(frozen=True, slots=True)
class LossSettings:
    fn: str  # the name of a file in conf/loss, or module:function
    kl_coef: NonNegative
    kl_estimator: Literal["k1", "k2", "k3"]
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


@dataclass(frozen=True, slots=True)
class GovernorSettings:
    start: Natural | None
    least: Natural
    most: Natural | None
    window: Count
    increase: Natural
    decrease: Natural


@dataclass(frozen=True, slots=True)
class EvalSettings:
    every: Natural
    num_prompts: Natural
    num_samples: Natural
    target: float | None


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    every: Natural
    keep: Count


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    trainer: list[int] | None
    generator: list[int] | None
    reward: list[int] | None
    reference: list[int] | None
    colocate: list[str] | None


@dataclass(frozen=True, slots=True)
class WeightsSettings:
    transport: Literal["auto", "shm", "gloo", "nccl", "cuda_ipc"]


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    tensorboard: bool
    wandb: bool
    trace: bool


@dataclass(frozen=True, slots=True)
class Config:
    max_steps: Natural
    run_dir: str | None
    resume: str
    resume_with_other: list[Literal["data", "reward"]]
    seed: Seed
    dry_run: bool
    max_lag: Natural | None
    overcommit: Natural | Literal["auto", "oppo", "window"]
    on_deadline: Literal["wait", "truncate"]
    straggler_factor: Annotated[float, Range(1)]
    groups_per_step: Count
    group_size: Count
    max_new_tokens: Count
    temperature: Positive
    lr: Positive
    threads: Count | None
    timeout_s: Positive
    heartbeat_timeout_s: Positive
    stop_s: Positive
    offload: bool
    governor: GovernorSettings
    beta_schedule: BetaScheduleSettings
    eval: EvalSettings
    checkpoint: CheckpointSettings
    weights: WeightsSettings
    metrics: MetricsSettings
    model: ModelSettings
    task: TaskSettings
    generator: GeneratorSettings
    reward: RewardSettings
    reference: ReferenceSettings
    buffer: BufferSettings
    trainer: TrainerSettings
    loss: LossSettings
    placement: PlacementSettings

    @property
    def trained_per_prompt(self) -> int:
        """Completions of a prompt that a step trains on."""
        return self.buffer.completions_per_prompt or self.group_size

    @property
    def updates_in_flight(self) -> bool:
        """Whether a generator takes in new weights while completions are running."""
        in_flight = self.generator.in_flight_updates
        return self.max_lag != 0 if in_flight is None else in_flight

    @property
    def resumes_partials(self) -> bool:
        """Whether a checkpoint's unfinished completions go on."""
        resume = self.generator.resume_partials
        return self.max_lag != 0 and self.updates_in_flight if resume is None else resume
