"""The section `model`: the model that training starts from, and what a builder of torchtune cannot
do.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Literal

from llamarl.words.fields import AnyText, Options, marked, settings_dataclass
from llamarl.words.findings import Findings


@settings_dataclass
class ModelSettings:
    path: AnyText | None = marked("data")
    """Directory of the model that training starts from, which chooses conf/model/hf.yaml; null:
    the tiny model that comes with the package.
    """
    dtype: Literal["float32", "bfloat16"] = marked("answers")
    """Type of the weights that the generators compute with."""
    builder: AnyText | None = marked("answers")
    """Import path of a builder of torchtune, which makes the model of model.path in the trainer,
    the generators and the reference: torchtune.models.llama3_2.llama3_2_1b (docs/models.md);
    null: model.implementation says what does.
    """
    implementation: Literal["auto", "native", "transformers"] = marked("answers")
    """Whose modules compute the model in the trainer, the generators and the reference: native is
    our own decoder, which has fast kernels for a few families; auto is native for these, and
    transformers for all others (docs/models.md).
    """
    template_options: Options = marked("data", "answers")
    """Variables of the chat template: model.template_options.enable_thinking=false."""

    @property
    def made_by(self) -> str:
        """What makes the decoder, as models.build.config_of takes it."""
        return self.implementation if self.builder is None else self.builder


def find_builder(
    model: ModelSettings, found: Findings, *, tensor_parallel: Mapping[str, int], quantize: str
) -> None:
    """Find what a builder's model cannot do. tensor_parallel: by section."""
    if model.builder is None:
        return
    if find_spec("torchtune") is None:
        what = "the package torchtune is missing; pip install 'llamarl[torchtune]'"
        found.add(what, "model.builder")
    if not model.builder:
        what = (
            "need an import path; model.builder=torchtune.models.llama3_2.llama3_2_1b, or model=hf"
        )
        found.add(what, "model.builder")
    if model.path is None:
        found.add("a builder makes the model of a directory; model.path=DIR", "model.builder")
    if model.implementation != "auto":
        found.add("a builder makes the model; model.implementation=auto", "model.implementation")
    what = "a builder of torchtune makes whole layers in model.dtype; {}, or model=hf"
    for section, ranks in tensor_parallel.items():
        key = f"{section}.tensor_parallel"
        if ranks > 1:
            found.add(what.format(f"{key}=1"), key, "model.builder")
    if quantize != "none":
        found.add(what.format("generator.quantize=none"), "generator.quantize", "model.builder")
