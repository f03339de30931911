"""The trainer of a supervised job, of its configuration."""

from __future__ import annotations

from executors.supervised import SupervisedTrainer
from executors.trainer import AdamSettings
from llamarl.config.supervised import RewardModelConfig, SFTConfig, SupervisedConfig
from llamarl.launch.supervised import SupervisedJob
from llamarl.learning.preference import BradleyTerry
from llamarl.learning.sft import NextToken
from llamarl.learning.supervised import Objective, SupervisedSettings


def build_reward_model_trainer(config: RewardModelConfig, job: SupervisedJob) -> SupervisedTrainer:
    """Bradley-Terry on the job's pairs."""
    return _build(config, job, BradleyTerry(center_coef=config.loss.center_coef))


def build_sft_trainer(config: SFTConfig, job: SupervisedJob) -> SupervisedTrainer:
    """The next token of what is learned of the job's rows."""
    return _build(config, job, NextToken())


def _build(config: SupervisedConfig, job: SupervisedJob, objective: Objective) -> SupervisedTrainer:
    t = config.trainer
    return SupervisedTrainer(
        model_path=config.model.path,
        model_dtype=config.model.dtype,
        compute_dtype=t.compute_dtype,
        score_seed=config.seed if config.scores else None,
        replicate=t.replicate,
        activation_checkpointing=t.activation_checkpointing,
        cpu_offload=t.cpu_offload,
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
        adam=AdamSettings(
            betas=(t.beta1, t.beta2), eps=t.eps, weight_decay=t.weight_decay, kind=t.optimizer
        ),
        evaluate_at=job.eval_due,
        checkpoint_at=job.checkpoint_due,
    )
