"""What is installed from a wheel: it has all that a run needs, and works where no checkout is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from configparser import ConfigParser
from email.parser import HeaderParser
from pathlib import Path

import pytest

import llamarl

ROOT = Path(__file__).parents[2]
SMALL = ("max_steps=2", "groups_per_step=4", "group_size=4", "eval.num_prompts=8", "eval.every=2")
LIMIT_S = 240


def in_checkout() -> list[str]:
    """The files that git tracks or would add."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def installed_name(name: str) -> str:
    """Where a file of the checkout lies in site-packages."""
    return f"llamarl/{name}" if name.startswith(("conf/", "recipes/")) else name


def run(*command: str, cwd: Path, **env: str) -> str:
    """Its output. The test fails with that if the command does."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


def test_every_package_of_the_checkout_is_listed():
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    listed = parser["options"]["packages"].split()
    modules = [name for name in in_checkout() if name.startswith(("llamarl/", "executors/"))]
    folders = {os.path.dirname(name) for name in modules if name.endswith(".py")}
    packages = {folder.replace("/", ".") for folder in folders}
    assert sorted(listed) == sorted(packages | {"llamarl.conf", "llamarl.recipes"})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Made of a copy, so that nothing of an older build gets into it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in in_checkout():
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    run(sys.executable, "-m", "pip", "wheel", *options, str(folder / "source"), cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """(an interpreter, its environment): this one's packages, but for llamarl, which is the
    wheel's.
    """
    folder = tmp_path_factory.mktemp("installed")
    site = folder / "site"
    options = ["--no-deps", "--no-index", "--target", str(site)]
    run(sys.executable, "-m", "pip", "install", *options, str(wheel), cwd=folder)
    # An environment of its own reads no .pth file of this one's, through which a checkout could
    # come.
    venv.create(folder / "venv")
    paths = sysconfig.get_paths()
    path = [str(site), *dict.fromkeys([paths["purelib"], paths["platlib"]])]
    env = {"PYTHONPATH": os.pathsep.join(path), "PYTHONNOUSERSITE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return str(folder / "venv" / "bin" / "python"), env


@pytest.mark.slow
def test_a_wheel_has_the_recipes_the_values_the_kernels_and_the_model(wheel):
    folders = ("llamarl/", "executors/", "conf/", "recipes/")
    expected = {installed_name(name) for name in in_checkout() if name.startswith(folders)}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected
    assert {"llamarl/machine/decode.c", "llamarl/conf/config.yaml"} <= held
    assert {"llamarl/models/tiny/model.safetensors", "llamarl/recipes/evaluate.py"} <= held


@pytest.mark.slow
def test_a_wheel_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    assert metadata["Version"] == llamarl.__version__
    assert metadata["License"] == "Apache-2.0" or metadata["License-Expression"] == "Apache-2.0"
    assert "Programming Language :: Python :: 3.13" in metadata.get_all("Classifier")
    assert metadata["Keywords"] and metadata["Description-Content-Type"] == "text/markdown"


@pytest.mark.slow
def test_main_job_and_evaluation_run_in_an_empty_directory(python, tmp_path):
    interpreter, env = python
    code = (
        "import json, llamarl, executors; print(json.dumps([llamarl.__file__, executors.__file__]))"
    )
    site = Path(env["PYTHONPATH"].split(os.pathsep)[0])
    found = json.loads(run(interpreter, "-c", code, cwd=tmp_path, **env))
    assert all(Path(file).is_relative_to(site) for file in found)

    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = ["-m", "llamarl.recipes.llama_async", *SMALL, "checkpoint.every=2"]
    assert "step 2/2" in run(interpreter, *launcher, *job, cwd=tmp_path, **env)
    (run_dir,) = (tmp_path / "runs").iterdir()

    checkpoint = str(run_dir / "checkpoints" / "latest")
    evaluation = ["-m", "llamarl.recipes.evaluate", f"model.path={checkpoint}", "num_prompts=4"]
    assert "pass@1" in run(interpreter, *evaluation, cwd=tmp_path, **env)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluation.jsonl", "runs"]
