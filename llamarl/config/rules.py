"""Collects problems that no single value of a configuration shows: values, files and ranks that
cannot work together, each with a remedy.

A section's rules are beside its dataclasses, in llamarl/config/sections/. Those of ranks, over all
sections, are in llamarl/config/placement.py.
"""

from __future__ import annotations

from collections.abc import Collection

from llamarl.config.conversion import to_values
from llamarl.config.files import EVAL_SETS, PARTS
from llamarl.config.placement import find_placement
from llamarl.config.schema import Config
from llamarl.config.sections.buffer import find_buffer
from llamarl.config.sections.evaluation import find_evaluation, find_set_names
from llamarl.config.sections.generator import (
    find_cut_distributions,
    find_generator,
    find_other_temperatures,
)
from llamarl.config.sections.loss import find_loss
from llamarl.config.sections.model import find_builder
from llamarl.config.sections.placement import find_asked, find_weights
from llamarl.config.sections.reference import (
    find_reference,
    find_reference_stream,
    find_teachers,
)
from llamarl.config.sections.reward import find_gold, find_reward
from llamarl.config.sections.run import find_metrics, find_run
from llamarl.config.sections.task import (
    EnvironmentSettings,
    FileSettings,
    MixtureSettings,
    find_environment,
)
from llamarl.config.sections.tickets import find_overcommit, find_tickets
from llamarl.config.sections.trainer import find_trainer
from llamarl.config.sections.victim import find_victim
from llamarl.scoring.kinds.kind import RunFacts
from llamarl.words.findings import Findings, Problem


def check(
    config: Config,
    world_size: int,
    local_world_size: int | None = None,
    *,
    attacks: bool = False,
    trains: bool = True,
) -> list[Problem]:
    """Return the values that cannot work together, or with this many ranks and these files.
    attacks: the recipe puts completions to a victim. trains: it trains on its completions.
    """
    c = config
    found = Findings(to_values(config))
    if not find_set_names(c.eval, found):
        return found.problems  # other problems name keys, and these make none
    num_started = world_size
    world_size = c.ranks or num_started
    if c.ranks is not None:
        local_world_size = None  # the cluster is imagined, so its hosts are not known
    num_hosts = -(-world_size // (local_world_size or world_size))
    has_rows = _has_rows(c)
    find_run(c, num_started, found, has_rows=has_rows)
    find_overcommit(c, c.governor, found, buffer_kind=c.buffer.kind)
    find_tickets(
        c.tickets,
        c,
        found,
        loss=c.loss,
        trainer=c.trainer,
        buffer_kind=c.buffer.kind,
        has_rows=has_rows,
    )
    find_asked(c.placement, found, offload=c.offload, max_lag=c.max_lag)
    find_placement(c, world_size, found)
    find_weights(c.weights, found, cpu_offload=c.trainer.cpu_offload, num_hosts=num_hosts)
    find_metrics(c.metrics, found)
    found.add_unless_model(c.model.path, "model.path")
    shared = {"trainer": c.trainer, "generator": c.generator, "reference": c.reference}
    find_builder(
        c.model,
        found,
        tensor_parallel={name: section.tensor_parallel for name, section in shared.items()},
        quantize=c.generator.quantize,
    )
    find_generator(c.generator, c, found, longest=c.longest_asked, longest_keys=c.longest_keys)
    if trains:
        find_cut_distributions(c.generator, found)
    find_other_temperatures(
        c.generator, c, found, loss=c.loss, reward_kl_coef=c.trainer.reward_kl_coef
    )
    scorers = {part.settings.kind for part in c.reward_parts}
    find_loss(c.loss, found, scorers=scorers)
    find_trainer(c.trainer, c, found, loss=c.loss, generator_kind=c.generator.kind)
    find_reference(c.reference, c, found, loss=c.loss, trainer=c.trainer, buffer_kind=c.buffer.kind)
    parts = None
    if isinstance(c.task, MixtureSettings):
        parts = c.task.parts
    find_teachers(c.reference, found, loss=c.loss, parts=parts)
    find_reference_stream(c.reference, c, found, generator_kind=c.generator.kind, longest=c.longest)
    seeks_novelty = any(part.settings.is_novelty for part in c.reward_parts)
    find_buffer(c.buffer, c, found, loss=c.loss, trainer=c.trainer, seeks_novelty=seeks_novelty)
    compared = [part.section for part in c.reward_parts if part.settings.compares]
    find_victim(c.victim, found, attacks=attacks, compared=compared)
    find_evaluation(c.eval, found)
    for section, played in c.environments.items():
        find_environment(
            played,
            section,
            found,
            generator_kind=c.generator.kind,
            tensor_parallel=c.generator.tensor_parallel,
            has_victim=c.victim.placed,
        )
    facts = _facts(c)
    find_reward(c.reward, facts, found)
    find_gold(c.given_gold, c.eval.gold_label, facts, found)
    _find_files(c, found)
    return found.problems


def check_sampling(run: Config, keys: Collection[str]) -> list[Problem]:
    """Return what keeps a run from sampling and scoring, for a job that has these of its keys, and
    those of a reward's parts.
    """
    found = []
    for problem in check(run, 1, trains=False):
        if all(key in keys or key.startswith(f"{PARTS}.") for key in problem.keys):
            found.append(problem)
    return found


def _has_rows(c: Config) -> bool:
    """Whether the task's prompts are one list of rows."""
    makes_its_own = isinstance(c.task, EnvironmentSettings) and c.task.path is None
    return not (makes_its_own or isinstance(c.task, MixtureSettings))


def _find_files(c: Config, found: Findings) -> None:
    """Find files of the task, of held-out prompts and of the victim that are not there."""
    for name in ("path", "eval_path"):
        found.add_unless_file(getattr(c.task, name, None), f"task.{name}")
    for name, one in c.eval.sets.items():
        found.add_unless_file(getattr(one.prompts, "path", None), f"eval.sets.{name}.path")


def _facts(c: Config) -> RunFacts:
    """Return the values that the settings of scorers must go together with."""
    asked: dict[str, object] = {"task": c.task}
    asked |= {f"{EVAL_SETS}.{name}": one.prompts for name, one in c.eval.sets.items()}
    unanswered = []
    for section, rows in asked.items():
        if isinstance(rows, FileSettings) and rows.answer_key is None:
            unanswered.append(f"{section}.answer_key")
    return RunFacts(
        unanswered=tuple(unanswered),
        group_size=c.group_size,
        asks_greedily_alone=c.is_evaluated and c.eval.num_samples == 0,
        longest=c.longest,
        max_lag=c.max_lag,
        offload=c.offload,
        generator_kind=c.generator.kind,
        has_victim=c.victim.placed,
        has_environment=bool(c.environments),
    )
