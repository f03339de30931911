"""The sections of the schema for what scores: each kind alone, and as one part of several."""

from __future__ import annotations

from typing import ClassVar, Literal

from llamarl.config.marks import settings_dataclass
from llamarl.config.ranges import Count, Natural, NonNegative, Positive, Share, Text
from llamarl.words.choices import ClassifierOutput, ClassifierReads, JudgeAsk


@settings_dataclass
class FunctionSourceSettings:
    kind: Literal["function"]
    fn: str | None
    num_workers: Count
    timeout_s: Positive
    memory_mb: Count


@settings_dataclass
class FunctionPartSettings(FunctionSourceSettings):
    weight: float


@settings_dataclass
class FunctionRewardSettings(FunctionSourceSettings):
    max_error_rate: Share

    replicate: ClassVar[int] = 1  # nothing of it is on the ranks' devices
    tensor_parallel: ClassVar[int] = 1
    stream: ClassVar[bool] = False
    chunk_tokens: ClassVar[None] = None
    cache_tokens: ClassVar[None] = None


@settings_dataclass
class ModelSourceSettings:
    kind: Literal["model"]
    path: Text
    label: str | None
    dtype: Literal["float32", "bfloat16"]
    microbatch_tokens: Count
    scale: float
    shift: float


@settings_dataclass
class ModelPartSettings(ModelSourceSettings):
    weight: float


@settings_dataclass
class ModelRewardSettings(ModelSourceSettings):
    replicate: Count
    tensor_parallel: Count
    max_error_rate: Share
    stream: bool
    chunk_tokens: Count | Literal["auto"] | None
    cache_tokens: Count | None


@settings_dataclass
class JudgeSourceSettings:
    kind: Literal["judge"]
    url: Text
    model: Text
    api_key_env: str | None
    ask: JudgeAsk
    template: str | None
    lowest: float
    highest: float
    max_parallel: Count
    timeout_s: Positive
    max_retries: Natural
    max_tokens: Count | None
    temperature: NonNegative | None


@settings_dataclass
class JudgePartSettings(JudgeSourceSettings):
    weight: float


@settings_dataclass
class JudgeRewardSettings(JudgeSourceSettings):
    max_error_rate: Share

    replicate: ClassVar[int] = 1  # nothing of it is on the ranks' devices
    tensor_parallel: ClassVar[int] = 1
    stream: ClassVar[bool] = False
    chunk_tokens: ClassVar[None] = None
    cache_tokens: ClassVar[None] = None


@settings_dataclass
class NoveltySourceSettings:
    kind: Literal["novelty"]
    embedder: Text
    history: Count
    nearest: Count | None


@settings_dataclass
class NoveltyPartSettings(NoveltySourceSettings):
    weight: float


@settings_dataclass
class NoveltyRewardSettings(NoveltySourceSettings):
    max_error_rate: Share

    replicate: ClassVar[int] = 1  # it is one history's, on one rank
    tensor_parallel: ClassVar[int] = 1
    stream: ClassVar[bool] = False
    chunk_tokens: ClassVar[None] = None
    cache_tokens: ClassVar[None] = None


@settings_dataclass
class EncoderSourceSettings:
    kind: Literal["encoder"]
    path: Text
    label: str | None
    output: ClassifierOutput
    reads: ClassifierReads
    dtype: Literal["float32", "bfloat16"]
    max_tokens: Count
    batch_size: Count


@settings_dataclass
class EncoderPartSettings(EncoderSourceSettings):
    weight: float


@settings_dataclass
class EncoderRewardSettings(EncoderSourceSettings):
    max_error_rate: Share

    replicate: ClassVar[int] = 1  # nothing of it is on the ranks' devices
    tensor_parallel: ClassVar[int] = 1
    stream: ClassVar[bool] = False
    chunk_tokens: ClassVar[None] = None
    cache_tokens: ClassVar[None] = None


AnySourceSettings = (
    FunctionSourceSettings
    | ModelSourceSettings
    | JudgeSourceSettings
    | NoveltySourceSettings
    | EncoderSourceSettings
)
AnyPartSettings = (
    FunctionPartSettings
    | ModelPartSettings
    | JudgePartSettings
    | NoveltyPartSettings
    | EncoderPartSettings
)


@settings_dataclass
class PartsRewardSettings:
    kind: Literal["parts"]
    parts: dict[str, AnyPartSettings]  # by names of the user's own
    replicate: Count
    tensor_parallel: Count
    max_error_rate: Share
    stream: bool
    chunk_tokens: Count | Literal["auto"] | None
    cache_tokens: Count | None


AnyRewardSettings = (
    FunctionRewardSettings
    | ModelRewardSettings
    | JudgeRewardSettings
    | NoveltyRewardSettings
    | EncoderRewardSettings
    | PartsRewardSettings
)
