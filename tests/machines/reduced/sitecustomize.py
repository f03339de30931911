"""Found by every Python that has this directory on its path: once torch is there, its products are
reduced ones.
"""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

_PRODUCTS = Path(__file__).resolve().parents[1] / "reduced_products.py"


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Lets the others find torch, and has its kernels replaced as soon as it has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        execute = spec.loader.exec_module

        def and_reduce(module):
            execute(module)
            products = importlib.util.spec_from_file_location("reduced_products", _PRODUCTS)
            reduced = importlib.util.module_from_spec(products)
            products.loader.exec_module(reduced)
            reduced.reduce_products()

        spec.loader.exec_module = and_reduce
        return spec


sys.meta_path.insert(0, _AfterTorch())
