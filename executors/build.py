"""The executors of the main job from a config: its keys become the plain values that these take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from executors.build_dialogues import dialogue_engine
from executors.build_trainer import build_trainer, late_ends_of, parity_limits
from executors.generator import Generator
from executors.reference import Reference
from executors.reward import Reward
from executors.trainer import FSDPTrainer
from llamarl.config.command_line import Config
from llamarl.config.placement import judge_models
from llamarl.config.sections.victim import placed_victim
from llamarl.evaluation.diversity import Diversity
from llamarl.evaluation.gold import make_gold, references_of
from llamarl.evaluation.judges import MakeEvalJudge
from llamarl.evaluation.perplexity import make_perplexity
from llamarl.evaluation.report import Samples
from llamarl.executor import ExecutorGroup, WeightsForm
from llamarl.inference import SamplingParams, TemperatureRange
from llamarl.inference.build import build_native, build_vllm
from llamarl.inference.protocol import Bind, BuildEngine, GenerationEngine
from llamarl.inference.stop_strings import unescaped
from llamarl.launch.inputs import JobInputs
from llamarl.launch.job import Job
from llamarl.launch.scorers import reward_parts
from llamarl.models.build import Decoder
from llamarl.models.shape import AUTO
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.replies import ReplySettings
from llamarl.scoring.scorer import MakeScorer
from llamarl.scoring.weighted import Weighted


def sampling_of(config: Config, inputs: JobInputs) -> SamplingParams:
    """Return how a group is sampled, without generator.temperature."""
    g = config.generator
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=g.top_k,
        top_p=g.top_p,
        min_p=g.min_p,
        min_new_tokens=g.min_new_tokens,
        stop_token_ids=inputs.stop_token_ids,
        stop_strings=tuple(unescaped(string) for string in g.stop),
        n=config.group_size,
        seed=config.seed,
    )


def engine_builder(
    config: Config, inputs: JobInputs, adapt: Callable[[Decoder], None]
) -> BuildEngine:
    """Return a function that builds the generator's engine, by generator.kind.

    adapt: changes the decoder's forward; see Generator.adapt_decoder.
    """
    g = config.generator
    if g.kind == "vllm":
        if adapt is not Generator.adapt_decoder:
            raise ValueError(
                "generator=vllm computes with its own model, which adapt_decoder cannot change; "
                "take generator=native"
            )
        return partial(
            build_vllm,
            model_path=str(inputs.model_path),
            model_dtype=config.model.dtype,
            max_slots=g.max_slots,
            max_len=config.longest_asked,
            decode=inputs.decode,
            gpu_memory_utilization=g.gpu_memory_utilization,
            lora=inputs.lora,
        )

    native = partial(
        build_native,
        model_path=str(inputs.model_path),
        model_dtype=config.model.dtype,
        max_slots=g.max_slots,
        max_len=config.longest_asked,
        cache_tokens=g.cache_tokens,
        kept_tokens=config.kept_tokens,
        prefill_chunk=g.prefill_chunk,
        quantize=g.quantize,
        quantize_exclude=tuple(g.quantize_exclude),
        lora=inputs.lora,
        made_by=config.model.made_by,
        decode=inputs.decode,
        reproducible=config.reproducible,
        notes_routes=config.trainer.routing_replay,
        adapt=adapt,
    )
    if not config.environments:
        return native

    def with_dialogues(group: ExecutorGroup, bind: Bind) -> GenerationEngine:
        return dialogue_engine(native(group, bind), inputs)

    return with_dialogues


def build_executors(
    config: Config,
    job: Job,
    *,
    generator: type[Generator] = Generator,
    reward: type[Reward] = Reward,
    reference: type[Reference] = Reference,
    trainer: type[FSDPTrainer] = FSDPTrainer,
) -> tuple[Generator, Reward, list[Reference], FSDPTrainer]:
    """Return the executors of the main job: generator, reward, reference if there is one, and
    trainer. Each is of the class given for it, which takes the keywords of its base class.
    """
    return (
        build_generator(config, job, generator),
        build_reward(config, job, reward),
        build_references(config, job, reference),
        build_trainer(config, job, trainer),
    )


def build_generator(config: Config, job: Job, kind: type[Generator] = Generator) -> Generator:
    """Build the generator, with the engine of generator.kind. kind: the generator's class."""
    g = config.generator
    temperatures = None
    if g.temperature is not None:
        lowest, highest = g.temperature
        temperatures = TemperatureRange(low=lowest, high=highest, seed=config.seed)
    max_quantization_kl = None
    if g.kind == "native" and g.quantize != "none":
        max_quantization_kl = g.max_quantization_kl
    return kind(
        build_engine=engine_builder(config, job.inputs, kind.adapt_decoder),
        prompts=job.inputs.prompts,
        eval_prompts=job.inputs.eval_prompts,
        eval_samples=config.eval.num_samples,
        sampling=sampling_of(config, job.inputs),
        temperatures=temperatures,
        chunk_tokens=g.chunk_tokens,
        max_seconds=g.max_seconds,
        in_flight_updates=config.updates_in_flight,
        recompute_kv=g.recompute_kv,
        parity=parity_limits(config),
        max_quantization_kl=max_quantization_kl,
        tensor_parallel=g.tensor_parallel,
        weights_form=WeightsForm(
            dtype=config.model.dtype,
            quantize=g.quantize,
            exclude=tuple(g.quantize_exclude),
            transport=config.weights.transport,
        ),
    )


