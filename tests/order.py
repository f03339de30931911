"""In which order files are handed to the workers: what may take long starts first, so that no
worker ends with a long file while the others have nothing left.
"""

from __future__ import annotations

import subprocess
from collections import Counter

from llamarl.scoring.pool import RewardPool
from tests import launching
from tests.build import job
from tests.forkery import Forkery, the_forkery

STARTERS = (
    launching.Job,
    launching.ForkedJob,
    launching.environment,
    job.finished_job,
    job.run_python,
    Forkery,
    the_forkery,
    RewardPool,
    subprocess,
)
SHARED_PROCESSES = {"pool", "runs"}


def starts_processes(item) -> bool:
    """Whether a test's file names what starts processes, or the test takes a fixture that does."""
    if SHARED_PROCESSES & set(item.fixturenames):
        return True
    names = vars(item.module).values()
    of_file = {id(value) for value in names}
    return any(id(starter) in of_file for starter in STARTERS)


def long_files_first(items: list) -> None:
    """Sort in place: files that start processes come first, and of each kind those of many tests.

    A file's tests stay together, and in the order that they had.
    """
    files = [item.path for item in items]
    num_tests = Counter(files)
    first_seen = {path: position for position, path in reversed(list(enumerate(files)))}
    starting = {item.path for item in items if starts_processes(item)}

    def place(item) -> tuple[bool, int, int]:
        return item.path not in starting, -num_tests[item.path], first_seen[item.path]

    items.sort(key=place)
