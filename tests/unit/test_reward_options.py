"""Options of reward functions in every form, short names of those that come with the package, and
what a configuration makes of both.
"""

import importlib
import sys
from pathlib import Path

import pytest

from llamarl.config.command_line import compose_config
from llamarl.config.conversion import load_config, save_config
from llamarl.config.placement import TINY_MODEL
from llamarl.launch.scorers import reward_kinds
from llamarl.scoring.pool import RewardPool, check_reward
from llamarl.scoring.scorer import score_all, text_item
from llamarl.tasks.forms import WorkerLimits, checked_by, with_options
from llamarl.words.names import NoFunction, import_function
from tests.build.user_module import write_modules
from tests.unit.refusals import job

LIMITS = WorkerLimits(timeout_s=5.0, memory_mb=1024)
OWN = """
from llamarl.tasks.forms import batched, checked_by

def single(prompt, completion, meta, *, scale=1.0):
    return scale * len(completion)

async def later(prompt, completion, meta, *, scale=1.0):
    return scale * len(completion)

def verl(data_source, solution_str, ground_truth, extra_info=None, *, scale=1.0):
    return scale * len(solution_str)

@batched
def batch(asked, said, rows, *, scale=1.0):
    return [scale * len(text) for text in said]

def trl(completions, *, scale=1.0, **kwargs):
    return [scale * len(text) for text in completions]

def check(limits, *, scale=1.0):
    if scale > limits.timeout_s:
        raise ValueError(f"option scale={scale}: at most {limits.timeout_s:g}")

@checked_by(check)
def checked(prompt, completion, meta, *, scale=1.0):
    return scale * len(completion)

def plain(prompt, completion, meta):
    return float(len(completion))
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    write_modules(tmp_path, monkeypatch, own_rewards=OWN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("own_rewards", "rewards"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def scored(name, **options):
    """Return the score of "abc" in a row whose column is called as the option."""
    item = text_item("", "abc", {"answer": "a", "scale": 100.0})
    with RewardPool(f"own_rewards:{name}", options=options) as pool:
        (outcome,) = score_all(pool, [item])
    return outcome.value


@pytest.mark.parametrize("form", ["single", "later", "checked", "verl", "batch"])
def test_an_option_reaches_the_function(form):
    assert scored(form, scale=2.0) == 6.0
    assert scored(form) == 3.0


def test_an_option_is_not_overwritten_by_a_column_of_the_row():
    """Without the option the column is what TRL hands over, a list."""
    assert scored("trl", scale=2.0) == 6.0


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("single", {"scal": 2}, r"single has no option scal; did you mean scale\?"),
        ("single", {"meta": 2}, "single has no option meta; it has scale"),
        ("plain", {"scale": 2}, "plain has no option scale; it has none"),
        ("checked", {"scale": 9}, "option scale=9: at most 5"),
    ],
)
def test_a_wrong_option_ends_the_start(name, options, message):
    with pytest.raises(ValueError, match=message):
        check_reward(f"own_rewards:{name}", [], options=options, timeout_s=5.0)


def test_options_are_checked_with_their_defaults_too():
    """What a function needs of the machine is looked for, whether it has options or not."""
    seen = []
    checks = checked_by(lambda limits, **options: seen.append((limits, options)))
    function = checks(lambda prompt, completion, meta: 0.0)
    assert with_options(function, {}, "f", LIMITS) is function
    assert seen == [(LIMITS, {})]


def test_rewards_is_the_packages_own_module():
    assert import_function("rewards:math_match").__module__ == "llamarl.tasks.math_answers"
    with pytest.raises(NoFunction, match="no function math_mach; did you mean math_match?"):
        import_function("rewards:math_mach")


def test_a_module_of_the_user_with_that_name_comes_first(own_folder):
    (own_folder / "rewards.py").write_text("def mine(prompt, completion, meta):\n    return 7.0\n")
    importlib.invalidate_caches()
    assert import_function("rewards:mine")("", "", {}) == 7.0
    with pytest.raises(NoFunction) as refused:
        import_function("rewards:math_match")
    assert "it has mine" in str(refused.value)
    assert "the package's own are in llamarl.tasks.rewards" in str(refused.value)


def test_a_module_that_refuses_to_be_imported_says_why_itself(own_folder):
    (own_folder / "refusing.py").write_text("raise ModuleNotFoundError('scorelib is absent')")
    with pytest.raises(ModuleNotFoundError, match="scorelib is absent"):
        import_function("refusing:score")


def test_options_of_a_config_are_read_written_and_read_again(tmp_path):
    config = compose_config(["reward.fn=own_rewards:single", "reward.options.scale=2"])
    assert config.reward.scorer.options == {"scale": 2}
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml").reward == config.reward


def test_a_part_has_options_of_its_own():
    words = ["reward=parts", "reward.parts.a.kind=function", "reward.parts.b.kind=function"]
    words += ["reward.parts.a.fn=own_rewards:single", "reward.parts.b.fn=own_rewards:plain"]
    config = compose_config([*words, "reward.parts.a.options.scale=2"])
    parts = config.reward.scorer.parts
    assert [part.scorer.options for part in parts.values()] == [{"scale": 2}, {}]


def test_other_options_are_another_reward():
    """A checkpoint of one does not go on with the other; the order of options is none."""

    def identity(*words):
        (kind,) = reward_kinds(job("reward.fn=own_rewards:single", *words).inputs)
        return kind.identity

    assert identity() == "own_rewards:single"
    assert identity("reward.options.scale=2") == 'own_rewards:single {"scale": 2}'
    both = ["reward.options.a=1", "reward.options.b=2"]
    assert identity(*both) == identity(*reversed(both))


def test_magistrals_reward_is_made_of_parts(tmp_path):
    """1 for a right answer of the form, of which 0.1 for the form; -0.1 at most for its length."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "config.json").write_text((TINY_MODEL / "config.json").read_text())
    words = ["+experiment=magistral", f"model.path={tmp_path}", "task.path=rows.jsonl"]
    words += ["max_new_tokens=40", "task.max_prompt_tokens=8"]
    parts = compose_config(words).reward.scorer.parts
    weights = {part.scorer.fn: part.weight for part in parts.values()}
    assert weights == {
        "rewards:thinking_form": 0.1,
        "rewards:math_match": 0.9,
        "rewards:soft_length": 0.1,
        "rewards:one_language": 0.1,
    }
    assert parts["length"].scorer.options == {"max_tokens": 40}
    assert parts["right"].scorer.options == parts["language"].scorer.options


