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
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llamarl.config.conversion import (
    ConfigError,
    Problem,
    config_differences,
    did_you_mean,
    keys_of,
    known_keys,
    load_config,
    save_config,
    sections_of_kinds,
    show,
    to_config,
    to_values,
)
from llamarl.config.files import PARTS
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
# For conf/loss: the name of a file there, while loss.fn is still the function that it sets.
OmegaConf.register_new_resolver(
    "preset",
    lambda name, fn, *, _parent_: name if _parent_.fn == fn else str(_parent_.fn),
    replace=True,
)


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

    dirs = [CONF_DIR]
    search = []
    if config_dir:
        own = Path(config_dir).resolve()
        dirs.append(own)
        search.append(f"hydra.searchpath=[file://{own}]")
    groups = _groups_in(dirs)
    problems: list[Problem] = []
    accepted = []
    choices = []
    for text in overrides:
        override = _read_override(text, groups, multirun)
        if isinstance(override, Problem):
            problems.append(override)
        else:
            accepted.append(override.text)
            choices.append([(override.key, point) for point in override.points])
    judge = functools.partial(check, world_size=world_size, local_world_size=local_world_size)
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        for combination in itertools.product(*choices):
            problems += _problems_of(config_name, search, dict(combination), judge)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return accepted


def _groups_in(dirs: list[Path]) -> dict[str, set[str]]:
    """What each Hydra group has to choose from, over these directories."""
    groups: dict[str, set[str]] = {}
    for path in dirs:
        for file in path.glob("*/*.yaml"):
            groups.setdefault(file.parent.name, set()).add(file.stem)
    return groups


def compose_config(overrides: list[str]) -> Config:
    """The checked config of a command line for one process, for a script that is no Hydra job.
    ConfigError as above.
    """
    from hydra import compose, initialize_config_dir

    accepted = check_command_line(overrides)
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_config(compose("config", accepted))


@dataclass(frozen=True, slots=True)
class _Override:
    """One word of a command line, as Hydra wants it."""

    key: str
    text: str  # key=value, with "++" where Hydra must be told to add the key
    points: list[str]  # the same for each point of a sweep; one if it is none


def _read_override(text: str, groups: dict[str, set[str]], multirun: bool) -> _Override | Problem:
    """A word of the command line, or what is wrong with it by itself."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        what = "cannot be read; write key=value, and quote text with signs in it: 'key=\"a, b\"'"
        return Problem(text, what, (text,))
    text = text.lstrip("+")
    key = override.get_key_element().lstrip("+")
    if override.is_hydra_override():
        return _Override(key, text, [text])
    if override.is_delete():
        what = "nothing can be removed; null switches off what is optional"
        return Problem(key, what, (key,))
    value = override.value()
    is_section = isinstance(value, dict)
    section, _, option = key.partition(".")
    for name in [f"{key}.{inner}" for inner in value] if is_section else [key]:
        # An option of a user's own loss may have any name.
        is_option = name.startswith("loss.") and name.count(".") == 1
        is_option |= name.startswith(f"{PARTS}.")  # of a part that the user has named
        if not (is_option or name in known_keys() or name in groups):
            return Problem(name, "unknown key" + did_you_mean(name, known_keys()), (name,))
    points = [text]
    if override.is_sweep_override():
        what = ""
        if not multirun:
            what = "several values need --multirun; quote a text that holds a comma: 'key=\"a, b\"'"
        elif not override.is_discrete_sweep() or "glob(" in text:
            what = "cannot be swept like this; list the values: key=a,b,c"
        if what:
            return Problem(key, what, (key,))
        points = [f"{key}={point}" for point in override.sweep_string_iterator()]
    if key in groups and not is_section:
        known = sorted(groups[key])
        for point in points:
            name = point.partition("=")[2]
            if name not in known:
                near = did_you_mean(name, known) if len(known) > 1 else ""
                return Problem(text, f"need {' or '.join(known)}{near}", (key,))
        return _Override(key, text, points)
    # conf/ lacks, until it is given, an option of a loss or what only some kinds of a section have.
    may_be_absent = section in sections_of_kinds()
    if section == "loss":
        may_be_absent = option not in ("", "fn", "name", "kl_coef", "kl_estimator", "entropy_coef")
    prefix = "++" if may_be_absent else ""
    return _Override(key, prefix + text, [prefix + point for point in points])


def _problems_of(
    config_name: str,
    search: list[str],
    chosen: dict[str, str],
    judge: Callable[[Config], list[Problem]],
) -> list[Problem]:
    """Everything wrong with the config that `chosen` (key -> override) makes; needs Hydra to be
    initialised. judge: what is wrong with values that fit the schema.
    """
    from hydra import compose
    from hydra.errors import HydraException

    refusals = (HydraException, OmegaConfBaseException)

    def refusal(text: str) -> str:
        """Why Hydra does not take an override by itself; "" if it does."""
        try:
            compose(config_name, [*search, text])
        except refusals as error:
            return " ".join(str(error).split())
        return ""

    problems: list[Problem] = []
    required: list[str] = []
    # Up to three times: what is wrong by itself is left out of the next, since combinations of the
    # rest are worth telling too.
    for _ in range(3):
        wrong = keys_of(problems)
        kept = {key: text for key, text in chosen.items() if key not in wrong}
        stand_ins = [f"++{key}=1" for key in required]  # a number, and a text
        try:
            config = to_config(compose(config_name, [*search, *kept.values(), *stand_ins]))
        except ConfigError as error:
            found = error.problems
            required += [problem.where for problem in found if problem.what.startswith("required")]
        except refusals as error:
            why = {key: refusal(text) for key, text in kept.items()}
            found = [Problem(kept[key], why[key], (key,)) for key in kept if why[key]]
            if not found:
                return [*problems, Problem(config_name, " ".join(str(error).split()))]
        else:
            return problems + [p for p in judge(config) if wrong.isdisjoint(p.keys)]
        problems += [problem for problem in found if wrong.isdisjoint(problem.keys)]
    return problems


def main(recipe: Callable[[Config], None]) -> Callable[[], None]:
    """Decorator: run a recipe with the checked Config of its command line, under Hydra (--help,
    --cfg job, --multirun).

    A bad command line ends the process with exit code 2, on every rank, with one message, before
    anything is started.
    """
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
            # The runs of a sweep side by side, for recipes/compare.py.
            composed.run_dir = hydra.runtime.output_dir
        try:
            config = to_config(composed)
            problems = check(config, world_size, local_world_size)
            if problems:
                raise ConfigError(problems)
        except ConfigError as error:
            refuse(error)
        idle = idle_ranks(config, world_size)
        if leader and idle:
            warning = f"ranks {show(idle)} host nothing; see placement, or start fewer"
            print(f"warning: {warning}", file=sys.stderr)
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
                    config_name=args.config_name or "config",
                    config_dir=args.config_dir,
                    multirun=args.multirun,
                    world_size=world_size,
                    local_world_size=local_world_size,
                )
            except ConfigError as error:
                refuse(error)
            rewritten = dict(zip(args.overrides, accepted))
            sys.argv = [rewritten.get(argument, argument) for argument in sys.argv]
        hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")(job)()

    return run
