"""The limit on the memory of a worker and of all that it starts.

    guard     Watch        looks every 10 to 250 ms at what the worker and its descendants hold
    worker    peak_bytes   tells after each call the most that the worker itself ever held
    pool      Note         tells how much it was, after the worker was ended for it

Resident memory counts (RSS, as ps shows it), with the pages of mapped files that were read. Memory
that is only mapped does not count, because CUDA's libraries map gigabytes. A look may miss memory
that a child of the worker holds for less than the time between two looks.

This needs Linux, as the guard does (guard.py). Elsewhere nothing limits memory. Standard library
only, and nothing that takes long to import: the guard and the worker import it.
"""

from __future__ import annotations

import os
import resource
import time

# Between two looks. How soon the next one comes depends on how much is left up to the limit: one
# process fills memory no faster than GROWTH_BYTES_PER_S.
SOONEST_S = 0.01
LATEST_S = 0.25
GROWTH_BYTES_PER_S = 4 << 30
# A look at shared pages takes milliseconds a gigabyte: it may take a tenth of the guard's time.
REST_FACTOR = 10
ROUNDED_TO_MB = 100

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Watch:
    """The looks of a guard at one worker and its descendants.

        held = Watch(worker_pid, limit_bytes=512 << 20, note=note.writer)
        while not held.is_too_much():
            select.select(sources, [], [], held.wait_s())

    note: a descriptor; if too much is held, the amount is written there.
    """

    def __init__(self, worker: int, limit_bytes: int, note: int):
        self._limit_bytes = limit_bytes
        self._note = note
        # The worker and its descendants, each with the process that started it.
        self._family = {worker: os.getpid()}
        self._strangers: set[int] = set()  # all other processes at the last look
        self._due = time.monotonic()
        self._was_over = False  # at the last look, by the sum of several processes

    def wait_s(self) -> float:
        """Seconds until the next look."""
        return max(0.0, self._due - time.monotonic())

    def is_too_much(self) -> bool:
        """Look, if it is time to. If they hold too much, write down how much, and return True."""
        if time.monotonic() < self._due:
            return False
        began_s = time.process_time()
        self._find_family()
        resident = self._resident()
        held = max(resident.values(), default=0)
        is_by_one = held > self._limit_bytes
        if not is_by_one:
            held = self._sum(resident)
        is_over = held > self._limit_bytes
        # A sum is looked at twice: a process that is just being started is one for a moment.
        if is_by_one or (is_over and self._was_over):
            write_note(self._note, held)
            return True
        self._was_over = is_over
        pause_s = (self._limit_bytes - held) / GROWTH_BYTES_PER_S
        pause_s = min(max(pause_s, SOONEST_S), LATEST_S)
        pause_s = max(pause_s, REST_FACTOR * (time.process_time() - began_s))
        self._due = time.monotonic() + pause_s
        return False

    def check_peak(self) -> None:
        """Write it down if the worker, which has ended, ever held too much, because the kernel may
        have ended it for that before a look did.
        """
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
        if peak > self._limit_bytes:
            write_note(self._note, peak)

    def _resident(self) -> dict[int, int]:
        """Return the resident bytes of each process of the family that has memory of its own."""
        sizes = {pid: _sizes(pid) for pid in self._family}
        resident = {}
        for pid, parent in self._family.items():
            # Between vfork and exec a process uses its parent's memory, so it shows its parent's
            # sizes.
            if sizes[pid] != sizes.get(parent):
                resident[pid] = sizes[pid][1] * _PAGE_BYTES
        return resident

    def _sum(self, resident: dict[int, int]) -> int:
        """Return what processes hold together. Pages that they share count once, if it matters."""
        total = sum(resident.values())
        if total <= self._limit_bytes:
            return total
        # Forked processes share most of their pages, so the sum may count a page many times.
        return sum(_own_share_bytes(pid, size) for pid, size in resident.items())

    def _find_family(self) -> None:
        """Add the processes that descendants have started, and forget those that are gone.

        A process whose parent ends becomes the worker's child (it is a subreaper), so what was once
        in the family stays in it.
        """
        alive = processes()
        self._family = {pid: parent for pid, parent in self._family.items() if pid in alive}
        self._strangers &= alive
        unknown = {pid: parent_of(pid) for pid in alive - self._strangers - self._family.keys()}
        while True:
            found = {pid: parent for pid, parent in unknown.items() if parent in self._family}
            if not found:
                break
            self._family |= found
            unknown = {pid: parent for pid, parent in unknown.items() if pid not in found}
        self._strangers |= unknown.keys()


def peak_bytes() -> int:
    """Return the most that this process ever held, since it was forked."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def be_first_to_go() -> None:
    """Let the kernel end this process and its descendants before any other if the machine itself
    runs out of memory.
    """
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # some containers do not allow it, and it is only a precaution beside the limit


class Note:
    """A pipe by which a worker's guard, or the worker, tells the pool how much memory was too much.

    note = Note()
    write_note(note.writer, 560 << 20)      # in the guard or the worker
    note.read()                             # 560 << 20, in the pool; None if nothing was written
    """

    def __init__(self):
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)

    def hand_over(self) -> None:
        """Close the writer here, because the process that was started with it has its own."""
        os.close(self.writer)

    def read(self) -> int | None:
        """Return the bytes that were written down. The second call returns None."""
        try:
            text = os.read(self._reader, 1 << 10)
        except BlockingIOError:
            return None
        first, _, _ = text.partition(b"\n")
        return int(first) if first.isdigit() else None

    def close(self) -> None:
        """Close the pool's end."""
        os.close(self._reader)


def write_note(writer: int, held_bytes: int) -> None:
    """Write down how much was held."""
    os.write(writer, b"%d\n" % held_bytes)


def too_much(held_bytes: int, limit_mb: int, section: str) -> str:
    """Return the reason why an item has no score. section: text before the key's name, such as
    "reward."; "" if the limit is no key.
    """
    # Rounded up, so that failures of one kind have one text and are counted together.
    steps = -(-held_bytes // (ROUNDED_TO_MB << 20))
    remedy = " (raise it if the function needs as much)" if section else ""
    return (
        f"out of memory: the worker and what it started held some {steps * ROUNDED_TO_MB:,} MiB, "
        f"more than {section}memory_mb={limit_mb}{remedy}"
    )


def processes() -> set[int]:
    """Return the ids of all processes."""
    return {int(entry) for entry in os.listdir("/proc") if entry.isdecimal()}


def _sizes(pid: int) -> tuple[int, int, int]:
    """Return the pages that a process has mapped, the resident ones, and the resident ones of
    files; zeros if it has ended.
    """
    try:
        with open(f"/proc/{pid}/statm") as file:
            fields = file.read().split()
    except OSError:
        return (0, 0, 0)
    return (int(fields[0]), int(fields[1]), int(fields[2]))


def _own_share_bytes(pid: int, resident_bytes: int) -> int:
    """Return resident bytes. A page that two processes share counts half for each.

    If the kernel does not tell the shares, return all resident bytes.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            lines = file.read().splitlines()
    except OSError:
        return resident_bytes
    for line in lines:
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return resident_bytes


def parent_of(pid: int) -> int:
    """Return the parent's id; 0 for a process that has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0
