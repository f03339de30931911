"""What the GPU tests share."""

import pytest


@pytest.fixture(autouse=True)
def exact_products(float32_products):
    """No TF32: results are compared with float32's."""
