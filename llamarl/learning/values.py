"""The critic of PPO: a value head on the policy's own trunk, its optimizer, and what it is trained
towards.

    A_t = sum_l (gamma lambda)^l delta_{t+l}        (GAE; OPPO eq. 1)
    delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
    return_t = A_t + V(s_t)

V(s_t) is the value of the hidden state that predicts token t, as it was before the step ("old");
after a completion's last token V is 0, whether it ended by itself or was cut off. The head is the
trainer's alone: it is in checkpoints, sharded like the policy, and neither travels to generators
nor is exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from llamarl.learning.losses.common import LossAndMetrics, half_square, per_token
from llamarl.learning.optim import build_optimizer, set_lr
from llamarl.models.fsdp import local, local_rows
from llamarl.models.heads import value_head
from llamarl.models.sharded_state import Shard, box_from, optimizer_tensors, set_steps, steps_of
from llamarl.models.sharding import Box

_SAVED_AS = {"weights": "value/", "moments": "value/"}  # prefixes, see sharded_state


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
    """The value head and its AdamW, without weight decay.

    mesh: as of the decoder; None for one rank.
    """

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
        # The shards, also while FSDP holds them whole.
        self.parameters = list(self.head.parameters())
        self._shards = [
            Shard(name, parameter, held_rows(parameter))
            for name, parameter in self.head.named_parameters()
        ]
        self.optimizer = build_optimizer(
            self.parameters, lr=settings.lr, betas=betas, eps=eps, weight_decay=0.0
        )

    def step(self, factor: float) -> None:
        """One optimizer step at `factor` times its learning rate."""
        set_lr(self.optimizer, self.settings.lr * factor)
        self.optimizer.step()

    # --- Checkpoints ---

    def state_dict(self) -> dict:
        """This rank's shard of the head and of its moments, and which rows they are."""
        state: dict = {"value_rows": {}, "value_step": steps_of(self.optimizer)}
        for shard in self._shards:
            state["value_rows"][shard.name] = [shard.box.offsets, shard.box.lengths]
            state |= shard.state(self.optimizer, **_SAVED_AS)
        return state

    @torch.no_grad()
    def load_state_dict(self, part: Mapping) -> bool:
        """Take what one rank's part holds of this rank's shard. False if that rank saved nothing of
        a value head.
        """
        if "value_rows" not in part:
            return False
        for shard in self._shards:
            theirs = box_from(part["value_rows"][shard.name])
            shard.load(part, theirs, self.optimizer, **_SAVED_AS)
        set_steps(self.optimizer, self.parameters, part["value_step"])
        return True

    def offloadable(self) -> Iterable[Tensor]:
        """The head and its moments; gradients end with the step."""
        self.optimizer.zero_grad()
        return [local(t) for t in (*self.parameters, *optimizer_tensors(self.optimizer))]


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
    *,
    value_clip: float | None,
    num_loss_tokens: float,
) -> LossAndMetrics:
    """sum_t max[ (V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2 ] / 2 / num_loss_tokens

    (PPO's value loss; TRL.) V = values, with gradient; V_old = old_values, before the batch's first
    update; R = returns (`gae`); eps = value_clip, None: no clip. Tensors [R], a trained label each,
    in units of the reward. ValueError for value_clip <= 0.

    metrics: value/sum, value/error (sum of |V - R|), value/clipped (labels whose gradient the clip
    cuts).
    """
    if value_clip is not None and not value_clip > 0:
        raise ValueError(f"value_clip={value_clip}: need more than 0, or null for no clip")
    loss = half_square(values - returns)
    clipped = loss
    if value_clip is not None:
        clipped_value = old_values + (values - old_values).clamp(-value_clip, value_clip)
        clipped = half_square(clipped_value - returns)
    total = torch.maximum(loss, clipped).sum()
    metrics = {
        "value/sum": values.detach().sum(),
        "value/error": (values - returns).detach().abs().sum(),
        "value/clipped": (clipped > loss).sum().float(),
    }
    return per_token(total, num_loss_tokens), metrics