def build_reward(config: Config, job: Job, kind: type[Reward] = Reward) -> Reward:
    """Build the reward with its scorer, by reward.kind: a function, a model, a judge, or several of
    them. kind: the reward's class.
    """
    r = config.reward
    parts = reward_parts(job.inputs, stream_settings(config, job, "reward") if r.stream else None)
    acts_as_one = any(part.settings.acts_as_one for part in config.reward_parts)
    make_scorer: MakeScorer = partial(Weighted, parts, outcomes=r.outcomes)
    if len(parts) == 1 and not acts_as_one and config.reward_parts[0].weight is None:
        make_scorer = parts[0].make
    return kind(
        make_scorer=make_scorer,
        first_takes=acts_as_one or bool(judge_models(config)),
        reads_ahead=r.stream,
        replicate=r.replicate,
        tensor_parallel=r.tensor_parallel,
        reproducible=config.reproducible,
        prompts=job.inputs.prompts,
        eval_prompts=job.inputs.held_out.prompt,
        decode=job.inputs.decode,
        decode_raw=job.inputs.decode_raw,
        group_size=config.group_size,
        eval_sets=job.inputs.eval_sets,
        num_eval_samples=config.eval.num_samples,
        max_error_rate=r.max_error_rate,
        judges=_judges_of(config, job),
        replies=_replies_of(config, job.inputs),
    )


def stream_settings(
    config: Config, job: Job, name: Literal["reward", "reference"]
) -> StreamSettings:
    """Return how the executor `name` reads completions while they are sampled."""
    piece_tokens = getattr(config, name).piece_tokens
    fractions = [max(1, config.max_new_tokens // parts) for parts in (16, 8, 4, 2)]
    searches = piece_tokens == "auto"
    if searches or piece_tokens is None:
        piece_tokens = fractions[0 if searches else 1]
    return StreamSettings(
        piece_tokens=piece_tokens,
        candidates=tuple(fractions) if searches else (),
        a_step=config.groups_per_step * config.group_size,
        cache_tokens=job.placement.stream_cache_tokens(name),
        longest=config.longest,
    )


def _replies_of(config: Config, inputs: JobInputs) -> ReplySettings | None:
    """Return how a victim's replies are read; None where completions are scored as they are."""
    if not config.victim.placed:
        return None
    return ReplySettings(
        decode=inputs.decode_answer,
        threshold=placed_victim(config.victim).threshold,
        decode_raw=inputs.decode_answer_raw,
    )


def _judges_of(config: Config, job: Job) -> list[MakeEvalJudge]:
    """Return the judges of evaluations, which measure more than the reward."""
    judges: list[MakeEvalJudge] = []
    if config.eval.save_samples:
        success_above = placed_victim(config.victim).threshold if config.victim.placed else None
        samples = Samples(job.files.directory.path / "samples", success_above)
        judges.append(lambda site: samples)
    if config.gold is not None:
        judges.append(make_gold(job.inputs, references_of(job.inputs)))
    if config.eval.base is not None:
        judges.append(make_perplexity(config))
    if config.eval.embedder is not None:
        embedder = job.inputs.embedder(config.eval.embedder)
        judges.append(partial(Diversity, settings=embedder))
    return judges


def build_references(
    config: Config, job: Job, kind: type[Reference] = Reference
) -> list[Reference]:
    """Return the reference executor in a list, which is empty without one. kind: its class."""
    reference = config.reference
    if not reference.placed:
        return []
    return [
        kind(
            model_path=next(iter(reference.given.values()), str(job.inputs.model_path)),
            teachers=reference.teachers if reference.kind == "frozen" else {},
            model_dtype=config.model.dtype,
            temperature=config.temperature,
            microbatch_tokens=config.trainer.microbatch_tokens,
            replicate=reference.replicate,
            tensor_parallel=reference.tensor_parallel,
            reproducible=config.reproducible,
            reset_every=reference.reset_every if reference.kind == "reset" else None,
            timeout_s=config.timeout_s,
            stream=stream_settings(config, job, "reference") if reference.stream else None,
            prompts=job.inputs.prompts,
            lora=job.inputs.lora if reference.kind == "reset" else None,
            weights_form=WeightsForm(dtype=config.model.dtype, transport=config.weights.transport),
            late_ends=late_ends_of(config, job),
            made_by=AUTO if reference.given else config.model.made_by,
        )
    ]
