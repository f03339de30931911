"""What is wrong with a configuration: problems, each with the keys that it is about."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llamarl.words.names import nearest


@dataclass(frozen=True, slots=True)
class Problem:
    where: str  # a key, or key=value
    what: str
    keys: tuple[str, ...] = ()  # the keys that it is about


def keys_of(problems: Iterable[Problem]) -> set[str]:
    """Return the keys that any of these problems is about."""
    return set().union(*(problem.keys for problem in problems))


class ConfigError(ValueError):
    """All problems of a config, each on an aligned line."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        width = min(max(len(p.where) for p in problems), 50)
        lines = [f"  {p.where:<{width}}   {p.what}" for p in problems]
        super().__init__("\n".join(["bad config, nothing started:", *lines]))


class Findings:
    """Collects the problems of a config that fits the schema, with the values that they are
    about.
    """

    def __init__(self, values: Mapping[str, object]):
        self.problems: list[Problem] = []
        self._values = values

    def add(self, what: str, *keys: str) -> None:
        """Add a problem of these keys. The message shows key=value of each, then `what`: the reason
        and the remedy.
        """
        shown = []
        for key in keys:
            value: object = self._values
            for name in key.split("."):
                assert isinstance(value, Mapping), f"{key}: there is no such section"
                value = value[name]
            shown.append(f"{key}={show(value)}")
        self.problems.append(Problem(" ".join(shown), what, keys))

    def add_unless_file(self, path: str | Path | None, key: str) -> None:
        """Add a problem unless there is something at the path, or a file that it is a pattern of;
        None is no path.
        """
        if not path or Path(path).exists():
            return
        if not any(Path(path).parent.glob(Path(path).name)):
            self.add(f"no such file: {Path(path)}", key)

    def add_unless_model(self, directory: str | None, key: str) -> None:
        """Add a problem unless a model's config.json is in the directory; None is no directory."""
        if not directory:
            return
        path = Path(directory)
        if not path.exists() and not path.is_absolute() and len(path.parts) == 2:
            what = (
                f"no such file: {path / 'config.json'}; a model is a directory on this machine, "
                f"so fetch one of the Hugging Face Hub first: hf download {path} --local-dir DIR"
            )
            self.add(what, key)
            return
        self.add_unless_file(path / "config.json", key)


def show(value: object) -> str:
    """Write a value as it is written on a command line."""
    if isinstance(value, list):
        return "[" + ",".join(map(show, value)) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def did_you_mean(key: str, names: Collection[str]) -> str:
    """Return "; did you mean NAME?" for the nearest name, by its last part or as a whole; "" if
    none is near.
    """
    last = {name.rpartition(".")[2]: name for name in reversed(list(names))}
    tail = key.rpartition(".")[2]
    if tail in last:
        return f"; did you mean {last[tail]}?"
    near = nearest(key, names, cutoff=0.75)
    if near is None:
        alike = nearest(tail, last, cutoff=0.7)
        near = None if alike is None else last[alike]
    return "" if near is None else f"; did you mean {near}?"
