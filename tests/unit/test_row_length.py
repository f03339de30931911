"""How long a row of supervised training may be: task.max_tokens, and never above the context."""

import json
import logging
import shutil

import pytest

from llamarl.config.command_line import compose_config
from llamarl.config.supervised import SFT
from llamarl.launch.supervised import launch_supervised, within_context
from llamarl.learning.sft import read_sft_data
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer

BAD_INPUT = 2  # exit code


def config_of(directory, rows, *overrides):
    """rows: a file, of two rows; the second has more than 16 tokens."""
    texts = ("1+1=", "1+" * 20 + "1=")
    rows.write_text("\n".join(json.dumps({"prompt": t, "completion": "2"}) for t in texts))
    words = [f"model.path={directory}", f"task.path={rows}", f"out={rows.parent / 'out'}"]
    return compose_config([*words, *overrides], SFT)


@pytest.fixture
def model(tmp_path):
    """A copy of the tiny model whose context is 16 tokens."""
    path = shutil.copytree(tiny_directory(), tmp_path / "model")
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 16}))
    return path


def test_a_context_below_task_max_tokens_is_taken_and_said_once(model, tmp_path, caplog):
    rows = tmp_path / "rows.jsonl"
    config = config_of(model, rows, "task.max_tokens=1024")
    with caplog.at_level(logging.WARNING, "llamarl"):
        taken = within_context(config, is_told=True)
        within_context(config, is_told=False)  # another rank
    assert taken.task.max_tokens == 16 and config.task.max_tokens == 1024
    assert len(caplog.records) == 1
    assert f"task.max_tokens=1024, but the context of {model} is 16 tokens" in caplog.text
    given = ("task.drop_long=true", "task.chat=false", "task.num_eval=1")
    short = within_context(config_of(model, rows, *given), is_told=False)
    assert len(read_sft_data(short.task, load_tokenizer(model)).train) == 1


def test_a_context_that_is_long_enough_changes_nothing(tmp_path, caplog):
    config = config_of(tiny_directory(), tmp_path / "rows.jsonl", "task.max_tokens=512")
    assert within_context(config, is_told=True) is config
    assert not caplog.records


def test_a_job_refuses_a_row_that_is_longer_than_its_models_context(model, tmp_path, run_here):
    rows = tmp_path / "rows.jsonl"
    config = config_of(model, rows, "task.chat=false", "threads=1")

    def begin():
        with launch_supervised(config, read_sft_data):
            raise AssertionError("the job began")

    code, output = run_here(begin)
    assert code == BAD_INPUT and f"{rows}:2: 45 tokens, the model takes 16" in output.err
