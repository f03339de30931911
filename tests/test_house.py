"""House rules that ruff cannot check: what may import what, sizes, and documents whose paths and
commands exist.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
import sys
import tomllib
from configparser import ConfigParser
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest

from llamarl.config.command_line import RED_TEAM, Config, ConfigError, check_command_line
from llamarl.config.conversion import known_keys, schemas_of
from llamarl.config.evaluation import EVALUATION
from llamarl.config.preferences import PREFERENCES
from llamarl.config.supervised import REWARD_MODEL, SFT
from llamarl.planner import __main__ as planner
from llamarl.scoring.kinds import KINDS
from tests.build.job import run_python
from tests.documents import (
    GUIDES,
    OVERRIDE,
    PAPERS,
    README,
    RLHF,
    SPAN,
    commands,
    hydra_commands,
    of_the_user,
    shell_of,
)
from tests.house import (
    BLOCK,
    ROOT,
    blocks,
    imported,
    module_of,
    our_files,
    outside_annotations,
    python_files,
    text_of,
    tree_of,
)

CODE = ("llamarl", "executors", "recipes")
MAX_FILE_LINES = 600
MAX_TEST_FILE_LINES = 1200  # a file of tests is read a test at a time
MAX_COLUMNS = 130
TINY = ROOT / "llamarl" / "models" / "tiny"


# --- Imports ---


def test_llamarl_imports_no_executor_and_no_recipe():
    def tops(folder: str) -> set[str]:
        found = set()
        for file in python_files(folder):
            found |= {name.split(".")[0] for name in imported(tree_of(file))}
        return found

    assert "executors" in tops("recipes")  # such an import is seen
    assert not {"executors", "recipes", "tests"} & tops("llamarl")


# By the text: the trees of all tests take seconds.
NAMES = r" import (?:.*|\([^)]*)\b"  # on one line, or on several in parentheses
TEST_FILE = re.compile(rf"^ *(?:from|import) +tests\b[\w.]*(?:\.|{NAMES})test_", re.MULTILINE)


def test_no_test_file_is_imported():
    """What tests share is in modules of its own, such as those of tests/build."""
    for line in (
        "from tests.unit import a, test_x",
        "from tests.unit import (\n    a,\n    test_x,\n)",
        "    import tests.test_x",
        "from tests.test_x",
    ):
        assert TEST_FILE.search(line)  # such an import is seen
    assert not [file for file in python_files("tests") if TEST_FILE.search(text_of(file))]


# The rooms of llamarl from the ground up: a file imports its own room and those before it.
ORDER = (
    "types errors words executor machine disk workers models memory tasks comm tickets learning "
    "inference ddma scoring environments config checkpoint observe planner ending controller "
    "launch evaluation run __main__"
).split()


@cache
def module_imports(*, for_types: bool = True) -> dict[str, set[str]]:
    """Module of llamarl -> modules of llamarl that it imports, at any place. for_types: also for
    annotations alone.
    """
    trees = {module_of(file): tree_of(file) for file in python_files("llamarl")}
    imports = {}
    for module, tree in trees.items():
        names = imported(tree if for_types else outside_annotations(tree)) & trees.keys()
        # `from package import module` is an import of the module.
        imports[module] = names - {name.rpartition(".")[0] for name in names}
    return imports


def climbs(imports: dict[str, set[str]]) -> list[str]:
    """Imports that run up in ORDER."""
    floor = {room: number for number, room in enumerate(ORDER)}
    found = []
    for module, names in imports.items():
        for name in names - {"llamarl"}:
            if module != "llamarl" and floor[name.split(".")[1]] > floor[module.split(".")[1]]:
                found.append(f"{module} -> {name}")
    return found


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, and what imports those; [] if none do."""
    left = {module: names - {module} for module, names in imports.items()}
    while left:
        ground = {module for module, names in left.items() if not names}
        if not ground:
            return sorted(left)
        left = {m: names - ground for m, names in left.items() if m not in ground}
    return []


def test_no_import_runs_up():
    assert climbs({"llamarl.comm.wire": {"llamarl.launch.job"}})  # such an import is seen
    assert not climbs(module_imports())


