"""Builds the trainer of a supervised job from its configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from executors.build import sampling_of
from executors.build_scripts import build_scorer, engine_alone
from executors.build_trainer import trained_model_of
from executors.supervised import SupervisedTrainer
from llamarl.config.supervised import RewardModelConfig, SFTConfig, SupervisedConfig
from llamarl.evaluation.ask import HeldOutPrompts
from llamarl.launch.supervised import SupervisedJob
from llamarl.learning.preference import BradleyTerry
from llamarl.learning.sft import NextToken
from llamarl.learning.supervised import Objective, SupervisedSettings


def build_reward_model_trainer(config: RewardModelConfig, job: SupervisedJob) -> SupervisedTrainer:
    """Build the trainer of a reward model, with the Bradley-Terry loss on the job's pairs."""
    return _build(config, job, BradleyTerry(center_coef=config.loss.center_coef))


def build_sft_trainer(config: SFTConfig, job: SupervisedJob) -> SupervisedTrainer:
    """Build the trainer that learns the next token of the job's rows."""
    held_out = None if job.target is None else partial(_build_held_out, job)
    return _build(config, job, NextToken(), held_out)


def _build_held_out(job: SupervisedJob) -> HeldOutPrompts:
    """Build what completes and scores the held-out prompts of the job's task, on every rank."""
    inputs = job.inputs
    assert inputs is not None, "only a task has held-out prompts"
    config = inputs.config
    scorer = build_scorer(inputs, job.world.device)
    scorer.start()
    return HeldOutPrompts(
        engine=engine_alone(inputs, job.world.device),
        scorer=scorer,
        sampling=sampling_of(config, inputs),
        chunk_tokens=config.generator.chunk_tokens,
        sets=inputs.eval_sets,
        prompts=inputs.eval_prompts,
        decode=inputs.decode,
        decode_raw=inputs.decode_raw,
    )


def _build(
    config: SupervisedConfig,
    job: SupervisedJob,
    objective: Objective,
    held_out: Callable[[], HeldOutPrompts] | None = None,
) -> SupervisedTrainer:
    t = config.trainer
    return SupervisedTrainer(
        model_settings=dataclasses.replace(
            trained_model_of(t, path=config.model.path, dtype=config.model.dtype),
            score_seed=config.seed if config.scores else None,
        ),
        replicate=t.replicate,
        objective=objective,
        examples=job.data.train,
        held_out=job.data.held_out,
        order=job.order,
        settings=SupervisedSettings(
            lr=config.lr,
            schedule=t.schedule,
            warmup_steps=job.warmup_steps,
            max_steps=job.max_steps,
            microbatch_tokens=t.microbatch_tokens,
            max_grad_norm=t.max_grad_norm,
        ),
        evaluate_at=job.eval_due,
        checkpoint_at=job.checkpoint_due,
        make_held_out=held_out,
        ends_run=job.ends_run,
    )
