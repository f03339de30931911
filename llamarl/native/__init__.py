"""Small C kernels, compiled on first use by the machine's own compiler. None is needed: each has a PyTorch equal.

    lib = library("copy")      # llamarl/native/copy.c as a ctypes.CDLL, or None

A library is kept in $XDG_CACHE_HOME/llamarl (~/.cache/llamarl) under a name made of its source, command, compiler and CPU,
so it is compiled once a machine, and a home directory that different machines share is safe. LLAMARL_NATIVE=0 switches all off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

_HERE = Path(__file__).parent
_LIMIT_S = 120
_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-std=gnu11")


@functools.cache
def library(name: str, *flags: str) -> ctypes.CDLL | None:
    """The kernels of NAME.c compiled with more flags, or None (warned once) where no compiler makes them or LLAMARL_NATIVE=0."""
    if os.environ.get("LLAMARL_NATIVE", "1") == "0":
        return None
    source = _HERE / f"{name}.c"
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return _without(name, "there is no C compiler (set CC, or install gcc or clang)")
    try:
        return ctypes.CDLL(str(_compiled(compiler, source, flags)))
    except subprocess.CalledProcessError as error:
        return _without(name, f"{compiler} failed: {error.stderr.strip()[-300:]}")
    except subprocess.TimeoutExpired:
        return _without(name, f"{compiler} took more than {_LIMIT_S} s")
    except OSError as error:
        return _without(name, str(error))


def _compiled(compiler: str, source: Path, flags: tuple[str, ...] = ()) -> Path:
    """The shared library of `source`, made if it is not there. Processes may make it at once: the last rename wins, all are equal."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_LIMIT_S, check=True).stdout
    key = "\n".join([source.read_text(), *_FLAGS, *flags, compiler, version, cpu_description()])
    folder = cache_folder()
    target = folder / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / target.name
            command = [compiler, *_FLAGS, *flags, str(source), "-o", str(made), "-lm"]
            subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
            os.replace(made, target)
    return target


def cache_folder() -> Path:
    """Where compiled kernels and measured choices are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamarl"


def cpu_description() -> str:
    """What -march=native looks at."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    features = sorted({line.partition(":")[2].strip() for line in lines if line.startswith(("flags", "Features", "model name"))})
    return "\n".join([platform.machine(), platform.processor(), *features])


def _without(name: str, reason: str) -> None:
    warnings.warn(f"{name}: going on with PyTorch's operations, which are slower; {reason}", stacklevel=3)
