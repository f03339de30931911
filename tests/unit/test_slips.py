"""Slips of a first command line, and what answers them before anything is loaded."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamarl.config.command_line import (
    ConfigError,
    _rewritten,
    check_command_line,
    compose_config,
)
from tests.launching import RECIPE, ROOT, environment


def complaints(*overrides):
    """{where: what} of a refused command line; {} if it is accepted."""
    try:
        check_command_line(list(overrides))
    except ConfigError as error:
        return {problem.where: problem.what for problem in error.problems}
    return {}


def recipe(*words):
    command = [sys.executable, str(RECIPE), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment())


def test_keys_typed_as_flags_and_words_beside_help_are_answered():
    for words, said in (
        (("--max_steps", "10", "--lr=1e-5"), ("write max_steps=10", "write lr=1e-5")),
        (("--config-file", "my.yaml"), ("--config-dir FOLDER +experiment=NAME",)),
        (("trainer", "--help"), ("write key=value",)),
    ):
        ended = recipe(*words)
        assert ended.returncode == 2 and "Traceback" not in ended.stderr
        assert all(one in ended.stderr for one in said), ended.stderr


def test_methods_that_are_an_option_of_another_loss_are_named():
    assert complaints("loss=gspo")["loss=gspo"].endswith(
        "gspo is loss=grpo loss.ratio_level=sequence_mean"
    )
    assert complaints("loss=GRPO")["loss=GRPO"].endswith("did you mean grpo?")
    dapo = compose_config(["loss=grpo", "loss.normalize=tokens", "loss.clip_high=0.28"])
    assert complaints("loss=DAPO")["loss=DAPO"].endswith("loss.clip_high=0.28") and dapo


def test_a_run_directory_that_cannot_be_made_is_said_before_anything_is_loaded(
    tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    for run_dir in (tmp_path / "file", tmp_path / "file" / "run"):
        (said,) = complaints(f"run_dir={run_dir}").values()
        assert said.startswith(f"{tmp_path / 'file'} is a file") and "run_dir=DIR" in said
    assert not complaints(f"run_dir={tmp_path / 'new' / 'run'}")
    with monkeypatch.context() as patch:
        exists = Path.exists

        def refuse(path):
            if path.parts[1] == "closed":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return exists(path)

        patch.setattr(Path, "exists", refuse)
        (said,) = complaints("run_dir=/closed/run").values()
    assert said.startswith("/closed/run cannot be looked into")
    monkeypatch.chdir(tmp_path)
    assert not complaints()
    (tmp_path / "runs").touch()
    (said,) = complaints().values()
    assert "runs is a file" in said


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_for_rows_is_said_at_the_start_with_its_extra(name, monkeypatch):
    monkeypatch.setattr("llamarl.config.sections.metrics.find_spec", lambda module: None)
    (said,) = complaints(f"metrics.{name}=true").values()
    assert f"pip install 'llamarl[{name}]'" in said


def test_words_that_are_added_stand_before_the_flags_that_follow_words():
    argv = ["recipe.py", "--config-dir", "mine", "model.path=D", "lr=1", "--cfg", "job"]
    made = _rewritten(argv, ["model.path=D", "lr=1"], ["model.path=D", "++lr=1", "model=hf"])
    assert made == [*argv[:4], "++lr=1", "model=hf", "--cfg", "job"]
