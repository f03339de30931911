"""Settings of threads that share a computation: they spin shortly, then sleep.

GNU's OpenMP, under PyTorch and our kernels, spins for 300,000 turns before it sleeps, which is 16
ms where a turn takes 140 cycles. Beside other work, and beside the second pool of threads that our
kernels bring, a spinning thread takes the core from the one that it waits for: a job took several
times as long. A spin of about 0.1 ms catches nearly all that is about to come on quiet cores, and
costs little on busy ones.

The library reads this once, when it is loaded: so before torch is imported. What the user sets goes
before.
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
