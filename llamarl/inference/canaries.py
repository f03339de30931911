"""Checks, after each swap of weights, that an engine computes what the trainer computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llamarl.inference.protocol import GenerationEngine, can_hold_quantized
from llamarl.models.parity import (
    Agreement,
    Canary,
    ParityLimits,
    check_canary,
    check_marks,
    check_quantized,
)
from llamarl.models.sharding import Box
from llamarl.types import Columns


class CanaryCheck:
    """Compares an engine with the canary of each version. temperature: of the logprobs.

    limits: how far these may differ from the trainer's. max_quantization_kl: the highest mean KL of
    quantised weights, nats, checked in place of limits; the engine is then a QuantizedEngine. None:
    weights are not quantised.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        limits: ParityLimits,
        *,
        max_quantization_kl: float | None,
        temperature: float,
    ):
        self._engine = engine
        self._agreement = Agreement(limits)
        self._max_quantization_kl = max_quantization_kl
        self._temperature = temperature

    def check(
        self, canary: Canary, held: Mapping[str, tuple[Box, Tensor]], *, version: int, rank: int
    ) -> Columns:
        """Return the columns of the comparison. ParityError if the engine does not hold the weights
        of this version, or computes another model.

        held: name -> which box of the parameter this rank holds, and the numbers in it.
        """
        check_marks(canary.marks, held, version=version, rank=rank)
        most = self._max_quantization_kl
        score = self._engine.score
        if most is not None:
            assert can_hold_quantized(self._engine), "setup has refused an engine without them"
            score = self._engine.score_all
        scores = []
        for sequence in canary.sequences:
            prompt_ids = sequence.token_ids[: sequence.given]
            token_ids = sequence.token_ids[sequence.given :]
            scores.append(score(prompt_ids, token_ids, self._temperature))
        scored = torch.cat(scores).cpu()
        if most is not None:
            kl = check_quantized(canary, scored, version=version, rank=rank, most=most)
            return {"weights/quantization_kl": kl}
        worst, rms = check_canary(canary, scored, self._agreement, version=version, rank=rank)
        return {"parity/canary_diff_max": worst, "parity/canary_diff_rms": rms}
