"""What the libraries under torch read from the environment when they are loaded: how threads wait, how large pages are.

Both are read once: so they are said before torch is imported. What the user sets goes before.

Waiting. GNU's OpenMP, under PyTorch and our kernels, spins for 300,000 turns before it sleeps, which is 16 ms where a turn takes 140
cycles. Beside other work, and beside the second pool of threads that our kernels bring, a spinning thread takes the core from the
one that it waits for: a job took several times as long. A spin of about 0.1 ms catches nearly all that is about to come on quiet
cores, and costs little on busy ones.

Pages. Each optimizer step takes new memory for gradients, copies of the weights and logits, and gives it back. By pages of 4 KiB
the system spends an eighth of a CPU's step in handing them out; by pages of 2 MiB nearly nothing.
"""

from __future__ import annotations

import os

SPINS = 3000
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # either says how threads wait
_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # PyTorch's: it asks for large pages behind tensors of 2 MiB and more


def prepare() -> None:
    """Say both to this process and to those that it starts, unless the environment says something else."""
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    os.environ.setdefault(_LARGE_PAGES, "1")
