"""The first process of a sandbox, a script that sandbox.py starts. It makes the walls, and runs one
program inside them.

    worker -- this script -- init, process 1 of the namespace -- program -- what the program starts

    argv     the descriptor of the status
    stdin    a line, the Job as JSON; then a line once this process's user is mapped
    stdout   the program's own
    status   "unshared", then "ended CODE", the exit code or minus the signal; or "failed WHY"

When the program ends, init ends too, and the kernel kills whatever is left in the namespace. Init
and this script die with their parents. With isolation "limits" there is no namespace: this process
becomes the program. Linux alone; standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import stat
import struct
import sys

INNER_ID = 1000  # of user and group inside; not 0, so that no program is started with capabilities
_ROOT = "/tmp"  # where the new root is put together; nothing of what is there is touched
_WORK = "/tmp"  # the program's own directory, inside
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_LIBC = ctypes.CDLL(None, use_errno=True)
# Linux's numbers.
_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
_HERE = -100  # as a descriptor: the current folder
_AT_RECURSIVE = 0x8000
_READ_ONLY = 1 | 2 | 4  # and no set-user-id, and no devices
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPABILITY_VERSION_3 = 0x20080522

# Calls that a program does not need, by their numbers on x86_64 and aarch64 (None: not there): ways
# to other processes and namespaces, kernel features with a history of holes, and memory that no
# limit of a process counts.
_REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
}
# Calls that make sockets, and the families that they may be of: of the program's own network, which
# has no interfaces. Others, such as vsock, know no namespaces.
_SOCKET_CALLS = {"x86_64": (41, 53), "aarch64": (198, 199)}
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000  # from here on x86_64 has the calls of another interface


class Failed(Exception):
    """A wall could not be made; the message says which."""


def main(status: int) -> None:
    """Read the job, make the walls and run the program. Does not return."""
    os.set_inheritable(status, False)
    commands = os.fdopen(os.dup(0), "rb")
    job = json.loads(commands.readline())
    _die_with_parent()
    try:
        if job["isolation"] == "limits":
            os.chdir(job["folder"])
            _become(job)
        _unshare(status, commands)
        _in_namespaces(job, status)
    except (OSError, Failed) as error:
        _tell(status, f"failed {error}")
        os._exit(1)


def _tell(status: int, line: str) -> None:
    os.write(status, line.encode() + b"\n")


def _unshare(status: int, commands) -> None:
    """Enter new namespaces, and wait until the parent has said who we are in them."""
    _checked("unshare: no user namespaces", _LIBC.unshare(_NEW_NAMESPACES))
    _tell(status, "unshared")
    if commands.readline() != b"mapped\n":
        raise Failed("its parent could not map its user")


def _in_namespaces(job: dict, status: int) -> None:
    """Fork init, and end as it ends."""
    init = os.fork()
    if init:
        os.close(1)
        _, ended = os.waitpid(init, 0)
        os._exit(0 if ended == 0 else 1)
    try:
        _die_with_parent()
        _make_walls(job)
        program = os.fork()
        if not program:
            _become(job)
        _run_init(program, status)
    except (OSError, Failed) as error:
        _tell(status, f"failed {error}")
    os._exit(1)


def _run_init(program: int, status: int) -> None:
    """Reap until the program has ended, and tell how."""
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    _refuse_calls()
    while True:
        pid, ended = os.wait()
        if pid == program:
            _tell(status, f"ended {os.waitstatus_to_exitcode(ended)}")
            os._exit(0)


def _make_walls(job: dict) -> None:
    """Leave the file system, the user and all capabilities behind."""
    seen = [path for path in (*_SYSTEM, *_DEVICES) if os.path.exists(path)]
    shown = [*seen, *(path for path in job["shown"] if not path.startswith("/usr/"))]
    # Opened as who we were outside, who may see what the new user may not.
    opened = {}
    for path in shown:
        if not os.path.islink(path):
            opened[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if job["is_root"]:
        os.setgroups([])
    os.setresgid(INNER_ID, INNER_ID, INNER_ID)
    os.setresuid(INNER_ID, INNER_ID, INNER_ID)
    _die_with_parent()  # a change of the user undoes it
    os.umask(0o022)
    _mount("", "/", _MS_PRIVATE | _MS_REC)
    _mount("tmpfs", _ROOT, _MS_NOSUID | _MS_NODEV, kind="tmpfs", options="size=1m,mode=755")
    os.chdir(_ROOT)
    os.mkdir(_WORK[1:])
    room = f"size={job['files_mb']}m,mode=700,nr_inodes=4096"
    _mount("tmpfs", _WORK[1:], _MS_NOSUID | _MS_NODEV, kind="tmpfs", options=room)
    for path in shown:
        inside = path[1:]
        if path not in opened:
            os.symlink(os.readlink(path), inside)
            continue
        is_folder = stat.S_ISDIR(os.fstat(opened[path]).st_mode)
        _show(f"/proc/self/fd/{opened[path]}", inside, is_folder=is_folder)
        if path not in _DEVICES:
            _set_read_only(inside, recursive=True)
    for name, text in job["files"].items():
        with open(os.path.join(_WORK[1:], name), "w", encoding="utf-8") as file:
            file.write(text)
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise Failed(f"{platform.machine()}: only x86_64 and aarch64 are known here")
    _checked("pivot_root", _LIBC.syscall(number, b".", b"."))
    _checked("umount2", _LIBC.umount2(b".", _MNT_DETACH))
    _set_read_only("/", recursive=False)
    os.chdir(_WORK)
    _drop_capabilities()


def _show(source: str, inside: str, *, is_folder: bool) -> None:
    """Bind a file or a folder of outside to a place inside."""
    if is_folder:
        os.makedirs(inside, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        with open(inside, "w"):
            pass
    _mount(source, inside, _MS_BIND | _MS_REC)


def _mount(source: str, target: str, flags: int, kind: str = "", options: str = "") -> None:
    words = [source.encode(), target.encode(), kind.encode() or None]
    result = _LIBC.mount(*words, ctypes.c_ulong(flags), options.encode() or None)
    _checked(f"mount of {target or '/'}", result)


def _set_read_only(path: str, *, recursive: bool) -> None:
    attributes = struct.pack("QQQQ", _READ_ONLY, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    words = (_MOUNT_SETATTR, _HERE, path.encode(), flags, attributes, len(attributes))
    _checked(f"mount_setattr of {path}", _LIBC.syscall(*words))


def _drop_capabilities() -> None:
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _checked("capset", _LIBC.capset(header, bytes(24)))


def _become(job: dict) -> None:
    """Limit this process and turn it into the program."""
    if job["isolation"] == "namespaces":
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
    mib = 1 << 20
    limits = {
        resource.RLIMIT_AS: job["memory_mb"] * mib,
        resource.RLIMIT_CPU: job["cpu_s"],
        resource.RLIMIT_FSIZE: job["files_mb"] * mib,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
    }
    if job["isolation"] == "namespaces":
        limits[resource.RLIMIT_NPROC] = job["processes"]
    nothing = os.open(os.devnull, os.O_RDWR)
    source = os.open("stdin", os.O_RDONLY) if "stdin" in job["files"] else nothing
    os.dup2(source, 0)
    os.dup2(nothing, 2)
    os.closerange(3, 1024)
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    if job["isolation"] == "namespaces":
        _refuse_calls()
    os.execve(job["command"][0], job["command"], job["environment"])


def _refuse_calls() -> None:
    """Let the kernel refuse the calls of _REFUSED, other networks and new namespaces, from now on
    and for ever.
    """
    machine = platform.machine()
    if machine not in _CLONE:
        raise Failed(f"{machine}: only x86_64 and aarch64 are known here")
    filters = _filters(machine)
    code = b"".join(struct.pack("HBBI", *line) for line in filters)
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(filters), ctypes.addressof(kept))
    _checked("no_new_privs", _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked("seccomp", _LIBC.prctl(_PR_SET_SECCOMP, 2, program, 0, 0))


def _filters(machine: str) -> list[tuple[int, int, int, int]]:
    """Return what is asked of each call: (code, jump if true, jump if false, constant), as in
    Linux's seccomp pages. Jumps are counted from the next instruction.
    """
    place = 0 if machine == "x86_64" else 1
    # What an instruction does, and what a filter answers.
    load = 0x20
    equals = 0x15
    at_least = 0x35
    any_bit = 0x45
    give = 0x06
    allow = 0x7FFF0000
    kill = 0x80000000
    refuse = 0x00050000
    no_such_call = refuse | errno.ENOSYS
    refused = refuse | errno.EPERM
    filters = [
        (load, 0, 0, 4),  # the architecture
        (equals, 1, 0, _AUDIT_ARCH[machine]),
        (give, 0, 0, kill),
        (load, 0, 0, 0),  # the number of the call
        (at_least, 0, 1, _X32),
        (give, 0, 0, no_such_call),
        # Its flags are in memory, where a filter cannot look; libraries then use clone.
        (equals, 0, 1, _CLONE3),
        (give, 0, 0, no_such_call),
    ]
    for numbers in _REFUSED.values():
        number = numbers[place]
        if number is not None:
            filters += [(equals, 0, 1, number), (give, 0, 0, refused)]
    for number in _SOCKET_CALLS[machine]:
        size = len(_FAMILIES)
        filters += [(equals, 0, size + 3, number), (load, 0, 0, 16)]
        for at, family in enumerate(_FAMILIES):
            filters.append((equals, size - at, 0, family))
        filters += [(give, 0, 0, refuse | errno.EAFNOSUPPORT), (give, 0, 0, allow)]
    filters += [
        (equals, 0, 3, _CLONE[machine]),
        (load, 0, 0, 16),  # the lower half of its first argument
        (any_bit, 0, 1, _NEW_NAMESPACES | 0x02000000),
        (give, 0, 0, refused),
        (give, 0, 0, allow),
    ]
    return filters


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _checked(what: str, result: int) -> None:
    """Raise Failed if a call of the C library has failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise Failed(f"{what} ({os.strerror(number)})")


if __name__ == "__main__":
    main(int(sys.argv[1]))