@pytest.fixture
def outside(own_folder, monkeypatch):
    """A folder of the user's, where no checkout is found."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "recipes"]:
        monkeypatch.delitem(sys.modules, name)
    elsewhere = [path for path in sys.path if not (Path(path) / "recipes" / "sft.py").exists()]
    monkeypatch.setattr(sys, "path", elsewhere)
    yield own_folder
    for name in ("recipes", "recipes.own"):
        sys.modules.pop(name, None)


def test_recipes_are_the_packages_own_and_not_torchtunes(outside):
    """torchtune installs a package `recipes` that raises on import."""
    assert import_function("recipes.calculator:Sums").__module__ == "llamarl.recipes.calculator"
    with pytest.raises(NoFunction, match=r"no_such is looked for in .*recipes.*would come first"):
        import_function("recipes.no_such:Sums")


def test_recipes_of_a_checkout_that_is_not_installed_are_looked_for_by_their_name(
    outside, monkeypatch
):
    find_spec = importlib.util.find_spec

    def found(name, package=None):
        if name == "llamarl.recipes":
            return None
        if name.startswith("llamarl.recipes."):
            raise ModuleNotFoundError("No module named 'llamarl.recipes'", name="llamarl.recipes")
        return find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    with pytest.raises(NoFunction, match="recipes"):
        import_function("recipes.no_such:Sums")


def test_a_folder_of_the_user_comes_before_an_installed_package(outside):
    (outside / "recipes").mkdir()
    (outside / "recipes" / "own.py").write_text("def mine():\n    return 7.0\n")
    (outside / "recipes" / "__init__.py").touch()
    before = list(sys.path)
    assert import_function("recipes.own:mine")() == 7.0
    assert sys.path == [*before, str(outside)]
