"""The configuration of a run: what must hold between its values, and `main`, which runs a recipe with it. Imports no torch.

    @main
    def run(config: Config) -> None: ...

Values live in conf/ (Hydra groups), types and ranges in llamarl/settings.py. Everything wrong with a command line is
found before anything heavy starts and is printed at once:

    bad config, nothing started:
      groups_per_step=0   need a whole number of at least 1
      loss.ratio_kap      unknown key; did you mean loss.ratio_cap?

Classes elsewhere take plain values; only recipes and the controller see a Config.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llamarl.models.config import ModelConfig, read_config
from llamarl.settings import (
    Config, ConfigError, LossSettings, PlacementSettings, Problem, config_differences, did_you_mean, known_keys, load_config,
    save_config, show, to_config, to_values,
)  # fmt: skip

__all__ = [
    "Config", "ConfigError", "Problem", "check", "check_command_line", "compose_config", "config_differences", "idle_ranks",
    "load_config", "main", "placement_of", "resolve_placement", "save_config", "to_config", "to_values",
]  # fmt: skip

COLOCATED = ("trainer", "generator", "reference")  # executors with a model on the device

CONF_DIR = Path(__file__).resolve().parents[1] / "conf"
TINY_MODEL = Path(__file__).parent / "models" / "tiny"


# --- Combinations: what no single value shows ---


def resolve_placement(
    placement: PlacementSettings, world_size: int, *, groups_per_step: int = 0, tensor_parallel: int = 1
) -> dict[str, tuple[int, ...]]:
    """Executor name -> its ranks, with every null filled in.

    Trainers take the first half of the ranks (as many as divide groups_per_step, and leave a multiple of tensor_parallel
    if that can be), generators the rest, as far as it makes whole replicas of tensor_parallel ranks, and reward and
    reference a rank that hosts nothing yet or else the generators' last. One rank hosts everything. Executors of
    placement.colocate share the ranks given for one of them, or all.
    """
    everyone = tuple(range(world_size))
    if together := set(placement.colocate or ()):
        given = [ranks for name in sorted(together) if (ranks := getattr(placement, name, None))]
        shared = {name: list(given[0] if given else everyone) for name in together & set(COLOCATED)}
        placement = dataclasses.replace(placement, **shared, colocate=None)
    trainer = tuple(placement.trainer or ())
    if not trainer:
        free = [rank for rank in everyone if rank not in (placement.generator or ())] or everyone
        size = max(1, min(world_size // 2, len(free)))
        sizes = [n for n in range(size, 0, -1) if groups_per_step % n == 0]
        whole = [n for n in sizes if placement.generator or (world_size - n) % tensor_parallel == 0 < world_size - n]
        trainer = tuple(free[: (whole or [n for n in sizes if world_size - n >= tensor_parallel] or sizes)[0]])
    rest = tuple(rank for rank in everyone if rank not in trainer)
    replicas = rest[: len(rest) // tensor_parallel * tensor_parallel]
    generator = tuple(placement.generator or replicas or rest or everyone)
    spare = tuple(rank for rank in rest if rank not in generator) or generator
    return {
        "trainer": trainer,
        "generator": generator,
        "reward": tuple(placement.reward or spare[-1:]),
        "reference": tuple(placement.reference or spare[-1:]),
    }


def placement_of(config: Config, world_size: int) -> dict[str, tuple[int, ...]]:
    """Executor name -> its ranks in this run."""
    return resolve_placement(
        config.placement,
        world_size,
        groups_per_step=config.groups_per_step,
        tensor_parallel=config.generator.tensor_parallel,
    )


def idle_ranks(config: Config, world_size: int) -> tuple[int, ...]:
    """The ranks that would host nothing."""
    placed = placement_of(config, world_size)
    hosts = {rank for name, ranks in placed.items() if name != "reference" or config.reference.enabled for rank in ranks}
    return tuple(rank for rank in range(world_size) if rank not in hosts)


def check(config: Config, world_size: int, local_world_size: int | None = None) -> list[Problem]:
    """What cannot work together, or with this many ranks and these files."""
    values = to_values(config)

    def problem(what: str, *keys: str) -> Problem:
        shown = ((key, functools.reduce(lambda section, part: section[part], key.split("."), values)) for key in keys)
        return Problem(" ".join(f"{key}={show(value)}" for key, value in shown), what, keys)

    c, g, hosts = config, config.governor, -(-world_size // (local_world_size or world_size))
    truncates = c.on_deadline == "truncate"
    longest = c.task.max_prompt_tokens + c.max_new_tokens
    impossible = [
        ("overcommit max_lag", c.max_lag == 0 and c.overcommit not in ("auto", 0),
         "without lag nothing can start ahead; overcommit=0, or max_lag=1"),
        ("on_deadline max_lag", truncates and c.max_lag == 0,
         "without lag every ticket is due at its own step, and none could stand in for it; on_deadline=wait, or max_lag=1"),
        ("on_deadline overcommit", truncates and c.max_lag > 0 and c.overcommit == 0,
         "ends a straggler once others make up its batch, and none are started beyond one; overcommit=auto, or on_deadline=wait"),
        ("governor.least governor.most", g.most is not None and g.least > g.most,
         "the least is more than the most"),
        ("governor.start governor.least", g.start is not None and g.start < g.least,
         "starts below the least"),
        ("governor.start governor.most", None not in (g.start, g.most) and g.start > g.most,
         "starts above the most"),
        ("group_size trainer.advantages", c.group_size < 2,
         "a group of one has no baseline: its advantage is always 0; need at least 2"),
        ("group_size generator.max_slots", c.group_size > c.generator.max_slots,
         "a group does not fit the slots of a generator; raise generator.max_slots"),
        ("generator.min_new_tokens max_new_tokens", c.generator.min_new_tokens > c.max_new_tokens,
         "the least is more than the most"),
        ("generator.cache_tokens", c.generator.cache_tokens is not None and c.generator.cache_tokens < longest,
         f"does not hold one sequence of task.max_prompt_tokens + max_new_tokens; need at least {longest}, or null"),
        ("generator.recompute_kv", c.generator.recompute_kv and not c.updates_in_flight,
         "no completion is running when new weights are loaded; leave it out, or raise max_lag"),
        ("generator.resume_partials max_lag", bool(c.generator.resume_partials) and c.max_lag == 0,
         "a resumed synchronous run has the bits of an uninterrupted one, so its completions start again; leave it out"),
        ("generator.resume_partials generator.in_flight_updates",
         bool(c.generator.resume_partials) and c.max_lag > 0 and not c.updates_in_flight,
         "would go on under other weights than they were begun with; leave one of them out"),
        ("loss.kl_coef reference.enabled", bool(c.loss.kl_coef) and not c.reference.enabled,
         "needs a reference: reference=frozen, or loss.kl_coef=0"),
        ("trainer.warmup_steps max_steps", c.trainer.warmup_steps > c.max_steps > 0,
         "the warm-up would not end"),
        ("task.path task.kind", c.task.kind in ("jsonl", "gsm8k", "hf_dataset") and not c.task.path,
         "needs its data: task.path=PATH"),
        ("task.name task.kind", c.task.kind == "reasoning_gym" and not c.task.name,
         "needs the name of a problem, such as task.name=chain_sum"),
        ("resume run_dir", c.resume == "auto" and not c.run_dir,
         "needs the run to go on with: run_dir=DIR"),
        ("offload", c.offload and not c.placement.colocate,
         "moves executors that share a device out of each other's way; name them: placement.colocate=[trainer,generator]"),
        ("offload max_lag", c.offload and c.max_lag > 0,
         "with any lag trainer and generator work at the same time, so neither can leave the device; max_lag=0"),
        ("weights.transport", c.weights.transport in ("shm", "cuda_ipc") and hosts > 1,
         f"ranks on {hosts} hosts share no memory; weights.transport=gloo or nccl, or auto"),
    ]  # fmt: skip
    problems = _placement_problems(config, world_size, problem)
    problems += [problem(what, *keys.split()) for keys, wrong, what in impossible if wrong]
    for key, path in (("task.path", c.task.path), ("task.eval_path", c.task.eval_path), ("model.path", c.model.path)):
        needed = Path(path or ".") / ("config.json" if path and key == "model.path" else "")
        if not needed.exists():
            problems.append(problem(f"no such file: {needed}", key))
    if c.resume not in ("auto", "never") and not Path(c.resume).is_dir():
        problems.append(problem("no such directory; need auto, never or a checkpoint's directory", "resume"))
    return problems + _loss_problems(c.loss)


def _placement_problems(c: Config, world_size: int, problem: Callable[..., Problem]) -> list[Problem]:
    found = []
    values = dataclasses.asdict(c.placement)
    if (together := values.pop("colocate")) is not None:
        if len(together) < 2 or not set(together) <= set(COLOCATED):
            found.append(problem(f"need two or three of {', '.join(COLOCATED)}; or null", "placement.colocate"))
        elif len({tuple(values[name]) for name in together if values[name]}) > 1:
            found.append(problem("share their ranks, but are given different ones", *(f"placement.{n}" for n in together if values[n])))
    for name, ranks in values.items():
        if ranks is None:
            continue
        if not ranks or len(set(ranks)) < len(ranks):
            found.append(problem("need at least one rank, each once; or null", f"placement.{name}"))
        if outside := [rank for rank in ranks if not 0 <= rank < world_size]:
            ranks_are = f"ranks are 0 to {world_size - 1}" if world_size > 1 else "there is one rank, 0"
            found.append(problem(f"no rank {show(outside)}: {ranks_are} (torchrun --nproc-per-node)", f"placement.{name}"))
    if found:
        return found
    placed = placement_of(c, world_size)
    return _trainer_problems(c, len(placed["trainer"]), problem) + _tensor_parallel_problems(c, placed, world_size, problem)


def _trainer_problems(c: Config, num_ranks: int, problem: Callable[..., Problem]) -> list[Problem]:
    """Ranks, groups or parts of the model that the trainer's topology cannot share out evenly."""
    found, replicate, t = [], c.trainer.replicate, c.trainer.tensor_parallel
    if num_ranks % (replicate * t):
        keys = [f"trainer.{key}" for key, size in (("replicate", replicate), ("tensor_parallel", t)) if size > 1]
        ranks = f"{num_ranks} trainer rank{'s' * (num_ranks > 1)}"
        found.append(problem(f"{ranks} cannot be split so; set placement.trainer to a multiple of {replicate * t} ranks", *keys))
    else:
        lanes = num_ranks // t
        ranks = f"{lanes} {'trainer ranks' if t == 1 else f'sets of {t} trainer ranks'}"
        for key, amount in (("groups_per_step", c.groups_per_step), ("overcommit", c.overcommit)):
            if not isinstance(amount, str) and amount % lanes:
                found.append(problem(f"{ranks} cannot share it evenly; need a multiple of {lanes}", key))
    if t > 1 and (model := _model(c)) is not None:
        parts = [(model.num_attention_heads, "query heads"), (model.num_key_value_heads, "key/value heads")]
        parts.append((model.intermediate_size, "hidden units (intermediate_size)"))
        if uneven := [f"{count} {what}" for count, what in parts if count % t]:
            what = f"the trainer splits the model evenly, but it has {' and '.join(uneven)}"
            found.append(problem(what, "trainer.tensor_parallel"))
    return found


