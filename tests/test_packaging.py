"""What a checkout has beside code: a licence, a changelog, a Dockerfile, hooks that check what
.ci/run checks.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from configparser import ConfigParser

import yaml
from packaging.specifiers import SpecifierSet

import llamarl
from tests.house import ROOT, text_of

# SHA-256 of https://www.apache.org/licenses/LICENSE-2.0.txt, whose last lines leave a name open.
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
OPEN_NAME = "Copyright [yyyy] [name of copyright owner]"
CHECKS = ("form", "lint", "types")  # the stages of .ci/run that look at files alone


def setup_cfg() -> ConfigParser:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def test_the_licence_is_apaches_own_text_and_is_packaged():
    text = text_of(ROOT / "LICENSE")
    as_published = text.replace("Copyright the llamarl developers", OPEN_NAME)
    assert hashlib.sha256(as_published.encode()).hexdigest() == APACHE_2
    metadata = setup_cfg()["metadata"]
    assert metadata["license"] == "Apache-2.0"
    assert metadata["license_files"].split() == ["LICENSE"]


def test_the_version_is_said_once_and_the_changelog_has_it():
    assert setup_cfg()["metadata"]["version"] == "attr: llamarl.__version__"
    headings = re.findall(r"^## (.*)$", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    newest = re.escape(f"[{llamarl.__version__}] - ")
    assert re.fullmatch(newest + r"\d{4}-\d\d-\d\d", headings[1])


def test_metadata_say_which_pythons_work():
    setup = setup_cfg()
    said = setup["metadata"]["classifiers"].split("\n")
    versions = [one.rpartition(" ")[2] for one in said if re.search(r":: 3\.\d+$", one)]
    assert setup["options"]["python_requires"] == f">={versions[0]}"
    assert f"Python {', '.join(versions[:-1])} or {versions[-1]}" in text_of(ROOT / "README.md")


def test_the_page_of_what_it_needs_says_what_setup_cfg_does():
    options = setup_cfg()["options"]
    least = re.findall(r"^(?:torch|transformers)>=([\d.]+)", options["install_requires"], re.M)
    pythons = options["python_requires"].removeprefix(">=")
    said = f"| {pythons} to 3.13; {least[0]} to 2.13; {least[1]} or later, below 6 |"
    assert said in text_of(ROOT / "docs" / "quickstart.md")
    assert "torch>=2.11,<2.14" in options["install_requires"]


def test_readmes_links_lead_somewhere_from_everywhere():
    """A package index shows README.md too, and has none of the other files."""
    targets = re.findall(r"(?<!!)\[[^\]]*\]\(([^)]*)\)", text_of(ROOT / "README.md"))
    assert not [target for target in targets if not target.startswith(("https://", "#"))]


def test_the_changelog_has_the_kinds_of_keep_a_changelog():
    kinds = re.findall(r"^### (.*)$", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def stages() -> dict[str, list[str]]:
    """Stage of .ci/run -> the words of its command, without the folder of the environment."""
    found = {}
    line = re.compile(r'^ *stage "(\w+)" \w+ "\$bin/(\w+)"(.*)$', re.MULTILINE)
    for name, program, rest in line.findall(text_of(ROOT / ".ci" / "run")):
        found[name] = [program, *shlex.split(rest)]
    return found


def test_hooks_run_what_ci_runs():
    (repo,) = yaml.safe_load(text_of(ROOT / ".pre-commit-config.yaml"))["repos"]
    assert repo["repo"] == "local"  # nothing is fetched
    hooks = {hook["id"]: shlex.split(hook["entry"]) for hook in repo["hooks"]}
    of_ci = stages()
    assert hooks == {name: of_ci[name] for name in CHECKS}
    for hook in repo["hooks"]:
        assert hook["language"] == "system"
        assert hook["pass_filenames"] is False


DOCKERFILE = text_of(ROOT / "Dockerfile").replace("\\\n", "")


def instructions(name: str) -> list[str]:
    """Return the arguments of each such instruction of the Dockerfile, in order."""
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)


def arguments() -> dict[str, str]:
    """Build arguments of the Dockerfile, with their defaults."""
    return dict(given.partition("=")[::2] for given in instructions("ARG"))


def test_the_image_has_a_python_and_a_torch_of_setup_cfg():
    options = setup_cfg()["options"]
    (torch,) = re.findall(r"^torch([<>=].*)$", options["install_requires"], re.MULTILINE)
    given = arguments()
    assert SpecifierSet(torch).contains(given["TORCH"])
    assert SpecifierSet(options["python_requires"]).contains(given["PYTHON"])
    assert f"torch=={given['TORCH']}" in text_of(ROOT / ".ci" / "run")
    assert {image.split()[0] for image in instructions("FROM")} == {
        "python:${PYTHON}-slim-bookworm"
    }


def test_what_the_image_copies_is_there_and_reaches_the_builder():
    copied = []
    for words in map(str.split, instructions("COPY")):
        if not words[0].startswith("--from"):
            copied += [word for word in words[:-1] if not word.startswith("--")]
    assert all((ROOT / name).exists() for name in copied)
    lines = text_of(ROOT / ".dockerignore").splitlines()
    ignored = [line for line in lines if not line.startswith("#")]
    assert ignored[0] == "*" and ignored[-1] == "**/__pycache__"
    assert ignored[1:-1] == [f"!{name}" for name in dict.fromkeys(copied)]
    source = set(setup_cfg()["options"]["packages"].split()) | {"conf", "recipes"}
    assert {name.partition(".")[0] for name in source} <= set(copied)


def test_the_image_runs_llamarl_without_privileges():
    assert instructions("USER") == ["1000"]
    assert DOCKERFILE.index("\nUSER") < DOCKERFILE.index("\nRUN python -m venv")
    assert json.loads(instructions("ENTRYPOINT")[0]) == ["llamarl"]
    scripts = setup_cfg()["options.entry_points"]["console_scripts"]
    assert "llamarl = llamarl.__main__:main" in scripts
    manifest = text_of(ROOT / "docs" / "jobset.yaml")
    assert "runAsUser: 1000" in manifest and "workingDir: /llamarl" in manifest
    assert instructions("WORKDIR")[-1] == "/llamarl"
