"""Runs the tests of tests/gpu on the GPU that is not there, all but those that start jobs and those
of kernels, which are compiled for a real one:

    pytest -p tests.imagined_plugin -m gpu tests/gpu

So that the first machine with a GPU meets no mistake of the tests themselves.
"""

from __future__ import annotations

import contextlib
import inspect

from tests.imagined_gpu import imagined_gpu

_stack = contextlib.ExitStack()


def pytest_configure(config) -> None:
    """Have the GPU before tests ask whether there is one."""
    _stack.enter_context(imagined_gpu())


def pytest_collection_modifyitems(config, items: list) -> None:
    """Leave out what starts processes of its own, in which there is no GPU, and kernels."""
    left_out = []
    for item in items:
        starts_job = "Job(" in inspect.getsource(item.function)
        if starts_job or item.path.stem == "test_triton_kernels":
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_unconfigure(config) -> None:
    """Take the GPU away."""
    _stack.close()
