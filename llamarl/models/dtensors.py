"""Whether FSDP2 made a tensor or a module, asked without loading FSDP2.

    if is_dtensor(parameter):
        parameter = parameter.to_local()

torch.distributed.tensor and torch.distributed.fsdp take most of a CPU second to import, with sympy.
A rank that trains alone, samples or scores shards nothing: there they stay unloaded, and where they
are not loaded, nothing can be theirs.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, of which each rank holds a part."""
    return _is_of(tensor, "torch.distributed.tensor", "DTensor")


def is_fsdp_module(module: object) -> TypeGuard[FSDPModule]:
    """Whether a module is wrapped by FSDP2."""
    return _is_of(module, "torch.distributed.fsdp", "FSDPModule")


def _is_of(instance: object, module: str, name: str) -> bool:
    """Whether something is an instance of a module's class, which exists once that is loaded."""
    kind = getattr(sys.modules.get(module), name, None)  # None also while it is being loaded
    return kind is not None and isinstance(instance, kind)
