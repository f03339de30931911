"""LoRA: low-rank adapters beside frozen projections.

    y = W x + (alpha / r) B A x    A [r, D_in], B [D_out, r], B = 0 at the start  (Hu et al. 2021)

Trainer, generator and reference compute this equation, and only A and B travel between them. The
sum is rounded once: W x, rounded to bfloat16 first, would swallow a small product B A x, and so
would W + (alpha / r) B A. Adapters are parameters of the projection's own module, so FSDP2 shards
them with it, and tensor parallelism splits them with it: A by the weight's columns, B by its rows.
There is no dropout: the policy that is sampled has none, and ratios compare with that policy.

Shapes: T tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from llamarl.models.decoder import Decoder
from llamarl.models.fsdp import fill, local, peers_of
from llamarl.models.fused import Gradients
from llamarl.models.hf import hf_name, named_parameters_hf
from llamarl.models.shape import Lora
from llamarl.models.sharding import LORA_A, LORA_B, adapter_shapes
from llamarl.models.tp import TensorParallel, copied


class LoraLinear(nn.Linear):
    """A frozen projection with an adapter. tp: the ranks that share the projection, if any do.
    inputs_split: they share its inputs, not its outputs.
    """

    def __init__(
        self, base: nn.Linear, lora: Lora, tp: TensorParallel | None, *, inputs_split: bool
    ):
        has_bias = base.bias is not None
        super().__init__(base.in_features, base.out_features, has_bias, device="meta")
        self.weight = base.weight
        self.bias = base.bias
        self.scaling = lora.scaling
        self.adapts = True  # see adapters_off
        self.lora_a = nn.Parameter(base.weight.new_empty(lora.rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_empty(base.out_features, lora.rank))
        self._tp = tp
        self._inputs_split = inputs_split

    def forward(self, x_TI: Tensor, of_rows: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the projection of x. of_rows: what stands for a parameter whose rows other
        tensor-parallel ranks hold too.
        """
        if not self.adapts:
            return F.linear(x_TI, self.weight, self.bias)
        a_RI: Tensor = self.lora_a
        b_OR: Tensor = self.lora_b
        if of_rows is not None:
            b_OR = of_rows(b_OR)
        # One of both is whole on every rank, which sees its part of x or y alone: the gradient is
        # the sum of all.
        if self._inputs_split:
            b_OR = copied(b_OR, self._tp)
        else:
            a_RI = copied(a_RI, self._tp)
        flat_TI = x_TI.flatten(0, -2)
        y_TO = _Adapted.apply(flat_TI, self.weight, self.bias, a_RI, b_OR, self.scaling)
        return y_TO.unflatten(0, x_TI.shape[:-1])


class _Adapted(Function):
    """y = x W^T + b + l B^T, l = s x A^T:   dB = g^T l, dl = g B, dA = s dl^T x,
    dx = g W + s dl A.
    """

    @staticmethod
    def forward(
        ctx,
        x_TI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scaling: float,
    ) -> Tensor:
        low_TR = low_of(x_TI, a_RI, scaling)
        ctx.save_for_backward(x_TI, weight_OI, a_RI, b_OR, low_TR)
        ctx.scaling = scaling
        if not is_low(x_TI):
            return F.linear(x_TI, weight_OI, bias_O).addmm_(low_TR, b_OR.T)
        # One product over both, whose sums are float32 inside.
        return F.linear(torch.cat([x_TI, low_TR], 1), side_by_side(weight_OI, b_OR), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TO: Tensor) -> Gradients:
        x_TI, weight_OI, a_RI, b_OR, low_TR = ctx.saved_tensors
        grad_low_TR = (grad_TO @ b_OR) * ctx.scaling
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.addmm(grad_TO @ weight_OI, grad_low_TR, a_RI)
        return grad_x, None, None, grad_low_TR.T @ x_TI, grad_TO.T @ low_TR, None


def is_low(tensor: Tensor) -> bool:
    """Whether numbers of this dtype are summed in a wider one."""
    return tensor.dtype.itemsize < torch.float32.itemsize


