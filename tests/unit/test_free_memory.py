"""What is free for a job is the least of what the machine and its control groups have left."""

from __future__ import annotations

import pytest
import torch

from llamarl.machine import free_memory
from llamarl.machine.free_memory import memory_of

CPU = torch.device("cpu")
MIB = 1 << 20
# The files of a control group and the field of its statistics, by version.
FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
SECOND = ("memory.max", "memory.current", "inactive_file")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with 100 MiB free, and this process in no control group."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {100 << 10} kB\n")
    monkeypatch.setattr(free_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "MEMBERSHIPS", tmp_path / "memberships")
    monkeypatch.setattr(free_memory, "GROUPS", tmp_path / "groups")
    return tmp_path


def group(machine, path, names, *, limit, used, droppable=0):
    folder = machine / "groups" / path
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, used_file, field = names
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"cache 7\n{field} {droppable}\n")


def test_without_control_groups_it_is_what_the_machine_has(machine):
    assert memory_of(CPU) == 100 * MIB
    (machine / "memberships").write_text("3:cpuset:/\n0::/\n")
    assert memory_of(CPU) == 100 * MIB


def test_the_tightest_of_a_group_and_those_around_it_counts(machine):
    """A group has its limit less what it uses and cannot drop."""
    (machine / "memberships").write_text("0::/batch/job\n")
    group(machine, "batch/job", SECOND, limit=50 * MIB, used=30 * MIB, droppable=10 * MIB)
    assert memory_of(CPU) == 30 * MIB
    group(machine, "batch/job", SECOND, limit="max", used=30 * MIB)
    group(machine, "batch", SECOND, limit=20 * MIB, used=15 * MIB)
    assert memory_of(CPU) == 5 * MIB
    group(machine, "batch", SECOND, limit=20 * MIB, used=25 * MIB)
    assert memory_of(CPU) == 0


@pytest.mark.parametrize("path", ["job", ""])
def test_the_first_version_of_control_groups_is_read_too(machine, path):
    """Also by a container that sees its own group as the root."""
    (machine / "memberships").write_text("4:cpu,memory:/job\n3:cpuset:/job\n")
    group(machine, f"memory/{path}", FIRST, limit=40 * MIB, used=10 * MIB)
    assert memory_of(CPU) == 30 * MIB


def test_a_group_that_cannot_be_read_is_left_out(machine):
    (machine / "memberships").write_text("0::/job\n")
    group(machine, "job", SECOND, limit=20 * MIB, used=15 * MIB)
    (machine / "groups" / "job" / "memory.stat").unlink()
    assert memory_of(CPU) == 100 * MIB
