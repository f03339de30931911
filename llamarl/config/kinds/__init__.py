"""The settings of scorers: one file for each kind.

A file of this folder has the settings of the kind that it is named after as SETTINGS, with what
cannot go together with them. A file of the same name in llamarl/launch/kinds/ says what a job does
with them, and conf/reward/NAME.yaml has their values. Nothing else names the kind: all of them are
found here.
"""

from __future__ import annotations

import importlib
import pkgutil

from llamarl.config.kinds.kind import KindSettings


def _find_kinds() -> tuple[type[KindSettings], ...]:
    """Import every file of this folder, in the order of their names."""
    found = []
    for file in pkgutil.iter_modules(__path__):
        if file.name != "kind":
            found.append(importlib.import_module(f"{__name__}.{file.name}").SETTINGS)
    return tuple(found)


KINDS = _find_kinds()
