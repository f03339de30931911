"""Executors from a config: where its keys become the plain values that executors take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from executors.generator import Generator
from executors.reference import Reference
from executors.reward import Reward
from executors.trainer import AdamSettings, FSDPTrainer
from executors.victim import Victim
from llamarl.config.command_line import Config
from llamarl.config.placement import judge_models
from llamarl.config.sections.victim import placed_victim
from llamarl.executor import WeightsForm
from llamarl.inference import Engine, SamplingParams, TemperatureRange
from llamarl.inference.build import build_native, build_vllm
from llamarl.inference.protocol import BuildEngine
from llamarl.inference.stop_strings import unescaped
from llamarl.launch.embedders import embedder_settings
from llamarl.launch.gold import gold_ids, gold_texts
from llamarl.launch.job import Job, stop_tokens
from llamarl.launch.kinds import gold_kind, reward_parts
from llamarl.launch.preferences import PreferencesJob
from llamarl.launch.scorers import stream_cache_tokens
from llamarl.learning.buffer import GroupBuffer
from llamarl.learning.losses import check_options, options_of, resolve_loss
from llamarl.learning.losses.common import has_mark
from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.replay import Draw, ReplayBuffer, SharedReplayBuffer, SplitReplayBuffer
from llamarl.learning.schedules import value_at
from llamarl.learning.shaping import Shaping
from llamarl.learning.update import UpdateSettings
from llamarl.learning.values import CriticSettings
from llamarl.models.lora import Lora
from llamarl.models.parity import TOP
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.diversity import Diversity
from llamarl.scoring.gold import Gold, GoldSettings
from llamarl.scoring.judges import MakeEvalJudge
from llamarl.scoring.pairing import PairMaker
from llamarl.scoring.pairs import PairRule
from llamarl.scoring.perplexity import Perplexity, PerplexitySettings
from llamarl.scoring.replies import ReplySettings
from llamarl.scoring.samples import Samples
from llamarl.scoring.scorer import Item, MakeScorer, Scorer, Site, site_alone
from llamarl.scoring.weighted import Part, Weighted
from llamarl.tasks.held_out import EvalSet
from llamarl.types import Prompt


def sampling_of(config: Config, job: Job) -> SamplingParams:
    """Return how a group is sampled, without generator.temperature."""
    g = config.generator
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=g.top_k,
        top_p=g.top_p,
        min_new_tokens=g.min_new_tokens,
        stop_token_ids=job.stop_token_ids,
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


def engine_builder(config: Config, job: Job) -> BuildEngine:
    """Return a function that builds the generator's engine, by generator.kind."""
    g = config.generator
    sizes: dict[str, Any] = dict(
        model_path=str(job.model_path),
        model_dtype=config.model.dtype,
        max_slots=g.max_slots,
        max_len=config.longest_asked,
        decode=job.decode,
    )
    if g.kind == "vllm":
        return partial(build_vllm, **sizes, gpu_memory_utilization=g.gpu_memory_utilization)
    return partial(
        build_native,
        **sizes,
        cache_tokens=g.cache_tokens,
        prefill_chunk=g.prefill_chunk,
        quantize=g.quantize,
        quantize_exclude=tuple(g.quantize_exclude),
        reproducible=config.max_lag == 0,
    )


def build_executors(
    config: Config, job: Job
) -> tuple[Generator, Reward, list[Reference], FSDPTrainer]:
    """Return the executors of the main job: generator, reward, reference if there is one, and
    trainer.
    """
    return (
        build_generator(config, job),
        build_reward(config, job),
        build_references(config, job),
        build_trainer(config, job),
    )


def build_generator(config: Config, job: Job) -> Generator:
    """Build the generator, with the engine of its kind."""
    g = config.generator
    max_quantization_kl = None
    if g.kind == "native" and g.quantize != "none":
        max_quantization_kl = g.max_quantization_kl
    return Generator(
        build_engine=engine_builder(config, job),
        prompts=job.prompts,
        eval_prompts=job.eval_prompts,
        eval_samples=config.eval.num_samples,
        sampling=sampling_of(config, job),
        temperatures=temperatures_of(config),
        chunk_tokens=g.chunk_tokens,
        max_seconds=g.max_seconds,
        in_flight_updates=config.updates_in_flight,
        recompute_kv=g.recompute_kv,
        parity_tolerance=config.trainer.parity_tolerance,
        max_quantization_kl=max_quantization_kl,
        tensor_parallel=g.tensor_parallel,
        weights_form=WeightsForm(
            dtype=config.model.dtype,
            quantize=g.quantize,
            exclude=tuple(g.quantize_exclude),
            transport=config.weights.transport,
        ),
    )


