"""Writes trl_losses.json beside it: losses and gradients of TRL's own trainers on fixed tensors
(tests/unit/test_losses_formulas.py).

Needs TRL 1.16, which the package does not: run it with an environment that has it. Each trainer's
`_compute_loss` is called as it is, on a stand-in for the trainer that hands it these logprobs in
place of a model's.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import nanstd

LENGTHS = [3, 5, 1, 4, 2, 5]  # two groups of three, padded to 5
CASES = {
    "grpo": {"loss_type": "grpo"},
    "grpo_clip_higher": {"loss_type": "grpo", "epsilon_high": 0.28},
    "grpo_delta": {"loss_type": "grpo", "delta": 1.5},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 3e-4,
        "epsilon_high": 4e-4,
    },
    "gspo_wide": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 0.05,
        "epsilon_high": 0.05,
    },
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dapo_kl": {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1},
    "dapo_entropy": {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.05},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "cispo_kl": {"loss_type": "cispo", "epsilon_high": 1.2, "beta": 0.1},
}


def tensors() -> dict[str, torch.Tensor]:
    """Padded [6, 5] float64, garbage-free; rewards [6]."""
    random = torch.Generator().manual_seed(7)
    pi, shift, ref, entropy = torch.rand(4, 6, 5, generator=random, dtype=torch.float64)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 2.0], dtype=torch.float64)
    grouped = rewards.view(2, 3)
    std = nanstd(grouped, dim=1).repeat_interleave(3)
    mean = torch.nanmean(grouped, dim=1).repeat_interleave(3)
    return {
        "trainer_logprobs": -2 * pi,
        "generator_logprobs": -2 * pi + 1.2 * (shift - 0.5),
        "ref_logprobs": -2 * ref,
        "entropy": entropy,
        "rewards": rewards,
        "advantages": (rewards - mean) / (std + 1e-4),
        "leave_one_out": rewards - (grouped.sum(1).repeat_interleave(3) - rewards) / 2,
    }


def stand_in(logprobs: torch.Tensor, entropy: torch.Tensor, **changes) -> SimpleNamespace:
    """What `_compute_loss` reads of a trainer, with TRL's defaults."""
    values = (
        dict(
            loss_type="grpo",
            importance_sampling_level="token",
            epsilon_low=0.2,
            epsilon_high=0.2,
            beta=0.0,
            delta=None,
            entropy_coef=0.0,
        )
        | changes
    )
    args = SimpleNamespace(
        delta=values["delta"], use_bias_correction_kl=False, steps_per_generation=1
    )
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, sync_gradients=True
    )
    return SimpleNamespace(
        **values,
        args=args,
        accelerator=accelerator,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        max_completion_length=logprobs.shape[1],
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        model=SimpleNamespace(training=True),
        _entropy_bonus_enabled=values["entropy_coef"] != 0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
    )


def run(
    trainer: type, t: dict[str, torch.Tensor], mask: torch.Tensor, inputs: dict, **changes
) -> dict:
    logprobs = t["trainer_logprobs"].clone().requires_grad_()
    entropy = t["entropy"].clone().requires_grad_()
    ids = torch.zeros_like(mask)
    given = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        **inputs,
    }
    loss = trainer._compute_loss(stand_in(logprobs, entropy, **changes), None, given)
    loss.backward()
    gradients = {"gradient": logprobs.grad, "entropy_gradient": entropy.grad}
    return {"loss": loss.item()} | {
        name: g.tolist() for name, g in gradients.items() if g is not None
    }


def main() -> None:
    t = tensors()
    mask = (torch.arange(5) < torch.tensor(LENGTHS)[:, None]).long()
    inputs = {
        "advantages": t["advantages"],
        "old_per_token_logps": t["generator_logprobs"],
        "ref_per_token_logps": t["ref_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    out = {name: run(GRPOTrainer, t, mask, inputs, **changes) for name, changes in CASES.items()}
    of_sequences = {
        "advantages": t["leave_one_out"],
        "old_logps": (t["generator_logprobs"] * mask).sum(1),
    }
    out["rloo"] = run(RLOOTrainer, t, mask, of_sequences)
    made = {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "script": "tests/golden/make_trl_losses.py",
    }
    tensors_out = {name: value.tolist() for name, value in t.items()}
    file = Path(__file__).with_name("trl_losses.json")
    file.write_text(
        json.dumps(
            {"made": made, "lengths": LENGTHS, "tensors": tensors_out, "losses": out}, indent=1
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
