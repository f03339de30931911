"""LoRA: low-rank adapters beside frozen projections, and the policy's weights as if there were
none.

    W x + (alpha / r) B A x    A [r, D_in], B [D_out, r], B = 0 at the start   (Hu et al. 2021, 4.1)

Adapters are parameters of the projection's own module, so FSDP2 shards them with it: B by the rows
of W, A by its r rows. What leaves the trainer (weights to generators, exported directories) is W +
(alpha / r) B A, made of this rank's rows alone: only A, which is small, is gathered. There is no
dropout: the policy that is sampled has none, and ratios compare with that policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarl.models.dtensors import is_dtensor
from llamarl.models.fsdp import local, local_rows
from llamarl.models.hf import hf_name, named_parameters_hf
from llamarl.models.protocol import LanguageModel

_ENDS = (".lora_a", ".lora_b")  # of the names of adapters

Value = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Lora:
    """Settings of the adapters. rank: r of each. alpha: their product counts alpha / r. targets:
    Hugging Face names of projections. seed: of A.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    seed: int = 0


class LoraLinear(nn.Linear):
    """A frozen projection with an adapter."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float):
        has_bias = base.bias is not None
        super().__init__(base.in_features, base.out_features, has_bias, device="meta")
        self.weight = base.weight
        self.bias = base.bias
        self.scaling = alpha / rank
        self.adapts = True  # see adapters_off
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_empty(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        frozen = F.linear(x, self.weight, self.bias)
        if not self.adapts:
            return frozen
        low = F.linear(x, self.lora_a) * self.scaling
        return frozen + F.linear(low, self.lora_b)


def add_lora(decoder: LanguageModel, lora: Lora) -> None:
    """Freeze the decoder and put adapters beside the targets, before it is sharded. `reset_lora`
    gives them values.

    ValueError for targets that the model does not have, or a tensor-parallel decoder.
    """
    if decoder.tensor_parallel is not None:
        raise ValueError(
            "LoRA and tensor parallelism do not go together: "
            "a split projection's adapter is not split"
        )
    decoder.requires_grad_(False)
    known = []
    for name, module in list(decoder.named_modules()):
        if not (isinstance(module, nn.Linear) and name.startswith("layers.")):
            continue
        parts = hf_name(f"{name}.weight").split(".")
        target = parts[-2]
        known.append(target)
        if target in lora.targets:
            decoder.set_submodule(name, LoraLinear(module, lora.rank, lora.alpha))
    missing = set(lora.targets) - set(known)
    if missing:
        choices = ", ".join(dict.fromkeys(known))
        raise ValueError(
            f"no projection is called {', '.join(sorted(missing))}; choose among {choices}"
        )


@torch.no_grad()
def reset_lora(decoder: nn.Module, lora: Lora) -> None:
    """Draw A uniformly from +-1/sqrt(D_in) and set B to zero. A is a function of (seed, place in
    the model) alone, however it is sharded.
    """
    draw = torch.Generator().manual_seed(lora.seed)
    for module in decoder.modules():
        if not isinstance(module, LoraLinear):
            continue
        bound = 1 / math.sqrt(module.in_features)
        a = torch.empty(module.lora_a.shape)
        a.uniform_(-bound, bound, generator=draw)
        if is_dtensor(module.lora_a):
            first, count = local_rows(module.lora_a)
            a = a[first : first + count]
        local(module.lora_a).copy_(a)
        local(module.lora_b).zero_()


@contextmanager
def adapters_off(decoder: nn.Module) -> Iterator[None]:
    """Let the decoder compute, inside the block, with its frozen weights alone: as the model that
    it began as.
    """
    adapted = [module for module in decoder.modules() if isinstance(module, LoraLinear)]
    for module in adapted:
        module.adapts = False
    try:
        yield
    finally:
        for module in adapted:
            module.adapts = True


class PolicyWeights:
    """The decoder's weights by Hugging Face name, adapters merged: what generators and
    `transformers` are given.

    Make it once the decoder is sharded and before it runs. Merged weights have buffers of their
    own, in float32 and this rank's shards; the others are the parameters themselves.
    """

    def __init__(self, decoder: nn.Module):
        # Captured now: while FSDP has a layer whole, its modules hold other tensors under these
        # names.
        self._adapted = {}
        for name, module in decoder.named_modules():
            if isinstance(module, LoraLinear):
                self._adapted[hf_name(f"{name}.weight")] = _Adapted(
                    module.weight, module.lora_a, module.lora_b, module.scaling
                )
        self.parameters: list[tuple[str, Tensor]] = []
        for name, parameter in named_parameters_hf(decoder):
            if name.endswith(_ENDS):
                continue
            weight: Tensor = parameter
            if name in self._adapted:
                weight = _like(parameter, torch.empty_like(local(parameter)))
            self.parameters.append((name, weight))

    @torch.no_grad()
    def refresh(self) -> None:
        """Collective over the ranks that share the model: bring `parameters` up to date. Without
        adapters nothing has to be done.
        """
        for name, merged in self.parameters:
            if name in self._adapted:
                self._adapted[name].merged(out=local(merged))

    @torch.no_grad()
    def with_values(self, value: Value) -> Iterator[tuple[str, Tensor]]:
        """Collective: yield the weights with value(p) in each parameter's place, merged one at a
        time.
        """
        for name, p in self.parameters:
            if name in self._adapted:
                yield name, _like(p, self._adapted[name].merged(value))
            else:
                yield name, value(p)

    def buffers(self) -> list[Tensor]:
        """Return the tensors that this rank holds beside the parameters."""
        return [local(merged) for name, merged in self.parameters if name in self._adapted]


@dataclass(frozen=True, slots=True)
class _Adapted:
    """A projection's frozen weight W and its adapter."""

    weight: Tensor
    a: Tensor
    b: Tensor
    scaling: float

    def merged(self, value: Value = lambda p: p, *, out: Tensor | None = None) -> Tensor:
        """Return this rank's rows of W + scaling B A, with value(p) in place of A and B. Collective
        over the ranks that shard A.
        """
        a = value(self.a).detach()
        if is_dtensor(a):
            a = a.full_tensor()
        rows = local(self.weight)
        b = local(value(self.b))
        assert b.shape[0] == rows.shape[0], "B is sharded as W is"
        return torch.addmm(rows, b, a, alpha=self.scaling, out=out)


def _like(parameter: Tensor, own: Tensor) -> Tensor:
    """Return a tensor that is sharded like the parameter, with this part of it."""
    if not is_dtensor(parameter):
        return own
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
