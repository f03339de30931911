"""Inference: continuous batching over the same decoder that is trained.

Importing it imports no torch (who reads the scheduler needs none); the names below come with theirs
when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamarl.inference.engine import Engine
    from llamarl.inference.offline import generate
    from llamarl.inference.sampler import SamplingParams, TemperatureRange

__all__ = ["Engine", "SamplingParams", "TemperatureRange", "generate"]

_MODULES = {
    "Engine": "engine",
    "SamplingParams": "sampler",
    "TemperatureRange": "sampler",
    "generate": "offline",
}


def __getattr__(name: str) -> object:
    """Import what is asked for from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES[name]}")
    return getattr(module, name)
