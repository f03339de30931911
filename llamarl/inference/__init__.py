"""Inference: continuous batching over the same decoder that is trained.

Importing it imports no torch, because the scheduler needs none; the names below import their
modules when they are first used.
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
    """Import the name's module, and return the name from it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES[name]}")
    return getattr(module, name)
