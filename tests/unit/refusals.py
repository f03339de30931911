"""What is said of a job of one rank that cannot be: by its command line, or by the files that it
names.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llamarl.comm.groups import World
from llamarl.config.command_line import ConfigError, check_command_line, compose_config
from llamarl.errors import BadInput
from llamarl.launch.checks import check_inputs
from llamarl.launch.job import Job
from llamarl.launch.run_directory import RunDirectory

WORLD = World(0, 1, torch.device("cpu"))


def job(*overrides: str, **options) -> Job:
    """Return a job of one rank, without a run directory. options: of the Job."""
    return Job(compose_config(list(overrides)), WORLD, RunDirectory(Path("."), None), **options)


def model_job(model: Path, *overrides: str) -> Job:
    """Return a job of one rank that starts from this model."""
    return job(f"model.path={model}", *overrides)


def refusal(*overrides: str) -> str:
    """Return what is said of the files that such a job names; they must be refused."""
    with pytest.raises(BadInput) as refused:
        check_inputs(job(*overrides).inputs)
    return str(refused.value)


def model_refusal(model: Path, *overrides: str) -> str:
    """Return what is said of a model, which must be refused."""
    return refusal(f"model.path={model}", *overrides)


def complaint(*overrides: str, ranks: int = 1) -> str:
    """Return what is said of a command line, which must be refused."""
    with pytest.raises(ConfigError) as refused:
        check_command_line(list(overrides), world_size=ranks)
    return str(refused.value)


def change(file: Path, **values) -> None:
    """Give keys of a JSON file other values."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
