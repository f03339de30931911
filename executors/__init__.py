"""The executors: generator, victim, reward, reference, trainer, supervised. Each can be built and
stepped alone.
"""

import llamarl  # noqa: F401  before torch, which the executors import
