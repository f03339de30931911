"""One rank's mixed precision: float32 masters are the parameters, and layers compute with copies
in a lower precision.

    masters -> copies      cast once a step, by the first microbatch that needs them
    gradients -> masters   each added to the master's float32 gradient as soon as backward made it

FSDP does the same over ranks. On one rank its gathering, scattering and padded buffers are copies
of every weight and gradient for nobody, which cost a CPU as much as half of the products do.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from llamarl.models.fused import add_up


class Masters:
    """Puts copies in the parameters' places while a layer, or the decoder around its layers, is in
    its forward.

    Outside of forward the modules hold the masters. `last`: no microbatch of this step follows, so
    copies are forgotten after the decoder's forward, but for what backward holds; a layer that
    backward recomputes makes its own again.
    """

    def __init__(self, decoder: nn.Module, dtype: torch.dtype):
        self.last = True
        self._dtype = dtype
        self._is_forward = False
        self._copies: dict[tuple[nn.Module, str], Tensor] = {}
        in_layers = set(decoder.layers.modules())
        around = [module for module in decoder.modules() if module not in in_layers]
        decoder.register_forward_pre_hook(self._begin)
        for layer in decoder.layers:
            _Swap(self, layer, list(layer.modules()))
        _Swap(self, decoder, around)
        decoder.register_forward_hook(self._end, always_call=True)

    def copy_of(self, module: nn.Module, name: str, master: Tensor) -> Tensor:
        """The values of module's parameter `name` in the lower precision, without gradients."""
        copy = self._copies.get((module, name))
        if copy is None:
            copy = master.detach().to(self._dtype)
            if self._is_forward:
                self._copies[module, name] = copy
        return copy

    def forget(self) -> None:
        """Make the copies anew when they are needed next: the masters change, or their step has
        ended early.
        """
        self._copies.clear()

    def _begin(self, *_: object) -> None:
        self._is_forward = True

    def _end(self, *_: object) -> None:
        self._is_forward = False
        if self.last:
            self.forget()


class _Swap:
    """The parameters of these modules, exchanged for copies while `owner` is in its forward."""

    def __init__(self, masters: Masters, owner: nn.Module, modules: list[nn.Module]):
        self._masters = masters
        self._modules = modules
        self._held: dict[tuple[nn.Module, str], nn.Parameter] = {}
        owner.register_forward_pre_hook(self._enter)
        owner.register_forward_hook(self._leave, always_call=True)
        for module in modules:
            if type(module) is nn.Embedding:
                module.forward = partial(self._look_up, module)

    def _enter(self, *_: object) -> None:
        for module in self._modules:
            for name, master in module._parameters.items():
                if master is None:
                    continue
                self._held[module, name] = master
                copy = self._masters.copy_of(module, name, master)
                module._parameters[name] = _Copy.apply(master, copy)

    def _leave(self, *_: object) -> None:
        for (module, name), master in self._held.items():
            module._parameters[name] = master
        self._held.clear()

    def _look_up(self, embedding: nn.Embedding, tokens: Tensor) -> Tensor:
        master = self._held[embedding, "weight"]
        return _Rows.apply(master, self._masters.copy_of(embedding, "weight", master), tokens)


class _Copy(Function):
    """The copy, whose gradient is added to the master's."""

    @staticmethod
    def forward(ctx, master: Tensor, copy: Tensor) -> Tensor:
        ctx.master = master
        return copy.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[None, None]:
        master = ctx.master
        if master.grad is None:
            master.grad = grad.to(master.dtype)
        else:
            add_up(master.grad, grad)
        return None, None


class _Rows(Function):
    """The copy's rows of these tokens. Their gradients are added to the master's rows: those of a
    whole embedding are zeros.
    """

    @staticmethod
    def forward(ctx, master: Tensor, copy: Tensor, tokens: Tensor) -> Tensor:
        ctx.master = master
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, copy)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[None, None, None]:
        (tokens,) = ctx.saved_tensors
        master = ctx.master
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        master.grad.index_add_(0, tokens.flatten(), grad.flatten(0, -2).to(master.dtype))
        return None, None, None
