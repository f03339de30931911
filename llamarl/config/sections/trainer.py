"""The section `trainer`: optimizer, advantages, critic, adapters, and what cannot go together with
them.
"""

from __future__ import annotations

from typing import Literal

from llamarl.config.sections.loss import LossSettings, declarations, declares, published_losses
from llamarl.config.sections.run import RunSettings
from llamarl.words.choices import Advantages, Schedule, Whiten
from llamarl.words.fields import (
    AnyText,
    BelowOne,
    Count,
    Flag,
    Natural,
    NonNegative,
    Number,
    Positive,
    Share,
    settings_dataclass,
)
from llamarl.words.findings import Findings


@settings_dataclass
class LoraSettings:
    path: AnyText | None
    """PEFT directory that the adapters start as. Its r, lora_alpha and target_modules must be
    the three keys below; null: B starts at 0.
    """
    rank: Natural
    """Rank of each adapter; 0: train the weights themselves."""
    alpha: Positive
    """An adapter's product counts alpha / rank."""
    targets: list[AnyText]
    """Last names of the projections that get an adapter (q_proj); all-linear: every projection of
    the layers.
    """


@settings_dataclass
class CriticModelSettings:
    trunk: Literal["shared", "own"]
    """shared: values come from a head on the policy's trunk; own: from a model beside it, with
    its own optimizer.
    """
    path: AnyText | None
    """With own: a reward model's directory that the critic starts as; null: as the policy, with
    a new head.
    """


@settings_dataclass
class ShardedTrainerSettings:
    """The settings of every trainer that shards a decoder."""

    replicate: Count
    """Copies of the model, each sharded over an equal share of the trainer ranks (HSDP)."""
    microbatch_tokens: Count
    """Packed tokens of a forward and backward pass of a rank. A stop request waits for one;
    more is faster on a GPU.
    """
    max_grad_norm: Positive | None
    """Norm to which gradients are clipped; null: not clipped."""
    optimizer: Literal["adamw", "adamw8bit"]
    """adamw8bit: moments of one byte each instead of four, in blocks of 256 (torchao)."""
    weight_decay: NonNegative
    """AdamW's weight decay."""
    beta1: BelowOne
    """AdamW's decay of the first moment."""
    beta2: BelowOne
    """AdamW's decay of the second moment."""
    eps: Positive
    """AdamW's epsilon."""
    schedule: Schedule
    """Learning rate over all optimizer updates. wsd: warm-up, stable, decay."""
    compute_dtype: Literal["float32", "bfloat16"]
    """Type that the forward and backward pass compute in."""
    activation_checkpointing: Flag
    """Recompute activations in the backward pass, to save memory."""
    cpu_offload: Flag
    """On a GPU: masters, gradients and moments in host memory, where AdamW runs. Weights then
    leave from there.
    """


