"""What tests of supervised objectives have in common: a step that only looks, and a task."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from llamarl.learning.supervised import SupervisedSettings, SupervisedUpdate


def update_that_keeps_weights(decoder, objective, microbatch_tokens: int) -> SupervisedUpdate:
    """A step that leaves gradients behind, and the weights as they were."""
    settings = SupervisedSettings(
        lr=0.0,
        schedule="constant",
        warmup_steps=0,
        max_steps=1,
        microbatch_tokens=microbatch_tokens,
        max_grad_norm=None,
    )
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.0)
    device = torch.device("cpu")
    return SupervisedUpdate(decoder, optimizer, objective, settings, group=None, device=device)


def task_of(path: Path, **changes: object) -> SimpleNamespace:
    """What a task over a file of rows says, but for the changes."""
    values = {
        "path": str(path),
        "eval_path": None,
        "num_eval": 0,
        "max_tokens": 16,
        "drop_long": False,
        "chat": True,
        "system_prompt": None,
    }
    return SimpleNamespace(**(values | changes))
