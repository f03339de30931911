"""llamarl: asynchronous RL post-training of LLMs in native PyTorch. Importing it imports no torch.

Import it before torch: it says how the threads of torch wait for each other
(llamarl.machine.waiting).
"""

from __future__ import annotations

from llamarl.machine.waiting import wait_briefly

__version__ = "0.2.0"

# Of llamarl/run.py: to start jobs from Python. Loaded when they are asked for.
_STARTS = ("Run", "evaluate", "red_team", "reward_model", "sft", "train")

wait_briefly()


def __getattr__(name: str) -> object:
    if name not in (*_STARTS, "Config"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llamarl import run

    return run.config if name == "Config" else getattr(run, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_STARTS, "Config"])
