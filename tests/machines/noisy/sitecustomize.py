"""Found by every Python that has this directory on its path: once torch is there, the last bits of
its products are random, and so are those of llamarl's kernels.
"""

import runpy
from pathlib import Path

_MACHINES = Path(__file__).resolve().parents[1]
_after_import = runpy.run_path(str(_MACHINES / "after_import.py"))["after_import"]
_after_import(
    {
        "torch": "make_products_noisy",
        "llamarl.models.fused": "make_training_kernels_noisy",
        "llamarl.inference.decode": "make_decoding_noisy",
    },
    _MACHINES / "noisy_products.py",
)