def build_reward(config: Config, job: Job) -> Reward:
    """Build the reward with its scorer, by reward.kind: a function, a model, a judge, or several of
    them.
    """
    r = config.reward
    parts = reward_parts(job, stream_settings(config, job, "reward") if r.stream else None)
    acts_as_one = any(part.settings.acts_as_one for part in config.reward_parts)
    make_scorer: MakeScorer = partial(Weighted, parts)
    if len(parts) == 1 and not acts_as_one and config.reward_parts[0].weight is None:
        make_scorer = parts[0].make
    return Reward(
        make_scorer=make_scorer,
        first_takes=acts_as_one or bool(judge_models(config)),
        reads_ahead=r.stream,
        replicate=r.replicate,
        tensor_parallel=r.tensor_parallel,
        reproducible=config.max_lag == 0,
        prompts=job.prompts,
        eval_prompts=job.held_out.prompt,
        decode=job.decode,
        decode_raw=job.decode_raw,
        group_size=config.group_size,
        eval_sets=job.eval_sets,
        num_eval_samples=config.eval.num_samples,
        max_error_rate=r.max_error_rate,
        judges=_judges_of(config, job),
        replies=_replies_of(config, job),
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
        cache_tokens=stream_cache_tokens(config, job.placement, name),
        longest=config.longest,
    )


def _replies_of(config: Config, job: Job) -> ReplySettings | None:
    """Return how a victim's replies are read; None where completions are scored as they are."""
    if not config.victim.placed:
        return None
    return ReplySettings(
        decode=job.decode_answer,
        threshold=placed_victim(config.victim).threshold,
        decode_raw=job.decode_answer_raw,
    )


def build_victim(config: Config, job: Job) -> Victim:
    """Build the victim, which replies to the completions."""
    v = placed_victim(config.victim)
    path = job.victim_path
    assert path is not None, "a victim's config has the directory of its model"
    build_engine = partial(
        _victim_engine,
        path=path,
        dtype=v.dtype,
        max_slots=v.max_slots,
        max_len=v.longest,
        reproducible=config.max_lag == 0,
    )
    sampling = SamplingParams(
        max_new_tokens=v.max_new_tokens,
        temperature=v.temperature,
        top_p=v.top_p,
        stop_token_ids=stop_tokens(path, job.victim_tokenizer),
        n=v.replies,
        seed=config.seed,
    )
    return Victim(
        build_engine=build_engine,
        decode=job.decode,
        read=job.victim_prompt_ids,
        sampling=sampling,
        max_prompt_tokens=v.max_prompt_tokens,
        chunk_tokens=v.chunk_tokens,
        group_size=config.group_size,
        num_eval_attacks=len(job.eval_prompts) * (1 + config.eval.num_samples),
        reproducible=config.max_lag == 0,
    )


def _victim_engine(device: torch.device, *, path: Path, **options) -> Engine:
    return Engine.from_hf(path, device=device, **options)


def _judges_of(config: Config, job: Job) -> list[MakeEvalJudge]:
    """Return the judges of evaluations, which measure more than the reward."""
    judges: list[MakeEvalJudge] = []
    if config.eval.save_samples:
        judges.append(partial(_samples_judge, config, job))
    gold = build_gold(config, job)
    if gold is not None:
        judges.append(partial(Gold, gold))
    base = base_settings(config, job.eval_sets)
    if base is not None:
        judges.append(partial(Perplexity, base))
    if config.eval.embedder is not None:
        embedder = embedder_settings(job, config.eval.embedder)
        judges.append(partial(Diversity, embedder, job.eval_sets))
    return judges


def _samples_judge(config: Config, job: Job, site: Site) -> Samples:
    success_above = placed_victim(config.victim).threshold if config.victim.placed else None
    return Samples(job.directory.path / "samples", job.eval_sets, success_above)


def build_gold(config: Config, job: Job) -> GoldSettings | None:
    """Return the gold scorer's settings; None without one."""
    if config.gold is None:
        return None
    texts = gold_texts(job.eval_sets, job.eval_prompts, config.eval.reference_key)
    items = gold_items(job, job.eval_prompts.values(), texts)
    return gold_settings(config, job, items, job.eval_sets)


def gold_settings(
    config: Config, job: Job, references: list[Item] | None, sets: Sequence[EvalSet]
) -> GoldSettings:
    """Return the gold scorer's settings. references: completions to compare with; sets: the sets
    whose prompts these complete.
    """
    gold = gold_kind(job)
    assert gold is not None, "called only if eval.gold is set"
    return GoldSettings(
        scorer=Part(gold.given.name, gold.make(None)),
        references=None if references is None else tuple(references),
        sets=tuple(sets),
    )


def base_settings(config: Config, sets: Sequence[EvalSet]) -> PerplexitySettings | None:
    """Return the settings of the model that measures likelihoods; None without one."""
    if config.eval.base is None:
        return None
    return PerplexitySettings(
        path=config.eval.base,
        dtype=config.model.dtype,
        microbatch_tokens=config.trainer.microbatch_tokens,
        sets=tuple(sets),
    )