def _tensor_parallel_problems(
    c: Config, placed: dict[str, tuple[int, ...]], world_size: int, problem: Callable[..., Problem]
) -> list[Problem]:
    """Replicas of the generator that are not whole, that the model has too few heads for, or that would wait for themselves."""
    key, m, found = "generator.tensor_parallel", c.generator.tensor_parallel, []
    if m == 1:
        return found
    generator = placed["generator"]
    if len(generator) % m:
        ranks = f"generator rank{'s' * (len(generator) > 1)} {show(list(generator))}"
        if world_size <= m:
            remedy = f"start at least {m + 1} ranks (torchrun --nproc-per-node={m + 1}), or lower it"
        else:
            remedy = (
                f"set placement.generator to {m} ranks or a multiple, such as {show(list(range(world_size - m, world_size)))}"
            )
        found.append(problem(f"{ranks} cannot be split into replicas of {m}; {remedy}", key))
    if (model := _model(c)) is not None and (heads := model.num_attention_heads) < m:
        found.append(problem(f"the model has {heads} query heads, fewer than ranks to split them over; at most {heads}", key))
    for first in range(0, len(generator), m) if c.max_lag else ():  # else one rests while the other works
        both = sorted(set(generator[first : first + m]) & set(placed["trainer"]))
        if len(both) > 1:
            why = f"ranks {show(both)} would share a replica and the trainer, and each wait in one for the other"
            what = f"{why}; place them apart, or max_lag=0"
            found.append(problem(what, key, "placement.trainer", "placement.generator"))
    return found


