"""The configuration of a run from its command line, and `main`, which runs a recipe with it.
Imports no torch.

    @main
    def run(config: Config) -> None: ...

Values live in conf/ (Hydra groups), types and ranges in llamarl/config/schema.py, what cannot work
together in llamarl/config/rules.py. Everything wrong with a command line is found before anything
heavy starts and is printed at once:

    bad config, nothing started:
      groups_per_step=0   need a whole number of at least 1
      loss.ratio_kap      unknown key; did you mean loss.ratio_cap?

Classes elsewhere take plain values; only recipes and the controller see a Config.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llamarl.config.conversion import (
    ConfigError,
    Problem,
    config_differences,
    did_you_mean,
    known_keys,
    load_config,
    save_config,
    show,
    to_config,
    to_values,
)
from llamarl.config.placement import idle_ranks, placement_of, resolve_placement
from llamarl.config.rules import CONF_DIR, check
from llamarl.config.schema import Config

__all__ = [
    "Config",
    "ConfigError",
    "Problem",
    "check",
    "check_command_line",
    "compose_config",
    "config_differences",
    "idle_ranks",
    "load_config",
    "main",
    "placement_of",
    "resolve_placement",
    "save_config",
    "to_config",
    "to_values",
]


# Arithmetic between values, for conf/experiment: what keeps its meaning while another value is
# swept.
OmegaConf.register_new_resolver("times", lambda a, b: a * b, replace=True)
OmegaConf.register_new_resolver("over", lambda a, b: -(-a // b), replace=True)  # rounded up


def check_command_line(
    overrides: list[str],
    *,
    config_name: str = "config",
    config_dir: str | None = None,
    multirun: bool = False,
    world_size: int = 1,
    local_world_size: int | None = None,
) -> list[str]:
    """The overrides as Hydra wants them (a needless `+` dropped). ConfigError with all that is
    wrong with them.
    """
    from hydra import initialize_config_dir

    dirs = [CONF_DIR] + ([Path(config_dir).resolve()] if config_dir else [])
    search = [f"hydra.searchpath=[file://{dirs[1]}]"] if config_dir else []
    problems, accepted, choices = [], [], []
    for text in overrides:
        key, values, what = _read_override(text, dirs, multirun)
        if what:
            problems.append(
                Problem(text.lstrip("+") if what.startswith("need") else key, what, (key,))
            )
            continue
        # Options of a loss are no part of the schema: Hydra must be told to add them.
        own = key.startswith("loss.") and key[5:] not in (
            "fn",
            "kl_coef",
            "kl_estimator",
            "entropy_coef",
        )
        accepted.append("++" * own + text.lstrip("+"))
        choices.append([(key, "++" * own + value.lstrip("+")) for value in values])
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        for combination in itertools.product(*choices):
            problems += _problems_of(
                config_name, dict(combination), search, world_size, local_world_size
            )
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return accepted


def compose_config(overrides: list[str]) -> Config:
    """The checked config of a command line for one process, for a script that is no Hydra job.
    ConfigError as above.
    """
    from hydra import compose, initialize_config_dir

    accepted = check_command_line(overrides)
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_config(compose("config", accepted))


def _read_override(text: str, dirs: list[Path], multirun: bool) -> tuple[str, list[str], str]:
    """(key, its `key=value` texts: several for a sweep, what is wrong or "")."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return (
            text,
            [text],
            "cannot be read; write key=value, and quote text with signs in it: 'key=\"a, b\"'",
        )
    key = override.get_key_element().lstrip("+")
    if override.is_hydra_override():
        return key, [text], ""
    if override.is_delete():
        return key, [text], "nothing can be removed; null switches off what is optional"
    groups = {folder.name for path in dirs for folder in path.iterdir() if folder.is_dir()}
    keys = known_keys()
    inner = (
        [f"{key}.{name}" for name in override.value()]
        if isinstance(override.value(), dict)
        else [key]
    )
    for name in inner:
        if (
            name not in keys
            and name not in groups
            and not (name.startswith("loss.") and name.count(".") == 1)
        ):
            return name, [text], "unknown key" + did_you_mean(name, keys)
    values = [text]
    if override.is_sweep_override():
        if not multirun:
            return (
                key,
                [text],
                "several values need --multirun; quote a text that holds a comma: 'key=\"a, b\"'",
            )
        if not override.is_discrete_sweep() or "glob(" in text:
            return key, [text], "cannot be swept like this; list the values: key=a,b,c"
        values = [f"{key}={value}" for value in override.sweep_string_iterator()]
    if key in groups and inner == [key]:
        options = sorted({file.stem for path in dirs for file in (path / key).glob("*.yaml")})
        for value in values:
            name = value.partition("=")[2]
            if name not in options:
                nearest = did_you_mean(name, options) if len(options) > 1 else ""
                return key, values, f"need {' or '.join(options)}{nearest}"
    return key, values, ""


