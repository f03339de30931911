"""The files of conf/experiment that configure the main job, and their configs with a model and data
of a user.
"""

from __future__ import annotations

import functools
import json

import pytest

from llamarl.config.command_line import CONF_DIR, compose_config

# How a file gives the command of another job.
OTHER_JOBS = ("\n# recipes/reward_model.py", "\n# recipes/sft.py")


def is_of_the_main_job(file):
    """Whether an experiment configures the main job."""
    text = file.read_text()
    return not any(job in text for job in OTHER_JOBS)


FILES = list((CONF_DIR / "experiment").glob("*.yaml"))
NAMES = sorted(file.stem for file in FILES if is_of_the_main_job(file))
# Those whose value model starts as the reward model.
OWN_CRITICS = ("async_rlhf_table4", "async_rlhf_table7_ppo")
# Those that a reward model scores, in the paper.
TABLES = ("async_rlhf_table4", "async_rlhf_table7", "tba_table3", "tba_red_team")
MODEL_REWARDS = tuple(name for name in NAMES if name.startswith(TABLES))


def reward_of(name, directory):
    """Return the words that name what scores, where the paper has a reward model."""
    return [f"reward.path={directory}"] if name in MODEL_REWARDS else []


def given_of(name, directory):
    """Return what such an experiment needs: a model, what it is prompted with, and what scores."""
    words = [f"model.path={directory}"]
    if not name.startswith("tba_red_team"):
        words.append(f"task.path={directory / 'train.jsonl'}")
    return words + reward_of(name, directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("given")


@pytest.fixture(scope="module")
def given(directory):
    """Write a model whose context is long enough, and data; return the words that name them."""
    model = json.loads(
        (CONF_DIR.parent / "llamarl" / "models" / "tiny" / "config.json").read_text()
    )
    (directory / "config.json").write_text(json.dumps({**model, "max_position_embeddings": 4096}))
    (directory / "train.jsonl").write_text(
        '{"prompt": "1+1=", "question": "1+1=", "answer": "#### 2"}\n' * 20
    )
    return [f"model.path={directory}", f"task.path={directory / 'train.jsonl'}"]


@pytest.fixture(scope="module")
def settings(given, directory):
    """Return settings(name, *overrides): the config of an experiment, composed once."""

    @functools.cache
    def settings_of(name, *overrides):
        return compose_config([f"+experiment={name}", *given_of(name, directory), *overrides])

    return settings_of