def test_no_import_runs_in_a_circle():
    """A kind makes its scorer, which takes the kind's settings: annotations make no circle."""
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]
    assert circle(module_imports(for_types=False)) == []


def test_the_ground_floor_stands_alone():
    imports = module_imports()
    alone = ("llamarl.types", "llamarl.errors", "llamarl.executor")
    assert {module: imports[module] for module in alone} == dict.fromkeys(alone, set())


def test_every_room_is_a_folder_but_those_that_many_know():
    rooms = {module.split(".")[1] for module in module_imports() if module != "llamarl"}
    assert rooms == set(ORDER)
    files = {file.stem for file in python_files("llamarl") if file.parent == ROOT / "llamarl"}
    assert files == {
        "__init__",
        "types",
        "errors",
        "executor",
        "memory",
        "ending",
        "controller",
        "run",
        "__main__",
    }


LIGHT = (
    "llamarl",
    "llamarl.__main__",
    "llamarl.run",
    "llamarl.config.command_line",
    "llamarl.inference.schedule",
    "llamarl.tasks.rewards",
    "llamarl.scoring.worker",
    "llamarl.workers.pool",
    "llamarl.environments.worker",
    "llamarl.planner.__main__",
    "llamarl.planner.fit",
)


def test_light_modules_import_no_torch():
    code = (
        "import importlib, sys\n"
        f"for module in {LIGHT}:\n"
        "    importlib.import_module(module)\n"
        "    heavy = {'torch', 'transformers', 'torchtune'} & sys.modules.keys()\n"
        "    assert not heavy, (module, heavy)\n"
    )
    run_python("-c", code)


# --- Kinds of what scores ---

KIND_ROOM = "llamarl.scoring.kinds"
KIND_NAMES = {file.stem for file in (ROOT / "conf" / "reward").glob("*.yaml")}


def asked_kinds(tree: ast.Module) -> list[str]:
    """What of a module depends on which kind a scorer is: a comparison of what is called kind with
    a name, or an import of what one kind has alone.
    """
    found = []
    for name in imported(tree):
        room, _, rest = name.partition(f"{KIND_ROOM}.")
        if not room and rest.split(".")[0] in KIND_NAMES:
            found.append(name)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        inside = list(ast.walk(node))
        words = {inner.value for inner in inside if isinstance(inner, ast.Constant)}
        names = {inner.attr for inner in inside if isinstance(inner, ast.Attribute)}
        if KIND_NAMES & words and "kind" in names:
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    "source",
    [
        "part.kind == 'model'",
        "part.kind in ('function', 'judge')",
        "'novelty' != part.kind",
        "from llamarl.scoring.kinds.model import ModelKindSettings",
        "import llamarl.scoring.kinds.judge",
        "from llamarl.scoring.kinds import encoder",
    ],
)
def test_asking_for_a_kind_of_scorer_is_seen(source):
    assert asked_kinds(ast.parse(source))


def test_nothing_asks_which_kind_a_scorer_is():
    others = "generator.kind == 'vllm'\nfrom llamarl.scoring.kinds.kind import Kind"
    assert not asked_kinds(ast.parse(others))
    rooms = (KIND_ROOM, "llamarl.config.sections.reward")
    found = {}
    for file in python_files(*CODE):
        if not module_of(file).startswith(rooms):
            if "kind" not in text_of(file):
                continue
            tree = outside_annotations(tree_of(file))  # a scorer takes its settings
            found[module_of(file)] = asked_kinds(tree)
    assert not {module: asked for module, asked in found.items() if asked}


def test_every_kind_of_scorer_has_its_two_files():
    kinds = KIND_NAMES - {"parts"}  # which are of several kinds
    assert {"function", "model", "encoder"} <= kinds
    files = (ROOT / "llamarl" / "scoring" / "kinds").glob("*.py")
    assert {file.stem for file in files} - {"__init__", "kind"} == kinds
    for kind in KINDS:
        name = kind.__module__.rpartition(".")[2]
        assert get_args(get_type_hints(kind)["kind"]) == (name,)