def low_of(x_TI: Tensor, a_RI: Tensor, scaling: float) -> Tensor:
    """Return s A x [T, R]."""
    return F.linear(x_TI, a_RI) * scaling


def side_by_side(weight_OI: Tensor, b_OR: Tensor) -> Tensor:
    """Return [W | B] [O, I + R]: the memory of both where `lay_side_by_side` has put them there,
    else a copy.
    """
    outs, ins = weight_OI.shape
    stride = weight_OI.stride(0)
    is_behind = b_OR.data_ptr() == weight_OI.data_ptr() + ins * weight_OI.itemsize
    if is_behind and b_OR.stride() == weight_OI.stride() and stride == ins + b_OR.shape[1]:
        return weight_OI.as_strided((outs, stride), (stride, 1))
    return torch.cat([weight_OI, b_OR], 1)


@torch.no_grad()
def lay_side_by_side(decoder: nn.Module) -> None:
    """Put every weight in a low precision and its B into the rows of one matrix, so that no pass
    copies them. For a decoder whose weights stay where they are.
    """
    for module in decoder.modules():
        if isinstance(module, LoraLinear) and is_low(module.weight):
            both = torch.cat([module.weight, module.lora_b], 1)
            module.weight.data = both[:, : module.in_features]
            module.lora_b.data = both[:, module.in_features :]


def add_lora(decoder: Decoder) -> None:
    """Freeze the decoder and put the adapters of its config beside the targets, before it is
    sharded. `reset_lora` gives them values.

    ValueError for targets that the model does not have.
    """
    lora = decoder.config.lora
    assert lora is not None, "the config has adapters"
    shapes = adapter_shapes(decoder.config)
    decoder.requires_grad_(False)
    for name, module in list(decoder.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        a_name = hf_name(f"{name}.weight").removesuffix(".weight") + LORA_A
        if a_name in shapes:
            inputs_split = peers_of(decoder, a_name) is not None
            outputs_split = peers_of(decoder, a_name.removesuffix(LORA_A) + LORA_B) is not None
            # A K/V head of our own that all ranks hold is whole, and each sees a part of its use.
            is_ours = decoder.config.implementation == "native"
            is_shared = is_ours or inputs_split or outputs_split
            tp = decoder.tensor_parallel if is_shared else None
            adapted = LoraLinear(module, lora, tp, inputs_split=inputs_split)
            decoder.set_submodule(name, adapted)


@torch.no_grad()
def reset_lora(decoder: Decoder, seed: int) -> None:
    """Draw A uniformly from +-1/sqrt(D_in) and set B to zero. A is a function of (seed, place in
    the model) alone, however it is split.
    """
    draw = torch.Generator().manual_seed(seed)
    shapes = adapter_shapes(decoder.config)
    for name, parameter in adapters_of(decoder):
        if name.endswith(LORA_B):
            local(parameter).zero_()
            continue
        bound = 1 / math.sqrt(shapes[name][1])
        whole = torch.empty(shapes[name]).uniform_(-bound, bound, generator=draw)
        fill(decoder, name, parameter, whole)


def adapters_of(decoder: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the adapters by Hugging Face name, in the decoder's order."""
    named = named_parameters_hf(decoder)
    return [(name, parameter) for name, parameter in named if name.endswith((LORA_A, LORA_B))]


def travelling(decoder: Decoder) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that a version of the policy consists of, by Hugging Face name: the
    adapters, or all weights where there are none.
    """
    if decoder.config.lora is not None:
        return adapters_of(decoder)
    return list(named_parameters_hf(decoder))


@contextmanager
def adapters_off(decoder: nn.Module) -> Iterator[None]:
    """Let the decoder compute, inside the block, with its frozen weights alone. It began as this
    model unless its adapters were read (trainer.lora.path).
    """
    adapted = [module for module in decoder.modules() if isinstance(module, LoraLinear)]
    for module in adapted:
        module.adapts = False
    try:
        yield
    finally:
        for module in adapted:
            module.adapts = True
