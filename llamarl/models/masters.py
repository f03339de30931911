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

from llamarl.models.fused import Gradients, add_up


class Masters:
    """Puts low-precision copies in the parameters' places while a layer, or the decoder around its
    layers, is in its forward.

    Outside of forward the modules hold the masters. `last`: no microbatch of this step follows, so
    copies are forgotten after the decoder's forward, but for what backward holds; a layer that
    backward recomputes makes its own again.
    """

    def __init__(self, decoder: nn.Module, layers: nn.ModuleList, dtype: torch.dtype):
        self.last = True
        self._dtype = dtype
        self._decoder = decoder
        self._held: dict[nn.Module, dict[str, nn.Parameter | None]] = {}
        self._copies: dict[tuple[nn.Module, str], Tensor] = {}
        in_layers = set(layers.modules())
        around = [module for module in decoder.modules() if module not in in_layers]
        for layer in layers:
            self._swap(layer, list(layer.modules()))
        self._swap(decoder, around)

    def _copy_of(self, module: nn.Module, name: str, master: Tensor) -> Tensor:
        """Return the values of module's parameter `name` in the lower precision, without
        gradients.
        """
        copy = self._copies.get((module, name))
        if copy is None:
            copy = master.detach().to(self._dtype)
            if self._decoder in self._held:
                self._copies[module, name] = copy
        return copy

    def forget(self) -> None:
        """Drop the copies, so that they are made anew when they are needed next: the masters
        change, or their step has ended early.
        """
        self._copies.clear()

    def _swap(self, owner: nn.Module, modules: list[nn.Module]) -> None:
        """Exchange the parameters of these modules for copies while `owner` is in its forward."""
        owner.register_forward_pre_hook(lambda *_: self._enter(modules))
        owner.register_forward_hook(lambda *_: self._leave(modules), always_call=True)
        for module in modules:
            if type(module) is nn.Embedding:
                setattr(module, "forward", partial(self._look_up, module))

    def _enter(self, modules: list[nn.Module]) -> None:
        for module in modules:
            self._held[module] = dict(module._parameters)
            for name, master in module._parameters.items():
                if master is not None:
                    copy = self._copy_of(module, name, master)
                    module._parameters[name] = _Copy.apply(master, copy)

    def _leave(self, modules: list[nn.Module]) -> None:
        for module in modules:
            module._parameters.update(self._held.pop(module, {}))
        if self.last and self._decoder not in self._held:
            self.forget()

    def _look_up(self, embedding: nn.Embedding, tokens: Tensor) -> Tensor:
        master = self._held[embedding]["weight"]
        assert master is not None, "an embedding has a weight"
        return _Rows.apply(master, self._copy_of(embedding, "weight", master), tokens)


class _Copy(Function):
    """Gives the copy; its gradient is added to the master's."""

    @staticmethod
    def forward(ctx, master: Tensor, copy: Tensor) -> Tensor:
        ctx.master = master
        return copy.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Gradients:
        master = ctx.master
        if master.grad is None:
            master.grad = grad.to(master.dtype)
        else:
            add_up(master.grad, grad)
        return None, None


class _Rows(Function):
    """Gives the copy's rows of these tokens. Their gradients are added to the master's rows alone,
    because those of all other rows are zeros.
    """

    @staticmethod
    def forward(ctx, master: Tensor, copy: Tensor, tokens: Tensor) -> Tensor:
        ctx.master = master
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, copy)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Gradients:
        (tokens,) = ctx.saved_tensors
        master = ctx.master
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        master.grad.index_add_(0, tokens.flatten(), grad.flatten(0, -2).to(master.dtype))
        return None, None, None
