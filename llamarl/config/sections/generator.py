"""The section `generator`: how completions are sampled, and what cannot go together with it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Protocol

from llamarl.config.sections.loss import LossSettings, declares
from llamarl.config.sections.run import RunSettings
from llamarl.words.choices import Quantized
from llamarl.words.fields import (
    ByKind,
    Count,
    Flag,
    Natural,
    Positive,
    PositiveInterval,
    PositiveShare,
    Share,
    Texts,
    marked,
    settings_dataclass,
)
from llamarl.words.findings import Findings


@settings_dataclass
class GeneratorSettings:
    """The settings of every kind of generator."""

    kind: str
    max_slots: Count
    """Completions that a rank decodes at once."""
    chunk_tokens: Count
    """Tokens of a slot between two looks at new work, new weights and requests."""
    temperature: PositiveInterval | None = marked("identity")
    """[LOW,HIGH], from which each ticket draws its temperature uniformly; null: temperature, at
    which the trainer scores.
    """
    top_k: Natural
    """Tokens to sample from; 0: all. Others only where nothing is trained: recipes/evaluate.py,
    recipes/preferences.py.
    """
    top_p: PositiveShare
    """Probability mass to sample from. Below 1 only where nothing is trained, because the
    trainer scores the whole softmax.
    """
    min_p: Share
    """Leave out tokens whose probability is below this share of the likeliest's, before top_k and
    top_p; 0: none. Others only where nothing is trained.
    """
    min_new_tokens: Natural
    """Tokens before which there is no end token. The trainer and the reference leave it out
    there too.
    """
    stop: Texts
    r"""Strings that end a completion with the token that completes one of them: ["\n\n"]."""
    in_flight_updates: Flag | None
    """Load new weights while completions are running; null: whenever max_lag allows any lag."""
    max_seconds: Positive | None
    """Wall-clock limit of a completion, from its ticket's start. Then it ends and is not
    trained on; null: none.
    """

    def samples_at(self, temperature: float) -> bool:
        """Return whether every completion is sampled at this temperature, which is the run's."""
        return self.temperature is None or self.temperature == [temperature] * 2

    def updates_in_flight(self, max_lag: int | None) -> bool:
        """Whether new weights are taken in while completions are running."""
        return max_lag != 0 if self.in_flight_updates is None else self.in_flight_updates


@settings_dataclass
class NativeGeneratorSettings(GeneratorSettings):
    kind: Literal["native"]
    tensor_parallel: Count
    """Ranks that share one copy of the model."""
    recompute_kv: Flag
    """Recompute the keys and values of running completions after new weights."""
    resume_partials: Flag | None
    """Continue a checkpoint's unfinished completions instead of starting them again; null: as
    in_flight_updates.
    """
    cache_tokens: Count | None
    """Places of the K/V cache. Completions that do not fit wait; null: enough for max_slots of
    the longest sequence.
    """
    prefill_chunk: Count
    """Tokens of a prompt that are prefilled at once, so that a long one does not hold up the
    others.
    """
    quantize: Quantized
    """fp8, int8: projections and an untied head in one byte a weight, with a scale a row."""
    quantize_exclude: Texts
    """Parts of names of weights that are not quantized: [lm_head,down_proj,"layers.0."]; []:
    none, so the head is too.
    """
    max_quantization_kl: Positive
    """Nats. A quantized generator that is further from the trainer's policy ends the run."""


@settings_dataclass
class VLLMGeneratorSettings(GeneratorSettings):
    kind: Literal["vllm"]
    gpu_memory_utilization: PositiveShare
    """Share of the device's memory (without GPUs: of the host's) for vLLM's weights and K/V
    cache.
    """

    tensor_parallel: ClassVar[int] = 1  # a vLLM here has one rank
    recompute_kv: ClassVar[bool] = False  # vLLM keeps its cache over new weights
    resume_partials: ClassVar[bool] = False  # it starts unfinished completions again
    cache_tokens: ClassVar[None] = None  # gpu_memory_utilization bounds its cache
    quantize: ClassVar[str] = "none"  # it takes weights as they are
    quantize_exclude: ClassVar[tuple[str, ...]] = ()


AnyGeneratorSettings = Annotated[NativeGeneratorSettings | VLLMGeneratorSettings, ByKind()]


def find_generator(
    generator: AnyGeneratorSettings,
    run: RunSettings,
    found: Findings,
    *,
    longest: int,
    longest_keys: str,
) -> None:
    """Find slots and caches that are too small, and what unfinished completions cannot go through.

    longest: tokens of any prompt and its completion at most. longest_keys: the keys that set it.
    """
    if generator.min_new_tokens > run.max_new_tokens:
        found.add(
            "generator.min_new_tokens must not exceed max_new_tokens",
            "generator.min_new_tokens",
            "max_new_tokens",
        )
    if run.group_size > generator.max_slots:
        found.add(
            "a generator's slots do not hold one group; raise generator.max_slots",
            "group_size",
            "generator.max_slots",
        )
    if generator.cache_tokens is not None and generator.cache_tokens < longest:
        found.add(
            f"the cache does not hold one sequence of {longest_keys}; need at least {longest}, "
            "or null",
            "generator.cache_tokens",
        )
    _find_unfinished(generator, run, found)
    if generator.kind == "vllm":
        _find_vllm(run, found)


