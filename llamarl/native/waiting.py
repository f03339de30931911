"""How threads that share a computation wait for each other: a short spin, then asleep.

GNU's OpenMP, under PyTorch and our kernels, spins for 300,000 turns by itself, which is 16 ms where a turn takes 140 cycles. That
helps while every thread has a core of its own. Beside other work, and beside the second pool of threads that our kernels bring,
a spinning thread takes the core from the one that it waits for: a job took several times as long. A spin of some tens of
microseconds catches what is about to come. Alone on its cores a job of two threads loses about a fifth of its speed by that.

The library reads this once, when it is loaded: so before torch is imported. What the user sets goes before.
"""

from __future__ import annotations

import os

SPINS = 1000
_SET_BY_USERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def wait_briefly() -> None:
    """Say so to the OpenMP of this process and of those that it starts, unless the environment says something else."""
    if not any(name in os.environ for name in _SET_BY_USERS):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
