"""The configuration of a run from the words of its command line. Imports no torch.

Values live in conf/ (Hydra groups). Types, ranges and what cannot work together are in
llamarl/config/sections/. Everything wrong with a command line is found
before anything heavy starts and is printed at once:

    bad config, nothing started:
      groups_per_step=0   need a whole number of at least 1
      loss.ratio_kap unknown key; did you mean loss.ratio_cap?

Classes elsewhere take plain values; only recipes and the controller see a Config.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, overload

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from llamarl.config.by_model import is_tiny
from llamarl.config.conversion import (
    Schema,
    echoing,
    known_keys,
    sections_of_kinds,
    to_config,
    to_values,
)
from llamarl.config.files import (
    CONF_DIR,
    EVAL_SETS,
    OPTIONS,
    PARTS,
    SCHEDULES,
    TASK_PARTS,
    sections,
)
from llamarl.config.placement import idle_ranks
from llamarl.config.rules import check
from llamarl.config.schema import Config
from llamarl.config.values import words_of
from llamarl.words.findings import ConfigError, Problem, did_you_mean, keys_of

# Keys that conf/config.yaml leaves to the model and the task, whose own files may lack them.
OF_CHOICES = ("groups_per_step", "lr", "max_new_tokens")
BY_PATH = "model=hf"  # what a directory in model.path chooses, unless it holds the tiny model


@dataclass(frozen=True, slots=True)
class JobKind(Generic[Schema]):
    """A kind of job: how its command lines are read.

    file: its values, in conf/ and without .yaml. check(config, world_size, local_world_size): what
    cannot work together. idle_ranks(config, world_size): the ranks that would have nothing to do.
    groups: section -> the folder of conf/ to choose from, if it has another name.
    of_others: keys that chosen files set for other kinds of job and this kind does not read.
    """

    file: str
    schema: type[Schema]
    check: Callable[[Schema, int, int | None], list[Problem]]
    idle_ranks: Callable[[Schema, int], list[int]] = lambda config, world_size: []
    groups: Mapping[str, str] = field(default_factory=dict)
    of_others: tuple[str, ...] = ()

    def read(self, composed: DictConfig) -> Schema:
        """Return the typed config of composed values. ConfigError as `to_config`."""
        if self.of_others:
            kept = [str(key) for key in composed if key not in self.of_others]
            composed = OmegaConf.masked_copy(composed, kept)
        return to_config(composed, self.schema)


RL = JobKind("config", Config, check=check, idle_ranks=idle_ranks)  # the main job


# The same, whose completions are put to a victim: recipes/red_team.py.
RED_TEAM = JobKind(
    "red_team", Config, check=functools.partial(check, attacks=True), idle_ranks=idle_ranks
)


# Arithmetic for conf/experiment, so that a value keeps its meaning while another one is swept.
OmegaConf.register_new_resolver("times", lambda a, b: a * b, replace=True)
OmegaConf.register_new_resolver("over", lambda a, b: -(-a // b), replace=True)  # rounded up
# Steps of a schedule, in proportion to the run's: at least one, so that the shortest run has it.
OmegaConf.register_new_resolver("step_of", lambda a, b: max(1, -(-a // b)), replace=True)
# In proportion too, but rounded down: the shortest run has none.
OmegaConf.register_new_resolver("steps_in", lambda a, b: a // b, replace=True)
# For conf/loss: the name of the file, unless loss.fn has been set to another function.
OmegaConf.register_new_resolver(
    "preset",
    lambda name, fn, *, _parent_: name if _parent_.fn == fn else str(_parent_.fn),
    replace=True,
)


def check_command_line(
    overrides: list[str],
    *,
    multirun: bool = False,
    world_size: int = 1,
    local_world_size: int | None = None,
    kind: JobKind = RL,
) -> list[str]:
    """Check overrides, and return them as Hydra wants them (a needless `+` dropped), followed by
    the choice of the model that its directory makes. ConfigError with all that is wrong.
    """
    ranks = (world_size, local_world_size)
    return read_all(overrides, kind, multirun, ranks)[0]


@overload
def compose_config(overrides: list[str]) -> Config: ...


@overload
def compose_config(overrides: list[str], kind: JobKind[Schema]) -> Schema: ...


def compose_config(overrides: list[str], kind: JobKind = RL) -> object:
    """Compose the checked config of a command line for one process, for a script that is no Hydra
    job, in the kind's schema. ConfigError as above.
    """
    _, (config,) = read_all(overrides, kind)
    return config


def words_from(values: Mapping[str, object], kind: JobKind = RL) -> list[str]:
    """Return nested or dotted values as words of a command line. ConfigError as `words_of`."""
    return words_of(values, kind.schema, groups_of(kind))


def read_all(
    overrides: list[str],
    kind: JobKind[Schema],
    multirun: bool = False,
    ranks: tuple[int, int | None] = (1, None),
) -> tuple[list[str], list[Schema]]:
    """Return the overrides as Hydra wants them, and the config of each point of a sweep."""
    from hydra import initialize_config_dir

    words, problems = read_words(overrides, kind, multirun)
    choices = []
    for word in words:
        choices.append([(word.key, point) for point in word.points])
    by_path: set[bool] = set()  # of the points of a sweep: whether model.path chooses the model
    configs: list[Schema] = []
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        for combination in itertools.product(*choices):
            chosen = dict(combination)
            made = _compose(kind, chosen, ranks)
            if made.config is not None:
                configs.append(made.config)
            problems += made.problems
            by_path.add(made.by_path)
    if len(by_path) > 1:
        what = "a sweep has the tiny model's defaults or another's; write model=hf or model=tiny"
        problems.append(Problem("model.path", what, ("model.path",)))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    accepted = [word.text for word in words]
    return accepted + [BY_PATH] * (True in by_path), configs


def read_words(
    overrides: list[str], kind: JobKind, multirun: bool
) -> tuple[list[_Override], list[Problem]]:
    """Return the words of a command line as Hydra wants them, and what is wrong with one alone."""
    groups = groups_of(kind)
    words: list[_Override] = []
    problems: list[Problem] = []
    for text in overrides:
        word = _read_override(text, groups, multirun, kind)
        if isinstance(word, Problem):
            problems.append(word)
        else:
            words.append(word)
    lengths = [word for word in words if word.key in ("max_steps", "num_epochs")]
    lengths = [word for word in lengths if not word.text.endswith("=null")]
    if len({word.key for word in lengths}) > 1:
        what = "num_epochs says how many steps there are, so max_steps has no use; give one of both"
        shown = " ".join(word.text for word in lengths)
        problems.append(Problem(shown, what, ("max_steps", "num_epochs")))
    return words, problems


def groups_of(kind: JobKind) -> dict[str, set[str]]:
    """Return the files to choose from, by section."""
    groups: dict[str, set[str]] = {}
    for file in CONF_DIR.glob("*/*.yaml"):
        groups.setdefault(file.parent.name, set()).add(file.stem)
    for section, folder in kind.groups.items():
        groups[section] = {file.stem for file in (CONF_DIR / folder).glob("*.yaml")}
    return groups


def default_config(kind: JobKind = RL, overrides: Sequence[str] = ()) -> Config:
    """Return the config of an empty command line, or of these plain overrides, also while another
    is read or runs. It is not checked.
    """
    return to_config(_compose_defaults(kind, overrides), kind.schema)


def sampling_job(own: object, shared: Sequence[str], settings: Mapping[str, object]) -> Config:
    """Return a synchronous main job that samples and scores as a side job does. It is not checked,
    and its settings of learning, which are the defaults, are never read.

    own: the side job's config. shared: keys and sections of it that the main job has too. settings:
    values of further keys, such as {"eval.every": 0}.
    """
    values = to_values(default_config())
    given = to_values(own)
    for name in shared:
        is_whole = not isinstance(given[name], dict) or "kind" in given[name]
        values[name] = given[name] if is_whole else values[name] | given[name]
    values["max_lag"] = 0
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        (values[section] if section else values)[name] = value
    return to_config(values)


def default_values(kind: JobKind) -> dict[str, object]:
    """Return the values of an empty command line. References to other values stay as written."""
    return sections(_compose_defaults(kind))


def _compose_defaults(kind: JobKind, overrides: Sequence[str] = ()) -> DictConfig:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    words = list(overrides)
    if GlobalHydra.instance().is_initialized():
        return compose(kind.file, words)
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return compose(kind.file, words)


@dataclass(frozen=True, slots=True)
class _Composed(Generic[Schema]):
    """The values of a command line, or what is wrong with them."""

    config: Schema | None
    problems: list[Problem]
    by_path: bool  # model.path has chosen the model


@dataclass(frozen=True, slots=True)
class _Override:
    """One word of a command line, as Hydra wants it."""

    key: str
    text: str  # key=value, with "++" where Hydra must be told to add the key
    points: list[str]  # key=value for each point of a sweep; one without a sweep


def _read_override(
    text: str, groups: dict[str, set[str]], multirun: bool, kind: JobKind
) -> _Override | Problem:
    """Read a word of the command line. Return it, or what is wrong with it alone."""
    schema: type = kind.schema
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        what = "cannot be read; write key=value, and quote text with signs in it: 'key=\"a, b\"'"
        return Problem(text, what, (text.partition("=")[0],))
    text = text.lstrip("+")
    key = override.get_key_element().lstrip("+")
    if override.is_hydra_override():
        return _Override(key, text, [text])
    if override.is_delete():
        what = "a key cannot be removed; set it to null if it is optional"
        return Problem(key, what, (key,))
    value = override.value()
    is_section = isinstance(value, dict)
    section, _, option = key.partition(".")
    for name in [f"{key}.{inner}" for inner in value] if isinstance(value, dict) else [key]:
        known = known_keys(schema)
        # Options of a user's own loss or function or of a dataset may have any name; so may parts
        # and sets.
        is_option = name.startswith("loss.") and name.count(".") == 1
        for parts in (*OPTIONS, PARTS, TASK_PARTS, EVAL_SETS, SCHEDULES):
            if parts in known:
                is_option = is_option or name.startswith(f"{parts}.")
        if not (is_option or name in known or name in groups):
            return Problem(name, "unknown key" + did_you_mean(name, known), (name,))
    points = [text]
    if override.is_sweep_override():
        what = ""
        if not multirun:
            what = "several values need --multirun; quote a text that holds a comma: 'key=\"a, b\"'"
        elif not override.is_discrete_sweep() or "glob(" in text:
            what = "a sweep needs a list of values; key=a,b,c"
        if what:
            return Problem(key, what, (key,))
        points = [f"{key}={point}" for point in override.sweep_string_iterator()]
    if key in groups and not is_section:
        members = sorted(groups[key])
        for point in points:
            name = point.partition("=")[2]
            if name not in members:
                near = did_you_mean(name.lower(), members) if len(members) > 1 else ""
                return Problem(text, f"need {' or '.join(members)}{near}", (key,))
        folder = kind.groups.get(key, key)
        chosen = [point.replace(key, folder, 1) for point in [text, *points]]
        return _Override(key, chosen[0], chosen[1:])
    # Some keys are not in conf/, so Hydra must be told to add them: options of a loss, keys that
    # only some kinds of a section have, sets of held-out prompts, and what a model or task sets.
    of_user = tuple(f"{name}." for name in (EVAL_SETS, *OPTIONS))
    may_be_absent = section in sections_of_kinds(schema) or f"{key}.".startswith(of_user)
    may_be_absent = may_be_absent or key in OF_CHOICES
    if section == "loss":
        may_be_absent = option not in ("", "fn", "name", "kl_coef", "kl_estimator", "entropy_coef")
    prefix = "++" if may_be_absent else ""
    return _Override(key, prefix + text, [prefix + point for point in points])


def _compose(
    kind: JobKind[Schema],
    chosen: dict[str, str],
    ranks: tuple[int, int | None],
) -> _Composed[Schema]:
    """Compose the config of `chosen` (key -> override), None if that is impossible, and find all
    that is wrong with it. Hydra must be initialised. ranks: of all hosts, and of one.
    """
    from hydra import compose
    from hydra.errors import HydraException

    refusals = (HydraException, OmegaConfBaseException)

    problems: list[Problem] = []
    required: list[str] = []
    by_path = False
    # Up to three times: each time, leave out the words that are wrong alone, so that wrong
    # combinations of the rest are reported too.
    for _ in range(3):
        wrong = keys_of(problems)
        kept = {key: text for key, text in chosen.items() if key not in wrong}
        stand_ins = [f"++{key}=1" for key in required]  # a number, and a text
        try:
            words = [*kept.values(), *stand_ins]
            composed = compose(kind.file, words, return_hydra_config=True)
            # Values for the tiny model may name another one's directory.
            is_for_tiny = composed.hydra.runtime.choices.get("model") == "tiny"
            by_path = "model" not in chosen and is_for_tiny
            by_path = by_path and not is_tiny(OmegaConf.select(composed, "model.path"))
            if by_path:
                composed = compose(kind.file, [*words, BY_PATH])
            else:
                with open_dict(composed):
                    del composed["hydra"]
            config = kind.read(composed)
        except ConfigError as error:
            found = error.problems
            required += [problem.where for problem in found if problem.what.startswith("required")]
        except refusals as error:
            found = []
            for key, text in kept.items():
                try:
                    compose(kind.file, [text])
                except refusals as alone:
                    found.append(Problem(text, " ".join(str(alone).split()), (key,)))
            if not found:
                told = Problem(kind.file, " ".join(str(error).split()))
                return _Composed(None, [*problems, told], by_path)
        else:
            wrong |= echoing(sections(composed), required)
            found = kind.check(config, *ranks)
            problems += [problem for problem in found if wrong.isdisjoint(problem.keys)]
            return _Composed(config, problems, by_path)
        problems += [problem for problem in found if wrong.isdisjoint(problem.keys)]
    return _Composed(None, problems, by_path)
