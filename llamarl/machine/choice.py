"""Finds the fastest of several ways to compute one thing, by trying each once on this machine.

    way = fastest("decode pass", {"tiles": ..., "vectors": ..., "module": ...}, key="...")

The result is stored beside the compiled kernels, so later runs choose alike and at once. A
reproducible run must not ask a clock: it takes the first way without a trial.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from llamarl.machine.kernels import cache_folder, cpu_description

# Times, before the order of the ways is departed from: a busy machine's clock is no finer.
CLEARLY_FASTER = 1.25
_TURNS = 3  # each way is tried so often, in turn, and its shortest time counts

log = logging.getLogger(__name__)


Ways = Mapping[str, Callable[[], object]]  # name -> does the work once


def fastest(
    what: str,
    ways: Ways,
    *,
    key: str,
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """Return the name of the way to take: the first, unless another one is clearly faster.

    what: for people. ways: the expected best comes first. key: what the times depend on beside the
    CPU, such as shapes and threads.
    """
    names = list(ways)
    if len(names) == 1:
        return names[0]
    known = "\n".join([what, *names, key, cpu_description()])
    digest = hashlib.sha256(known.encode()).hexdigest()
    file_name = f"choice-{digest[:16]}.json"
    kept = _read(file_name)
    if kept is not None and kept in ways:
        return kept
    # A first call of each, which may compile or lay out, does not count.
    for work in ways.values():
        work()
    times = {name: float("inf") for name in ways}
    for _ in range(_TURNS):
        for name, work in ways.items():
            began = clock()
            work()
            seconds = clock() - began
            times[name] = min(times[name], seconds)
    chosen = names[0]
    for name in names[1:]:
        if times[name] * CLEARLY_FASTER < times[chosen]:
            chosen = name
    measured = [f"{name} {seconds * 1e3:.1f} ms" for name, seconds in times.items()]
    log.info("%s: %s, by measurement (%s)", what, chosen, ", ".join(measured))
    _keep(file_name, {"way": chosen, "what": what, "key": key, "times_s": times})
    return chosen


def _read(name: str) -> str | None:
    """Return the way that is kept under a name; None if there is no file, or one that cannot be
    read.
    """
    try:
        way = json.loads((cache_folder() / name).read_text())["way"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        log.warning("%s: measuring anew, for it cannot be read: %s", name, error)
        return None
    return way if isinstance(way, str) else None


def _keep(name: str, found: dict) -> None:
    """Keep what was found. Processes may do so at once: the last rename wins."""
    try:
        file = cache_folder() / name
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            made = Path(scratch) / file.name
            made.write_text(json.dumps(found, indent=1) + "\n")
            os.replace(made, file)
    except OSError as error:
        log.warning("%s: %s will be measured again in the next run: %s", name, found["what"], error)
