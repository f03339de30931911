"""The trainer from a config, with its buffer and what changes from step to step."""

from __future__ import annotations

import dataclasses
from functools import partial

from executors.trainer import FSDPTrainer
from llamarl.config.command_line import Config
from llamarl.config.sections.trainer import ShardedTrainerSettings
from llamarl.launch.job import Job
from llamarl.learning.buffer import GroupBuffer
from llamarl.learning.logprobs import LateEnds
from llamarl.learning.losses import check_options, check_splits, options_of, resolve_loss
from llamarl.learning.losses.common import Loss, has_mark
from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.optim import AdamSettings, value_at
from llamarl.learning.replay import (
    DrawSettings,
    ReplayBuffer,
    SharedReplayBuffer,
    SplitReplayBuffer,
)
from llamarl.learning.targets import Shaping
from llamarl.learning.trained_model import TrainedModelSettings
from llamarl.learning.update import UpdateSettings
from llamarl.learning.values import CriticSettings
from llamarl.models.parity import TOP, ParityLimits

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
    dp_ranks = job.placement.num_dp_ranks
    peers = config.trainer.tensor_parallel
    ranks = job.placement["trainer"]
    trains_here = job.world.rank in ranks
    dp_rank = ranks.index(job.world.rank) // peers if trains_here else 0
    draw = DrawSettings(
        prompts=config.groups_per_step // job.placement.num_buffers,
        completions=config.trained_per_prompt,
        most_on_policy=b.most_on_policy,
        priority=b.priority,
        temperature=b.temperature,
    )
    return BUFFERS[b.draw](
        draw=draw,
        sync_period=b.sync_period,
        max_size=b.max_size // job.placement.num_buffers,
        seed=config.seed,
        rank=dp_rank,
        num_ranks=dp_ranks,
        grow_until=b.grow_until,
        good_reward=b.good_reward,
        max_lag=config.max_lag,
        most_lag=job.placement.replay_lag,
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


def build_trainer(config: Config, job: Job, kind: type[FSDPTrainer] = FSDPTrainer) -> FSDPTrainer:
    """Build the trainer, with its loss and its buffer. kind: the trainer's class."""
    t = config.trainer
    reference = config.reference
    own_reference = None
    if reference.kind != "frozen" and reference.kind != "reset":  # these two are executors
        own_reference = reference.kind
    model_path = str(job.inputs.model_path)
    loss_fn = loss_of(config)
    return kind(
        model_settings=dataclasses.replace(
            trained_model_of(t, path=model_path, dtype=config.model.dtype),
            lora=job.inputs.lora,
            adapter_path=t.lora.path,
            ema_decay=t.ema_decay,
            made_by=config.model.made_by,
        ),
        replicate=t.replicate,
        tensor_parallel=t.tensor_parallel,
        loss_fn=loss_fn,
        settings=update_settings(config, job, loss_fn),
        buffer=build_buffer(config, job),
        canary_prompts=job.inputs.fixed_prompts,
        canary_top=0 if config.generator.quantize == "none" else TOP,
        evaluate_at=job.inputs.eval_due,
        checkpoint_at=partial(_is_due, config.checkpoint.every),
        critic_settings=_critic_of(config, model_path),
        own_reference=own_reference,
        step_options=partial(options_at, config=config),
        samples=job.files.sample_maker,
        resets_reference=partial(_is_due, reference.reset_every),
        shares_replicas=job.placement.shares_replicas,
    )


def loss_of(config: Config) -> Loss:
    """Return the loss with its options and regularisers. ValueError for options that it lacks."""
    c = config.loss
    plain_loss = resolve_loss(c.fn)
    options = c.options_for(set(options_of(plain_loss)))
    check_options(plain_loss, options)
    if config.splits_prompts:
        check_splits(plain_loss, c.fn)
    return regularised(
        partial(plain_loss, **options),
        kl_coef=c.kl_coef,
        kl_estimator=c.kl_estimator,
        entropy_coef=c.entropy_coef,
    )


def update_settings(config: Config, job: Job, loss_fn: Loss) -> UpdateSettings:
    """Return how a batch becomes an update of the policy."""
    t = config.trainer
    # Leaving out a group without advantage is exact if the loss is the policy gradient alone,
    # because such completions add nothing to it.
    by_token = t.advantages == "gae"
    skips = t.skip_zero_advantage and not by_token and not has_mark(loss_fn, "uses_all_completions")
    return UpdateSettings(
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
        parity=None if config.samples_otherwise else parity_limits(config),
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
        masks_truncated=t.mask_truncated_completions,
        recomputes_kv=config.generator.recompute_kv,
        late_ends=late_ends_of(config, job),
        replays_routes=t.routing_replay,
    )


def _critic_of(config: Config, model_path: str) -> CriticSettings | None:
    """Return the critic's settings; None without one. model_path: the policy's directory."""
    t = config.trainer
    if t.advantages != "gae":
        return None
    path = None
    if t.critic.trunk == "own":
        path = t.critic.path or model_path
    return CriticSettings(
        lr=config.critic_lr,
        coef=t.value_coef,
        clip=t.value_clip,
        gamma=t.gamma,
        gae_lambda=t.gae_lambda,
        path=path,
        seed=config.seed,
    )


def trained_model_of(
    trainer: ShardedTrainerSettings, *, path: str, dtype: str
) -> TrainedModelSettings:
    """Return the settings of the model that a job trains. dtype: of the exported model."""
    return TrainedModelSettings(
        path=path,
        dtype=dtype,
        compute_dtype=trainer.compute_dtype,
        adam=AdamSettings(
            betas=(trainer.beta1, trainer.beta2),
            eps=trainer.eps,
            weight_decay=trainer.weight_decay,
            kind=trainer.optimizer,
        ),
        activation_checkpointing=trainer.activation_checkpointing,
        cpu_offload=trainer.cpu_offload,
    )


def parity_limits(config: Config) -> ParityLimits:
    """Return how far logprobs of the trainer and the generator may differ."""
    t = config.trainer
    return ParityLimits.of(
        config.model.dtype,
        t.compute_dtype,
        fixed=t.parity_tolerance,
        temperature=config.temperature,
    )


def late_ends_of(config: Config, job: Job) -> LateEnds | None:
    """Return what a completion could not have when it was sampled; None if it could have all."""
    least = config.generator.min_new_tokens
    if not least or not job.inputs.stop_token_ids:
        return None
    return LateEnds(job.inputs.stop_token_ids, min_new_tokens=least)


def _is_due(every: int | None, version: int) -> bool:
    """Whether what happens every so many versions, from a first one on, is due at this version."""
    return every is not None and every > 0 and version % every == 0
