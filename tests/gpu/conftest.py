"""What the GPU tests share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_products():
    """No TF32: results are compared with float32's."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
