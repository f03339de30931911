"""Converts settings from a YAML file or from Python to words of a command line, so that one path
composes and checks them all. Imports no torch.

    {"model": {"path": "DIR"}, "loss": "grpo"}    # loss=grpo model.path='DIR'
    {"model.path": "DIR", "loss": "grpo"}         # the same

A section's choice is a text, or the section's `kind` (`name` of a loss). A function is given by the
path from which it can be imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from llamarl.config.conversion import ConfigError, Problem, known_keys
from llamarl.config.files import EVAL_SETS, OPTIONS, PARTS, SCHEDULES, TASK_PARTS, sections
from llamarl.disk.files import other_format

CHOOSING = ("kind", "name")  # keys of a section that say which file of conf/ is chosen for it
# Sections whose keys the user names: given whole.
_OF_USER = (PARTS, TASK_PARTS, EVAL_SETS, SCHEDULES, *OPTIONS)
# Backslashes stand for themselves, but for those before a quote or the end.
_QUOTE = re.compile(r"(\\*)('|$)")
# What a run's own config.yaml says of that run alone.
_OF_ONE_RUN = ("format", "run_dir", "out", "resume")


def read_settings(file: Path) -> dict[str, object]:
    """Return the values of a YAML file, which may be the config.yaml of a run. ConfigError names
    the file if it cannot be read.
    """
    where = f"--config {file}"
    try:
        composed = OmegaConf.load(file)
    except OSError as error:
        raise ConfigError([Problem(where, error.strerror or str(error))]) from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError([Problem(where, " ".join(str(error).split()))]) from error
    if not isinstance(composed, DictConfig):
        raise ConfigError([Problem(where, "need keys with values, this is a list")])
    values = sections(composed)
    if "format" in values:
        refusal = other_format(values)
        if refusal:
            raise ConfigError([Problem(where, refusal)])
        values = {key: value for key, value in values.items() if key not in _OF_ONE_RUN}
        if values.get("num_epochs") is not None:
            del values["max_steps"]  # which followed from it
    return values


def words_of(
    values: Mapping[str, object], schema: type, choices: Mapping[str, Collection[str]]
) -> list[str]:
    """Return a word for each value, choices first. ConfigError for a function that no other process
    can import. choices: section -> the files of conf/ to choose from.
    """
    chosen: list[str] = []
    words: list[str] = []

    def add(key: str, value: object) -> None:
        members = choices.get(key, ())
        if members and isinstance(value, str):
            chosen.append(f"{key}={value}")
            return
        if not isinstance(value, Mapping) or not _is_section(key, schema):
            words.append(f"{key}={literal(value, key)}")
            return
        inner = dict(value)
        for name in CHOOSING:
            choice = inner.get(name)
            if choice in members:
                del inner[name]
                chosen.append(f"{key}={choice}")
        for name, below in inner.items():
            add(f"{key}.{name}", below)

    for key, value in values.items():
        add(key, value)
    return chosen + words


def _is_section(key: str, schema: type) -> bool:
    """Whether a key holds keys of the schema."""
    if key in _OF_USER:
        return False
    within = f"{key}."
    return any(one.startswith(within) for one in known_keys(schema))


def literal(value: object, key: str) -> str:
    """Return a value as Hydra's grammar writes it. ConfigError, naming the key, for a value that
    has no such form.
    """
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | Path():
            return _quoted(str(value))
        case list() | tuple():
            items = [literal(one, key) for one in value]
            return f"[{', '.join(items)}]"
        case Mapping():
            items = []
            for name, one in value.items():
                written = literal(one, f"{key}.{name}")
                items.append(f"{name}: {written}")
            return f"{{{', '.join(items)}}}"
        case Callable():
            path = import_path(value, key)
            return _quoted(path)
        case _:
            kind = type(value).__name__
            what = f"{kind}: need a number, a text, a list, or keys with values"
            raise ConfigError([Problem(key, what, (key,))])


def _quoted(text: str) -> str:
    def doubled(found: re.Match[str]) -> str:
        before = found[1] * 2
        return before + "\\'" if found[2] else before

    inside = _QUOTE.sub(doubled, text)
    return f"'{inside}'"


def import_path(function: Callable, key: str) -> str:
    """Return "module:function", for a function that is imported by other processes. ConfigError if
    it cannot be.
    """
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "")
    if module and module != "__main__" and name.isidentifier():
        return f"{module}:{name}"
    what = (
        "other processes import it, so it must be in a file: write it to my_functions.py (in a "
        "notebook by a cell that begins with %%writefile my_functions.py), and give "
        f"{key}='my_functions:NAME'"
    )
    raise ConfigError([Problem(key, what, (key,))])
