"""What cannot go together of evaluations: what is asked, and what judges it."""

from __future__ import annotations

import re

from llamarl.config.files import EVAL_SETS
from llamarl.config.findings import Findings, Problem
from llamarl.config.schema import Config
from llamarl.config.search_rules import Rule
from llamarl.words.columns import OWN_COLUMNS

# Of a set: it names columns, and keys of the command line.
_SET_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def find_set_names(c: Config, found: Findings) -> bool:
    """Names of sets that cannot be used. Returns whether all can be."""
    for name in c.eval.sets:
        key = f"{EVAL_SETS}.{name}"
        if not _SET_NAME.fullmatch(name):
            what = "a set's name has letters, digits, _ and -, and begins with a letter"
            found.problems.append(Problem(key, f"{what}; it names columns, eval/NAME/...", (key,)))
        elif name in OWN_COLUMNS:
            what = f"eval/{name} is a column of the task's own held-out prompts; another name"
            found.problems.append(Problem(key, what, (key,)))
    return all(_SET_NAME.fullmatch(name) for name in c.eval.sets)


def eval_rules(c: Config) -> list[Rule]:
    """Rules about how often is asked, about targets, and about what judges besides the reward."""
    aims = c.eval.target is not None
    is_model = c.gold is not None and c.gold.kind == "model"
    rules = [
        (
            "eval.target eval.every",
            aims and c.eval.every == 0,
            "nothing is evaluated, so no target is reached; eval.every=10, or eval.target=null",
        ),
        (
            "eval.target eval.num_prompts",
            aims and c.eval.num_prompts == 0,
            "the task's own held-out prompts are not asked, so no target is reached; "
            "eval.num_prompts=500, or eval.target=null",
        ),
        (
            "eval.gold_label eval.gold",
            c.eval.gold_label is not None and not is_model,
            "only a scorer's directory has labels; eval.gold_label=null, or eval.gold=DIR",
        ),
        (
            "eval.embedder eval.num_samples",
            c.eval.embedder is not None and c.eval.num_samples < 2,
            "diversity is of several answers to a prompt; eval.num_samples=2 or more, "
            "or eval.embedder=null",
        ),
    ]
    for key in ("eval.gold", "eval.base", "eval.embedder"):
        given = getattr(c.eval, key.removeprefix("eval."))
        rules.append(
            (
                f"{key} eval.every eval.num_prompts",
                given is not None and not c.is_evaluated,
                f"nothing is evaluated; eval.every=10 eval.num_prompts=500, or {key}=null",
            )
        )
    return rules
