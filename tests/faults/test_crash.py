"""A rank that is killed in native code says at which line of Python each of its threads stood."""

import signal
import subprocess
import sys

from tests.launching import JOB_S, ROOT, environment

CRASHES = """
import ctypes
import sys

from llamarl.config import Config, main


@main
def run(config: Config) -> None:
    where_it_stands()


def where_it_stands():
    ctypes.string_at(0)


sys.argv = ["recipe", "max_steps=1"]
run()
"""


def test_a_crash_in_native_code_names_its_line_of_python():
    done = subprocess.run(
        [sys.executable, "-c", CRASHES],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=JOB_S,
    )
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr and "in where_it_stands" in done.stderr
