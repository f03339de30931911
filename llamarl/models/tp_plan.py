"""Tensor parallelism of transformers' modules: a rank holds its part of the modules that
transformers' plan names, and our collectives stand around them.

    colwise                          y_r = W_r copied(x)                 rows; a part of the output
    rowwise                          y = summed(W_r x_r) + b             columns; the whole output
    colwise_gather_output            y = gathered(W_r copied(x))
    rowwise_split_input              y = summed(W_r copied(x)_r) + b
    ep_dispatch_experts              y = summed(the rank's experts of copied(x))
    replicated_with_grad_allreduce   y = norm(x, copied(w))              of the rank's heads

Experts are shared as wholes, as transformers' plan of expert parallelism does: a rank's part of a
fused gate and up projection would be two boxes. Who holds what is in llamarl.models.sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llamarl.models.shape import ModelConfig
from llamarl.models.sharding import EXPERTS, WHOLE, kind_of, tensor_parallel_box, why_not_split
from llamarl.models.tp import TensorParallel, copied, gathered, summed


def keep_part(model: nn.Module, config: ModelConfig, tp: TensorParallel) -> None:
    """Let the modules of a model on the meta device have the rank's part alone. ValueError if the
    ranks cannot share the model.
    """
    why = why_not_split(config, tp.size)
    if why:
        raise ValueError(f"tensor_parallel={tp.size}: {why}; tensor_parallel=1")
    for name, parameter in list(model.named_parameters()):
        shape = tuple(parameter.shape)
        box = tensor_parallel_box(config, name, shape, tp.rank, tp.size)
        if box.lengths == shape:
            continue
        around, _, own = name.rpartition(".")
        module: Any = model.get_submodule(around)
        setattr(module, own, nn.Parameter(parameter.new_empty(box.lengths)))
        if kind_of(config, around) == EXPERTS:
            module.num_experts = box.lengths[0]
            module._is_expert_parallel = True
        elif own == "weight":
            module.out_features, module.in_features = box.lengths


def compute_together(decoder: Any) -> None:
    """Put the collectives around the modules of a TransformersDecoder that has the rank's part of
    each, once adapters are beside them.
    """
    tp = decoder.tensor_parallel
    assert tp is not None, "ranks share the decoder"
    for name, module in decoder.transformers.named_modules():
        kind = kind_of(decoder.config, name)
        if kind is not None:
            module.forward = partial(_FORWARDS[kind], module, module.forward, tp)


Forward = Callable[..., Tensor]


def _colwise(_: nn.Module, forward: Forward, tp: TensorParallel, x: Tensor) -> Tensor:
    return forward(copied(x, tp))


def _colwise_gathered(module: Any, forward: Forward, tp: TensorParallel, x: Tensor) -> Tensor:
    return gathered(forward(copied(x, tp)), module.out_features * tp.size, tp)


def _rowwise(module: Any, forward: Forward, tp: TensorParallel, x: Tensor) -> Tensor:
    bias = module.bias
    with _instead(module, {"bias": None}):
        y = summed(forward(x), tp)
    return y if bias is None else y + bias


def _rowwise_of_whole(module: Any, forward: Forward, tp: TensorParallel, x: Tensor) -> Tensor:
    own = copied(x, tp).split(module.in_features, -1)[tp.rank]
    return _rowwise(module, forward, tp, own)


def _whole(module: nn.Module, forward: Forward, tp: TensorParallel, *given: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*given)
    held = {name: copied(p, tp) for name, p in module.named_parameters(recurse=False)}
    with _instead(module, held):
        return forward(*given)


def _experts(
    module: Any,
    forward: Forward,
    tp: TensorParallel,
    x_TD: Tensor,
    experts_TN: Tensor,
    weights_TN: Tensor,
) -> Tensor:
    """Compute this rank's experts. The number behind its last expert says that another rank has
    it.
    """
    count = module.num_experts
    local_TN = experts_TN - tp.rank * count
    other_TN = (local_TN < 0) | (local_TN >= count)
    local_TN = local_TN.masked_fill(other_TN, count)
    weights_TN = copied(weights_TN, tp).masked_fill(other_TN, 0.0)
    return summed(forward(copied(x_TD, tp), local_TN, weights_TN), tp)


@contextmanager
def _instead(module: nn.Module, tensors: dict[str, Any]) -> Iterator[None]:
    """Put other tensors in the place of a module's parameters within the block."""
    held: dict[str, Any] = module._parameters
    before = {name: held[name] for name in tensors}
    held.update(tensors)
    try:
        yield
    finally:
        held.update(before)


_FORWARDS: dict[str, Callable[..., Tensor]] = {
    "colwise": _colwise,
    "colwise_gather_output": _colwise_gathered,
    "rowwise": _rowwise,
    "rowwise_split_input": _rowwise_of_whole,
    EXPERTS: _experts,
    WHOLE: _whole,
}
