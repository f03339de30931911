"""Runs a recipe with the configuration of its command line.

    @main
    def run(config: Config) -> None: ...

    run()          # as a command: reads sys.argv
    run(config)    # from Python

Imports no torch.
"""

from __future__ import annotations

import faulthandler
import functools
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import overload

from omegaconf import DictConfig

from llamarl.config.command_line import (
    RL,
    JobKind,
    default_values,
    groups_of,
    read_all,
    read_words,
    words_from,
)
from llamarl.config.conversion import Schema, known_keys
from llamarl.config.files import CONF_DIR
from llamarl.config.keys import key_lines
from llamarl.config.schema import Config
from llamarl.config.values import read_settings
from llamarl.words.findings import ConfigError, Problem, did_you_mean, show

STDERR = 2  # the file, whatever sys.stderr is by then
CONFIG_FLAG = "--config"  # FILE: values of one's own
# Flags that name a file in other programs, or folders of Hydra's.
OF_OTHER_PROGRAMS = ("--config-file", *("--config-dir", "--config-name", "--config-path"))
OWN_VALUES = "write your values, key: value, to a file, and start with --config FILE"


@overload
def main(recipe: Callable[[Config], None]) -> Callable[..., None]: ...


@overload
def main(recipe: Callable[[Schema], None], kind: JobKind[Schema]) -> Callable[..., None]: ...