def _find_unfinished(generator: AnyGeneratorSettings, run: RunSettings, found: Findings) -> None:
    """Find what unfinished completions cannot go through: new weights, or a resume."""
    updates_in_flight = generator.updates_in_flight(run.max_lag)
    if generator.recompute_kv and not updates_in_flight:
        found.add(
            "without lag no completion is running when new weights are loaded, so no cache needs "
            "to be recomputed; leave it out, or raise max_lag",
            "generator.recompute_kv",
        )
    if generator.resume_partials is not True:
        return
    if run.synchronous:
        found.add(
            "a resumed synchronous run must repeat an uninterrupted one to the bit, so its "
            "completions start again; leave generator.resume_partials out",
            "generator.resume_partials",
            "max_lag",
        )
    elif not updates_in_flight:
        found.add(
            "resumed completions would go on under other weights than they began with, which "
            "in_flight_updates=false forbids; leave one of the two keys out",
            "generator.resume_partials",
            "generator.in_flight_updates",
        )


def _find_vllm(run: RunSettings, found: Findings) -> None:
    """Find what vLLM cannot do, or that it is not installed."""
    from llamarl.inference.vllm_engine import vllm_problem  # imports torch, so only for vLLM

    if run.offload:
        found.add(
            "vLLM's memory cannot leave the device; generator=native, or offload=false",
            "offload",
            "generator.kind",
        )
    if what := vllm_problem():
        found.add(what, "generator.kind")


def find_cut_distributions(generator: AnyGeneratorSettings, found: Findings) -> None:
    """Find what cuts the distribution that is sampled in a job that trains on the samples."""
    remedy = (
        "the trainer scores the whole softmax, so its ratios to tokens from a part of it would be "
        "too small at every step; {}, and narrow it by generator.temperature or temperature "
        "instead (recipes/evaluate.py and recipes/preferences.py take this key)"
    )
    if generator.top_p < 1:
        found.add(remedy.format("generator.top_p=1"), "generator.top_p")
    if generator.top_k > 0:
        found.add(remedy.format("generator.top_k=0"), "generator.top_k")
    if generator.min_p > 0:
        found.add(remedy.format("generator.min_p=0"), "generator.min_p")


def find_other_temperatures(
    generator: AnyGeneratorSettings,
    run: RunSettings,
    found: Findings,
    *,
    loss: LossSettings,
    reward_kl_coef: float,
) -> None:
    """Find what needs completions that are sampled at the temperature that they are trained on at.

    An importance weight pi/mu is right for others too: mu is what they were sampled from.
    """
    if generator.samples_at(run.temperature):
        return
    if declares(loss.fn, "holds_to_generator"):
        found.add(
            "this loss keeps the policy close to the distribution that sampled, and another "
            "temperature makes that a different one; loss=tb, tba or aipo, or "
            "generator.temperature=null",
            "generator.temperature",
            "loss.fn",
        )
    if reward_kl_coef > 0:
        found.add(
            "the penalty in the reward would measure the KL of the distribution that sampled, "
            "not the policy's; loss.kl_coef instead, or generator.temperature=null",
            "generator.temperature",
            "trainer.reward_kl_coef",
        )


class ReadsAhead(Protocol):
    """Settings of a model that may read completions while they are sampled."""

    @property
    def piece_tokens(self) -> int | str | None: ...

    @property
    def cache_tokens(self) -> int | None: ...


def find_reading_ahead(
    settings: ReadsAhead,
    found: Findings,
    *,
    section: str,
    reader: str,
    generator_kind: str,
    offload: bool,
    longest: int,
) -> None:
    """Find what keeps a model from reading completions while they are sampled.

    section: of its settings. longest: tokens of a prompt that is trained on and its completion at
    most.
    """
    stream = f"{section}.stream"
    if generator_kind == "vllm":
        found.add(
            "vLLM gives no tokens of a completion before it has ended; generator=native, or "
            f"{stream}=false",
            stream,
            "generator.kind",
        )
    if offload:
        found.add(
            f"with offload executors take turns on the device, so the {reader} cannot read while "
            f"the generator samples; offload=false, or {stream}=false",
            stream,
            "offload",
        )
    if isinstance(settings.piece_tokens, int) and settings.piece_tokens >= longest:
        found.add(
            "completions have fewer tokens than one piece, so none would be read before it ends; "
            f"at most {longest - 1}, or null",
            f"{section}.piece_tokens",
        )
    if settings.cache_tokens is not None and settings.cache_tokens < longest:
        found.add(
            "the cache does not hold one sequence of task.max_prompt_tokens + max_new_tokens; "
            f"need at least {longest}, or null",
            f"{section}.cache_tokens",
        )
