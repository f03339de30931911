"""The commands of README and the guides run with the tiny model: a dry run reads the data, checks
the model against them and scores three samples. README's tasks also make a step.
"""

import sys

import pytest

from tests.built_tasks import need_reasoning_gym
from tests.documents import GUIDES, README, hydra_commands, of_the_user
from tests.house import blocks
from tests.launching import ForkedJob

# What a machine may lack: services, scorers, optional packages, rows with tests of programs, the
# user's own environments and checkpoints.
LACKING = (
    "generator=vllm",
    "metrics.mlflow=",
    "metrics.tensorboard=",
    "metrics.trackio=",
    "metrics.wandb=",
    "model.template_options",
    "placement.sheet=",
    "reward=encoder",
    "reward=function reward.fn=...",
    "reward=judge",
    "reward=model",
    "reward.parts.quality.kind=model",
    "rewards:python_tests",
    "resume=auto",
    "environment=my_module:",
    "environment: my_module:",
    "textarena:",
    "verifiers:",
)


def needs_more(words):
    typed = " ".join(words)
    return any(one in typed for one in LACKING)


# What a dry run reads or builds. That other keys are accepted is a test of tests/test_house.py.
READ = (
    "task",
    "model",
    "reward",
    "reference",
    "eval.sets",
    "loss.fn",
    "trainer.lora",
    "generator.quantize",
    "placement",
    "+ranks",
)


def reads_something(words):
    return any(word.startswith(READ) and not word.endswith("=") for word in words)


RANKS = {tuple(overrides): ranks for ranks, overrides in hydra_commands()}
COMMANDS = [words for words in RANKS if reads_something(words) and not needs_more(words)]
# README's rows of "Your data", and its own reward and loss.
TASKS = [tuple(words) for _, words in hydra_commands(README) if words and "task=" in words[0]]
SHORT = ("max_steps=1", "eval.every=0", "checkpoint.every=0", "groups_per_step=2", "group_size=2")
ROW = '{"prompt": "1+1=", "question": "1+1=", "answer": "#### 2"}\n'
OWN_TASK = """
from llamarl.tasks.base import Example
from llamarl.tasks.list_task import ListTask


def make_task(maker, most=20):
    rows = [Example(f"{a}+1=", {"answer": str(a + 1)}) for a in range(most)]
    reward = "llamarl.tasks.rewards:exact_match"
    return ListTask("mine", rows[2:], rows[:2], maker, default_reward=reward)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make the current directory that of somebody who follows the documents."""
    data = tmp_path / "home" / "data"
    data.mkdir(parents=True)
    for file in (data / "train.jsonl", data.parent / "train.jsonl"):
        file.write_text(ROW * 20)
    (module,) = [body for body in blocks("python", GUIDES) if body.startswith("# my_module.py")]
    (data.parent / "my_module.py").write_text(module)
    (data.parent / "my_tasks.py").write_text(OWN_TASK)
    monkeypatch.chdir(data.parent)
    monkeypatch.syspath_prepend(str(data.parent))
    for name in ("my_module", "my_tasks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield data.parent
    for name in ("my_module", "my_tasks"):
        sys.modules.pop(name, None)


def typed(words):
    """Return the words as this user types them, who has rows in train.jsonl and in data/."""
    given = [word.replace("path: FILE", "path: train.jsonl") for word in words]
    if "task=hf_dataset" in words:
        return [word.replace("task.path=DIR", "task.path=data") for word in given]
    return of_the_user(given)


def need_its_package(words):
    if "task=reasoning_gym" in words:
        need_reasoning_gym()


def test_the_commands_are_those_of_the_documents():
    assert len(COMMANDS) > 30 and len(TASKS) == 9
    assert set(TASKS) <= set(COMMANDS)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_of_the_documents_holds_with_the_tiny_model(words, folder, launch_here):
    need_its_package(words)
    code, said = launch_here(*typed(words), "+dry_run=true", f"+ranks={RANKS[words]}")
    assert code == 0, said.err


@pytest.mark.slow
@pytest.mark.parametrize("words", TASKS, ids=" ".join)
def test_a_task_of_the_readme_makes_a_step_with_the_tiny_model(words, folder):
    need_its_package(words)
    with ForkedJob(*typed(words), *SHORT, run_dir=folder.parent / "run", cwd=folder) as job:
        assert job.wait() == 0, job.output
        assert job.rows[-1]["step"] == 1
