"""Runs whose prompts are conversations, or of several tasks, from the command line."""

import json

import pytest

from llamarl.launch.reading import FILE
from tests.build.job import finished_job
from tests.build.model_directory import copy_tiny
from tests.launching import SMALL

BAD_INPUT = 2

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}{{ m.content }}={% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture
def model(tmp_path):
    """A copy of the tiny model with a chat template."""
    path = copy_tiny(tmp_path / "model")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def rows(file, count=60):
    """Rows whose answer is the last turn."""
    lines = []
    for n in range(count):
        turns = [("system", "7"), ("user", "1+1"), ("assistant", "2"), ("user", f"{n}+{n}")]
        prompt = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"prompt": prompt, "answer": f"{n}+{n}"}) + "\n")
    file.write_text("".join(lines))
    return file


def test_a_run_on_conversations_and_its_resumption_look_at_the_rows_once(tmp_path, model):
    path = rows(tmp_path / "rows.jsonl")
    data = (f"task.path={path}", "task=jsonl", "task.max_prompt_tokens=64", "max_new_tokens=6")
    given = (f"model.path={model}", "model=hf", *data, "reward.fn=tests.launching:of_turns")
    run_dir = tmp_path / "run"
    job = finished_job(*SMALL, *given, "max_steps=1", run_dir=run_dir, ranks=2)
    kept = (run_dir / FILE).read_bytes()
    assert job.rows[0]["eval/reward"] == job.rows[1]["reward/mean"] == 1.0
    job = finished_job(*SMALL, *given, "max_steps=2", "resume=auto", run_dir=run_dir)
    assert (run_dir / FILE).read_bytes() == kept
    assert job.rows[-1]["step"] == 2 and job.rows[-1]["reward/mean"] == 1.0


def test_a_conversation_that_the_template_refuses_ends_the_start(launch_here, tmp_path, model):
    (model / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    file = rows(tmp_path / "rows.jsonl")
    given = (f"model.path={model}", "model=hf", "task=jsonl", f"task.path={file}")
    code, said = launch_here(*SMALL, *given, f"run_dir={tmp_path / 'run'}")
    assert code == BAD_INPUT
    assert f"{file}:1: the chat template refuses it: no system" in said.err
    assert not (tmp_path / "run").exists()


def test_a_mixture_has_a_mean_reward_of_each_part(tmp_path):
    parts = "task.parts={even: {kind: addition, weight: 3}, odd: {kind: addition}}"
    given = ("task=mixture", parts, "max_new_tokens=6", "max_lag=0", "eval.every=0")
    steps = finished_job(*SMALL, *given, run_dir=tmp_path / "run").rows
    assert len(steps) == 4
    assert all(0 <= row["reward/part/even/mean"] <= 1 for row in steps)
    # With 4 groups a step a part of a quarter may be missing in one of them.
    assert any("reward/part/odd/mean" in row for row in steps)
