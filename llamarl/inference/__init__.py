"""Inference: continuous batching over the same decoder that is trained."""

from llamarl.inference.engine import Engine
from llamarl.inference.offline import generate
from llamarl.inference.sampler import SamplingParams, TemperatureRange

__all__ = ["Engine", "SamplingParams", "TemperatureRange", "generate"]
