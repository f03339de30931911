"""Collects what no single value of a configuration shows: values, files and ranks that cannot work
together, each with the remedy.

A section's rules are beside its dataclasses, in llamarl/config/sections/. Those of ranks, over all
sections, are in llamarl/config/placement.py.
"""

from __future__ import annotations

from llamarl.config.conversion import to_values
from llamarl.config.findings import Findings, Problem
from llamarl.config.placement import find_placement
from llamarl.config.reward_rules import comparing_judges, reward_rules
from llamarl.config.rewards import (
    EncoderSourceSettings,
    JudgeSourceSettings,
    ModelSourceSettings,
    NoveltySourceSettings,
)
from llamarl.config.schema import Config
from llamarl.config.sections.buffer import find_buffer
from llamarl.config.sections.evaluation import START, find_evaluation, find_set_names
from llamarl.config.sections.generator import find_generator, find_other_temperatures
from llamarl.config.sections.loss import find_loss
from llamarl.config.sections.model import find_model
from llamarl.config.sections.overcommit import find_overcommit
from llamarl.config.sections.placement import find_sharing
from llamarl.config.sections.reference import find_reference, find_reference_stream
from llamarl.config.sections.run import find_run
from llamarl.config.sections.trainer import find_trainer
from llamarl.config.sections.weights import find_weights
from llamarl.config.victim import ModelVictimSettings, victim_rules
from llamarl.words.urls import url_problem


def check(
    config: Config,
    world_size: int,
    local_world_size: int | None = None,
    *,
    attacks: bool = False,
) -> list[Problem]:
    """What cannot work together, or with this many ranks and these files. attacks: the recipe puts
    completions to a victim.
    """
    c = config
    found = Findings(to_values(config))
    if not find_set_names(c.eval, found):
        return found.problems  # what else is wrong is told by keys, which such names do not make
    num_started = world_size
    world_size = c.ranks or num_started
    if c.ranks is not None:
        local_world_size = None  # of a cluster that nothing is known of
    num_hosts = -(-world_size // (local_world_size or world_size))
    find_run(c, num_started, found)
    find_overcommit(c, c.governor, found, buffer_kind=c.buffer.kind)
    find_sharing(c.placement, found, offload=c.offload)
    find_placement(c, world_size, found)
    find_weights(c.weights, found, cpu_offload=c.trainer.cpu_offload, num_hosts=num_hosts)
    find_model(c.model, found)
    find_generator(c.generator, c, found, longest=c.longest_asked, longest_keys=c.longest_keys)
    find_other_temperatures(
        c.generator, c, found, loss=c.loss, reward_kl_coef=c.trainer.reward_kl_coef
    )
    find_loss(c.loss, found)
    find_trainer(c.trainer, c, found, loss=c.loss)
    find_reference(c.reference, c, found, loss=c.loss, trainer=c.trainer, buffer_kind=c.buffer.kind)
    find_reference_stream(c.reference, c, found, generator_kind=c.generator.kind, longest=c.longest)
    seeks_novelty = any(part.kind == "novelty" for part in c.reward_parts.values())
    find_buffer(c.buffer, c, found, loss=c.loss, trainer=c.trainer, seeks_novelty=seeks_novelty)
    find_evaluation(c.eval, found)
    rules = [
        *reward_rules(c),
        *victim_rules(c.victim, attacks=attacks, compared=comparing_judges(c)),
    ]
    for keys, is_broken, remedy in rules:
        if is_broken:
            found.add(remedy, *keys.split())
    _find_files(c, found)
    _find_credentials(c, found)
    return found.problems


def _find_files(c: Config, found: Findings) -> None:
    """Find files of the task, of held-out prompts and of what scores that are not there."""
    for name in ("path", "eval_path"):
        found.add_unless_file(getattr(c.task, name, None), f"task.{name}")
    for name, one in c.eval.sets.items():
        found.add_unless_file(getattr(one, "path", None), f"eval.sets.{name}.path")
    victim = c.victim.path if isinstance(c.victim, ModelVictimSettings) else None
    found.add_unless_model(victim, "victim.path")
    for key, part in c.reward_parts.items():
        if isinstance(part, ModelSourceSettings | EncoderSourceSettings):
            found.add_unless_model(part.path, f"{key}.path")
        elif isinstance(part, JudgeSourceSettings):
            found.add_unless_file(part.template, f"{key}.template")
        elif isinstance(part, NoveltySourceSettings) and part.embedder != START:
            found.add_unless_model(part.embedder, f"{key}.embedder")


def _find_credentials(c: Config, found: Findings) -> None:
    """Urls or keys of judges that cannot be used. The values are not shown: they may be secret."""
    for key, judge in c.reward_parts.items():
        if judge.kind != "judge":
            continue
        what = url_problem(judge.url)
        if what is not None:
            found.problems.append(Problem(f"{key}.url", what, (f"{key}.url",)))
        variable = judge.api_key_env
        if variable is not None and not variable.isidentifier():
            what = "is no name of an environment variable; export the key there, and give the name"
            found.problems.append(Problem(f"{key}.api_key_env", what, (f"{key}.api_key_env",)))
