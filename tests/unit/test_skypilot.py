"""recipes/skypilot.yaml is a task by SkyPilot's schema, its commands are accepted, and it goes on
where a run was stopped.
"""

import re
import shlex
import subprocess

import pytest
import yaml

from llamarl.config.command_line import check_command_line
from llamarl.observe.ended import EXIT_STOPPED
from tests.house import ROOT, text_of

TASK = yaml.safe_load(text_of(ROOT / "recipes" / "skypilot.yaml"))
PARTS = ("setup", "run")


def words_of(part: str) -> list[str]:
    return shlex.split(TASK[part].replace("\\\n", " "), comments=True)


def test_it_is_a_task_of_skypilot():
    schemas = pytest.importorskip("sky.utils.schemas")
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(TASK, schemas.get_task_schema())
    jsonschema.validate(TASK["resources"], schemas.get_resources_schema())


def test_its_command_is_accepted_and_continues_its_run():
    words = words_of("run")
    first = words.index("recipes/llama_async.py") + 1
    last = words.index("resume=auto") + 1
    tiny = str(ROOT / "llamarl" / "models" / "tiny")
    given = {"$MODEL": tiny, "$RUN_DIR": TASK["envs"]["RUN_DIR"]}
    overrides = [re.sub(r"\$\w+", lambda name: given[name[0]], word) for word in words[first:last]]
    check_command_line(overrides, world_size=1)
    assert "--nproc-per-node=$SKYPILOT_NUM_GPUS_PER_NODE" in words
    assert words[-3:] == ["-m", "llamarl.observe.ended", "$RUN_DIR"]
    assert TASK["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_STOPPED]


def test_what_it_names_is_there():
    said = " ".join(words_of("setup"))
    assert TASK["envs"]["MODEL"] in said and "[smollm2]" in said
    for script in re.findall(r"recipes/\w+\.py", TASK["setup"] + TASK["run"]):
        assert (ROOT / script).is_file()


@pytest.mark.parametrize("part", PARTS)
def test_its_scripts_are_bashs(part):
    assert subprocess.run(["bash", "-n", "-c", TASK[part]]).returncode == 0
