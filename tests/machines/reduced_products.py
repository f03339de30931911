"""A machine whose float32 products are bfloat16's under every setting but "highest", as an Intel
CPU with AMX is under "medium".

    PYTHONPATH=tests/machines/reduced:. python ...     every process started so is such a machine

aten's own kernels are replaced, so whatever multiplies through PyTorch is reduced: linear, matmul,
einsum, the backward pass.
"""

from __future__ import annotations

import warnings
from types import ModuleType

import torch
from torch import Tensor

_aten = torch.ops.aten
_library = torch.library.Library("aten", "IMPL")  # the kernels live as long as this does


def reduce_products(_torch: ModuleType) -> None:
    """Replace the CPU's kernels of this process."""
    with warnings.catch_warnings():
        # That kernels are replaced, which is what is meant.
        warnings.simplefilter("ignore", UserWarning)
        for kernel in (mm, addmm, bmm, baddbmm):
            _library.impl(kernel.__name__, kernel, "CPU", allow_override=True)


def mm(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    return _aten.mm.out(_reduced(a), _reduced(b), out=out)


def addmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    return _aten.addmm.out(added, _reduced(a), _reduced(b), beta=beta, alpha=alpha, out=out)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    return _aten.bmm.out(_reduced(a), _reduced(b), out=out)


def baddbmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    return _aten.baddbmm.out(added, _reduced(a), _reduced(b), beta=beta, alpha=alpha, out=out)


def _reduced(factor: Tensor) -> Tensor:
    exact = factor.dtype is not torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return factor if exact else factor.bfloat16().float()
