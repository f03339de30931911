"""How likely answers to held-out prompts must be, by a model of transformers."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from llamarl.models.config import tiny_directory


@torch.no_grad()
def logprobs_by_transformers(items):
    """Return [N] float64, nats: each answer's by its own pass, in float64."""
    model = AutoModelForCausalLM.from_pretrained(tiny_directory(), dtype=torch.float64)
    found = []
    for item in items:
        prompt = item.prompt.prompt_ids
        logits = model(torch.cat([prompt, item.token_ids])[None]).logits[0].log_softmax(-1)
        places = torch.arange(item.token_ids.numel()) + prompt.numel() - 1
        found.append(float(logits[places, item.token_ids].sum()))
    return np.array(found)