# --- Sizes and leftovers ---


def trusting(source: str) -> list[int]:
    """Lines that have transformers load something and do not forbid a directory's own code.

    Left out, transformers asks on the terminal, and runs the code after a "y".
    """
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr != "from_pretrained":
            continue
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if given.get("trust_remote_code") != "False":
            lines.append(node.lineno)
    return lines


def test_no_code_of_a_model_directory_is_run():
    assert trusting("a = AutoModel.from_pretrained(path)") == [1]  # such a call is seen
    assert trusting("AutoModel.from_pretrained(path, trust_remote_code=True)") == [1]
    assert not trusting("AutoModel.from_pretrained(path, trust_remote_code=False)")
    found = {}
    for file in python_files(*CODE, "benchmarks"):
        source = text_of(file)
        lines = trusting(source) if "from_pretrained" in source else []
        if lines:
            found[file.name] = lines
    assert not found


def test_files_are_short():
    long = []
    for file in python_files(*CODE, "benchmarks", "tests"):
        lines = len(file.read_text().splitlines())
        is_test = file.relative_to(ROOT).parts[0] == "tests"
        if lines > (MAX_TEST_FILE_LINES if is_test else MAX_FILE_LINES):
            long.append(f"{file.relative_to(ROOT)}: {lines} lines")
    assert not long


def test_documents_have_no_overlong_lines():
    documents = [file for file in our_files() if file.suffix == ".md"]
    assert ROOT / "README.md" in documents and ROOT / "docs" / "asynchrony.md" in documents
    overlong = []
    for file in documents:
        for number, line in enumerate(text_of(file).splitlines(), 1):
            if len(line) > MAX_COLUMNS:
                overlong.append(f"{file.name}:{number}")
    assert not overlong


def test_no_path_of_a_machine():
    paths = re.compile(r"(?<![\w.$}])/(?:work|root|home|Users)/\w")
    assert paths.search("open('/" + "home/x')") and not paths.search("https://example.org/work/x")
    assert not [str(file.relative_to(ROOT)) for file in our_files() if paths.search(text_of(file))]


# --- Config groups ---


# The first names of keys that a file of sections rules, where they are not the file's name alone.
# None: the keys that are in no section. The section of a task is a variable in its rules.
RULED_KEYS = {
    "evaluation": {"eval"},
    "generator": {"generator", "offload"},
    "placement": {"placement", "weights"},
    "reward": {"reward", "eval"},
    "run": None,
    "task": {"victim", "generator"},
    "tickets": {"tickets", "governor", "max_lag", "on_deadline", "overcommit"},
}


def rule_keys(source: str) -> list[set[str]]:
    """Of each `found.add(REMEDY, *KEYS)` in a source, the first names of the keys that are written
    out there; none of a rule whose keys are all variables.
    """
    rules = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != "found.add":
            continue
        written = [arg.value for arg in node.args[1:] if isinstance(arg, ast.Constant)]
        rules.append({str(key).split(".")[0] for key in written})
    return rules


def strangers(file: Path) -> list[set[str]]:
    """The rules in the file of a section of which no key is of that section."""
    own = RULED_KEYS.get(file.stem, {file.stem})
    if own is None:
        own = {name for name, hint in get_type_hints(Config).items() if not schemas_of(hint)}
    return [keys for keys in rule_keys(file.read_text()) if keys and not keys & own]


def test_a_rule_is_in_the_file_of_a_section_that_it_is_about():
    source = 'found.add("no", "loss.fn", "max_lag")\nfound.add("no", key)'
    assert rule_keys(source) == [{"loss", "max_lag"}, set()]
    files = [file for file in python_files("llamarl") if file.parent.name == "sections"]
    assert {file.stem: bad for file in files if (bad := strangers(file))} == {}
    rules = (ROOT / "llamarl/config/rules.py").read_text()
    assert not any(rule_keys(rules)), "rules.py collects, and has no rule of its own"


