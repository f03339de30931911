"""Lets the threads of a computation spin only shortly before they sleep.

GNU's OpenMP, which PyTorch and our kernels use, spins 300,000 times before it sleeps: 16 ms at 140
cycles a turn. Beside other work a spinning thread takes the core from the thread that it waits for,
and a job took several times as long. A spin of about 0.1 ms is enough on quiet cores and costs
little on busy ones.

OpenMP reads the setting once, when torch is imported, so it must be set before. A user's own
setting has precedence.
"""

from __future__ import annotations

import os

SPINS = 3000
_SET_BY_USERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def wait_briefly() -> None:
    """Tell the OpenMP of this process and of those that it starts to spin shortly, unless the
    environment says something else.
    """
    if not any(name in os.environ for name in _SET_BY_USERS):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