def _problems_of(
    config_name: str,
    chosen: dict[str, str],
    search: list[str],
    world_size: int,
    local_world_size: int | None,
) -> list[Problem]:
    """Everything wrong with the config that `chosen` (key -> override) makes; needs Hydra to be
    initialised.
    """
    from hydra import compose
    from hydra.errors import HydraException

    def composed(texts) -> DictConfig:
        return compose(config_name, [*search, *texts])

    problems: list[Problem] = []
    # Up to three times: what is wrong by itself is left out of the next, since combinations of the
    # rest are worth telling too.
    for _ in range(3):
        wrong = {key for problem in problems for key in problem.keys}
        kept = {key: text for key, text in chosen.items() if key not in wrong}
        missing = [
            f"{problem.where}=_" for problem in problems if problem.what.startswith("required")
        ]
        try:
            config = to_config(composed([*kept.values(), *missing]))
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
        except (HydraException, OmegaConfBaseException) as error:
            refused = [
                Problem(text, why, (key,))
                for key, text in kept.items()
                if (why := _refusal(composed, text))
            ]
            problems += refused
            if not refused:
                return [*problems, Problem(config_name, " ".join(str(error).split()))]
        else:
            impossible = check(config, world_size, local_world_size)
            return problems + [problem for problem in impossible if not wrong & set(problem.keys)]
    return problems


def _refusal(composed: Callable[[list[str]], DictConfig], text: str) -> str:
    """Why Hydra does not take an override by itself; "" if it does."""
    from hydra.errors import HydraException

    try:
        composed([text])
    except (HydraException, OmegaConfBaseException) as error:
        return " ".join(str(error).split())
    return ""


def main(recipe: Callable[[Config], None] | None = None, *, config_name: str = "config"):
    """Decorator: run a recipe with the checked Config of its command line, under Hydra (--help,
    --cfg job, --multirun).

    A bad command line ends the process with exit code 2, on every rank, with one message, before
    anything is started.
    """
    if recipe is None:
        return functools.partial(main, config_name=config_name)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    leader = os.environ.get("RANK", "0") == "0"

    def refuse(error: ConfigError):
        if leader:
            print(error, file=sys.stderr)
        sys.exit(2)

    @functools.wraps(recipe)
    def job(composed: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        hydra = HydraConfig.get()
        if hydra.mode == RunMode.MULTIRUN and composed.run_dir is None:
            composed.run_dir = (
                hydra.runtime.output_dir
            )  # the runs of a sweep side by side, for recipes/compare.py
        try:
            config = to_config(composed)
            if problems := check(config, world_size, local_world_size):
                raise ConfigError(problems)
        except ConfigError as error:
            refuse(error)
        if leader and (idle := idle_ranks(config, world_size)):
            print(
                f"warning: ranks {show(list(idle))} host nothing; see placement, or start fewer",
                file=sys.stderr,
            )
        recipe(config)

    @functools.wraps(recipe)
    def run() -> None:
        import hydra
        from hydra._internal.utils import get_args_parser

        args = get_args_parser().parse_args()
        if not (args.help or args.hydra_help or args.shell_completion or args.info):
            try:
                accepted = check_command_line(
                    args.overrides,
                    config_name=args.config_name or config_name,
                    config_dir=args.config_dir,
                    multirun=args.multirun,
                    world_size=world_size,
                    local_world_size=local_world_size,
                )
            except ConfigError as error:
                refuse(error)
            rewritten = dict(zip(args.overrides, accepted))
            sys.argv = [rewritten.get(argument, argument) for argument in sys.argv]
        hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=config_name)(job)()

    return run
