"""Runs whose prompts are conversations, or of several tasks, from the command line."""

import json
import shutil

import pytest

from llamarl.launch.reading import FILE
from llamarl.models.config import tiny_directory
from tests.launching import SMALL, ForkedJob

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}{{ m.content }}={% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture
def model(tmp_path):
    """A copy of the tiny model with a chat template."""
    shutil.copytree(tiny_directory(), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "model"


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
    with ForkedJob(*SMALL, *given, "max_steps=2", run_dir=run_dir, ranks=2) as job:
        assert job.wait() == 0, job.output
    kept = (run_dir / FILE).read_bytes()
    assert [row["reward/mean"] for row in job.rows if row["step"]] == [1.0, 1.0]
    assert job.rows[-1]["eval/reward"] == 1.0
    more = ("max_steps=3", "resume=auto")
    with ForkedJob(*SMALL, *given, *more, run_dir=run_dir, ranks=2) as job:
        assert job.wait() == 0, job.output
    assert (run_dir / FILE).read_bytes() == kept
    assert job.rows[-1]["step"] == 3 and job.rows[-1]["reward/mean"] == 1.0


def test_a_conversation_that_the_template_refuses_ends_the_start(tmp_path, model):
    (model / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    file = rows(tmp_path / "rows.jsonl")
    given = (f"model.path={model}", "model=hf", "task=jsonl", f"task.path={file}")
    with ForkedJob(*SMALL, *given, run_dir=tmp_path / "run", ranks=2) as job:
        assert job.wait() != 0, job.output
    assert f"{file}:1: the chat template refuses it: no system" in job.output
    assert "Traceback" not in job.output and not (tmp_path / "run").exists()


def test_a_mixture_has_a_mean_reward_of_each_part(tmp_path):
    parts = "task.parts={even: {kind: addition, weight: 3}, odd: {kind: addition}}"
    given = ("task=mixture", parts, "max_new_tokens=6", "max_lag=0")
    with ForkedJob(*SMALL, *given, run_dir=tmp_path / "run") as job:
        assert job.wait() == 0, job.output
    steps = [row for row in job.rows if row["step"]]
    assert len(steps) == 4
    assert all(0 <= row["reward/part/even/mean"] <= 1 for row in steps)
    # With 4 groups a step a part of a quarter may be missing in one of them.
    assert any("reward/part/odd/mean" in row for row in steps)