def gold_items(
    job: Job, prompts: Iterable[Prompt], texts: Sequence[str] | None
) -> list[Item] | None:
    """Return texts as completions that ended by themselves, one a prompt; None without texts."""
    if texts is None:
        return None
    items = []
    for prompt, text in zip(prompts, texts):
        item = Item(
            prompt=prompt,
            token_ids=gold_ids(job, text),
            text=text,
            has_ended=True,
            is_held_out=True,
            decode_raw=job.decode_raw,
        )
        items.append(item)
    return items


def build_scorer(config: Config, job: Job) -> Scorer:
    """Build the scorer in this process alone, loaded and not started: for a script."""
    scorer = Weighted(reward_parts(job, None), site_alone(job.world.device))
    scorer.load()
    return scorer


def engine_alone(config: Config, job: Job) -> Engine:
    """Build the native engine with the model as it was saved, for a script that is no job."""
    g = config.generator
    assert g.kind == "native", "its recipes have no other engine"
    return Engine.from_hf(
        job.model_path,
        dtype=config.model.dtype,
        device=job.world.device,
        max_slots=g.max_slots,
        max_len=config.longest_asked,
        cache_tokens=g.cache_tokens,
        prefill_chunk=g.prefill_chunk,
        decode=job.decode,
    )


def build_pair_maker(job: PreferencesJob, scorer: Scorer) -> PairMaker:
    """Build what makes the pairs of recipes/preferences.py. scorer: one that has been started."""
    config, run = job.config, job.run_job
    settings = run.config
    sampling = sampling_of(settings, run)
    rule = PairRule(
        pairing=config.pairing,
        compares=any(part.settings.compares for part in settings.reward_parts),
        label_noise=config.label_noise,
        margin_coef=config.margin_coef,
        seed=config.seed,
    )
    return PairMaker(
        engine=engine_alone(settings, run) if config.samples else None,
        scorer=scorer,
        sampling=dataclasses.replace(sampling, n=max(1, config.samples)),
        chunk_tokens=config.generator.chunk_tokens,
        prompt_of=job.prompt,
        targets_of=job.references,
        tokenizer=run.tokenizer,
        prompts=job.prompt_maker,
        rule=rule,
        max_error_rate=config.reward.max_error_rate,
    )


def build_references(config: Config, job: Job) -> list[Reference]:
    """Return the reference executor in a list, which is empty without one."""
    reference = config.reference
    if not reference.placed:
        return []
    return [
        Reference(
            model_path=str(job.model_path),
            model_dtype=config.model.dtype,
            temperature=config.temperature,
            microbatch_tokens=config.trainer.microbatch_tokens,
            replicate=reference.replicate,
            tensor_parallel=reference.tensor_parallel,
            reproducible=config.max_lag == 0,
            reset_every=reference.reset_every if reference.kind == "reset" else None,
            timeout_s=config.timeout_s,
            stream=stream_settings(config, job, "reference") if reference.stream else None,
            prompts=job.prompts,
            weights_form=WeightsForm(dtype=config.model.dtype, transport=config.weights.transport),
        )
    ]


BUFFERS = {  # by buffer.draw
    "local": ReplayBuffer,
    "shared": SharedReplayBuffer,
    "split": SplitReplayBuffer,
}


def build_buffer(config: Config, job: Job) -> GroupBuffer:
    """Build this trainer rank's buffer. A replay buffer that draws locally holds a share of the
    prompts and of the room; any other replay buffer, all.
    """
    b = config.buffer
    if b.kind == "fifo":
        return GroupBuffer(config.max_lag)
    dp_ranks = job.num_dp_ranks
    peers = config.trainer.tensor_parallel
    ranks = job.placement["trainer"]
    trains_here = job.world.rank in ranks
    dp_rank = ranks.index(job.world.rank) // peers if trains_here else 0
    draw = Draw(
        prompts=config.groups_per_step // job.num_buffers,
        completions=config.trained_per_prompt,
        most_on_policy=b.most_on_policy,
        priority=b.priority,
        temperature=b.temperature,
    )
    return BUFFERS[b.draw](
        draw=draw,
        sync_period=b.sync_period,
        max_size=b.max_size // job.num_buffers,
        seed=config.seed,
        rank=dp_rank,
        num_ranks=dp_ranks,
        grow_until=b.grow_until,
        good_reward=b.good_reward,
        max_lag=config.max_lag,
        most_lag=job.replay_lag,
    )


def options_at(step: int, *, config: Config) -> dict[str, float]:
    """Return the scheduled options of the loss at a step."""
    options = {}
    for option, schedule in config.loss.schedules.items():
        first = config.loss.options[option]
        assert isinstance(first, int | float), (
            "the rules of the config let only numbers have a schedule"
        )
        options[option] = value_at(step, float(first), **dataclasses.asdict(schedule))
    return options


