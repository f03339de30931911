"""What a start has made is never looked through again, and what runs leave behind is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
import gc, json, weakref
from llamarl.machine.collecting import collect_as_usual, collect_seldom

class Knot:
    def __init__(self):
        self.itself = self

usual = gc.get_threshold()
collect_seldom()
seldom = gc.get_threshold()
made = [[] for _ in range(1000)]
collect_as_usual()
first = gc.get_freeze_count()
of_a_run = weakref.ref(Knot())
collect_seldom()
collect_as_usual()
gc.collect()
print(json.dumps({
    "usual": usual, "seldom": seldom, "after": gc.get_threshold(), "first": first,
    "second": gc.get_freeze_count(), "is_left": of_a_run() is not None,
}))
"""


def test_what_a_start_has_made_is_set_aside_once():
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["seldom"][0] > found["usual"][0] == found["after"][0]
    assert found["first"] >= 1000
    assert found["second"] == found["first"]
    assert not found["is_left"]