def test_every_group_is_a_section_of_the_schema():
    """But for experiments, which set values of many (tests/recipes/test_experiments.py)."""
    sections = {name for name, hint in get_type_hints(Config).items() if schemas_of(hint)}
    groups = {file.parent.name for file in (ROOT / "conf").glob("*/*.yaml")} - {"experiment"}
    assert groups and groups <= sections
    executors = {file.stem for file in python_files("executors")}
    assert {"generator", "reward", "reference", "trainer"} <= groups & executors


# --- The README and the documents ---

OTHER_JOBS = {
    "recipes/sft.py": SFT,
    "recipes/reward_model.py": REWARD_MODEL,
    "recipes/preferences.py": PREFERENCES,
    "recipes/red_team.py": RED_TEAM,
    "recipes/evaluate.py": EVALUATION,
}


def other_job_commands(text: str) -> list[tuple[str, int, list[str]]]:
    """(recipe, ranks, overrides) of the runs of other recipes that read key=value."""
    found = []
    shell = "".join(f"```bash\n{body}```\n" for body in blocks("bash", text))
    spans = [span for span in SPAN.findall(BLOCK.sub("", text)) if "recipes/" in span]
    for words in commands(shell + "\n".join(f"`{span}`" for span in spans)):
        for recipe in OTHER_JOBS.keys() & set(words):
            overrides = words[words.index(recipe) + 1 :]
            ranks = [int(word.partition("=")[2]) for word in words if word.startswith("--nproc")]
            if overrides and all(OVERRIDE.match(word) for word in overrides):
                found.append((recipe, *(ranks or [1]), overrides))
    return found


