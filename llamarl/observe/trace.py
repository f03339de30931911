"""Trace: records what each executor of a rank did when, as a file for https://ui.perfetto.dev or
chrome://tracing.

It holds the newest `capacity` spans, so it can always be on. Each rank writes its own file. To see
all ranks on one time line:

    python -m llamarl.observe.trace RUN_DIR/trace.rank*.json -o trace.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from pathlib import Path

from llamarl.disk.files import replace_text


class Trace:
    """Holds a ring buffer of spans; one process (`rank`) with a track per executor in the
    viewer.
    """

    def __init__(self, rank: int, *, capacity: int = 20_000):
        self.rank = rank
        self.num_spans = 0
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=capacity)
        # Clocks of different hosts agree about the time of day only.
        self._epoch_s = time.time() - time.monotonic()

    def add(self, track: str, name: str, start_s: float, end_s: float) -> None:
        """Record a span; times are `time.monotonic()`."""
        self._spans.append((track, name, start_s, end_s))
        self.num_spans += 1

    def dump(self, path: str | Path) -> None:
        """Write the spans as Trace Event JSON (microseconds since 1970), replacing the file in one
        move.
        """
        tracks = sorted({track for track, *_ in self._spans})
        events = [
            self._meta("process_name", name=f"rank {self.rank}"),
            self._meta("process_sort_index", sort_index=self.rank),
        ]
        for number, track in enumerate(tracks):
            events.append(self._meta("thread_name", name=track) | {"tid": number})
        for track, name, start_s, end_s in self._spans:
            span = {
                "ph": "X",
                "name": name,
                "pid": self.rank,
                "tid": tracks.index(track),
                "ts": round((start_s + self._epoch_s) * 1e6),
                "dur": max(0, round((end_s - start_s) * 1e6)),
            }
            events.append(span)
        _write(Path(path), events, dropped=self.num_spans - len(self._spans))

    def _meta(self, what: str, **arguments) -> dict:
        """Return an event that names something of this rank for the viewer."""
        return {"ph": "M", "name": what, "pid": self.rank, "args": arguments}


def merge(paths: list[str | Path], out: str | Path) -> None:
    """Join the files of several ranks; time starts at the first span. ValueError names a file that
    is not a trace.
    """
    events = []
    dropped = 0
    for path in paths:
        try:
            trace = json.loads(Path(path).read_text())
            events += trace["traceEvents"]
            dropped += trace["otherData"]["dropped_spans"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: not a trace that llamarl wrote ({error!r}); name trace.rank*.json files"
            ) from error
    spans = [event for event in events if "ts" in event]
    start_us = min((span["ts"] for span in spans), default=0)
    for span in spans:
        span["ts"] -= start_us
    _write(Path(out), events, dropped=dropped)


def _write(path: Path, events: list[dict], *, dropped: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"dropped_spans": dropped},
    }
    replace_text(path, json.dumps(trace))


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m llamarl.observe.trace", description="Merge the traces of several ranks."
    )
    parser.add_argument("files", nargs="+", help="trace.rank*.json of one run")
    parser.add_argument("-o", "--out", default="trace.json")
    arguments = parser.parse_args(argv)
    merge(arguments.files, arguments.out)
    print(f"wrote {arguments.out}; open it in https://ui.perfetto.dev")


if __name__ == "__main__":
    main()
