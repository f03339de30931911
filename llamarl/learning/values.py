"""The critic of PPO, its optimizer, and its targets. Its trunk is the policy's own, or that of a
value model.

    A_t = sum_l (gamma lambda)^l delta_{t+l}        (GAE; OPPO eq. 1)
    delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
    return_t = A_t + V(s_t)

V(s_t) is the value of the hidden state that predicts token t, as it was before the step ("old");
after a completion's last token V is 0, whether it ended by itself or was cut off. A critic is the
trainer's alone: it is in checkpoints, sharded like the policy, and neither travels to generators
nor is exported.

    SharedCritic   a scalar head on the policy's trunk, which its loss trains too
    OwnCritic      a decoder of its own with a scalar head (llamarl.models.scorer); the policy's
                   gradients know nothing of it
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llamarl.executor import ExecutorGroup
from llamarl.learning.losses.common import LossAndMetrics, half_square, per_token
from llamarl.learning.optim import build_optimizer, set_lr, settle_moments
from llamarl.learning.step_metrics import Metric, Metrics, Reduction, metrics_of_loss
from llamarl.learning.trained_model import TrainedModel, load_decoder
from llamarl.models.attention import PackedAttention
from llamarl.models.build import Decoder
from llamarl.models.decoder import Head
from llamarl.models.fsdp import held_rows, local
from llamarl.models.hf import named_parameters_hf
from llamarl.models.scorer import scores_at
from llamarl.models.sharded_state import (
    Shard,
    load_shards,
    optimizer_tensors,
    saved_state,
    set_steps,
    shards_of,
    steps_of,
)
from llamarl.models.sharding import Box, Shape, parameter_shapes
from llamarl.types import PackedBatch

_SAVED_AS = {"weights": "value/", "moments": "value/"}  # prefixes, see sharded_state


# A head is a module beside the decoder, whose parameters travel to generators and are exported. It
# is called inside the decoder's forward, through the head that is handed in there.
class ValueHead(nn.Module):
    """v = h . w + b: [R, D] -> [R] float32. It starts at 0, on every rank alike: all values are 0
    then.

    w is [D], not [1, D], so that FSDP's shards of it are even.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_RD: Tensor) -> Tensor:
        return hidden_RD.float() @ self.weight + self.bias


def value_head(dim: int, *, mesh: DeviceMesh | None, device: torch.device) -> ValueHead:
    """Return a value head, float32, sharded over `mesh` like the decoder's parameters. Collective
    over it from the first use on.
    """
    head = ValueHead(dim).to(device)
    if mesh is not None and mesh.size() > 1:
        from torch.distributed.fsdp import fully_shard

        fully_shard(head, mesh=mesh, reshard_after_forward=False)
    return head


@dataclass(frozen=True, slots=True)
class CriticSettings:
    """Settings of a critic. lr: of its own parameters, by the policy's schedule. coef: of its loss.
    clip: how far a value may move, None: any way. path: directory from which a value model of its
    own starts, None: a head on the policy's trunk. seed: draws that model's head if the directory
    has none.
    """

    lr: float
    coef: float
    clip: float | None
    gamma: float
    gae_lambda: float
    path: str | None = None
    seed: int = 0


