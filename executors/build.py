"""Executors from a config: where its keys become the plain values that executors take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from executors.build_trainer import build_trainer, late_ends_of, parity_limits
from executors.generator import TRAIN, Generator
from executors.reference import Reference
from executors.reward import Reward
from executors.trainer import FSDPTrainer
from executors.victim import Victim
from llamarl.config.command_line import Config
from llamarl.config.placement import judge_models
from llamarl.config.sections.task import PlayedSettings
from llamarl.config.sections.victim import placed_victim
from llamarl.environments.calls import FORMATS
from llamarl.environments.dialogues import Dialogues, Environment
from llamarl.environments.engine import DialogueEngine
from llamarl.environments.pool import EnvironmentPool
from llamarl.evaluation.diversity import Diversity
from llamarl.evaluation.gold import make_gold, references_of
from llamarl.evaluation.judges import MakeEvalJudge
from llamarl.evaluation.perplexity import make_perplexity
from llamarl.evaluation.report import Samples
from llamarl.executor import ExecutorGroup, WeightsForm
from llamarl.inference import Engine, SamplingParams, TemperatureRange
from llamarl.inference.build import build_native, build_vllm
from llamarl.inference.protocol import Bind, BuildEngine, GenerationEngine
from llamarl.inference.stop_strings import unescaped
from llamarl.launch.inputs import JobInputs
from llamarl.launch.job import Job
from llamarl.launch.preferences import PreferencesJob
from llamarl.launch.scorers import reward_parts
from llamarl.models.build import Decoder
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.pairs import PairMaker, PairRule
from llamarl.scoring.replies import ReplySettings
from llamarl.scoring.scorer import MakeScorer, Scorer, site_alone
from llamarl.scoring.weighted import Weighted
from llamarl.tasks.environment import makes_prompts, turn_tokens
from llamarl.tasks.parts import section_of
from llamarl.tasks.special import stop_tokens
from llamarl.types import Prompt


def sampling_of(config: Config, inputs: JobInputs) -> SamplingParams:
    """Return how a group is sampled, without generator.temperature."""
    g = config.generator
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=g.top_k,
        top_p=g.top_p,
        min_new_tokens=g.min_new_tokens,
        stop_token_ids=inputs.stop_token_ids,
        stop_strings=tuple(unescaped(string) for string in g.stop),
        n=config.group_size,
        seed=config.seed,
    )


def temperatures_of(config: Config) -> TemperatureRange | None:
    """Return the temperatures of tickets; None unless generator.temperature is set."""
    drawn = config.generator.temperature
    if drawn is None:
        return None
    return TemperatureRange(low=drawn[0], high=drawn[1], seed=config.seed)


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
        decode=inputs.decode,
        reproducible=config.reproducible,
        adapt=adapt,
    )
    if not config.environments:
        return native

    def with_dialogues(group: ExecutorGroup, bind: Bind) -> GenerationEngine:
        return dialogue_engine(native(group, bind), inputs)

    return with_dialogues


def dialogue_engine(inner: Engine, inputs: JobInputs) -> DialogueEngine:
    """Build the engine of dialogues around one that samples turns and has its weights."""
    reproducible = inputs.config.reproducible
    sections = inputs.config.environments.keys()
    return DialogueEngine(
        inner,
        partial(_dialogues, inputs, reproducible=reproducible),
        prompt_of=partial(_prompt_of, inputs),
        is_played=lambda prompt: section_of(prompt) in sections,
        reproducible=reproducible,
    )


def _prompt_of(inputs: JobInputs, stream: int, ticket: int) -> Prompt:
    """Return the prompt of a ticket, or in a stream of evaluations the held-out one."""
    return inputs.prompts[ticket] if stream == TRAIN else inputs.held_out.prompt(ticket)


def _dialogues(
    inputs: JobInputs, on_answer: Callable[[], None], *, reproducible: bool
) -> Dialogues:
    """Build the dialogues of a replica with all its environments, and their workers."""
    environments = {}
    for section, task in inputs.config.environments.items():
        environments[section] = _environment(task, section, inputs, on_answer)
    return Dialogues(
        environments, decode=inputs.decode, seed=inputs.config.seed, reproducible=reproducible
    )


def _environment(
    task: PlayedSettings, section: str, inputs: JobInputs, on_answer: Callable[[], None]
) -> Environment:
    """Build what plays the prompts of a section."""
    play = task.play
    turns = turn_tokens(
        task.environment, inputs.tokenizer, chat=task.chat, system_prompt=task.system_prompt
    )
    calls = play.calls
    if calls == "auto":
        calls = "json" if turns.has_template else "words"
    has_own_messages = makes_prompts(task.environment)
    return Environment(
        pool=EnvironmentPool(
            task.environment,
            num_workers=play.num_workers,
            timeout_s=play.timeout_s,
            memory_mb=play.memory_mb,
            on_answer=on_answer,
            section=section,
        ),
        turns=turns,
        read_calls=FORMATS[calls],
        prompt_key=task.prompt_key,
        is_own=task.path is None or has_own_messages,
        is_dialogue=has_own_messages,
        max_turns=play.max_turns,
        max_turn_tokens=play.max_turn_tokens,
    )


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
    max_quantization_kl = None
    if g.kind == "native" and g.quantize != "none":
        max_quantization_kl = g.max_quantization_kl
    return kind(
        build_engine=engine_builder(config, job.inputs, kind.adapt_decoder),
        prompts=job.inputs.prompts,
        eval_prompts=job.inputs.eval_prompts,
        eval_samples=config.eval.num_samples,
        sampling=sampling_of(config, job.inputs),
        temperatures=temperatures_of(config),
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


def build_victim(config: Config, job: Job) -> Victim:
    """Build the victim, which replies to the completions."""
    v = placed_victim(config.victim)
    path = job.inputs.victim_path
    assert path is not None, "a victim's config has the directory of its model"

    def build_engine(device: torch.device) -> Engine:
        return Engine.from_hf(
            path,
            device=device,
            dtype=v.dtype,
            max_slots=v.max_slots,
            max_len=v.longest,
            reproducible=config.reproducible,
        )

    sampling = SamplingParams(
        max_new_tokens=v.max_new_tokens,
        temperature=v.temperature,
        top_p=v.top_p,
        stop_token_ids=stop_tokens(path, job.inputs.victim_tokenizer, chat=v.chat),
        n=v.replies,
        seed=config.seed,
    )
    return Victim(
        build_engine=build_engine,
        decode=job.inputs.decode,
        read=job.inputs.victim_prompt_ids,
        sampling=sampling,
        max_prompt_tokens=v.max_prompt_tokens,
        chunk_tokens=v.chunk_tokens,
        group_size=config.group_size,
        num_eval_attacks=len(job.inputs.eval_prompts) * (1 + config.eval.num_samples),
        reproducible=config.reproducible,
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


def build_scorer(inputs: JobInputs, device: torch.device) -> Scorer:
    """Build the scorer in this process alone, loaded and not started: for a script."""
    parts = reward_parts(inputs, None)
    scorer = Weighted(parts, site_alone(device), outcomes=inputs.config.reward.outcomes)
    scorer.load()
    return scorer


def answering_engine(inputs: JobInputs, device: torch.device) -> GenerationEngine:
    """Build what answers held-out prompts in a script that is no job: the native engine, or with an
    environment the engine of its dialogues.
    """
    engine = engine_alone(inputs, device)
    return dialogue_engine(engine, inputs) if inputs.config.environments else engine


def engine_alone(inputs: JobInputs, device: torch.device) -> Engine:
    """Build the native engine with the model as it was saved, for a script that is no job."""
    config = inputs.config
    g = config.generator
    assert g.kind == "native", "its recipes have no other engine"
    return Engine.from_hf(
        inputs.model_path,
        dtype=config.model.dtype,
        device=device,
        max_slots=g.max_slots,
        max_len=config.longest_asked,
        cache_tokens=g.cache_tokens,
        prefill_chunk=g.prefill_chunk,
        decode=inputs.decode,
        kept_tokens=config.kept_tokens,
        adapter=config.trainer.lora.path,
    )


def build_pair_maker(job: PreferencesJob, scorer: Scorer) -> PairMaker:
    """Build what makes the pairs of recipes/preferences.py. scorer: one that has been started."""
    config = job.config
    settings = job.inputs.config
    sampling = sampling_of(settings, job.inputs)
    rule = PairRule(
        pairing=config.pairing,
        compares=any(part.settings.compares for part in settings.reward_parts),
        label_noise=config.label_noise,
        margin_coef=config.margin_coef,
        seed=config.seed,
    )
    return PairMaker(
        engine=engine_alone(job.inputs, job.device) if config.samples else None,
        scorer=scorer,
        sampling=dataclasses.replace(sampling, n=max(1, config.samples)),
        chunk_tokens=config.generator.chunk_tokens,
        prompt_of=job.prompt,
        targets_of=job.references,
        tokenizer=job.inputs.tokenizer,
        prompts=job.prompt_maker,
        rule=rule,
        max_error_rate=config.reward.max_error_rate,
    )


def build_references(
    config: Config, job: Job, kind: type[Reference] = Reference
) -> list[Reference]:
    """Return the reference executor in a list, which is empty without one. kind: its class."""
    reference = config.reference
    if not reference.placed:
        return []
    return [
        kind(
            model_path=str(job.inputs.model_path),
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
        )
    ]
