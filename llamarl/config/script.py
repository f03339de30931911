"""The command line of a script that is no job: key=value, as strict as a configuration, into a
record. Imports no torch.

    @settings_dataclass
    class Settings:
        out: Text
        seed: Seed

    settings = read_script(sys.argv[1:], Settings, {"out": REQUIRED, "seed": 0}, doc=__doc__)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from llamarl.config.conversion import ConfigError, Problem, Schema, to_config
from llamarl.config.files import sections


def read_script(
    words: Sequence[str],
    schema: type[Schema],
    defaults: Mapping[str, object],
    *,
    doc: str | None,
    listed: str | None = None,
) -> Schema:
    """Return the record of a command line. ConfigError with all that is wrong with it; SystemExit
    for --help, which prints doc.

    defaults: a value for every key; REQUIRED if there is none. listed: the key of the list that
    takes words without a key.
    """
    if {"-h", "--help"} & set(words):
        print(doc)
        raise SystemExit(0)
    problems: list[Problem] = []
    values = dict(defaults)
    alone: list[str] = []
    for word in words:
        key, has_value, _ = word.partition("=")
        if has_value and not key.startswith("-"):
            try:
                values |= sections(OmegaConf.from_dotlist([word]), resolve=True)
            except (OmegaConfBaseException, YAMLError) as error:
                what = f"cannot be read: {' '.join(str(error).split())}"
                problems.append(Problem(word, what, (key,)))
        elif listed is not None and not word.startswith("-"):
            alone.append(word)
        else:
            problems.append(Problem(word, "write key=value", (key,)))
    if listed is not None and alone:
        values[listed] = alone
    try:
        settings = to_config(values, schema)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return settings
