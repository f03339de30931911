"""The section `eval`: which held-out prompts are asked, what judges the answers, and what cannot go
together there.
"""

from __future__ import annotations

import re
from typing import Annotated

from llamarl.config.files import EVAL_SETS
from llamarl.config.sections.task import EvalSetSettings
from llamarl.words.choices import OWN_COLUMNS, START
from llamarl.words.fields import (
    AnyText,
    ByKind,
    Flag,
    Natural,
    Number,
    Text,
    marked,
    settings_dataclass,
)
from llamarl.words.findings import Findings, Problem

# A set's name is part of names of metrics and of keys of the command line.
_SET_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@settings_dataclass
class EvalSettings:
    every: Natural
    """Steps between evaluations; 0: never."""
    num_prompts: Natural = marked("data")
    """Held-out prompts, answered greedily; 0: none."""
    num_samples: Natural
    """Completions of a held-out prompt that are sampled as in training, for pass@k; 0: the
    greedy one alone.
    """
    sets: dict[str, Annotated[EvalSetSettings, ByKind()]] = marked("data")
    """More held-out prompts by names of your own, with columns eval/NAME/...: name -> kind,
    num_prompts (eval.num_prompts if not given) and the keys of that kind. All rows of its path
    are held out; of a dataset's directory, those of its test or validation split if it has one
    (docs/data.md).
    """
    target: Number | None = marked("outward")
    """End the run once eval/reward reaches this (with scores of 0 or 1: the accuracy); null: no
    target.
    """
    gold: AnyText | None
    """A scorer's directory, or module:function, that judges the greedy answers besides the
    reward and is never trained on (docs/rewards.md).
    """
    gold_label: AnyText | None
    """Label of that scorer; null: its only one."""
    reference_key: AnyText | None
    """Key of a task's row whose answer eval/win_rate compares with; null: no win rate."""
    base: AnyText | None
    """Directory of a language model, such as the SFT model, for eval/perplexity of the answers
    under it; null: none.
    """
    embedder: Text | None
    """Embeds the sampled answers for eval/diversity. start: the model that training starts
    from; or a sentence encoder's directory (docs/algorithms.md).
    """
    save_samples: Flag = marked("outward")
    """Write the answers and their scores to RUN_DIR/samples/step_N.jsonl."""

    @property
    def is_asked(self) -> bool:
        """Whether any held-out prompt is ever asked."""
        return self.every > 0 and (self.num_prompts > 0 or bool(self.sets))


def find_set_names(evaluation: EvalSettings, found: Findings) -> bool:
    """Find names of sets that cannot be used. Return whether all of them can be parts of keys."""
    for name in evaluation.sets:
        key = f"{EVAL_SETS}.{name}"
        if not _SET_NAME.fullmatch(name):
            what = "a set's name has letters, digits, _ and -, and begins with a letter"
            found.problems.append(Problem(key, f"{what}; metrics are called eval/NAME/...", (key,)))
        elif name in OWN_COLUMNS:
            what = (
                f"eval/{name} is a metric of the task's own held-out prompts; choose another name"
            )
            found.problems.append(Problem(key, what, (key,)))
    return all(_SET_NAME.fullmatch(name) for name in evaluation.sets)


def find_evaluation(evaluation: EvalSettings, found: Findings) -> None:
    """Find targets that cannot be reached, judges that do not exist, and judges without
    completions.
    """
    if evaluation.target is not None:
        _find_target(evaluation, found)
    if evaluation.embedder is not None and evaluation.num_samples < 2:
        found.add(
            "diversity compares several completions of a prompt; eval.num_samples=2 or more, or "
            "eval.embedder=null",
            "eval.embedder",
            "eval.num_samples",
        )
    judges = {
        "eval.gold": evaluation.gold,
        "eval.base": evaluation.base,
        "eval.embedder": evaluation.embedder,
    }
    for key, given in judges.items():
        if given is not None and not evaluation.is_asked:
            found.add(
                f"nothing is evaluated; eval.every=10 eval.num_prompts=500, or {key}=null",
                key,
                "eval.every",
                "eval.num_prompts",
            )
    found.add_unless_model(evaluation.base, "eval.base")
    if evaluation.embedder != START:
        found.add_unless_model(evaluation.embedder, "eval.embedder")


def _find_target(evaluation: EvalSettings, found: Findings) -> None:
    """Find why eval.target would never be reached."""
    if evaluation.every == 0:
        found.add(
            "nothing is evaluated, so no target is reached; eval.every=10, or eval.target=null",
            "eval.target",
            "eval.every",
        )
    if evaluation.num_prompts == 0:
        found.add(
            "the task's own held-out prompts are not asked, so no target is reached; "
            "eval.num_prompts=500, or eval.target=null",
            "eval.target",
            "eval.num_prompts",
        )
