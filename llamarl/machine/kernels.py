"""Kernels in C, compiled on first use from decode.c and train.c.

The kernels are small, compiled by the machine's own compiler, and each has a PyTorch equal.

    lib = library("decode", structs=(_Step,))   # llamarl/machine/decode.c as a ctypes.CDLL, or None

LLAMARL_NATIVE=0 switches all kernels off. LLAMARL_NATIVE_ARCH is the instruction set, in the
compiler's own words (-march): "native", the default, is everything that this CPU has; "x86-64-v3"
is x86 with AVX2 and without AVX-512. On an Arm CPU "native" becomes -mcpu=native, which gcc and
clang both know. If the compiler refuses "native", it compiles for its own default and a warning
says so. An instruction set given by name is never replaced. LLAMARL_NATIVE_INCLUDE names a header
that is compiled before each kernel; tests use it to take the branches of other CPUs
(tests/machines/other_branches.h).

A library is stored in $XDG_CACHE_HOME/llamarl (~/.cache/llamarl) under a hash of its source,
command, compiler and CPU. So it is compiled once per machine, and machines may share a home
directory. Loading a library runs its code. So it is loaded from there only if this user owns the
file and its folder and nobody else may write to them. Otherwise it is compiled in a private folder
for this process, and a warning names the path.

A struct that Python and C share is a ctypes.Structure _NAME and a typedef NAME. C exports its size
as size_of_NAME(). If the sizes differ when the library is loaded, a warning says so and PyTorch's
operations are used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import warnings
from pathlib import Path

_HERE = Path(__file__).parent
_LIMIT_S = 120
_FLAGS = ("-O3", "-shared", "-fPIC", "-std=gnu11", "-fno-strict-aliasing")
_ARM = ("aarch64", "arm64")

Structs = tuple[type[ctypes.Structure], ...]


@functools.cache
def library(name: str, *flags: str, structs: Structs = ()) -> ctypes.CDLL | None:
    """Load the kernels of NAME.c compiled with more flags; structs: those shared with the caller.

    Returns None where LLAMARL_NATIVE=0, and, with a warning, where no compiler makes the kernels or
    a struct has another size in C.
    """
    if os.environ.get("LLAMARL_NATIVE", "1") == "0":
        return None
    try:
        kernels = _loaded(_HERE / f"{name}.c", flags)
        _check_sizes(kernels, structs)
        return kernels
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip()
        reason = f"{error.cmd[0]} failed: {said[-300:]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    warnings.warn(
        f"{name}: going on with PyTorch's operations, which are slower; {reason}", stacklevel=2
    )
    return None


def _loaded(source: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Load the library of `source` for LLAMARL_NATIVE_ARCH.

    If the compiler refuses "native", it is compiled for the compiler's own default, with a warning.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise OSError("there is no C compiler (set CC, or install gcc or clang)")
    arch = os.environ.get("LLAMARL_NATIVE_ARCH") or "native"
    if header := os.environ.get("LLAMARL_NATIVE_INCLUDE"):
        flags = ("-include", header, *flags)
    wanted = f"-march={arch}"
    if arch == "native" and platform.machine() in _ARM:
        wanted = "-mcpu=native"
    try:
        return _kept(compiler, source, (*_FLAGS, wanted, *flags))
    except subprocess.CalledProcessError:
        if arch != "native":
            raise
    kernels = _kept(compiler, source, (*_FLAGS, *flags))
    # Only now is it known that the instruction set was what the compiler refused.
    warnings.warn(
        f"{source.name}: {compiler} refuses {wanted}; compiled for its default, which may be "
        "slower (LLAMARL_NATIVE_ARCH names the instruction set)",
        stacklevel=3,
    )
    return kernels


def _kept(compiler: str, source: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Load the library of `source` from the cache, which is filled if need be.

    If others own the cache or may write to it, a library is made in a private folder, with a
    warning.
    """
    target = cache_folder() / _file_name(compiler, source, flags)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    stranger = _not_ours(target)
    if stranger is None:
        if not target.is_file():
            _compile(compiler, source, flags, target)
        return ctypes.CDLL(str(target))
    warnings.warn(
        f"{stranger} belongs to another user, or others may write to it: {source.name} is compiled "
        "for this process alone, in seconds; remove it, or take others' right away (chmod go-w)",
        stacklevel=4,
    )
    with tempfile.TemporaryDirectory(prefix="llamarl-") as private:
        target = Path(private) / target.name
        _compile(compiler, source, flags, target)
        return ctypes.CDLL(str(target))  # it stays loaded when its file is gone


def _compile(compiler: str, source: Path, flags: tuple[str, ...], target: Path) -> None:
    """Make `target`. Processes may make it at once: the last rename wins, all are equal."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [compiler, *flags, str(source), "-o", str(made), "-lm"]
        subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
        made.chmod(0o700)  # whatever the umask is
        os.replace(made, target)


def cache_folder() -> Path:
    """Return where compiled kernels and measured choices are kept. OSError if this user has no
    home.
    """
    caches = os.environ.get("XDG_CACHE_HOME")
    if caches:
        return Path(caches, "llamarl")
    try:
        return Path.home() / ".cache" / "llamarl"
    except RuntimeError as error:
        raise OSError(f"no folder to keep files in ({error}); set XDG_CACHE_HOME") from error


def _file_name(compiler: str, source: Path, flags: tuple[str, ...]) -> str:
    """Return a name that differs for another source, command, compiler or CPU."""
    command = [compiler, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    parts = [source.read_text(), *flags, compiler, done.stdout, cpu_description()]
    if header := os.environ.get("LLAMARL_NATIVE_INCLUDE"):
        parts.append(Path(header).read_text())
    key = "\n".join(parts)
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f"{source.stem}-{digest[:16]}.so"


def _not_ours(target: Path) -> Path | None:
    """Return which of the folder and the file (if there is one) others own or may write to; None:
    neither.
    """
    paths = [target.parent]
    if os.path.lexists(target):
        paths.append(target)
    for path in paths:
        # The link too, where it is one: who owns it says where it points.
        for found in (path.lstat(), path.stat()):
            if found.st_uid != os.geteuid():
                return path
            is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if is_open and not stat.S_ISLNK(found.st_mode):
                return path
    return None


def _check_sizes(kernels: ctypes.CDLL, structs: Structs) -> None:
    """Raise OSError if a struct has another size in C."""
    for struct in structs:
        name = struct.__name__.lstrip("_")
        size_of = getattr(kernels, f"size_of_{name}", None)
        if size_of is None:
            raise OSError(f"it does not say how large its struct {name} is")
        size_of.restype = ctypes.c_size_t
        in_c = size_of()
        in_python = ctypes.sizeof(struct)
        if in_c != in_python:
            raise OSError(f"its struct {name} has {in_c} bytes in C and {in_python} in Python")


def cpu_description() -> str:
    """Return what the compiler's "native" looks at."""
    features = set()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith(("flags", "Features", "model name")):
                features.add(line.partition(":")[2].strip())
    parts = [platform.machine(), platform.processor(), *sorted(features)]
    return "\n".join(parts)
