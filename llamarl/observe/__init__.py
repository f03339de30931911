"""Reports of a run about itself: metrics rows, the console, traces and the report. Importing it
imports no torch.
"""

from llamarl.errors import MetricsError
from llamarl.observe.columns import is_timing
from llamarl.observe.console import Console
from llamarl.observe.metrics import Metrics
from llamarl.observe.rows import RowWriter
from llamarl.observe.services import build_sinks
from llamarl.observe.sinks import Jsonl, Sink
from llamarl.observe.trace import Trace

__all__ = [
    "Console",
    "Jsonl",
    "Metrics",
    "MetricsError",
    "RowWriter",
    "Sink",
    "Trace",
    "build_sinks",
    "is_timing",
]
