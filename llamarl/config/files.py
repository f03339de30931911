"""The files of conf/, where every value of a run has its default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from omegaconf import OmegaConf

_PACKAGE = Path(__file__).resolve().parents[1]
# An installed package has it inside, a checkout beside it.
CONF_DIR = next(path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir())
PARTS = "reward.parts"  # sections by names of the user's own
# Of a whole reward, and so of no part of one.
_OF_ALL_PARTS = (
    "max_error_rate",
    "replicate",
    "tensor_parallel",
    "stream",
    "chunk_tokens",
    "cache_tokens",
)


def with_whole_parts(values: dict[str, object]) -> dict[str, object]:
    """The values, unresolved, where each part of a reward has what it does not set itself from the
    file of its kind, conf/reward/KIND.yaml, and a weight of 1.
    """
    reward = values.get("reward")
    parts = reward.get("parts") if isinstance(reward, Mapping) else None
    if not isinstance(parts, Mapping):
        return values
    whole = {}
    for name, part in parts.items():
        whole[name] = part
        if isinstance(part, Mapping):
            whole[name] = {**_defaults(part.get("kind")), **part}
    return {**values, "reward": {**reward, "parts": whole}}


def _defaults(kind: object) -> dict[str, object]:
    """What a part of this kind has that does not set it; nothing of a kind that there is not."""
    file = CONF_DIR / "reward" / f"{kind}.yaml"
    if kind == "parts" or not file.is_file():
        return {}
    values = OmegaConf.to_container(OmegaConf.load(file))
    own = {name: value for name, value in values.items() if name not in _OF_ALL_PARTS}
    return {**own, "weight": 1.0}