@pytest.fixture
def users_folder(tmp_path, monkeypatch):
    """The current directory of somebody who follows README: their data, and my_module.py as README
    has it.
    """
    row = '{"prompt": "1+1=", "question": "1+1=", "answer": "#### 2"}\n'
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(row * 20)
    (module,) = [body for body in blocks("python", GUIDES) if body.startswith("# my_module.py")]
    (tmp_path / "my_module.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    yield tmp_path
    sys.modules.pop("my_module", None)


def validate(ranks: int, overrides: list[str]) -> None:
    """ConfigError if a run with these would be refused."""
    given = of_the_user(overrides)
    resumes = "resume=auto" in given and not any(word.startswith("run_dir=") for word in given)
    multirun = "--multirun" in overrides
    check_command_line(given + ["run_dir=runs/mine"] * resumes, world_size=ranks, multirun=multirun)


def assert_accepted(commands: list[tuple[int, list[str]]]) -> None:
    """Check command lines as a run would, each once: (ranks, overrides)."""
    refused = {}
    for ranks, overrides in {(ranks, *words): (ranks, words) for ranks, words in commands}.values():
        try:
            validate(ranks, overrides)
        except ConfigError as error:
            refused[f"{' '.join(overrides)} on {ranks} ranks"] = str(error)
    assert not refused


def test_what_pickles_is_banned_everywhere_but_in_tests_and_benchmarks():
    lint = tomllib.loads(text_of(ROOT / "pyproject.toml"))["tool"]["ruff"]["lint"]
    banned = {"pickle", "marshal", "dill", "multiprocessing", "torch.load", "torch.save"}
    assert banned <= lint["flake8-tidy-imports"]["banned-api"].keys()
    assert "TID251" in lint["select"]
    exempt = [files for files, rules in lint["per-file-ignores"].items() if "TID251" in rules]
    assert exempt == ["{benchmarks,tests}/**"]
    for file in python_files(*CODE):
        assert "noqa: TID" not in text_of(file), file
        # Collectives of objects pickle, however they were imported.
        called = re.findall(
            r"(?<!self\.)\b(?:_pickle|\w+_object_list|(?:all_)?gather_object)\b", text_of(file)
        )
        assert not called, file


def test_commands_of_guides_and_pages_are_accepted(users_folder, monkeypatch):
    # These need not be installed.
    monkeypatch.setattr("llamarl.inference.vllm_engine.vllm_problem", lambda: None)
    installed = SimpleNamespace(origin="somewhere")
    monkeypatch.setattr("llamarl.config.sections.run.find_spec", lambda name: installed)
    found = hydra_commands()
    assert len(found) > 20 and (2, []) in found
    pages = [f"docs/{name}.md" for name in ("algorithms", "models", "papers")]
    for page in (*pages, "benchmarks/rlhf/README.md"):
        of_page = hydra_commands(shell_of(page))
        assert of_page, page
        found += of_page
    assert_accepted(found)


def test_commands_of_other_jobs_are_accepted(users_folder):
    found = []
    for text in (GUIDES, shell_of("docs/papers.md"), shell_of("benchmarks/rlhf/README.md")):
        found += other_job_commands(text)
    assert {recipe for recipe, _, _ in found} == OTHER_JOBS.keys() and len(found) > 8
    for recipe, ranks, overrides in found:
        given = of_the_user(overrides)
        check_command_line(given, world_size=ranks, kind=OTHER_JOBS[recipe])


def test_the_pages_of_the_papers_sweep_and_list_every_experiment():
    runs = hydra_commands(shell_of("benchmarks/rlhf/README.md"))
    assert sum("--multirun" in overrides for _, overrides in runs) >= 7
    table = PAPERS.partition("| `+experiment=` |")[2].partition("\n\n")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    listed = set(re.findall(r"`(\w+)`", "".join(first_cells)))
    assert listed == {file.stem for file in (ROOT / "conf" / "experiment").glob("*.yaml")}
    with pytest.raises(ConfigError, match="overcommit"):
        overrides = [
            "+experiment=async_rlhf_table10",
            "model.path=DIR",
            "task.path=FILE",
            "max_lag=0,1",
            "overcommit=3",
        ]
        validate(1, ["--multirun", *overrides])


def test_a_wrong_command_would_be_refused(users_folder):
    with pytest.raises(AssertionError, match="max_lags"):
        assert_accepted([(8, []), (8, ["max_lags=2"])])


def test_readme_keys_and_paths_exist():
    spans = []
    for span in SPAN.findall(BLOCK.sub("", GUIDES)):
        spans += span.split()
    words = spans + list(itertools.chain.from_iterable(commands()))
    roots = (
        "recipes/",
        "conf/",
        "docs/",
        "llamarl/",
        "executors/",
        "tests/",
        "benchmarks/",
        ".ci/",
    )
    paths = {word for word in words if word.startswith(roots)}
    assert len(paths) >= 8
    assert not {path for path in paths if not (ROOT / path).exists()}
    sections = "|".join(name for name, hint in get_type_hints(Config).items() if schemas_of(hint))
    keys = {word for word in spans if re.fullmatch(rf"(?:{sections})\.[a-z_]+", word)}
    keys.discard("metrics.jsonl")  # a file of a run, named as a key is
    assert keys and keys <= set(known_keys())


def test_commands_of_scripts_are_accepted():
    scripts = {
        "recipes/fetch_smollm2.py",
        "recipes/compare.py",
        "recipes/push.py",
        "benchmarks/rlhf/tldr.py",
    }
    plain = [
        words for words in commands() + commands(PAPERS) + commands(RLHF) if scripts & set(words)
    ]
    assert scripts <= set(itertools.chain.from_iterable(plain))
    for words in plain:
        script = next(word for word in words if word in scripts)
        module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
        given = words[words.index(script) + 1 :]
        if given:
            module.parse(given)


def test_readme_modules_exist():
    modules = {
        words[words.index("-m") + 1]
        for words in commands()
        if "-m" in words and words[0] in ("python", "torchrun")
    }
    # Where llamarl is not installed, its recipes are no modules, but files beside it.
    recipes = {module for module in modules if module.startswith("llamarl.recipes.")}
    assert recipes and modules > recipes
    assert all(importlib.util.find_spec(module) for module in modules - recipes)
    files = [module.removeprefix("llamarl.").replace(".", "/") + ".py" for module in recipes]
    assert all((ROOT / file).is_file() for file in files)


def test_what_is_promised_to_the_bit_says_what_the_promise_is():
    """Such a test is left out where products are noisy, by this marker and with its reason."""
    found = []
    for file in python_files("tests"):
        if "pytest.mark.bitwise" not in text_of(file):
            continue
        for node in ast.walk(tree_of(file)):
            for decorator in getattr(node, "decorator_list", ()):
                if ast.unparse(decorator).startswith("pytest.mark.bitwise"):
                    found.append((f"{file.name} {node.name}", decorator))
    assert found
    for name, decorator in found:
        has_reason = isinstance(decorator, ast.Call) and len(decorator.args) == 1
        assert has_reason and isinstance(decorator.args[0].value, str), name


def test_readme_extras_and_markers_are_in_setup_cfg():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = set(re.findall(r"\.\[(\w+)\]", README))
    assert "dev" in extras and extras <= set(setup["options.extras_require"])
    table = text_of(ROOT / "docs" / "quickstart.md").partition("| extra |")[2].partition("\n\n")[0]
    cells = "".join(line.split("|")[1] for line in table.splitlines()[2:])
    assert sorted(SPAN.findall(cells)) == sorted(setup["options.extras_require"])
    markers = {
        words[words.index("-m") + 1]
        for words in commands()
        if words[0] == "pytest" and "-m" in words
    }
    assert markers == set(re.findall(r"^(\w+):", setup["tool:pytest"]["markers"], re.MULTILINE))
    assert tomllib.loads(text_of(ROOT / "pyproject.toml"))["build-system"]


def test_readme_reward_and_loss_work(users_folder):
    import torch

    from llamarl.learning.losses import resolve_loss
    from llamarl.scoring.pool import check_reward
    from llamarl.scoring.scorer import text_item
    from tests.loss_problems import inputs_of

    items = [text_item("1+1=", text, {"answer": "2"}) for text in (" 2\n", "3")]
    outcomes = check_reward("my_module:my_reward", items)
    assert [outcome.value for outcome in outcomes] == [1.0, 0.0]
    logprobs = torch.tensor([-1.0, -2.0, -5.0], requires_grad=True)
    advantages, mask = torch.tensor([1.0, -1.0, 3.0]), torch.tensor([True, True, False])
    my_loss = resolve_loss("my_module:my_loss")
    inputs = inputs_of(logprobs, logprobs.detach(), None, advantages, mask, num_loss_tokens=2)
    loss, metrics = my_loss(inputs, scale=0.5)
    assert loss.item() == -0.5 * (1 * -1.0 + -1 * -2.0) / 2 and metrics == {}
    loss.backward()
    assert logprobs.grad.tolist() == [-0.25, 0.25, 0.0]


def test_ci_runs_what_the_readme_says():
    script = text_of(ROOT / ".ci" / "run")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert "set -euo pipefail" in script and "torch==2.13.0" in script and "torch==2.13.0" in README
    assert "install -q -e '.[dev]'" in script and '"$bin/pytest"' in script and "-m slow" in script
    main_job = "train -n 2"
    assert f'"$bin/llamarl" {main_job}' in script and f".venv/bin/llamarl {main_job}" in README
    assert not re.search(r"https?://|--index-url|\.org\b|\.io\b", script)


@pytest.mark.slow
def test_the_table_of_overcommit_is_what_its_command_prints():
    document = text_of(ROOT / "docs" / "asynchrony.md")
    simulations = [words for words in commands(document) if "llamarl.planner" in words]
    ((python, *words),) = simulations
    assert python == "python"
    (table,) = [body for body in blocks("", document) if body.startswith("overcommit")]
    *printed, legend = run_python(*words).splitlines()
    assert printed == table.splitlines()
    assert legend.startswith("each cell: seconds a step, mean lag / largest lag")


def test_simulations_of_the_planners_page_are_accepted(capsys):
    found = [words for words in commands(shell_of("docs/scaling.md")) if words[3:4] == ["simulate"]]
    assert len(found) == 4
    for words in found:
        assert words[:4] == ["python", "-m", "llamarl.planner", "simulate"]
        # Few steps: here it matters that they are accepted.
        assert planner.main([*words[3:], "max_steps=4"]) == 0, capsys.readouterr().err
