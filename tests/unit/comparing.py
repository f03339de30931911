"""Runs that never ran, by their metrics files, and the recipe that compares them."""

from __future__ import annotations

import importlib
import json
import struct

import pytest

from llamarl.config.command_line import compose_config
from llamarl.config.conversion import save_config

EXACT = 1e-12


def without_nulls(row: dict) -> dict:
    return {name: value for name, value in row.items() if value is not None}


@pytest.fixture(scope="module")
def recipe():
    return importlib.import_module("llamarl.observe.compare")


@pytest.fixture
def make(tmp_path):
    """A run directory with these overrides and columns, a value a step; None: not in the row."""

    def made(name, *overrides, wall_s, **columns):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        save_config(compose_config(list(overrides)), folder / "config.yaml")
        columns = {
            "time/wall_s": wall_s,
            **{name.replace("__", "/"): values for name, values in columns.items()},
        }
        rows = [
            {"step": step, **dict(zip(columns, values))}
            for step, values in enumerate(zip(*columns.values()))
        ]
        rows = list(map(without_nulls, rows))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return made


def png_size(file):
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])
