"""The section `model`: the model that training starts from."""

from __future__ import annotations

from typing import Literal

from llamarl.words.fields import AnyText, marked, settings_dataclass
from llamarl.words.findings import Findings


@settings_dataclass
class ModelSettings:
    path: AnyText | None = marked("data")
    """Directory of the model that training starts from, which chooses conf/model/hf.yaml; null:
    the tiny model that comes with the package.
    """
    dtype: Literal["float32", "bfloat16"] = marked("answers")
    """Type of the weights that the generators compute with."""


def find_model(model: ModelSettings, found: Findings) -> None:
    """Find a directory without a model."""
    found.add_unless_model(model.path, "model.path")