def _check_splits(loss_fn: Callable, name: str) -> None:
    """Raise ValueError if the loss cannot be computed from parts of groups."""
    needed = ("whole_groups", "group_means", "uses_all_completions")
    lacking = [f"@{mark}" for mark in needed if not has_mark(loss_fn, mark)]
    if lacking:
        raise ValueError(
            f"buffer.draw=split loss.fn={name}: draw=split gives each rank some of a prompt's "
            "completions, and this loss does not declare that it allows that "
            f"({', '.join(lacking)}: docs/losses.md); buffer.draw=shared, or loss=tb"
        )


def build_trainer(config: Config, job: Job) -> FSDPTrainer:
    """Build the trainer, with its loss and its buffer."""
    t, g = config.trainer, config.generator
    reference = config.reference
    own_reference = None
    if reference.kind != "frozen" and reference.kind != "reset":  # these two are executors
        own_reference = reference.kind
    c = config.loss
    plain_loss = resolve_loss(c.fn)
    options = c.options_for(set(options_of(plain_loss)))
    check_options(plain_loss, options)
    if config.splits_prompts:
        _check_splits(plain_loss, c.fn)
    loss_fn = regularised(
        partial(plain_loss, **options),
        kl_coef=c.kl_coef,
        kl_estimator=c.kl_estimator,
        entropy_coef=c.entropy_coef,
    )
    step_options = partial(options_at, config=config)
    critic = None
    if t.advantages == "gae":
        critic = CriticSettings(
            lr=config.critic_lr,
            coef=t.value_coef,
            clip=t.value_clip,
            gamma=t.gamma,
            gae_lambda=t.gae_lambda,
        )
    critic_path = None
    if t.critic.trunk == "own":
        critic_path = t.critic.path or str(job.model_path)
    lora = None
    if t.lora.rank:
        lora = Lora(
            rank=t.lora.rank,
            alpha=t.lora.alpha,
            targets=tuple(t.lora.targets),
            seed=config.seed,
        )
    # If the generator samples from another distribution on purpose, the logprobs of fresh tokens
    # differ from the trainer's.
    filters = g.top_k > 0 or g.top_p < 1 or g.min_new_tokens > 0
    differs = filters or g.quantize != "none" or not config.samples_as_trained
    # Exact if the loss is the policy gradient alone, because such completions add nothing to it.
    by_token = t.advantages == "gae"
    skips = t.skip_zero_advantage and not by_token and not has_mark(loss_fn, "uses_all_completions")
    settings = UpdateSettings(
        lr=config.lr,
        schedule=t.schedule,
        warmup_steps=t.warmup_steps,
        decay_steps=t.decay_steps,
        max_steps=config.max_steps,
        microbatch_tokens=t.microbatch_tokens,
        max_grad_norm=t.max_grad_norm,
        temperature=config.temperature,
        advantages=t.advantages,
        skip_zero_advantage=skips,
        parity_tolerance=None if differs else t.parity_tolerance,
        whole_groups=has_mark(loss_fn, "whole_groups"),
        shares_groups=config.splits_prompts,
        minibatches_per_step=t.minibatches_per_step,
        updates_per_batch=t.updates_per_batch,
        shaping=Shaping(
            missing_eos_penalty=t.missing_eos_penalty,
            reward_kl_coef=t.reward_kl_coef,
            whiten=t.whiten,
        ),
        filter_groups=t.filter_groups,
        recomputes_kv=g.recompute_kv,
    )
    return FSDPTrainer(
        model_path=str(job.model_path),
        model_dtype=config.model.dtype,
        compute_dtype=t.compute_dtype,
        replicate=t.replicate,
        tensor_parallel=t.tensor_parallel,
        activation_checkpointing=t.activation_checkpointing,
        cpu_offload=t.cpu_offload,
        loss_fn=loss_fn,
        settings=settings,
        buffer=build_buffer(config, job),
        adam=AdamSettings(
            betas=(t.beta1, t.beta2), eps=t.eps, weight_decay=t.weight_decay, kind=t.optimizer
        ),
        canary_prompts=job.prompts,
        canary_top=0 if g.quantize == "none" else TOP,
        evaluate_at=job.eval_due,
        checkpoint_at=partial(_is_due, config.checkpoint.every),
        critic_settings=critic,
        critic_path=critic_path,
        critic_seed=config.seed,
        own_reference=own_reference,
        lora=lora,
        ema_decay=t.ema_decay,
        step_options=step_options,
        resets_reference=partial(_is_due, reference.reset_every),
    )


def _is_due(every: int | None, version: int) -> bool:
    """Whether what happens every so many versions, from a first one on, is due at this version."""
    return every is not None and every > 0 and version % every == 0
