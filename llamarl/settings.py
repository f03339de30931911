"""The schema of a run's configuration: what may be set, its type and its range.

Keys are explained where their values are, in conf/; llamarl/config.py reads, checks and saves them. No field has a
default here, so that every value of a run is found in conf/ or on its command line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal


@dataclass(frozen=True, slots=True)
class Range:
    """low <= value <= high; low < value when open."""

    low: float
    high: float = math.inf
    open: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.high < math.inf:
            return f"between {self.low} and {self.high}" + (f", {self.low} excluded" if self.open else "")
        return f"above {self.low}" if self.open else f"of at least {self.low}"


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, open=True)]
NonNegative = Annotated[float, Range(0)]
Beta = Annotated[float, Range(0, 0.999999)]


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
    answer_key: str
    name: str | None
    chat: bool
    system_prompt: str | None
    max_prompt_tokens: Count


@dataclass(frozen=True, slots=True)
class GeneratorSettings:
    max_slots: Count
    chunk_tokens: Count
    top_k: Natural
    top_p: Annotated[float, Range(0, 1, open=True)]
    min_new_tokens: Natural
    in_flight_updates: bool | None


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


@dataclass(frozen=True, slots=True)
class BufferSettings:
    kind: Literal["fifo"]


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    microbatch_tokens: Count
    max_grad_norm: Positive
    weight_decay: NonNegative
    beta1: Beta
    beta2: Beta
    eps: Positive
    schedule: Literal["constant", "linear", "cosine", "wsd"]
    warmup_steps: Natural
    advantages: Literal["group_mean", "group_mean_std"]
    compute_dtype: Literal["float32", "bfloat16"]
    activation_checkpointing: bool
    parity_tolerance: Positive
    skip_zero_advantage: bool


@dataclass(frozen=True, slots=True)
class LossSettings:
    fn: str  # the name of a file in conf/loss, or module:function
    ratio_cap: Positive | None
    kl_coef: NonNegative | None
    options: dict[str, object]  # every further key of loss.*, for the function alone

    @property
    def keywords(self) -> dict[str, object]:
        """The keyword arguments that the loss function is called with; null values are left to its own defaults."""
        named = {"ratio_cap": self.ratio_cap, "kl_coef": self.kl_coef, **self.options}
        return {key: value for key, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True)
class EvalSettings:
    every: Natural
    num_prompts: Natural


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


@dataclass(frozen=True, slots=True)
class WeightsSettings:
    transport: Literal["auto", "shm", "gloo"]


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
    seed: Natural
    dry_run: bool
    max_lag: Natural
    overcommit: Natural | Literal["auto"]
    groups_per_step: Count
    group_size: Count
    max_new_tokens: Count
    temperature: Positive
    lr: Positive
    threads: Count | None
    deadline_s: Positive
    heartbeat_timeout_s: Positive
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