class Critic:
    """Predicts values, and learns them beside the policy: it has parameters, their optimizer, and
    their part of a checkpoint.
    """

    trunk: Decoder | None = None  # None: the policy's

    def __init__(
        self,
        settings: CriticSettings,
        shards: list[Shard],
        optimizer: torch.optim.Optimizer,
    ):
        self.settings = settings
        self.optimizer = optimizer
        self.shards = shards
        # The shards, also while FSDP holds them whole.
        self.parameters = [shard.parameter for shard in shards]

    def values(self, policy: Decoder, batch: PackedBatch, attention: PackedAttention) -> Tensor:
        """Collective: return [R] float32, the values of the hidden states at the batch's rows."""
        raise NotImplementedError

    def beside(self, head: Head, rows: Tensor) -> Head:
        """Return the head of the policy's forward, which gives values too where the trunk is
        shared.
        """
        raise NotImplementedError

    def loss(
        self, values: Tensor, batch: PackedBatch, num_loss_tokens: float
    ) -> tuple[Tensor, Metrics]:
        """Return a microbatch's share of the loss of its values [R], times `coef`, and its
        metrics.
        """
        loss, sums = value_loss(
            values,
            batch.old_values,
            batch.returns,
            value_clip=self.settings.clip,
            num_loss_tokens=num_loss_tokens,
        )
        metrics = metrics_of_loss(sums)
        metrics["value/loss"] = Metric(loss.detach(), Reduction.UPDATE_MEAN)
        return self.settings.coef * loss, metrics

    def step(self, factor: float) -> None:
        """Make one optimizer step at `factor` times its learning rate."""
        set_lr(self.optimizer, self.settings.lr * factor)
        self.optimizer.step()

    # --- Checkpoints ---

    def state_dict(self, *, is_first_peer: bool = True) -> dict:
        """Return this rank's shards and their moments, and which boxes they are.

        is_first_peer: whether it also saves what all tensor-parallel ranks hold.
        """
        return {"value_step": steps_of(self.optimizer)} | saved_state(
            self.shards,
            lambda shard: shard.state(self.optimizer, **_SAVED_AS),
            is_first_peer=is_first_peer,
            boxes="value_rows",
        )

    @torch.no_grad()
    def load_state_dict(self, parts: Iterable[Mapping]) -> int:
        """Take what the ranks' parts hold of this rank's shards. Returns how many elements of these
        they lack. ValueError if a part is of another value model.
        """
        parts = list(parts)
        missing = load_shards(
            self.shards,
            parts,
            shapes=self.shapes,
            take=lambda shard, *of: shard.load(*of, self.optimizer, **_SAVED_AS),
            boxes="value_rows",
            remedy="resume with the trainer.critic.trunk and trainer.critic.path that it was "
            "trained with",
        )
        settle_moments(self.optimizer)
        if not missing:
            steps = max(float(part.get("value_step", 0.0)) for part in parts)
            set_steps(self.optimizer, self.parameters, steps)
        return sum(missing.values())

    def resume(self, parts: Sequence[Mapping]) -> None:
        """Go on from a checkpoint. ValueError if weights of a value model are missing; a missing
        head starts at 0.
        """
        missing = self.load_state_dict(parts)
        if missing and self.trunk is not None:
            raise ValueError(
                f"the checkpoint lacks {missing} elements of this rank's value model "
                "(trainer.critic.trunk=own): it was saved without one, or with another"
            )
        if missing:
            message = "the checkpoint has no value head: this run's starts at 0"
            warnings.warn(message, stacklevel=2)

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of its whole parameters, by the names that they are saved under."""
        raise NotImplementedError

    def offloadable(self) -> Iterable[Tensor]:
        """Return the parameters and their moments; gradients end with the step."""
        self.optimizer.zero_grad()
        return [local(t) for t in (*self.parameters, *optimizer_tensors(self.optimizer))]


class SharedCritic(Critic):
    """A value head on the policy's trunk, and its AdamW without weight decay.

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
        self.head = value_head(dim, mesh=mesh, device=device)
        shards = []
        for name, p in self.head.named_parameters():
            shards.append(Shard(name, p, held_rows(p, Box.whole(tuple(p.shape)))))
        optimizer = build_optimizer(
            self.head.parameters(), lr=settings.lr, betas=betas, eps=eps, weight_decay=0.0
        )
        super().__init__(settings, shards, optimizer)

    def values(self, policy: Decoder, batch: PackedBatch, attention: PackedAttention) -> Tensor:
        """Return values by a forward of the policy that makes no logits."""

        def head(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
            return self.head(hidden_TD.index_select(0, batch.rows))

        return policy(batch.input_ids, batch.positions, attention, head)

    def beside(self, head: Head, rows: Tensor) -> Head:
        """Return a head that gives what `head` gives (logprobs, entropy), and the value of the
        hidden state of each row.
        """

        def both(hidden_TD: Tensor, weight_VD: Tensor) -> tuple[object, ...]:
            made = head(hidden_TD, weight_VD)
            assert isinstance(made, tuple), "a head of labels gives logprobs and entropy"
            return (*made, self.head(hidden_TD.index_select(0, rows)))

        return both

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the head's weight and bias."""
        return {shard.name: tuple(shard.parameter.shape) for shard in self.shards}


class OwnCritic(Critic):
    """A value model of its own: a scorer with one label, sharded as training_decoder left it.

    optimizer: over its parameters.
    """

    trunk: Decoder

    def __init__(self, trunk: Decoder, settings: CriticSettings, optimizer: torch.optim.Optimizer):
        self.trunk = trunk
        shards = shards_of(trunk, named_parameters_hf(trunk))
        super().__init__(settings, shards, optimizer)

    def values(self, policy: Decoder, batch: PackedBatch, attention: PackedAttention) -> Tensor:
        """Return values by its own forward: the scores of the rows."""
        head = scores_at(batch.rows)
        values_R1 = self.trunk(batch.input_ids, batch.positions, attention, head)
        return values_R1.squeeze(1)

    def beside(self, head: Head, rows: Tensor) -> Head:
        """Return `head` itself, since the values come from elsewhere."""
        return head

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of its trunk's parameters, by Hugging Face names."""
        return parameter_shapes(self.trunk.config)


def load_critic(settings: CriticSettings, model: TrainedModel, group: ExecutorGroup) -> Critic:
    """Load the critic of a model, sharded as that is. Collective over the group."""
    adam = model.settings.adam
    if settings.path is None:
        return SharedCritic(
            model.decoder.config.hidden_size,
            settings,
            betas=adam.betas,
            eps=adam.eps,
            mesh=group.data_mesh(),
            device=group.device,
        )
    value_model = dataclasses.replace(
        model.settings, path=settings.path, lora=None, score_seed=settings.seed
    )
    trunk = load_decoder(value_model, group)
    optimizer = build_optimizer(trunk.parameters(), lr=settings.lr, **dataclasses.asdict(adam))
    return OwnCritic(trunk, settings, optimizer)


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
        # Bounds of the value itself: old + (values - old) has other last bits than values, and
        # would count as clipped where no clip acts.
        clipped_value = values.clamp(old_values - value_clip, old_values + value_clip)
        clipped = half_square(clipped_value - returns)
    total = torch.maximum(loss, clipped).sum()
    metrics = {
        "value/sum": values.detach().sum(),
        "value/error": (values - returns).detach().abs().sum(),
        "value/clipped": (clipped > loss).sum().float(),
    }
    return per_token(total, num_loss_tokens), metrics
