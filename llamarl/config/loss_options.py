"""The options and marks of losses, for a config that is checked before torch is imported.

Each loss declares them in its signature and its decorators. Those of the package's losses are read
from their source, because importing it would import torch; a user's own loss is imported.
conf/loss/NAME.yaml has the values of a published loss.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

from llamarl.config.ranges import Count, NonNegative, Positive, Share
from llamarl.words.choices import Normalize, RatioLevel

# What each option may be; it means the same in every loss that has it.
LOSS_OPTIONS: dict[str, object] = {
    "ratio_cap": Positive | None,
    "ratio_mask_low": NonNegative | None,
    "ratio_mask_high": Positive | None,
    "ratio_level": RatioLevel,
    "normalize": Normalize,
    "max_tokens": Count | None,
    "clip_low": Share,
    "clip_high": NonNegative,
    "beta": Positive,
    "log_reward_temperature": Positive,
    "reference_temperature": Positive,
    "tau": NonNegative,
    "length_normalize": bool,
}

_LOSSES = Path(__file__).resolve().parents[1] / "learning" / "losses"


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declaration of a loss, read from its source."""

    options: tuple[str, ...]  # its keyword-only parameters
    marks: frozenset[str]  # its decorators, such as "needs_reference"


@functools.cache
def declarations() -> dict[str, Declaration]:
    """Return the package's losses by name. A loss is the function with the name of its file."""
    found = {}
    for file in sorted(_LOSSES.glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == file.stem:
                options = tuple(argument.arg for argument in node.args.kwonlyargs)
                marks = frozenset(ast.unparse(mark) for mark in node.decorator_list)
                found[node.name] = Declaration(options, marks)
    return found


def declares(loss: str, mark: str) -> bool:
    """Whether a loss, by its name or "module:function", has the mark. False for one that is not
    there, which is found where the loss itself is checked.
    """
    if ":" not in loss:
        return loss in declarations() and mark in declarations()[loss].marks
    from llamarl.learning.losses import resolve_loss  # these import torch, so only here
    from llamarl.learning.losses.common import has_mark

    try:
        return has_mark(resolve_loss(loss), mark)
    except ValueError:
        return False
