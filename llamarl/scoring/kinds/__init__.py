"""The kinds of scorers: one file for each, and its values in conf/reward/NAME.yaml.

A file of this folder has the kind that it is named after: its settings as SETTINGS, with what
cannot go together with them, and what a job does with them as KIND. Nothing else names the kind:
all of them are found here.

Configuration imports these files, so what needs torch is imported where it is used.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from llamarl.scoring.kinds.kind import Given, JobView, Kind, KindSettings, ScoredText


def _find_kinds() -> dict[type[KindSettings], type[Kind[Any]]]:
    """Import every file of this folder, in the order of their names."""
    found = {}
    for file in pkgutil.iter_modules(__path__):
        if file.name != "kind":
            module = importlib.import_module(f"{__name__}.{file.name}")
            found[module.SETTINGS] = module.KIND
    return found


_FOUND = _find_kinds()
KINDS = tuple(_FOUND)  # the settings of each kind


def kind_of(given: Given, job: JobView, scored: ScoredText) -> Kind[Any]:
    """Return the kind of a scorer. scored: the text and tokens that it scores."""
    return _FOUND[type(given.settings)](given.settings, given, job, scored)
