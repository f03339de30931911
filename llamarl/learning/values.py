"""The critic of PPO: a value head on the policy's own trunk, its optimizer, and what it is trained
towards.

    A_t = sum_l (gamma lambda)^l delta_{t+l},   delta_t = r_t + gamma V(s_{t+1}) - V(s_t)        (GAE; OPPO eq. 1)
    return_t = A_t + V(s_t)

V(s_t) is the value of the hidden state that predicts token t, as it was before the step ("old");
after a completion's last token V is 0, whether it ended by itself or was cut off. The head is the
trainer's alone: it is in checkpoints, sharded like the policy, and neither travels to generators
nor is exported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from llamarl.learning.advantages import gae
from llamarl.learning.losses.common import Metrics, half_square, masked, per_token
from llamarl.learning.optim import build_optimizer, set_lr
from llamarl.learning.packing import Targets, trainable
from llamarl.learning.shaping import Rewards
from llamarl.models.fsdp import local, overlap
from llamarl.models.heads import value_head
from llamarl.models.hf import local_rows
from llamarl.models.sharding import Box
from llamarl.types import Group

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class CriticSettings:
    """lr: of the head alone, by the policy's schedule. coef: of its loss. clip: how far a value may
    move, None: any way.
    """

    lr: float
    coef: float
    clip: float | None
    gamma: float
    gae_lambda: float


class Critic:
    """The value head and its AdamW (no weight decay). mesh: as of the decoder; None for one rank."""

    def __init__(
        self,
        dim: int,
        settings: CriticSettings,
        *,
        betas: tuple[float, float],
        eps: float,
        mesh: DeviceMesh | None,
        device: torch.device,
    ):
        self.settings = settings
        self.head = value_head(dim, mesh=mesh, device=device)
        self.parameters = list(
            self.head.parameters()
        )  # the shards, also while FSDP holds them whole
        self._named = list(zip(("weight", "bias"), self.parameters, strict=True))
        self.optimizer = build_optimizer(
            self.parameters, lr=settings.lr, betas=betas, eps=eps, weight_decay=0.0
        )

    def step(self, factor: float) -> None:
        """One optimizer step at `factor` times its learning rate."""
        set_lr(self.optimizer, self.settings.lr * factor)
        self.optimizer.step()

    def targets(self, groups: list[Group], rewards: list[Rewards], values: Tensor) -> list[Targets]:
        """Advantages and returns of every token. values [C]: the old ones of all groups' tokens,
        end to end; 0 where not trained.
        """
        if not groups:
            return []
        lengths = torch.cat([g.lengths for g in groups])
        tokens = torch.cat([r.tokens for r in rewards])
        made = gae(tokens, values, lengths, gamma=self.settings.gamma, lam=self.settings.gae_lambda)
        trained = torch.cat([trainable(g) for g in groups]).repeat_interleave(lengths)
        sizes = [g.token_ids.numel() for g in groups]
        by_group = [torch.where(trained, x, 0).split(sizes) for x in (*made, values)]
        return [
            Targets(r.completions, *of_group)
            for r, *of_group in zip(rewards, *by_group, strict=True)
        ]

    # -- checkpoints
    # ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """This rank's shard of the head and of its moments, and which rows they are."""
        state: dict = {"value_rows": {}, "value_step": 0.0}
        for name, p in self._named:
            rows = held_rows(p)
            state["value_rows"][name] = [rows.offsets, rows.lengths]
            state[f"value/{name}"] = local(p)
            moments = self.optimizer.state.get(p, {})
            state |= {
                f"value/{key}/{name}": local(moments[key]) for key in _MOMENTS if key in moments
            }
            state["value_step"] = float(moments.get("step", 0.0))
        return state

    @torch.no_grad()
    def load_state_dict(self, part: dict) -> bool:
        """Take what one rank's part holds of this rank's shard. False if that rank saved nothing of
        a value head.
        """
        if "value_rows" not in part:
            return False
        for name, p in self._named:
            mine, theirs = held_rows(p), Box(*map(tuple, part["value_rows"][name]))
            common = overlap(mine, theirs)
            local(p)[common.within(mine)].copy_(part[f"value/{name}"][common.within(theirs)])
            for key in _MOMENTS if part["value_step"] else ():
                state = self.optimizer.state[p]
                state["step"] = torch.tensor(part["value_step"], device=p.device)
                if key not in state:
                    state[key] = torch.zeros_like(p)
                local(state[key])[common.within(mine)].copy_(
                    part[f"value/{key}/{name}"][common.within(theirs)]
                )
        return True

    def offloadable(self) -> Iterable[Tensor]:
        """The head and its moments; gradients end with the step."""
        self.optimizer.zero_grad(set_to_none=True)
        moments = [
            t
            for state in self.optimizer.state.values()
            for t in state.values()
            if isinstance(t, Tensor)
        ]
        return [local(t) for t in (*self.parameters, *moments)]


def held_rows(parameter: torch.nn.Parameter) -> Box:
    """The part of a head's parameter that this rank holds."""
    if not isinstance(parameter, DTensor):
        return Box.whole(tuple(parameter.shape))
    first, count = local_rows(parameter)
    return Box((first,), (count,))


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    value_clip: float | None,
    num_loss_tokens: float,
) -> tuple[Tensor, Metrics]:
    """sum_t max[ (V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2 ] / 2 / num_loss_tokens

    (PPO's value loss; TRL.) V = values, with gradient; V_old = old_values, before the batch's first
    update; R = returns (`gae`); eps = value_clip, None: no clip. Tensors [T], in units of the
    reward. A masked label adds nothing. ValueError for value_clip <= 0.

    metrics: value/sum, value/error (sum of |V - R|), value/clipped (labels whose gradient the clip
    cuts).
    """
    if value_clip is not None and not value_clip > 0:
        raise ValueError(f"value_clip={value_clip}: need more than 0, or null for no clip")
    v = masked(values, loss_mask)
    old = masked(old_values.detach(), loss_mask)
    target = masked(returns.detach(), loss_mask)
    loss = half_square(v - target)
    clipped = loss
    if value_clip is not None:
        clipped_value = old + (v - old).clamp(-value_clip, value_clip)
        clipped = half_square(clipped_value - target)
    total = torch.maximum(loss, clipped).sum()
    metrics = {
        "value/sum": v.detach().sum(),
        "value/error": (v - target).detach().abs().sum(),
        "value/clipped": (clipped > loss).sum().to(v.dtype),
    }
    return per_token(total, num_loss_tokens), metrics
