"""Found by every Python that has this directory on its path: once torch is there, its products are
reduced ones.
"""

import runpy
from pathlib import Path

_MACHINES = Path(__file__).resolve().parents[1]
_after_import = runpy.run_path(str(_MACHINES / "after_import.py"))["after_import"]
_after_import({"torch": "reduce_products"}, _MACHINES / "reduced_products.py")