def main(recipe: Callable, kind: JobKind = RL) -> Callable[..., None]:
    """Decorator: run a recipe with the checked config of its command line, under Hydra (--cfg
    job, --multirun). Called with a config, it runs that, and reads no command line.

    A bad command line ends the process with exit code 2, on every rank, with one message, before
    anything is started. The recipe's own imports, if it makes them inside, come after that.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    leader = os.environ.get("RANK", "0") == "0"

    def job(config) -> None:
        idle = kind.idle_ranks(config, world_size)
        if leader and idle:
            warning = f"ranks {show(idle)} host nothing; see placement, or start fewer"
            print(f"warning: {warning}", file=sys.stderr)
        if leader:  # what follows is silent for some seconds
            print("llamarl: loading PyTorch, model and data", file=sys.stderr, flush=True)
        recipe(config)

    @functools.wraps(recipe)
    def hydra_job(composed: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        hydra = HydraConfig.get()
        if hydra.mode == RunMode.MULTIRUN and composed.get("run_dir", "") is None:
            # The runs of a sweep lie side by side, so that recipes/compare.py finds them.
            composed.run_dir = hydra.runtime.output_dir
        job(kind.read(composed))  # `run` has checked it

    @functools.wraps(recipe)
    def run(config: object = None) -> None:
        # What kills a rank in native code is said with the Python line of each of its threads.
        faulthandler.enable(STDERR)
        if config is not None:
            return job(config)
        import hydra
        from hydra._internal.utils import get_args_parser

        try:
            sys.argv[1:] = _with_files(sys.argv[1:], kind)
            flags = _problems_of_flags(sys.argv[1:], kind.schema)
            if flags:
                raise ConfigError(flags)
            args = get_args_parser().parse_args()
            asked = [word.removesuffix("=?") for word in args.overrides if word.endswith("=?")]
            if args.help or asked:
                about = asked or [_key_of(word) for word in args.overrides]
                if leader:
                    print(_help(kind, about))
                return None
        except ConfigError as error:
            if leader:
                print(error, file=sys.stderr)
            sys.exit(2)
        if not (args.hydra_help or args.shell_completion or args.info):
            try:
                accepted, configs = read_all(
                    args.overrides,
                    kind,
                    multirun=args.multirun,
                    ranks=(world_size, local_world_size),
                )
            except ConfigError as error:
                if leader:
                    print(error, file=sys.stderr)
                words, wrong = read_words(args.overrides, kind, args.multirun)
                if not args.cfg or wrong:
                    sys.exit(2)
                # --cfg shows values, such as a paper's, without the files that a run needs.
                accepted, configs = [word.text for word in words], []
            if _asks_for_values_alone(sys.argv[1:]):
                return job(configs[0])
            sys.argv = _rewritten(sys.argv, args.overrides, accepted)
        hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=kind.file)(
            hydra_job
        )()

    return run


def _with_files(words: list[str], kind: JobKind) -> list[str]:
    """Return a command line with the values of each `--config FILE` before its own words, which
    therefore win. ConfigError for a file that cannot be read.
    """
    of_files: list[str] = []
    own: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, _, file = word.partition("=")
        if flag != CONFIG_FLAG:
            own.append(word)
            continue
        file = file or next(rest, "")
        if not file:
            raise ConfigError([Problem(CONFIG_FLAG, "name a file: --config my.yaml")])
        of_files += words_from(read_settings(Path(file)), kind)
    given = {_key_of(word) for word in own}
    kept = [word for word in of_files if _sections_of(_key_of(word)).isdisjoint(given)]
    return [*kept, *own]


def _sections_of(key: str) -> set[str]:
    """Return a key with the sections that it is in: task.path, task."""
    return set(itertools.accumulate(key.split("."), "{}.{}".format))


def _key_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def _problems_of_flags(words: list[str], schema: type) -> list[Problem]:
    """Return a problem for each flag that is a key ("--lr 3"), or that other programs have."""
    found = []
    for word, following in zip(words, [*words[1:], ""]):
        flag, _, value = word.partition("=")
        key = flag.removeprefix("--").replace("-", "_")
        if flag in OF_OTHER_PROGRAMS:
            found.append(Problem(word, OWN_VALUES))
        elif key != flag and key in known_keys(schema):
            is_value = not following.startswith("-") and "=" not in following
            value = value or (following if is_value else "")
            found.append(Problem(word, f"write {key}={value or 'VALUE'}"))
    return found


def _rewritten(argv: list[str], given: list[str], accepted: list[str]) -> list[str]:
    """Return a command line whose words are as Hydra wants them. Further words stand directly
    behind the last given one: argparse takes no words behind a flag if there were some before it.
    """
    as_accepted = dict(zip(given, accepted))
    words = [as_accepted.get(word, word) for word in argv]
    last = max((place for place, word in enumerate(argv) if word in as_accepted), default=0)
    return [*words[: last + 1], *accepted[len(given) :], *words[last + 1 :]]


def _asks_for_values_alone(words: list[str]) -> bool:
    """Whether a command line sets each of some keys once, and has no flag and no setting of
    Hydra's: then the config that was checked is the job's, and Hydra, which would compose it twice
    more, has nothing else to do.
    """
    keys = [_key_of(word) for word in words]
    is_plain = all("=" in word and not word.startswith(("-", "~")) for word in words)
    is_hydras = any(key.startswith(("hydra.", "hydra/")) for key in keys)
    return is_plain and not is_hydras and len(set(keys)) == len(keys)


def _help(kind: JobKind, about: Sequence[str] = ()) -> str:
    """Return what --help prints: the files to choose from, and all keys; or the keys that are asked
    `about`, and those in them. ConfigError for one that there is not.
    """
    keys = key_lines(kind.schema, default_values(kind))
    if about:
        schema: type = kind.schema
        known = known_keys(schema)
        unknown = [key for key in about if key not in known]
        if unknown:
            near = [Problem(key, "unknown key" + did_you_mean(key, known)) for key in unknown]
            raise ConfigError(near)
        return "\n".join(line for line in keys if _is_about(line, about))
    program = sys.argv[0]
    lines = [
        f"{f'python {program}' if program.endswith('.py') else program} KEY=VALUE ...",
        "--config FILE takes values of a YAML file, --help KEY ... tells about some keys alone",
        "--cfg job prints the values, --multirun KEY=A,B runs each, --hydra-help lists more flags",
        "",
        "Files to choose from, SECTION=NAME:",
    ]
    for section, names in sorted(groups_of(kind).items()):
        lines.append(f"{section}: {', '.join(sorted(names))}")
    return "\n".join([*lines, "", "Keys:", *keys])


def _is_about(line: str, keys: Sequence[str]) -> bool:
    """Whether an item or a heading of the reference is about one of the keys, or one in it."""
    named = line.removeprefix("## ").removeprefix("- ")
    return any(named.startswith((f"`{key}`", f"`{key}.")) for key in keys)
