"""docs/jobset.yaml is a JobSet by the types of JobSet and Kubernetes, its numbers agree, and what
its containers run ends with the run's exit code.
"""

import copy
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from llamarl.config.command_line import check_command_line
from llamarl.observe.ended import EXIT_FAILED, EXIT_STOPPED, EXIT_UNREADABLE
from tests.house import ROOT, text_of
from tests.launching import environment

MANIFEST = yaml.safe_load(text_of(ROOT / "docs" / "jobset.yaml"))
(NODE,) = MANIFEST["spec"]["replicatedJobs"]
JOB = NODE["template"]["spec"]
POD = JOB["template"]["spec"]
(CONTAINER,) = POD["containers"]
(SCRIPT,) = CONTAINER["args"]


def differences_from_types(manifest: dict) -> dict:
    """Return the manifest as its types read it, which drop what they do not know; they raise for a
    wrong type.
    """
    types = pytest.importorskip("kubeflow_trainer_api.models.jobset_v1alpha2_job_set")
    return types.JobsetV1alpha2JobSet.from_dict(copy.deepcopy(manifest)).to_dict()


def test_the_manifest_is_a_jobset():
    assert differences_from_types(MANIFEST) == MANIFEST


@pytest.mark.parametrize(
    "path, key, value",
    [
        ("spec failurePolicy", "maxRestarts", "often"),
        ("spec network", "dnsHostnames", True),
        ("spec replicatedJobs 0 template spec", "parallelism", "two"),
        ("spec replicatedJobs 0 template spec template spec", "container", []),
    ],
)
def test_what_is_no_jobset_is_found(path, key, value):
    wrong = copy.deepcopy(MANIFEST)
    place = wrong
    for word in path.split():
        place = place[int(word) if word.isdigit() else word]
    place[key] = value
    try:
        assert differences_from_types(wrong) != wrong
    except ValueError:
        pass  # that is told too


def option(name: str) -> str:
    """Return what torchrun is given."""
    (value,) = re.findall(rf"--{name}=(\S+)", SCRIPT)
    return value


def test_its_numbers_and_names_agree():
    nodes = int(option("nnodes"))
    assert JOB["parallelism"] == JOB["completions"] == nodes
    assert JOB["completionMode"] == "Indexed" and JOB["backoffLimit"] == 0
    # A pod's name in its JobSet: SET-REPLICATEDJOB-JOB-POD, in the domain SET.
    set_name = MANIFEST["metadata"]["name"]
    host, port = option("rdzv-endpoint").split(":")
    assert host == f"{set_name}-{NODE['name']}-0-0.{set_name}"
    assert [one["containerPort"] for one in CONTAINER["ports"]] == [int(port)]
    mounted = {one["name"] for one in CONTAINER["volumeMounts"]}
    assert mounted == {one["name"] for one in POD["volumes"]}
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == int(option("nproc-per-node"))
    (rule,) = JOB["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == CONTAINER["name"]
    assert rule["onExitCodes"]["values"] == [EXIT_FAILED, EXIT_UNREADABLE]
    assert subprocess.run(["bash", "-n", "-c", SCRIPT]).returncode == 0


def test_its_command_is_accepted():
    words = shlex.split(SCRIPT.replace("\\\n", " "), comments=True)
    first = words.index("recipes/llama_async.py") + 1
    overrides = words[first : words.index("&")]
    ranks = int(option("nnodes")) * int(option("nproc-per-node"))
    check_command_line(overrides, world_size=ranks)
    assert f"run_dir=runs/{MANIFEST['metadata']['name']}" in overrides


TORCHRUN = """
import json, signal, sys
from pathlib import Path
run_dir = Path("runs/llamarl")
assert not (run_dir / "outcome.json").exists(), "an earlier pod's"
def end(*_):
    outcome = {"ended": "stopped", "step": 3, "max_steps": 9}
    (run_dir / "outcome.json").write_text(json.dumps(outcome))
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
print("trains", flush=True)
signal.pause()
"""


def test_a_pod_that_gets_sigterm_passes_it_on_and_ends_with_the_runs_exit_code(tmp_path):
    """With a stand-in for torchrun, which ends with 1 after a stop as torchrun does."""
    bin_dir = tmp_path / ".venv" / "bin"
    bin_dir.mkdir(parents=True)
    run_dir = tmp_path / "runs" / "llamarl"
    run_dir.mkdir(parents=True)
    (run_dir / "outcome.json").write_text('{"ended": "finished", "step": 9, "max_steps": 9}')
    (bin_dir / "stand_in.py").write_text(TORCHRUN)
    programs = {"torchrun": f"{bin_dir}/stand_in.py", "python": '"$@"'}
    for name, arguments in programs.items():
        (bin_dir / name).write_text(f"#!/bin/sh\nexec {sys.executable} {arguments}\n")
        (bin_dir / name).chmod(0o755)
    pod = subprocess.Popen(
        ["bash", "-c", SCRIPT], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    with pod:
        assert pod.stdout.readline() == "trains\n"
        pod.terminate()
        assert pod.wait(60) == EXIT_STOPPED
        assert "stopped after step 3" in pod.stdout.read()
