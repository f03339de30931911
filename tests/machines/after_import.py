"""Functions that are called as soon as a module has been imported, whoever imports it.

A machine's sitecustomize.py loads this file by its path, for no package is on Python's path yet.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType


def after_import(functions: Mapping[str, str], file: Path) -> None:
    """Call functions of `file` with modules that have just been imported.

    functions: a module's name -> the name of a function in `file`. The file is loaded after the
    first of these modules.
    """
    sys.meta_path.insert(0, _AfterImport(functions, file))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module, and adds a call behind its execution."""

    def __init__(self, functions: Mapping[str, str], file: Path):
        self._functions = dict(functions)
        self._file = file
        self._loaded: ModuleType | None = None

    def find_spec(self, name, path=None, target=None):
        function = self._functions.pop(name, None)
        if function is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def and_call(module: ModuleType) -> None:
            execute(module)
            getattr(self._file_as_module(), function)(module)

        spec.loader.exec_module = and_call
        return spec

    def _file_as_module(self) -> ModuleType:
        if self._loaded is None:
            spec = importlib.util.spec_from_file_location(self._file.stem, self._file)
            self._loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self._loaded)
        return self._loaded
