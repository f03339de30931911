"""The tables of docs/migration.md: the keys of llamarl for the settings of TRL and verl.

    python -m tests.migration_table > docs/migration.md

tests/unit/test_migration.py checks that every key and every choice in the second column exists.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD = """# Coming from TRL or verl

`python -m tests.migration_table > docs/migration.md` made this page. The first column has the
settings of TRL's `GRPOConfig` (1.16) and of verl, the second what to write here, behind
`python recipes/llama_async.py`. `docs/keys.md` explains each key. Reward functions of both
(`docs/rewards.md`) and TRL's environments (`docs/data.md`) run unchanged, with few exceptions.

TRL's batch sizes count completions: `generation_batch_size` is by default
`per_device_train_batch_size` times devices times `steps_per_generation`. `groups_per_step` counts
prompts, over all trainer ranks. A step here is a batch of sampled prompts, of which
`trainer.minibatches_per_step` and `trainer.updates_per_batch` make several optimizer updates.
Ratios always use the logprobs of the generator that sampled, so there is no separate correction for
vLLM's."""

SERVICES = (
    "`metrics.wandb=true` `metrics.tensorboard=true` `metrics.trackio=true` `metrics.mlflow=true`"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of the other framework.

    ours: what to write here, as code spans apart from "none". note: one sentence, or nothing.
    """

    theirs: str
    ours: str
    note: str = ""


TRL = (
    Setting("learning_rate", "`lr`", "the default depends on the model's size"),
    Setting("max_grad_norm, weight_decay", "`trainer.max_grad_norm` `trainer.weight_decay`"),
    Setting(
        "adam_beta1, adam_beta2, adam_epsilon", "`trainer.beta1` `trainer.beta2` `trainer.eps`"
    ),
    Setting("optim=adamw_8bit", "`trainer.optimizer=adamw8bit`", "needs torchao"),
    Setting("lr_scheduler_type", "`trainer.schedule=cosine`", "ends at 0: there is no floor"),
    Setting("warmup_steps, warmup_ratio", "`trainer.warmup_steps`", "in steps; there is no ratio"),
    Setting(
        "generation_batch_size",
        "`groups_per_step`",
        "divided by num_generations",
    ),
    Setting(
        "per_device_train_batch_size, gradient_accumulation_steps",
        "`trainer.microbatch_tokens`",
        "always packed",
    ),
    Setting("num_generations", "`group_size`"),
    Setting("max_completion_length", "`max_new_tokens`"),
    Setting(
        "max_prompt_length (older TRL)",
        "`task.max_prompt_tokens`",
        "a longer row is left out, not cut",
    ),
    Setting("max_steps", "`max_steps`", "steps of sampled batches, not optimizer updates"),
    Setting("num_train_epochs", "`num_epochs`", "in place of `max_steps`"),
    Setting(
        "steps_per_generation",
        "`trainer.minibatches_per_step`",
        "divided by gradient_accumulation_steps",
    ),
    Setting("num_iterations", "`trainer.updates_per_batch`"),
    Setting(
        "beta",
        "`loss.kl_coef` `reference=frozen`",
        "both keys; with adapters `reference=adapters_off`",
    ),
    Setting("sync_ref_model, ref_model_sync_steps", "`reference=reset` `reference.reset_every`"),
    Setting("ref_model_mixup_alpha", "none", "`reference=reset` takes the policy's weights whole"),
    Setting("epsilon, epsilon_high", "`loss.clip_low` `loss.clip_high`"),
    Setting("delta", "`loss.ratio_cap`", "of a clipped loss"),
    Setting("entropy_coef", "`loss.entropy_coef`", "there is no adaptive one"),
    Setting("loss_type=grpo", "`loss=grpo`"),
    Setting("loss_type=dapo", "`loss=dapo`", "`loss.clip_high=0.2` for TRL's default clip"),
    Setting(
        "loss_type=bnpo", "`loss=bnpo`", "a mean over the minibatch, not over a device's batch"
    ),
    Setting(
        "loss_type=dr_grpo",
        "`loss=dr_grpo` `loss.max_tokens=${max_new_tokens}`",
        "caps the ratio, where TRL clips it",
    ),
    Setting("loss_type=cispo", "`loss=cispo` `loss.ratio_cap`", "TRL's epsilon_high is the cap"),
    Setting(
        "importance_sampling_level=sequence",
        "`loss=gspo`",
        "with the paper's clip; or `loss.ratio_level=sequence_mean`",
    ),
    Setting("scale_rewards=group", "`trainer.advantages=group_mean_std`", "what `loss=grpo` sets"),
    Setting(
        "scale_rewards=batch",
        "`trainer.advantages=group_mean` `trainer.whiten=rewards`",
    ),
    Setting("scale_rewards=none", "`trainer.advantages=group_mean`"),
    Setting("reward_funcs (one)", "`reward.fn=my_module:my_reward`", "TRL's signature works"),
    Setting(
        "reward_funcs, reward_weights",
        "`reward=parts` `reward.parts`",
        "each part has kind, fn, weight",
    ),
    Setting("mask_truncated_completions", "`trainer.mask_truncated_completions=true`"),
    Setting("temperature", "`temperature`"),
    Setting(
        "top_p, top_k, min_p",
        "`generator.top_p` `generator.top_k` `generator.min_p`",
        "only where nothing is trained",
    ),
    Setting("repetition_penalty", "none", "a part of `reward.parts` that scores repetition"),
    Setting("chat_template_kwargs", "`model.template_options.enable_thinking=false`"),
    Setting("bf16", "`model.dtype=bfloat16`", "`trainer.compute_dtype` follows it"),
    Setting("gradient_checkpointing", "`trainer.activation_checkpointing=true`"),
    Setting(
        "LoraConfig r, lora_alpha, target_modules",
        "`trainer.lora.rank` `trainer.lora.alpha` `trainer.lora.targets`",
    ),
    Setting("LoraConfig lora_dropout", "none", "`trainer.weight_decay` regularises too"),
    Setting("use_vllm", "`generator=vllm`", "`generator=native` is the default"),
    Setting(
        "vllm_mode=colocate, sleep mode",
        "`placement.colocate=[trainer,generator]` `offload=true`",
        "with `max_lag=0`",
    ),
    Setting(
        "vllm_mode=server", "`placement.trainer` `placement.generator`", "ranks of the same job"
    ),
    Setting(
        "vllm_gpu_memory_utilization",
        "`generator.gpu_memory_utilization`",
        "of `generator=native`: `generator.cache_tokens`",
    ),
    Setting("vllm_tensor_parallel_size", "`generator.tensor_parallel`"),
    Setting("save_steps, save_total_limit", "`checkpoint.every` `checkpoint.keep`"),
    Setting("eval_steps", "`eval.every`"),
    Setting("logging_steps", "none", "every step is a row of RUN_DIR/metrics.jsonl"),
    Setting("report_to", SERVICES),
    Setting("output_dir", "`run_dir`"),
    Setting("run_name, trackio_space_id", "`metrics.run_name`", "for a Space set TRACKIO_SPACE_ID"),
    Setting("log_completions", "`metrics.samples` `metrics.show_every`", "and in the report"),
    Setting("push_to_hub, hub_model_id", "none", "recipes/push.py uploads a run's model"),
    Setting("resume_from_checkpoint", "`resume=auto` `run_dir`", "or `resume=PATH`"),
    Setting("seed", "`seed`"),
)

VERL = (
    Setting("data.train_files, data.val_files", "`task=hf_dataset` `task.path` `task.eval_path`"),
    Setting("data.train_batch_size", "`groups_per_step`", "the same meaning"),
    Setting("rollout.n", "`group_size`", "the same meaning"),
    Setting("data.max_prompt_length", "`task.max_prompt_tokens`"),
    Setting("data.filter_overlong_prompts", "none", "longer rows are always left out"),
    Setting("data.truncation", "none", "prompts are never cut"),
    Setting("data.max_response_length", "`max_new_tokens`"),
    Setting("actor.optim.lr", "`lr`"),
    Setting(
        "actor.ppo_mini_batch_size",
        "`trainer.minibatches_per_step`",
        "a count: train_batch_size over ppo_mini_batch_size",
    ),
    Setting("actor.ppo_epochs", "`trainer.updates_per_batch`"),
    Setting(
        "actor.ppo_micro_batch_size_per_gpu, use_dynamic_bsz, ppo_max_token_len_per_gpu",
        "`trainer.microbatch_tokens`",
        "always packed",
    ),
    Setting(
        "actor.use_kl_loss, kl_loss_coef",
        "`reference=frozen` `loss.kl_coef`",
    ),
    Setting(
        "actor.kl_loss_type",
        "`loss.kl_estimator`",
        "low_var_kl is k3, mse is k2, kl is k1",
    ),
    Setting(
        "algorithm.use_kl_in_reward, kl_ctrl.kl_coef",
        "`reference=frozen` `trainer.reward_kl_coef`",
    ),
    Setting("algorithm.kl_ctrl.type=adaptive", "none", "a fixed `trainer.reward_kl_coef`"),
    Setting(
        "algorithm.adv_estimator=grpo",
        "`trainer.advantages=group_mean_std`",
        "what `loss=grpo` sets",
    ),
    Setting(
        "algorithm.adv_estimator=rloo",
        "`trainer.advantages=leave_one_out`",
        "what `loss=rloo` sets",
    ),
    Setting("algorithm.adv_estimator=gae", "`loss=ppo` `trainer.advantages=gae`"),
    Setting("algorithm.gamma, algorithm.lam", "`trainer.gamma` `trainer.gae_lambda`"),
    Setting(
        "algorithm.adv_estimator=reinforce_plus_plus",
        "none",
        "its _baseline form is below: there is always a baseline",
    ),
    Setting(
        "algorithm.adv_estimator=reinforce_plus_plus_baseline",
        "`loss=ppo` `trainer.whiten=advantages`",
    ),
    Setting(
        "algorithm.adv_estimator=remax",
        "none",
        "`trainer.advantages=leave_one_out` has no greedy baseline",
    ),
    Setting("critic.optim.lr, cliprange_value", "`trainer.value_lr` `trainer.value_clip`"),
    Setting("critic.model.path", "`trainer.critic.trunk=own` `trainer.critic.path`"),
    Setting("actor.loss_agg_mode=token-mean", "`loss.normalize=tokens`"),
    Setting("actor.loss_agg_mode=seq-mean-token-mean", "`loss.normalize=completions`"),
    Setting(
        "actor.loss_agg_mode=seq-mean-token-sum-norm",
        "`loss=dr_grpo` `loss.max_tokens=${max_new_tokens}`",
    ),
    Setting("actor.loss_agg_mode=seq-mean-token-sum", "`loss=dr_grpo` `loss.max_tokens=1`"),
    Setting("actor.clip_ratio_low, clip_ratio_high", "`loss.clip_low` `loss.clip_high`"),
    Setting(
        "actor.clip_ratio_c (dual clip)",
        "`loss.ratio_cap=3.0`",
        "of a clipped loss: the same bound where the advantage is negative",
    ),
    Setting("actor.entropy_coeff", "`loss.entropy_coef`"),
    Setting("actor.policy_loss.loss_mode=gspo", "`loss=gspo`"),
    Setting(
        "fsdp_config.param_offload, optimizer_offload",
        "`trainer.cpu_offload=true`",
        "or `offload=true`",
    ),
    Setting(
        "actor.ulysses_sequence_parallel_size",
        "none",
        "`trainer.tensor_parallel` `trainer.activation_checkpointing=true`",
    ),
    Setting("rollout.name=vllm", "`generator=vllm`"),
    Setting("rollout.tensor_model_parallel_size", "`generator.tensor_parallel`"),
    Setting(
        "rollout.gpu_memory_utilization",
        "`generator.gpu_memory_utilization`",
        "of `generator=vllm`",
    ),
    Setting("rollout.val_kwargs.n", "`eval.num_samples`", "sampled, beside the greedy answer"),
    Setting(
        "rollout.val_kwargs.temperature", "none", "one answer is greedy, samples are as in training"
    ),
    Setting(
        "algorithm.filter_groups (DAPO)",
        "`tickets.informative=true` `tickets.max_refill`",
        "`trainer.filter_groups` starts no others",
    ),
    Setting(
        "reward_model.overlong_buffer (DAPO)",
        "`reward.fn=rewards:soft_length`",
        "as a part of `reward.parts`",
    ),
    Setting(
        "custom_reward_function.path, name",
        "`reward.fn=my_module:my_reward`",
        "verl's signature works",
    ),
    Setting("reward_model.model.path", "`reward=model` `reward.path`"),
    Setting("n_gpus_per_node, nnodes", "none", "torchrun's --nproc-per-node and --nnodes"),
    Setting("total_epochs", "`num_epochs`", "in place of `max_steps`"),
    Setting("save_freq, test_freq", "`checkpoint.every` `eval.every`"),
    Setting("logger", SERVICES),
    Setting("project_name, experiment_name", "`metrics.project` `metrics.run_name`"),
    Setting("critic_warmup", "none", "a critic of its own: `trainer.critic.path`"),
    Setting("resume_mode", "`resume=auto` `run_dir`"),
)


def page() -> str:
    """Return the page."""
    lines = [HEAD]
    for title, settings in (("TRL", TRL), ("verl", VERL)):
        lines += ["", f"## {title}", "", f"| {title} | here | note |", "|---|---|---|"]
        for one in settings:
            lines.append(f"| {one.theirs} | {one.ours} | {one.note} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