@settings_dataclass
class TrainerSettings(ShardedTrainerSettings):
    tensor_parallel: Count
    """Ranks that share each layer and train on the same groups. Each of these parts is sharded
    (FSDP2 x TP).
    """
    warmup_steps: Natural
    """Steps of the warm-up, each of minibatches_per_step * updates_per_batch updates."""
    decay_steps: Count | None
    """With wsd: steps of the line to 0 at the end; null: a fifth of those after the warm-up."""
    advantages: Advantages
    """group_mean: reward minus its group's mean; group_mean_std: also divided by its standard
    deviation; leave_one_out: reward minus the mean of the others; turns: for a dialogue's turn,
    the later rewards minus the group's mean (docs/data.md); gae: by token, from the
    values of trainer.critic (loss=ppo). loss=NAME sets the one that the loss was published
    with.
    """
    lora: LoraSettings
    """Low-rank adapters beside frozen weights. Only they travel, and checkpoints have adapter/
    beside hf/.
    """
    ema_decay: BelowOne | None
    """Such as 0.99: average <- 0.99 average + 0.01 weights at each optimizer update, exported
    as hf_ema/; null: no average.
    """
    parity_tolerance: Positive | None
    """Root mean square, in nats, by which logprobs of trainer and generator may differ, on
    fixed prompts at every version and on fresh tokens; null: what the dtype explains, then
    twice what the start of the run gave.
    """
    skip_zero_advantage: Flag
    """If the loss is a policy gradient alone, leave out completions of advantage 0, which add
    nothing.
    """
    filter_groups: Flag
    """Leave out groups of equal rewards, so that no mean or deviation counts them (Magistral)."""
    mask_truncated_completions: Flag
    """Completions that were cut off at max_new_tokens have no loss. Their rewards still count in
    their group's mean (TRL, DAPO's overlong filtering).
    """
    routing_replay: Flag
    """In a mixture of experts the trainer takes the experts by which each token was sampled, and
    weighs them by its own router (R3, arXiv 2510.11370).
    """
    minibatches_per_step: Count
    """N, the minibatches of whole groups that a batch is cut into, with one optimizer update
    each (Async RLHF).
    """
    updates_per_batch: Count
    """T, the passes over a batch (Async RLHF; "PPO epochs")."""
    missing_eos_penalty: Number | None
    """Reward of a completion that was cut off, instead of its own, such as -1 (Async RLHF
    tables 4, 7); null: its own.
    """
    reward_kl_coef: NonNegative
    """KL to the reference that is taken off the reward: with gae of each token, else of the
    completion.
    """
    whiten: Whiten
    """rewards: divide by their deviation in the batch; advantages: to mean 0 and deviation 1;
    both; completions: advantages so over the completions of each minibatch, not over tokens
    (Magistral).
    """
    gamma: Share
    """With gae: the discount of a token."""
    gae_lambda: Share
    """With gae: lambda."""
    critic: CriticModelSettings
    """With gae: the value model."""
    value_lr: Positive | None
    """With gae: learning rate of the critic's own parameters, by the schedule of lr; null:
    1.0e-3 for a head, which starts at 0, and lr for a trunk of its own.
    """
    value_coef: NonNegative
    """With gae: weight of the values' loss, which trains a shared trunk too."""
    value_clip: Positive | None
    """With gae: a value moves no further from the old one than this (PPO); null: no clipping."""


def find_trainer(
    trainer: TrainerSettings,
    run: RunSettings,
    found: Findings,
    *,
    loss: LossSettings,
    generator_kind: str,
) -> None:
    """Find settings of the trainer that cannot go together."""
    _find_optimizer(trainer, run, found)
    _find_steps(trainer, run, found)
    _find_advantages(trainer, run, found, loss=loss)
    _find_critic(trainer, found)
    _find_adapters(trainer, found, generator_kind=generator_kind)
    if trainer.routing_replay and generator_kind == "vllm":
        found.add(
            "vLLM does not say which experts sampled a token; generator=native, or "
            "trainer.routing_replay=false",
            "trainer.routing_replay",
            "generator.kind",
        )


def _find_optimizer(trainer: TrainerSettings, run: RunSettings, found: Findings) -> None:
    """Find optimizer moments that cannot lie where the settings want them."""
    if run.offload and trainer.cpu_offload:
        found.add(
            "each of these moves the trainer to host memory in its own way; choose one: "
            "trainer.cpu_offload=false, or offload=false",
            "offload",
            "trainer.cpu_offload",
        )
    if trainer.optimizer != "adamw8bit":
        return
    if run.offload:
        found.add(
            "offload moves the optimizer's moments to host memory, and 8-bit ones cannot leave "
            "the device; trainer.optimizer=adamw, or offload=false",
            "trainer.optimizer",
            "offload",
        )
    if trainer.cpu_offload:
        found.add(
            "8-bit moments must lie on the device, and cpu_offload keeps them in host memory; "
            "trainer.optimizer=adamw, or trainer.cpu_offload=false",
            "trainer.optimizer",
            "trainer.cpu_offload",
        )


def _find_steps(trainer: TrainerSettings, run: RunSettings, found: Findings) -> None:
    """Find a warm-up and a decay of the learning rate that are longer than the run."""
    # The steps of num_epochs are known, and checked, once the rows have been read.
    max_steps = run.max_steps if run.num_epochs is None else 0
    if trainer.warmup_steps >= max_steps > 0:
        found.add(
            "the warm-up would not end; trainer.warmup_steps must be below max_steps",
            "trainer.warmup_steps",
            "max_steps",
        )
    if trainer.decay_steps is None:
        return
    if trainer.schedule != "wsd":
        found.add(
            "only the schedule wsd ends with a decay; trainer.schedule=wsd, or "
            "trainer.decay_steps=null",
            "trainer.decay_steps",
            "trainer.schedule",
        )
    if trainer.decay_steps + trainer.warmup_steps > max_steps > 0:
        found.add(
            "warm-up and decay are longer than the run; lower one of them, or raise max_steps",
            "trainer.decay_steps",
            "trainer.warmup_steps",
            "max_steps",
        )


