"""Names that a user gives: a function by its import path, and the nearest name to a wrong one.

Standard library only: reward workers use it, and start in a moment.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Short names of modules that come with the package. A module of the user's with that name is taken
# first, as it was before.
_SHORT = {"rewards": "llamarl.tasks.rewards"}
_RECIPES = "recipes"  # also the name of a package that torchtune installs, and refuses to import
_SHOWN_NAMES = 8  # of a module, where none of them is near


class NoFunction(ValueError):
    """An import path names no function. The message says where it fails, and the nearest name."""


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the one of `names` that is most like `name`, or None if none is.

    cutoff: 0 to 1, the least likeness (difflib's ratio) that counts.
    """
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of an error message: "; did you mean NEAREST?", or "" where no name is
    near.
    """
    near = nearest(name, names, cutoff)
    return "" if near is None else f"; did you mean {near}?"


def import_function(path: str) -> Callable:
    """Import the function that "module:function" names, such as "my_module:my_reward".

    A module in the current directory comes before an installed package of that name.
    "rewards:function" is in llamarl/tasks/rewards.py, unless another module rewards is found, and
    "recipes.calculator:Sums" is in llamarl.recipes, unless there is a folder recipes. NoFunction if
    there is no such module or function; other errors of the module's import are raised as they are.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise NoFunction('need an import path "module:function"')
    if os.getcwd() not in sys.path:
        # A script's sys.path begins with the script's directory, not with the user's.
        sys.path.append(os.getcwd())
    module_name = _full_name(module_name)
    top = module_name.partition(".")[0]
    try:
        with _searched_first(os.getcwd() if _is_here(top) else None):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not error.name and top == _RECIPES and not _is_here(top):
            found = importlib.util.find_spec(top)
            raise NoFunction(
                f"{module_name} is looked for in {found and found.origin}, which is not to be "
                f"imported ({error}); is another module meant? One of that name in {os.getcwd()} "
                "would come first"
            ) from error
        if not error.name or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
        files = [file.stem for file in Path.cwd().glob("*.py")]
        raise NoFunction(
            f"no module {error.name} in {os.getcwd()} or on sys.path"
            f"{did_you_mean(error.name, files, cutoff=0.5)}"
        ) from error
    function = getattr(module, name, None)
    if callable(function):
        return function
    what = "no function"
    if function is not None:
        what = f"{type(function).__name__}, not a function, under the name"
    members = vars(module).items()
    functions = [key for key, value in members if callable(value) and not key.startswith("_")]
    it_has = f"; it has {', '.join(functions[:_SHOWN_NAMES]) or 'no functions'}"
    hint = did_you_mean(name, functions, cutoff=0.5) or it_has
    if module_name in _SHORT:
        hint += f"; it is {module.__file__}, and the package's own are in {_SHORT[module_name]}"
    raise NoFunction(f"{module_name} has {what} {name}{hint}")


def _full_name(module: str) -> str:
    """Return the name of a module of the package by its short one; else the name as it is."""
    if module in _SHORT and importlib.util.find_spec(module) is None:
        return _SHORT[module]
    if module.startswith(f"{_RECIPES}.") and not _is_here(_RECIPES):
        # A checkout that is not installed has no llamarl.recipes.
        is_installed = importlib.util.find_spec(f"llamarl.{_RECIPES}") is not None
        own = f"llamarl.{module}"
        return own if is_installed and importlib.util.find_spec(own) else module
    return module


def _is_here(top: str) -> bool:
    """Whether the current directory has a module or package of that name."""
    return Path(f"{top}.py").is_file() or Path(top).is_dir()


@contextmanager
def _searched_first(folder: str | None) -> Iterator[None]:
    """Look for modules in a folder before all others."""
    if folder is None:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
