"""The files of conf/, where every value of a run has its default."""

from __future__ import annotations

from collections.abc import Mapping
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
# Arguments of what the user names, by names that it has; teachers, by parts of the task.
OPTIONS = ("task.options", "reward.options", "model.template_options", "reference.teachers")
# Where users name sections: the section that has them, the key there, the folder of conf/ that has
# a file of each kind, the keys of such a file that they lack, and values that no file has. All rows
# of a set of held-out prompts are held out, so it has no eval_path.
_OF_ALL_PARTS = (
    "max_error_rate",
    "replicate",
    "tensor_parallel",
    "stream",
    "piece_tokens",
    "cache_tokens",
)
_NAMED: tuple[tuple[str, str, str, tuple[str, ...], dict[str, object]], ...] = (
    ("reward", "parts", "reward", _OF_ALL_PARTS, {"weight": 1.0}),
    ("task", "parts", "task", (), {"weight": 1.0}),
    ("eval", "sets", "task", ("eval_path",), {"num_prompts": "${eval.num_prompts}"}),
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
    for name, key, folder, lacking, further in _NAMED:
        section = values.get(name)
        given = section.get(key) if isinstance(section, Mapping) else None
        if not isinstance(section, Mapping) or not isinstance(given, Mapping):
            continue
        filled: dict[str, object] = dict(given)
        for part, own in given.items():
            kind = own.get("kind") if isinstance(own, Mapping) else None
            defaults = {} if kind in ("parts", "mixture") else defaults_of(folder, kind)
            kept = {one: value for one, value in defaults.items() if one not in lacking}
            if isinstance(own, Mapping) and kept:
                filled[part] = _filled({**kept, **further}, own)
        whole[name] = {**section, key: filled}
    return whole


def _filled(defaults: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Return the defaults with what is given in their places, also within their own sections."""
    filled = {**defaults, **given}
    for name, own in defaults.items():
        theirs = filled[name]
        if isinstance(own, Mapping) and isinstance(theirs, Mapping):
            filled[name] = {**own, **theirs}
    return filled


def defaults_of(section: str, kind: object) -> dict[str, object]:
    """Return the values of conf/SECTION/KIND.yaml; nothing for an unknown kind."""
    file = CONF_DIR / section / f"{kind}.yaml"
    if not file.is_file():
        return {}
    values = sections(OmegaConf.load(file))
    return values.get(section, values)  # some files set values of other sections too
