"""Times an update that two trainer ranks make together, as a process for each.

    time_together_s("DIR", "float32", groups=16)

FSDP2 around the layers, the sum of gradients, and what ranks tell each other take a trainer's rank
time that no update of one process has.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

RANKS = 2
LONGEST_S = 120  # of all, with the start of two processes


def time_together_s(path: str, dtype: str, *, groups: int) -> float:
    """Return the seconds of an update that two ranks make of so many short groups each, the
    shortest of some. path: "": the embedded model. RuntimeError where they do not end well.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = []
        for rank in range(RANKS):
            words = [store, str(rank), path, dtype, str(groups)]
            command = [sys.executable, "-m", "llamarl.planner.probe_rank", *words]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        try:
            said = [process.communicate(timeout=LONGEST_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError("two ranks that train together ended with an error; it is above")
    return float(said[0].split()[-1])
