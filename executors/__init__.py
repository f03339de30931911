"""The executors: generator, reward, reference, trainer. Each can be built and stepped alone."""

import llamarl  # noqa: F401  before torch, which the executors import