def _model(c: Config) -> ModelConfig | None:
    """The model's config; None if it cannot be read, which is told elsewhere."""
    try:
        return read_config(c.model.path or TINY_MODEL)
    except (OSError, ValueError):
        return None


def _loss_problems(loss: LossSettings) -> list[Problem]:
    """A loss that does not exist, or options that it does not take."""
    names = sorted(file.stem for file in (CONF_DIR / "loss").glob("*.yaml"))
    if loss.fn in names:
        options = [key for key in OmegaConf.load(CONF_DIR / "loss" / f"{loss.fn}.yaml") if key != "fn"]
        keys = [f"loss.{name}" for name in options]
        unknown = {f"loss.{name}" for name in loss.options} - set(keys)
        return [Problem(key, "unknown key" + did_you_mean(key, keys)) for key in sorted(unknown)]
    if ":" not in loss.fn:
        what = f"need {' or '.join(names)} or module:function{did_you_mean(loss.fn, names)}"
        return [Problem(f"loss.fn={loss.fn}", what, ("loss.fn",))]
    from llamarl.learning.losses import (
        check_options,
        options_of,
        resolve_loss,
    )  # imports torch, so only for a loss of the user's own

    try:
        fn = resolve_loss(loss.fn)
        check_options(fn, loss.keywords_for(options_of(fn)))
    except ValueError as error:
        return [Problem(f"loss.fn={loss.fn}", line, ("loss.fn",)) for line in str(error).splitlines()]
    return []


