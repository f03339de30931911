"""Jobs from the console and from Python: the same processes, the same run directories."""

import subprocess
import sys
from pathlib import Path

import pytest

import llamarl
from llamarl.__main__ import COMMANDS, num_ranks
from llamarl.errors import JobFailed
from llamarl.run import _start as start_job

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"groups_per_step": 4, "group_size": 4, "generator": {"max_slots": 16}, "eval.every": 0}


def console(*words, **given):
    command = [sys.executable, "-m", "llamarl", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **given)


# --- the console ---


def test_llamarl_alone_lists_its_commands_and_a_wrong_one_is_answered():
    shown = console()
    assert shown.returncode == 0
    assert all(f"  {name} " in shown.stdout for name in COMMANDS)
    assert console("--version").stdout.split() == ["llamarl", llamarl.__version__]
    wrong = console("trian")
    assert wrong.returncode == 2 and "no such command; did you mean train?" in wrong.stderr
    wrong = console("report", "-n", "2")
    assert wrong.returncode == 2 and "llamarl report runs in one process" in wrong.stderr


def test_every_command_is_there():
    import importlib

    for command in COMMANDS.values():
        inside = "." in command.module
        module = importlib.import_module(command.module if inside else f"recipes.{command.module}")
        assert callable(getattr(module, command.function))


def test_the_number_of_ranks_stands_anywhere_among_the_words():
    assert num_ranks(["a=1", "-n", "2", "b=2"]) == (2, ["a=1", "b=2"])
    assert num_ranks(["-n3"]) == (3, []) and num_ranks(["-n=3"]) == (3, [])
    assert num_ranks(["a=1", "--num"]) == (None, ["a=1", "--num"])
    for words in (["-n"], ["-n", "0"], ["-n", "two"]):
        with pytest.raises(ValueError, match="need a whole number of ranks, such as -n 2"):
            num_ranks(words)


# --- Python ---


def test_settings_are_checked_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = llamarl.Config({"loss": "grpo"}, trainer={"lora": {"rank": 4}})
    assert (config.loss.name, config.trainer.lora.rank) == ("grpo", 4)
    for start in (llamarl.train, llamarl.Config):
        with pytest.raises(ValueError, match="did you mean max_lag"):
            start(max_lagg=1)
    with pytest.raises(ValueError, match="model.path"):
        llamarl.sft({"task.path": "no-such-rows.jsonl"})
    with pytest.raises(AttributeError):
        _ = llamarl.no_such_function
    assert not list(tmp_path.iterdir())


def test_two_ranks_from_python_leave_a_run_that_a_program_reads(tmp_path, capsys):
    run = llamarl.train(SMALL, max_steps=2, run_dir=tmp_path / "run", ranks=2)
    assert "step 2/2" in capsys.readouterr().out
    assert (run.path, run.outcome["ended"]) == (tmp_path / "run", "finished")
    assert [row["step"] for row in run.rows] == [1, 2] == run.frame().index.tolist()
    assert run.model_path == tmp_path / "run" / "checkpoints" / "step_2" / "hf"
    assert run.report().read_text().startswith("<!doctype html>")
    (axes,) = run.plot().axes
    (reward,) = axes.lines
    assert reward.get_ydata().tolist() == run.frame()["reward/mean"].tolist()
    (axes,) = run.plot("loss/value", "grad_norm").axes
    assert axes.lines


def test_an_evaluation_returns_the_answers(capsys):
    answers = llamarl.evaluate({"model.path": llamarl_tiny(), "num_prompts": 3})
    assert {answer["sample"] for answer in answers} == {0} and len(answers) == 3
    assert "pass@1" in capsys.readouterr().out


def llamarl_tiny():
    from llamarl.models.config import tiny_directory

    return tiny_directory()


def test_a_job_that_fails_is_an_error_with_its_last_lines(tmp_path):
    with pytest.raises(JobFailed, match=r"report ended with exit code 2.*\n.*no such file"):
        start_job("report", [str(tmp_path)], 1)
