"""Runs whose prompts are conversations, from the command line."""

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
    data = (f"task.path={rows(tmp_path / 'rows.jsonl')}", "task=jsonl")
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
        assert job.wait() == 2, job.output
    assert f"{file}:2: the chat template refuses it: no system" in job.output
    assert "Traceback" not in job.output and not (tmp_path / "run").exists()
