"""The configuration of recipes/evaluate.py: the main job's keys, and those that only an evaluation
has. Imports no torch.
"""

from __future__ import annotations

from llamarl.config.command_line import JobKind
from llamarl.config.conversion import to_values
from llamarl.config.rules import check as check_run
from llamarl.config.schema import Config
from llamarl.words.fields import Count, Natural, Text, settings_dataclass
from llamarl.words.findings import Findings, Problem

REFERENCES = "references"


@settings_dataclass
class EvaluationConfig(Config):
    """The keys of an evaluation. A main job's keys choose task, reward and sampling."""

    out: Text
    """File of prompts, completions and scores, a line each."""
    num_prompts: Count | None
    """The first so many held-out prompts of each set; null: as the config has it."""
    samples: Natural | None
    """Sampled completions of a prompt, for pass@k; null: eval.num_samples."""
    against: Text
    """Answers that eval.gold compares with. references: those of the task's rows, under
    eval.reference_key; DIR: those of another model; FILE: those of a file that out has made.
    """


def check(
    config: EvaluationConfig, world_size: int, local_world_size: int | None = None
) -> list[Problem]:
    """Return what cannot work together."""
    found = Findings(to_values(config))
    found.problems += check_run(config, 1, trains=False)
    if config.model.path is None:
        found.problems.append(
            Problem("model.path", "required: set model.path=DIR", ("model.path",))
        )
    if config.generator.kind != "native":
        found.add("the native engine evaluates models; leave generator out", "generator.kind")
    if config.against != REFERENCES and config.gold is None:
        what = "a judge must compare the two; eval.gold=DIR or eval.gold=module:function"
        found.add(what, "against")
    return found.problems


EVALUATION = JobKind("evaluate", EvaluationConfig, check=check)