# --- The command line ---


def check_command_line(
    overrides: list[str],
    *,
    config_name: str = "config",
    config_dir: str | None = None,
    multirun: bool = False,
    world_size: int = 1,
    local_world_size: int | None = None,
) -> list[str]:
    """The overrides as Hydra wants them (a needless `+` dropped). ConfigError with all that is wrong with them."""
    from hydra import initialize_config_dir

    dirs = [CONF_DIR] + ([Path(config_dir).resolve()] if config_dir else [])
    search = [f"hydra.searchpath=[file://{dirs[1]}]"] if config_dir else []
    problems, accepted, choices = [], [], []
    for text in overrides:
        key, values, what = _read_override(text, dirs, multirun)
        if what:
            problems.append(Problem(text.lstrip("+") if what.startswith("need") else key, what, (key,)))
            continue
        # Options of a loss are no part of the schema: Hydra must be told to add them.
        own = key.startswith("loss.") and key not in known_keys()
        accepted.append("++" * own + text.lstrip("+"))
        choices.append([(key, "++" * own + value.lstrip("+")) for value in values])
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        for combination in itertools.product(*choices):
            problems += _problems_of(config_name, dict(combination), search, world_size, local_world_size)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return accepted


def compose_config(overrides: list[str]) -> Config:
    """The checked config of a command line for one process, for a script that is no Hydra job. ConfigError as above."""
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
        return text, [text], "cannot be read; write key=value, and quote text with signs in it: 'key=\"a, b\"'"
    key = override.get_key_element().lstrip("+")
    if override.is_hydra_override():
        return key, [text], ""
    if override.is_delete():
        return key, [text], "nothing can be removed; null switches off what is optional"
    groups = {folder.name for path in dirs for folder in path.iterdir() if folder.is_dir()}
    keys = known_keys()
    inner = [f"{key}.{name}" for name in override.value()] if isinstance(override.value(), dict) else [key]
    for name in inner:
        if name not in keys and name not in groups and not (name.startswith("loss.") and name.count(".") == 1):
            return name, [text], "unknown key" + did_you_mean(name, keys)
    values = [text]
    if override.is_sweep_override():
        if not multirun:
            return key, [text], "several values need --multirun; quote a text that holds a comma: 'key=\"a, b\"'"
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
    config_name: str, chosen: dict[str, str], search: list[str], world_size: int, local_world_size: int | None
) -> list[Problem]:
    """Everything wrong with the config that `chosen` (key -> override) makes; needs Hydra to be initialised."""
    from hydra import compose
    from hydra.errors import HydraException

    def composed(texts) -> DictConfig:
        return compose(config_name, [*search, *texts])

    problems: list[Problem] = []
    # Up to three times: what is wrong by itself is left out of the next, since combinations of the rest are worth telling too.
    for _ in range(3):
        wrong = {key for problem in problems for key in problem.keys}
        kept = {key: text for key, text in chosen.items() if key not in wrong}
        missing = [f"{problem.where}=_" for problem in problems if problem.what.startswith("required")]
        try:
            config = to_config(composed([*kept.values(), *missing]))
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
        except (HydraException, OmegaConfBaseException) as error:
            refused = [Problem(text, why, (key,)) for key, text in kept.items() if (why := _refusal(composed, text))]
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
    """Decorator: run a recipe with the checked Config of its command line, under Hydra (--help, --cfg job, --multirun).

    A bad command line ends the process with exit code 2, on every rank, with one message, before anything is started.
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
        try:
            config = to_config(composed)
            if problems := check(config, world_size, local_world_size):
                raise ConfigError(problems)
        except ConfigError as error:
            refuse(error)
        if leader and (idle := idle_ranks(config, world_size)):
            print(f"warning: ranks {show(list(idle))} host nothing; see placement, or start fewer", file=sys.stderr)
        recipe(config)

    @functools.wraps(recipe)
    def run() -> None:
        import hydra
        from hydra._internal.utils import get_args_parser

        args = get_args_parser().parse_args()
        if not (args.help or args.hydra_help or args.shell_completion or args.info):
            try:
                accepted = check_command_line(
                    args.overrides, config_name=args.config_name or config_name, config_dir=args.config_dir,
                    multirun=args.multirun, world_size=world_size, local_world_size=local_world_size,
                )  # fmt: skip
            except ConfigError as error:
                refuse(error)
            rewritten = dict(zip(args.overrides, accepted))
            sys.argv = [rewritten.get(argument, argument) for argument in sys.argv]
        hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=config_name)(job)()

    return run