def _find_advantages(
    trainer: TrainerSettings, run: RunSettings, found: Findings, *, loss: LossSettings
) -> None:
    """Find advantages that are always 0, or that nothing can use."""
    if trainer.advantages != "gae" and run.group_size < 2 and not loss.ignores_rewards:
        found.add(
            "a group of one has no baseline, so its advantage is always 0; need at least 2, "
            "or trainer.advantages=gae",
            "group_size",
            "trainer.advantages",
        )
    if trainer.filter_groups and loss.fn == "distill":
        found.add(
            "a teacher has something to say of groups of equal rewards too; "
            "trainer.filter_groups=false",
            "trainer.filter_groups",
            "loss.fn",
        )
    if trainer.advantages not in ("gae", "turns"):
        return
    # An unknown loss is reported elsewhere, and a user's own loss may take any advantages.
    if loss.fn in declarations() and not declares(loss.fn, "token_advantages"):
        published = published_losses().items()
        by_token = [n for n, sets in published if declares(str(sets["fn"]), "token_advantages")]
        found.add(
            f"{trainer.advantages} gives each token its own advantage, which this loss does not "
            "use; "
            f"trainer.advantages=group_mean, or loss={' or '.join(by_token)}",
            "trainer.advantages",
            "loss.fn",
        )
    if trainer.whiten == "completions":
        found.add(
            f"{trainer.advantages} gives advantages to tokens and none to completions; "
            "trainer.whiten=advantages",
            "trainer.whiten",
            "trainer.advantages",
        )
    if trainer.filter_groups:
        why = "groups of equal rewards may have turns that differ"
        if trainer.advantages == "gae":
            why = "a value model learns from groups of equal rewards too"
        found.add(
            f"{why}, so keep them; trainer.filter_groups=false",
            "trainer.filter_groups",
            "trainer.advantages",
        )


def _find_critic(trainer: TrainerSettings, found: Findings) -> None:
    """Find a value model that nothing asks, or that cannot start as it should."""
    if trainer.critic.trunk == "own" and trainer.advantages != "gae":
        found.add(
            "only trainer.advantages=gae uses the values of a value model; choose it, or "
            "trainer.critic.trunk=shared",
            "trainer.critic.trunk",
            "trainer.advantages",
        )
    if trainer.critic.path is not None and trainer.critic.trunk == "shared":
        found.add(
            "a shared trunk is the policy's, so it cannot start as another model; "
            "trainer.critic.trunk=own, or trainer.critic.path=null",
            "trainer.critic.path",
            "trainer.critic.trunk",
        )
    found.add_unless_model(trainer.critic.path, "trainer.critic.path")


def _find_adapters(trainer: TrainerSettings, found: Findings, *, generator_kind: str) -> None:
    """Find adapters without a projection, a directory of adapters that nothing asks for, and a
    rank that the engine has no room for.
    """
    path = trainer.lora.path
    found.add_unless_file(path and f"{path}/adapter_config.json", "trainer.lora.path")
    if trainer.lora.rank == 0:
        if path is not None:
            found.add(
                "these adapters are not used; set trainer.lora.rank, trainer.lora.alpha and "
                "trainer.lora.targets as its adapter_config.json has them (r, lora_alpha, "
                "target_modules), or trainer.lora.path=null",
                "trainer.lora.path",
                "trainer.lora.rank",
            )
        return
    if generator_kind == "vllm":
        from llamarl.inference.vllm_engine import LORA_RANKS  # imports torch, so only for vLLM

        if trainer.lora.rank > LORA_RANKS[-1]:
            found.add(
                f"vLLM takes adapters of rank {LORA_RANKS[-1]} at most; generator=native, or a "
                "smaller trainer.lora.rank",
                "trainer.lora.rank",
                "generator.kind",
            )
    if not trainer.lora.targets:
        found.add(
            "there is nothing to adapt; name projections, such as "
            "trainer.lora.targets=[q_proj,v_proj]",
            "trainer.lora.targets",
            "trainer.lora.rank",
        )
