"""The files of conf/, where every value of a run has its default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf

_PACKAGE = Path(__file__).resolve().parents[1]
# An installed package has conf/ inside, a checkout has it beside the package.
CONF_DIR = next(path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir())
# These sections hold sections whose names the user gives.
PARTS = "reward.parts"
TASK_PARTS = "task.parts"
EVAL_SETS = "eval.sets"
SCHEDULES = "loss.schedules"  # by options of the loss
# Arguments of what the user names, by names that it has.
OPTIONS = ("task.options", "reward.options")
# Keys of a whole reward that its parts do not have.
_OF_ALL_PARTS = (
    "max_error_rate",
    "replicate",
    "tensor_parallel",
    "stream",
    "piece_tokens",
    "cache_tokens",
)


def sections(config: object, *, resolve: bool = False) -> dict:
    """Return a config of OmegaConf's as nested values. resolve: fill in references."""
    values = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(values, dict), f"sections were expected, and not {type(values).__name__}"
    return values


def with_whole_parts(values: dict[str, object]) -> dict[str, object]:
    """Fill in the parts of a reward or of a task, and the sets of held-out prompts: keys that they
    do not set come from the file of their kind, conf/reward/KIND.yaml or conf/task/KIND.yaml, a
    part's weight is 1, and a set has eval.num_prompts prompts. The values stay unresolved.
    """
    whole = dict(values)
    for name in ("reward", "task"):
        section = values.get(name)
        parts = section.get("parts") if isinstance(section, Mapping) else None
        if isinstance(section, Mapping) and isinstance(parts, Mapping):
            whole[name] = {**section, "parts": _whole(parts, partial(_of_a_part, name))}
    evaluation = values.get("eval")
    sets = evaluation.get("sets") if isinstance(evaluation, Mapping) else None
    if isinstance(evaluation, Mapping) and isinstance(sets, Mapping):
        whole["eval"] = {**evaluation, "sets": _whole(sets, _of_a_set)}
    return whole


def _whole(
    parts: Mapping[str, object], defaults_of: Callable[[object], dict[str, object]]
) -> dict[str, object]:
    whole = {}
    for name, part in parts.items():
        whole[name] = part
        if isinstance(part, Mapping):
            whole[name] = _filled(defaults_of(part.get("kind")), part)
    return whole


def _filled(defaults: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Return the defaults with what is given in their places, also within their own sections."""
    filled = {**defaults, **given}
    for name, own in defaults.items():
        theirs = filled[name]
        if isinstance(own, Mapping) and isinstance(theirs, Mapping):
            filled[name] = {**own, **theirs}
    return filled


def _of_a_part(section: str, kind: object) -> dict[str, object]:
    """Return the defaults of a part of this kind; nothing for an unknown kind."""
    own = _defaults(section, kind)
    return {**own, "weight": 1.0} if own else {}


def _of_a_set(kind: object) -> dict[str, object]:
    """Return the values that a set of held-out prompts of this kind has by default. All rows of its
    path are held out, so there is no eval_path.
    """
    own = _defaults("task", kind)
    own.pop("eval_path", None)
    return {**own, "num_prompts": "${eval.num_prompts}"} if own else {}


def _defaults(section: str, kind: object) -> dict[str, object]:
    """Return the values that a part of this kind has by default; nothing for an unknown kind."""
    if kind in ("parts", "mixture"):
        return {}
    values = defaults_of(section, kind)
    return {name: value for name, value in values.items() if name not in _OF_ALL_PARTS}


def defaults_of(section: str, kind: object) -> dict[str, object]:
    """Return the values of conf/SECTION/KIND.yaml; nothing for an unknown kind."""
    file = CONF_DIR / section / f"{kind}.yaml"
    if not file.is_file():
        return {}
    values = sections(OmegaConf.load(file))
    return values.get(section, values)  # some files set values of other sections too
