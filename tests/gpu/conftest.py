"""What only a GPU can show: skipped, saying so, where CUDA is not available."""

from pathlib import Path

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items) -> None:
    """Mark the tests of this folder, before others are left out by their marks."""
    is_missing = not torch.cuda.is_available()
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(is_missing, reason="needs CUDA"))


@pytest.fixture(autouse=True)
def exact_products(float32_products):
    """No TF32: results are compared with float32's."""
