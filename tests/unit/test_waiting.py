"""Threads wait for each other as the package says, unless the user says something else, and it says
so in time.
"""

from __future__ import annotations

import ast

import pytest

from llamarl.machine.waiting import SPINS, wait_briefly
from tests.house import ROOT, python_files


@pytest.fixture
def environment(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def settings() -> dict[str, str]:
    import os

    return {
        name: os.environ[name]
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
        if name in os.environ
    }


def test_waiting_threads_spin_briefly(environment):
    wait_briefly()
    assert settings() == {"GOMP_SPINCOUNT": str(SPINS)}


@pytest.mark.parametrize("given", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_what_the_user_sets_goes_before(environment, given):
    for name, value in given.items():
        environment.setenv(name, value)
    wait_briefly()
    assert settings() == given


def first_import(file, packages: set[str]) -> str | None:
    """Which of these packages a program imports first, by its top level."""
    for node in ast.parse(file.read_text()).body:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            if name.partition(".")[0] in packages:
                return name.partition(".")[0]
    return None


def test_every_program_that_computes_imports_the_package_before_torch():
    ours = {"llamarl", "executors"}
    late = []
    for file in python_files("recipes", "benchmarks"):
        if first_import(file, ours) and first_import(file, {"torch", *ours}) == "torch":
            late.append(file.relative_to(ROOT).as_posix())
    assert late == []
