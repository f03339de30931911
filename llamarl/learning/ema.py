"""The exponential moving average of the weights: e <- d e + (1 - d) w after each optimizer step,
from the initial weights on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from llamarl.models.fsdp import local


class WeightAverage:
    """Averages the parameters that require a gradient, in float32, sharded as they are; frozen ones
    are their own average.

    decay d in [0, 1). It follows the optimizer by itself: every optimizer.step() is counted, and
    nothing else.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, decay: float
    ):
        self.decay = decay
        trained = [p for p in parameters if p.requires_grad]
        self._averages: dict[Tensor, Tensor] = {p: p.detach().float().clone() for p in trained}
        optimizer.register_step_post_hook(lambda *_: self.update())

    @torch.no_grad()
    def update(self) -> None:
        """Make one step of the average."""
        weights = [local(p).float() for p in self._averages]
        torch._foreach_lerp_(self.tensors(), weights, 1 - self.decay)

    def of(self, parameter: Tensor) -> Tensor:
        """Return the average of a parameter: sharded like it, or itself if it is frozen."""
        return self._averages.get(parameter, parameter)

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the weights as they are."""
        for p, average in self._averages.items():
            local(average).copy_(local(p))

    def tensors(self) -> list[Tensor]:
        """Return this rank's parts of the averages."""
        return [local(e) for e in self._averages.values()]
